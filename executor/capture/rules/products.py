"""Rules of linear layers, matrix products and ``einsum``."""

from itertools import zip_longest

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.work import Call, Rule, RuleError, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def linear(call: Call) -> Work:
    """``input (.., in) * weight (out, in) -> (.., out)``, with an optional bias."""
    weight, bias = call["weight"], call["bias"]
    source = call.separate(call["input"], range(len(call.get_dims(call["input"])) - 1), call.get_dims(weight)[:1])
    dims = call.get_dims(call.read("input", source))
    read_weight = call.read("weight", call.align(weight, {1: dims[-1]}))
    output_dim = call.get_dims(read_weight)[0]
    if bias is not None:
        call.replace_operand("bias", call.align(bias, {0: output_dim}))
    out = (*dims[:-1], output_dim)
    return _multiply(call, OperatorKind.MATMUL, out, dims[-1], (source, read_weight))


def _multiply(
    call: Call, kind: OperatorKind, out: TensorDims, inner_dim: Dim | None, factors: tuple[Node, Node]
) -> Work:
    """Return the work of a product; backward reads each factor for the gradient of the other."""
    call.unifier.keep_apart((*out, inner_dim))
    saves = tuple(
        factor
        for factor, cofactor in zip(factors, reversed(factors), strict=True)
        if call.is_differentiable(cofactor) or factor is cofactor
    )
    return Work((out,), kind, reduced_dims=drop_none((inner_dim,)), flops=2.0, saves=saves)


def matmul(call: Call) -> Work:
    """``(.., m, k) * (.., k, n) -> (.., m, n)``, batched over broadcast dims; either operand may be a vector."""
    names = call.argument_names[:2]
    left_operand, right_operand = call[names[0]], call[names[1]]
    left_dims, right_dims = call.get_dims(left_operand), call.get_dims(right_operand)
    inner_place = 0 if len(right_dims) == 1 else len(right_dims) - 2
    wanted_dims: dict[int, Dim | None] = {inner_place: left_dims[-1]}
    batch_places = range(max(len(right_dims) - 2, 0))
    for place in batch_places:
        left_place = place - (len(right_dims) - 2) + (len(left_dims) - 2)
        if left_place >= 0:
            wanted_dims[place] = left_dims[left_place]
    right_operand = call.align(right_operand, wanted_dims)
    if len(right_dims) > 1:
        right_operand = call.separate(right_operand, [len(right_dims) - 1], left_dims)
    right_dims = call.get_dims(call.read(names[1], right_operand))
    rows = left_dims[-2:-1] if len(left_dims) > 1 else ()
    columns = right_dims[-1:] if len(right_dims) > 1 else ()
    batch_dims = _broadcast_dims(left_dims[:-2], right_dims[:-2])
    out = (*batch_dims, *rows, *columns)
    kind = OperatorKind.BATCH_MATMUL if drop_none(batch_dims) else OperatorKind.MATMUL
    return _multiply(call, kind, out, left_dims[-1], (left_operand, right_operand))


def _broadcast_dims(left_dims: TensorDims, right_dims: TensorDims) -> TensorDims:
    pairs = zip_longest(reversed(left_dims), reversed(right_dims))
    return tuple(left_dim or right_dim for left_dim, right_dim in pairs)[::-1]


def addmm(call: Call) -> Work:
    """``bias_dims + left_operand * right_operand``."""
    left_operand, right_operand = call["mat1"], call["mat2"]
    left_dims = call.get_dims(left_operand)
    read_operand = call.read("mat2", call.separate(call.align(right_operand, {0: left_dims[1]}), [1], left_dims))
    out = (left_dims[0], call.get_dims(read_operand)[1])
    bias_dims = dict(enumerate(out[2 - len(call.get_dims(call["self"])) :]))
    call.replace_operand("self", call.align(call["self"], bias_dims))
    return _multiply(call, OperatorKind.MATMUL, out, left_dims[1], (left_operand, read_operand))


