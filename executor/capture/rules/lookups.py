"""Rules of look-ups by index."""

from meshwise.executor.capture.rules.work import Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def embedding(call: Call) -> Work:
    """Look up rows of ``weight (rows, width)``, which is a sum over rows in which all but one have the factor 0."""
    weight, indices = call["weight"], call["indices"]
    read = call.separate(weight, [1], call.axes(indices))
    if read is not weight:
        call.read("weight", read)
    rows, width = call.axes(read)
    out = (*call.axes(indices), width)
    call.dims.keep_apart((*out, rows))
    for dim, name in ((rows, "vocab"), (width, "hidden")):
        if dim is not None:
            dim.leaves[0].hints.add((2, name))
    return Work((out,), OperatorKind.EMBEDDING, reduced=present((rows,)), saves=(indices,))


def index_select(call: Call) -> Work:
    """Take the indices of a list along a dim."""
    axes = call.axes(call["self"])
    place = call.place(call["dim"], axes)
    picked = call.separate(call["index"], [0], axes)
    if picked is not call["index"]:
        call.read("index", picked)
    out = (*axes[:place], call.axes(picked)[0], *axes[place + 1 :])
    call.dims.keep_apart((*out, axes[place]))
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=present((axes[place],)), space=present(out), saves=(picked,))


RULES: dict[str, Rule] = {"embedding": embedding, "index_select": index_select}
