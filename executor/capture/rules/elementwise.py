"""Rules of pointwise operators, dropout and one-hot rows."""

from collections.abc import Sequence

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.work import MASK, RESULT, Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind

KEEPS_NOTHING = frozenset(
    {"add", "sub", "rsub", "neg", "_to_copy", "sign", "round", "floor", "ceil", "trunc"}
    | {"eq", "ne", "lt", "le", "gt", "ge"}
    | {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli"}
    | {"logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and"}
)
KEEPS_RESULT = frozenset(["exp", "sigmoid", "tanh", "rsqrt", "sqrt", "reciprocal", "relu", "expm1"])
KEEPS_CONDITION = frozenset({"where", "masked_fill"})


def broadcast_operands(call: Call, operands: Sequence[tuple[str, int | None, Node]]) -> TensorDims:
    """Unify the dims of operands, aligned at the last dim, and return the dims of the result."""
    num_dims = len(call.shape)
    result: list[Dim | None] = [None] * num_dims
    for name, item, operand in operands:
        dims = call.get_dims(operand)
        shift = num_dims - len(dims)
        wanted_dims = {place: result[place + shift] for place in range(len(dims))}
        read_operand = call.align(operand, wanted_dims)
        # as for a tensor times its own transpose
        free_places = [place for place, dim in wanted_dims.items() if dim is None]
        read_operand = call.read(name, call.separate(read_operand, free_places, result), item)
        for place, read_dim in enumerate(call.get_dims(read_operand)):
            result[place + shift] = result[place + shift] or read_dim
    call.unifier.keep_apart(result)
    return tuple(result)


def list_tensors(call: Call) -> list[tuple[str, int | None, Node]]:
    """Return argument name, list index and node of each tensor operand, those with the most dims first."""
    operands: list[tuple[str, int | None, Node]] = []
    for name, value in call.arguments.items():
        if isinstance(value, Node):
            operands.append((name, None, value))
        elif isinstance(value, list | tuple):
            operands += [(name, item, node) for item, node in enumerate(value) if isinstance(node, Node)]
    return sorted(operands, key=lambda operand: -len(drop_none(call.get_dims(operand[2]))))


def pointwise(call: Call) -> Work:
    """Compute point by point on operands that are broadcast."""
    out = broadcast_operands(call, list_tensors(call))
    return Work((out,), OperatorKind.ELEMENTWISE, saves=_list_saves(call), is_pointwise=True)


def _list_saves(call: Call) -> tuple[Node | str, ...]:
    name = call.node.target.overloadpacket.__name__  # type: ignore[union-attr]
    operands = call.node.all_input_nodes
    if name in KEEPS_NOTHING:
        return ()
    if name in KEEPS_RESULT:
        return (RESULT,)
    if name in KEEPS_CONDITION:
        return tuple(operand for operand in operands if not operand.meta["val"].is_floating_point())
    if name == "mul":
        return _list_factors(call, operands)
    if name == "div":
        divisor = call.get_argument(1)
        if not isinstance(divisor, Node):
            return ()
        return tuple(operands) if call.is_differentiable(divisor) else (divisor,)
    return tuple(operands)


def _list_factors(call: Call, operands: list[Node]) -> tuple[Node, ...]:
    """Return the factors that the other factor's gradient needs; a square needs itself."""
    if len(operands) == 1:
        return tuple(operands) if isinstance(call.get_argument(1), Node) else ()
    return tuple(
        factor
        for factor, cofactor in zip(operands, reversed(operands), strict=True)
        if call.is_differentiable(cofactor)
    )


def dropout(call: Call) -> Work:
    """Drop points out; backward reads the mask."""
    out = call.get_dims(call.get_argument(0))
    if len(call.shapes) == 1:
        return Work((out,), OperatorKind.DROPOUT)
    return Work((out, out), OperatorKind.DROPOUT, saves=(MASK,))


def one_hot(call: Call) -> Work:
    """Turn class numbers into rows of zeros with a single one."""
    classes = call.unifier.create_dim(call.shape[-1])
    out = (*call.get_dims(call.get_argument(0)), classes if classes.size > 1 else None)
    call.unifier.keep_apart(out)
    classes.hints.add((4, "experts"))
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=(classes,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("_to_copy", "masked_fill", "where", "zeros_like", "ones_like", "full_like"), pointwise),
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli"), pointwise),
    **dict.fromkeys(("native_dropout", "dropout"), dropout),
    "one_hot": one_hot,
}
