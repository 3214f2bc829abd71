"""Rules of pointwise operators, dropout and one-hot rows."""

from collections.abc import Sequence

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Axes, Dim
from meshwise.executor.capture.rules.work import MASK, RESULT, Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind

KEEPS_NOTHING = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "neg",
        "_to_copy",
        "sign",
        "round",
        "floor",
        "ceil",
        "trunc",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    }
    | {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli"}
    | {"logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and"}
)
KEEPS_RESULT = frozenset(["exp", "sigmoid", "tanh", "rsqrt", "sqrt", "reciprocal", "relu", "expm1"])
KEEPS_CONDITION = frozenset({"where", "masked_fill"})


def broadcast(call: Call, operands: Sequence[tuple[str, int | None, Node]]) -> Axes:
    """Unify the dims of operands, aligned at the last dim, and return the dims of the result."""
    rank = len(call.shape)
    result: list[Dim | None] = [None] * rank
    for name, item, operand in operands:
        axes = call.axes(operand)
        shift = rank - len(axes)
        wanted = {place: result[place + shift] for place in range(len(axes))}
        read = call.align(operand, wanted)
        alone = [place for place, dim in wanted.items() if dim is None]  # as for a tensor times its own transpose
        read = call.separate(read, alone, result)
        if read is not operand:
            call.read(name, read) if item is None else call.read_item(name, item, read)
        for place, axis in enumerate(call.axes(read)):
            result[place + shift] = result[place + shift] or axis
    call.dims.keep_apart(result)
    return tuple(result)


def tensors(call: Call) -> list[tuple[str, int | None, Node]]:
    """Return argument name, list index and node of each tensor operand, those with the most dims first."""
    found: list[tuple[str, int | None, Node]] = []
    for name, value in call.given.items():
        if isinstance(value, Node):
            found.append((name, None, value))
        elif isinstance(value, list | tuple):
            found += [(name, item, each) for item, each in enumerate(value) if isinstance(each, Node)]
    return sorted(found, key=lambda operand: -len(present(call.axes(operand[2]))))


def pointwise(call: Call) -> Work:
    """Compute point by point on operands that are broadcast."""
    operands = tensors(call)
    out = broadcast(call, operands)
    return Work((out,), OperatorKind.ELEMENTWISE, saves=_saves(call))


def _saves(call: Call) -> tuple[Node | str, ...]:
    name = call.node.target.overloadpacket.__name__  # type: ignore[union-attr]
    operands = call.operands()
    if name in KEEPS_NOTHING:
        return ()
    if name in KEEPS_RESULT:
        return (RESULT,)
    if name in KEEPS_CONDITION:
        return tuple(each for each in operands if not each.meta["val"].is_floating_point())
    if name == "mul":
        return _factors(call, operands)
    if name == "div":
        divisor = call.value(1)
        if not isinstance(divisor, Node):
            return ()
        return tuple(operands) if call.differentiable(divisor) else (divisor,)
    return tuple(operands)


def _factors(call: Call, operands: list[Node]) -> tuple[Node, ...]:
    """Return the factors that the other factor's gradient needs; a square needs itself."""
    if len(operands) == 1:
        return tuple(operands) if isinstance(call.value(1), Node) else ()
    return tuple(one for one, other in zip(operands, reversed(operands), strict=True) if call.differentiable(other))


def dropout(call: Call) -> Work:
    """Drop points out; backward reads the mask."""
    out = call.axes(call.value(0))
    if len(call.shapes) == 1:
        return Work((out,), OperatorKind.DROPOUT)
    return Work((out, out), OperatorKind.DROPOUT, saves=(MASK,))


def one_hot(call: Call) -> Work:
    """Turn class numbers into rows of zeros with a single one."""
    classes = call.dims.new(call.shape[-1])
    out = (*call.axes(call.value(0)), classes if classes.size > 1 else None)
    call.dims.keep_apart(out)
    classes.hints.add((4, "experts"))
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=(classes,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("_to_copy", "masked_fill", "where", "zeros_like", "ones_like", "full_like"), pointwise),
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli"), pointwise),
    **dict.fromkeys(("native_dropout", "dropout"), dropout),
    "one_hot": one_hot,
}
