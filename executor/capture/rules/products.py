"""Rules of linear layers, matrix products and ``einsum``."""

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Axes, Dim
from meshwise.executor.capture.rules.work import Call, Rule, Unknown, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def linear(call: Call) -> Work:
    """``input (.., in) * weight (out, in) -> (.., out)``, with an optional bias."""
    weight, bias = call["weight"], call["bias"]
    source = call.separate(call["input"], range(len(call.axes(call["input"])) - 1), call.axes(weight)[:1])
    if source is not call["input"]:
        call.read("input", source)
    axes = call.axes(source)
    read = call.align(weight, {1: axes[-1]})
    if read is not weight:
        call.read("weight", read)
    wide = call.axes(read)[0]
    if bias is not None:
        call.read("bias", call.align(bias, {0: wide}))
    out = (*axes[:-1], wide)
    call.dims.keep_apart((*out, axes[-1]))
    return Work((out,), OperatorKind.MATMUL, reduced=present(axes[-1:]), flops=2.0, saves=_factors(call, source, read))


def _factors(call: Call, left: Node, right: Node) -> tuple[Node, ...]:
    """Return the factors of a product that backward reads: each one for the gradient of the other."""
    return tuple(kept for kept, other in ((left, right), (right, left)) if call.differentiable(other) or kept is other)


def matmul(call: Call) -> Work:
    """``(.., m, k) * (.., k, n) -> (.., m, n)``, batched over broadcast dims; either operand may be a vector."""
    names = call.order[:2]
    left, right = call[names[0]], call[names[1]]
    first, second = call.axes(left), call.axes(right)
    inner = 0 if len(second) == 1 else len(second) - 2
    wanted: dict[int, Dim | None] = {inner: first[-1]}
    batched = range(max(len(second) - 2, 0))
    for place in batched:
        opposite = place - (len(second) - 2) + (len(first) - 2)
        if opposite >= 0:
            wanted[place] = first[opposite]
    right = call.align(right, wanted)
    if len(second) > 1:
        right = call.separate(right, [len(second) - 1], first)
    if right is not call[names[1]]:
        call.read(names[1], right)
    second = call.axes(right)
    rows = first[-2:-1] if len(first) > 1 else ()
    columns = second[-1:] if len(second) > 1 else ()
    outer = _broadcast(first[:-2], second[:-2])
    out = (*outer, *rows, *columns)
    call.dims.keep_apart((*out, first[-1]))
    kind = OperatorKind.BATCH_MATMUL if present(outer) else OperatorKind.MATMUL
    return Work((out,), kind, reduced=present(first[-1:]), flops=2.0, saves=_factors(call, left, right))


def _broadcast(one: Axes, other: Axes) -> Axes:
    rank = max(len(one), len(other))
    left, right = (None,) * (rank - len(one)) + one, (None,) * (rank - len(other)) + other
    return tuple(a or b for a, b in zip(left, right, strict=True))


def addmm(call: Call) -> Work:
    """``bias + left * right``."""
    left, right = call["mat1"], call["mat2"]
    axes = call.axes(left)
    read = call.separate(call.align(right, {0: axes[1]}), [1], axes)
    if read is not right:
        call.read("mat2", read)
    out = (axes[0], call.axes(read)[1])
    bias = call.axes(call["self"])
    shift = 2 - len(bias)
    call.read("self", call.align(call["self"], {place: out[place + shift] for place in range(len(bias))}))
    call.dims.keep_apart((*out, axes[1]))
    return Work((out,), OperatorKind.MATMUL, reduced=present(axes[1:]), flops=2.0, saves=_factors(call, left, read))


def einsum(call: Call) -> Work:
    """Multiply operands and sum over the letters that are not in the result."""
    equation = call["equation"].replace(" ", "")
    operands = list(call["tensors"])
    if "->" not in equation or "." in equation:
        raise Unknown("the rule of einsum reads equations with an arrow and without dots")
    reads, written = equation.split("->")
    of: dict[str, Dim | None] = {}
    for item, (letters, operand) in enumerate(zip(reads.split(","), operands, strict=True)):
        if len(set(letters)) < len(letters):
            raise Unknown("the rule of einsum reads no diagonals")
        read = call.align(operand, {place: of.get(letter) for place, letter in enumerate(letters)})
        fresh = [place for place, letter in enumerate(letters) if not of.get(letter)]
        read = call.separate(read, fresh, [dim for letter, dim in of.items() if letter not in letters])
        mine = call.axes(read)
        if read is not operand:
            call.read_item("tensors", item, read)
            operands[item] = read
        for place, letter in enumerate(letters):
            of[letter] = of.get(letter) or mine[place]
    call.dims.keep_apart(of.values())
    out = tuple(of[letter] for letter in written)
    gone = present(dim for letter, dim in of.items() if letter not in written)
    kind = _einsum_kind(reads.split(","), written)
    flops = 0.0 if kind is OperatorKind.ELEMENTWISE else 2.0
    return Work((out,), kind, reduced=gone, flops=flops, saves=tuple(operands) if len(operands) > 1 else ())


def _einsum_kind(reads: list[str], written: str) -> OperatorKind:
    if len(reads) != 2:
        return OperatorKind.ELEMENTWISE
    shared = set(reads[0]) & set(reads[1])
    if not shared - set(written):
        return OperatorKind.ELEMENTWISE
    return OperatorKind.BATCH_MATMUL if shared & set(written) else OperatorKind.MATMUL


RULES: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul),
    "addmm": addmm,
    "einsum": einsum,
}
