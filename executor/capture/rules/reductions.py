"""Rules of sums, whose parts are partial results, and of what cannot be computed in parts of the dims that it reads.

Such are other reductions, and norms and softmax, which need statistics along dims.
"""

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.elementwise import broadcast_operands, list_tensors
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
    return Work((out,), OperatorKind.ELEMENTWISE, reduced_dims=summed_dims, is_pointwise=True)


def reduce_whole(call: Call) -> Work:
    """Reduce along dims to a value that is no sum of partial results; no mesh axis cuts these dims."""
    out, reduced_dims = _reduce_dims(call)
    outputs, saves = tuple(out for _ in call.shapes), (call.get_argument(0), RESULT)
    return Work(outputs, OperatorKind.ELEMENTWISE, uncut_dims=reduced_dims, saves=saves)


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


def layer_norm(call: Call) -> Work:
    """Normalise over the last dims, which weight and bias have as well."""
    source = call.get_argument(0)
    dims = call.get_dims(source)
    broadcast_operands(call, list_tensors(call))
    normalised_dims = drop_none(dims[len(dims) - len(call["normalized_shape"]) :])
    if normalised_dims:
        normalised_dims[-1].leaves[-1].hints.add((4, "hidden"))
    return Work((dims,), OperatorKind.NORM, uncut_dims=normalised_dims, saves=(source,))


def group_norm(call: Call) -> Work:
    """Normalise groups of channels over all points; weight and bias have one value per channel."""
    source = call.get_argument(0)
    dims = call.get_dims(source)
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            call.replace_operand(name, call.align(call[name], {0: dims[1]}))
    return Work((dims,), OperatorKind.NORM, uncut_dims=drop_none(dims[1:]), saves=(source,))


def _normalise_exponentials(call: Call, kind: OperatorKind) -> Work:
    """Compute the softmax or its logarithm along one dim; backward reads the result."""
    dims = call.get_dims(call.get_argument(0))
    softmax_dims = drop_none((dims[call.normalise_index(call["dim"], dims)],))
    return Work((dims,), kind, uncut_dims=softmax_dims, saves=(RESULT,), is_pointwise=True)


def softmax(call: Call) -> Work:
    """Compute the softmax along one dim."""
    return _normalise_exponentials(call, OperatorKind.SOFTMAX)


def log_softmax(call: Call) -> Work:
    """Compute the log-softmax along the classes of a loss."""
    work = _normalise_exponentials(call, OperatorKind.CROSS_ENTROPY)
    for dim in work.uncut_dims:
        dim.leaves[0].hints.add((3, "classes"))
    return work


_WHOLE_REDUCTIONS = (
    *("amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "logsumexp", "prod"),
    *("linalg_vector_norm", "norm", "any", "all"),
)

RULES: dict[str, Rule] = {
    "sum": sum_dims,
    **dict.fromkeys(_WHOLE_REDUCTIONS, reduce_whole),
    "topk": top_k,
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "group_norm": group_norm,
    **dict.fromkeys(("softmax", "_softmax"), softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), log_softmax),
}