def einsum(call: Call) -> Work:
    """Multiply operands and sum over the letters that are not in the result."""
    equation = call["equation"].replace(" ", "")
    operands = list(call["tensors"])
    if "->" not in equation or "." in equation:
        raise RuleError("the rule of einsum reads equations with an arrow and without dots")
    input_text, output_letters = equation.split("->")
    letter_dims: dict[str, Dim | None] = {}
    for item, (letters, operand) in enumerate(zip(input_text.split(","), operands, strict=True)):
        if len(set(letters)) < len(letters):
            raise RuleError("the rule of einsum reads no diagonals")
        read_operand = call.align(operand, {place: letter_dims.get(letter) for place, letter in enumerate(letters)})
        new_places = [place for place, letter in enumerate(letters) if not letter_dims.get(letter)]
        read_operand = call.separate(
            read_operand, new_places, [dim for letter, dim in letter_dims.items() if letter not in letters]
        )
        operands[item] = call.read("tensors", read_operand, item)
        operand_dims = call.get_dims(read_operand)
        for place, letter in enumerate(letters):
            letter_dims[letter] = letter_dims.get(letter) or operand_dims[place]
    call.unifier.keep_apart(letter_dims.values())
    out = tuple(letter_dims[letter] for letter in output_letters)
    summed_dims = drop_none(dim for letter, dim in letter_dims.items() if letter not in output_letters)
    kind = _einsum_kind(input_text.split(","), output_letters)
    flops = 0.0 if kind is OperatorKind.ELEMENTWISE else 2.0
    return Work((out,), kind, reduced_dims=summed_dims, flops=flops, saves=tuple(operands) if len(operands) > 1 else ())


def _einsum_kind(input_terms: list[str], output_letters: str) -> OperatorKind:
    if len(input_terms) != 2:
        return OperatorKind.ELEMENTWISE
    shared_letters = set(input_terms[0]) & set(input_terms[1])
    if not shared_letters - set(output_letters):
        return OperatorKind.ELEMENTWISE
    return OperatorKind.BATCH_MATMUL if shared_letters & set(output_letters) else OperatorKind.MATMUL


def grouped_product(call: Call) -> Work:
    """``(rows, in) * (experts, in, out) -> (rows, out)``; every expert has the rows up to its end in a third operand.

    It is a sum over experts in which all but one have the factor 0. Which rows are whose depends on the data, so that
    none are cut.
    """
    left_name, right_name, ends_name = call.argument_names[:3]
    left_operand, right_operand = call[left_name], call[right_name]
    left_dims, right_dims = call.get_dims(left_operand), call.get_dims(right_operand)
    if (
        len(left_dims) != 2
        or len(right_dims) != 3
        or not isinstance(call[ends_name], Node)
        or call.arguments.get("bias")
    ):
        raise RuleError("the rule of grouped products reads rows, a matrix of each expert and the ends of their rows")
    right_operand = call.separate(call.align(right_operand, {1: left_dims[1]}), [0, 2], left_dims)
    experts, inner_dim, width = call.get_dims(call.read(right_name, right_operand))
    if experts is None:
        raise RuleError("the rule of grouped products reads several experts")
    experts.leaves[0].hints.add((3, "experts"))
    out = (left_dims[0], width)
    call.unifier.keep_apart((*out, inner_dim, experts))
    return Work(
        (out,),
        OperatorKind.GROUPED_MATMUL,
        reduced_dims=drop_none((experts, inner_dim)),
        uncut_dims=drop_none(left_dims[:1]),
        space=drop_none((*out, inner_dim)),
        flops=2.0 / experts.size,
        saves=(left_operand, right_operand),
    )


GROUPED = ("_grouped_mm", "grouped_product", "grouped_mm_fallback")
"""Grouped products of torch, of `meshwise.executor.capture.grouped_products`, and of transformers."""

RULES: dict[str, Rule] = {
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul),
    "addmm": addmm,
    "einsum": einsum,
    **dict.fromkeys(GROUPED, grouped_product),
}
