"""Rules of sums, whose parts are partial results, and of reductions that cannot be computed in parts."""

from meshwise.executor.capture.rules.dims import Axes, Dim
from meshwise.executor.capture.rules.work import MASK, RESULT, Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def _over(call: Call) -> tuple[Axes, tuple[Dim, ...]]:
    """Return the dims of the result, and the dims that were reduced."""
    axes = call.axes(call.value(0))
    given = call.given.get("dim")
    places = [given] if isinstance(given, int) else list(given or range(len(axes)))
    gone = {call.place(place, axes) for place in places}
    if call.given.get("keepdim"):
        out = tuple(None if place in gone else axis for place, axis in enumerate(axes))
    else:
        out = tuple(axis for place, axis in enumerate(axes) if place not in gone)
    return out, present(axes[place] for place in sorted(gone))


def total(call: Call) -> Work:
    """Sum along dims."""
    out, gone = _over(call)
    return Work((out,), OperatorKind.ELEMENTWISE, reduced=gone)


def whole(call: Call) -> Work:
    """Reduce along dims to a value that is no sum of partial results; no mesh axis cuts these dims."""
    out, gone = _over(call)
    return Work(tuple(out for _ in call.shapes), OperatorKind.ELEMENTWISE, uncut=gone, saves=(call.value(0), RESULT))


def top_k(call: Call) -> Work:
    """Choose the ``k`` largest values along a dim; backward reads their indices."""
    axes = call.axes(call["self"])
    place = call.place(call["dim"], axes)
    chosen = call.dims.new(call["k"]) if call["k"] > 1 else None
    out = (*axes[:place], chosen, *axes[place + 1 :])
    call.dims.keep_apart((*out, axes[place]))
    for dim, name in ((axes[place], "experts"), (chosen, "top_k")):
        if dim is not None:
            dim.leaves[0].hints.add((3, name))
    uncut = present((axes[place], chosen))
    return Work((out, out), OperatorKind.TOP_K, uncut=uncut, space=present(axes), saves=(MASK,))


_WHOLE = ("amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "logsumexp", "prod", "linalg_vector_norm")

RULES: dict[str, Rule] = {
    "sum": total,
    **dict.fromkeys((*_WHOLE, "norm", "any", "all", "var_mean"), whole),
    "topk": top_k,
}
