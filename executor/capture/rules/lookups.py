"""Rules of look-ups by index."""

from meshwise.executor.capture.rules.work import Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def embedding(call: Call) -> Work:
    """Look up rows of ``weight (rows, width)``, which is a sum over rows in which all but one have the factor 0."""
    weight, indices = call["weight"], call["indices"]
    read_weight = call.separate(weight, [1], call.get_dims(indices))
    if read_weight is not weight:
        call.replace_operand("weight", read_weight)
    rows, width = call.get_dims(read_weight)
    out = (*call.get_dims(indices), width)
    call.unifier.keep_apart((*out, rows))
    for dim, name in ((rows, "vocab"), (width, "hidden")):
        if dim is not None:
            dim.leaves[0].hints.add((2, name))
    return Work((out,), OperatorKind.EMBEDDING, reduced_dims=drop_none((rows,)), saves=(indices,))


def index_select(call: Call) -> Work:
    """Take the indices of a list along a dim."""
    dims = call.get_dims(call["self"])
    place = call.normalise_index(call["dim"], dims)
    read_index = call.separate(call["index"], [0], dims)
    if read_index is not call["index"]:
        call.replace_operand("index", read_index)
    out = (*dims[:place], call.get_dims(read_index)[0], *dims[place + 1 :])
    call.unifier.keep_apart((*out, dims[place]))
    return Work(
        (out,),
        OperatorKind.ELEMENTWISE,
        uncut_dims=drop_none((dims[place],)),
        space=drop_none(out),
        saves=(read_index,),
    )


RULES: dict[str, Rule] = {"embedding": embedding, "index_select": index_select}
