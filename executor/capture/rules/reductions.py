"""Rules of sums, whose parts are partial results, and of reductions that cannot be computed in parts."""

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.work import MASK, RESULT, Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def _reduce_dims(call: Call) -> tuple[TensorDims, tuple[Dim, ...]]:
    """Return the dims of the result, and the dims that were reduced."""
    dims = call.get_dims(call.get_argument(0))
    dim_argument = call.arguments.get("dim")
    places = [dim_argument] if isinstance(dim_argument, int) else list(dim_argument or range(len(dims)))
    removed_places = {call.normalise_index(place, dims) for place in places}
    if call.arguments.get("keepdim"):
        out = tuple(None if place in removed_places else dim for place, dim in enumerate(dims))
    else:
        out = tuple(dim for place, dim in enumerate(dims) if place not in removed_places)
    return out, drop_none(dims[place] for place in sorted(removed_places))


def sum_dims(call: Call) -> Work:
    """Sum along dims."""
    out, summed_dims = _reduce_dims(call)
    return Work((out,), OperatorKind.ELEMENTWISE, reduced_dims=summed_dims)


def reduce_whole(call: Call) -> Work:
    """Reduce along dims to a value that is no sum of partial results; no mesh axis cuts these dims."""
    out, reduced_dims = _reduce_dims(call)
    return Work(
        tuple(out for _ in call.shapes),
        OperatorKind.ELEMENTWISE,
        uncut_dims=reduced_dims,
        saves=(call.get_argument(0), RESULT),
    )


def top_k(call: Call) -> Work:
    """Choose the ``k`` largest values along a dim; backward reads their indices."""
    dims = call.get_dims(call["self"])
    place = call.normalise_index(call["dim"], dims)
    chosen_dim = call.unifier.create_dim(call["k"]) if call["k"] > 1 else None
    out = (*dims[:place], chosen_dim, *dims[place + 1 :])
    call.unifier.keep_apart((*out, dims[place]))
    for dim, name in ((dims[place], "experts"), (chosen_dim, "top_k")):
        if dim is not None:
            dim.leaves[0].hints.add((3, name))
    uncut = drop_none((dims[place], chosen_dim))
    return Work((out, out), OperatorKind.TOP_K, uncut_dims=uncut, space=drop_none(dims), saves=(MASK,))


_WHOLE_REDUCTIONS = (
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "var",
    "std",
    "logsumexp",
    "prod",
    "linalg_vector_norm",
)

RULES: dict[str, Rule] = {
    "sum": sum_dims,
    **dict.fromkeys((*_WHOLE_REDUCTIONS, "norm", "any", "all", "var_mean"), reduce_whole),
    "topk": top_k,
}
