"""Runs one operator in two parts, as a cut of one of its dims says, and puts the results together."""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.operators.cut_attention import attend_rows
from meshwise.simulator.operator_graph import BATCH, Operator

PARTS = 2


class Values(Interpreter):
    """Runs the program and keeps the value of every node."""

    def __init__(self, captured: CapturedModule, arguments: list[Tensor]) -> None:
        super().__init__(captured.module)
        self.values: dict[Node, Any] = {}
        self.run(*arguments)

    def run_node(self, node: Node) -> Any:
        self.values[node] = super().run_node(node)
        return self.values[node]


def arguments(captured: CapturedModule, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what the program is called with."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    named = [parameters[name] for name in captured.parameters.values()]
    return [*named, *(buffers[name] for name in captured.buffers.values()), *captured.constants.values(), *inputs]


def operators(captured: CapturedModule) -> dict[str, Operator]:
    """Return the operators of the graph by ``block.operator``."""
    return {f"{block.name}.{each.name}": each for block in captured.graph.blocks for each in block.operators}


def sizes(captured: CapturedModule, node: Node) -> dict[str, int]:
    """Return the size of every dim of the block of an operator's node."""
    name = captured.operators[node.name].rpartition(".")[0]
    block = next(each for each in captured.graph.blocks if each.name == name)
    found = {dim: size for each in block.tensors for dim, size in zip(each.dims, each.shape, strict=True)}
    return found | {dim: size for each in block.operators for dim, size in each.dims} | {BATCH: captured.batch}


def place(captured: CapturedModule, node: Node, dim: str) -> int | None:
    """Return the torch dim of a node that ``dim`` is in; None where it has no such dim."""
    found = [index for index, parts in enumerate(captured.dims[node.name]) if dim in parts]
    assert len(found) <= 1
    return found[0] if found else None


def unpacked(captured: CapturedModule, value: Tensor, of: Node, dim: str, size: dict[str, int]) -> Tensor:
    """Return a value whose torch dim with ``dim`` is three: what is outside of it, the dim itself, what is inside."""
    index = place(captured, of, dim)
    assert index is not None
    group = captured.dims[of.name][index]
    inside = prod(size[each] for each in group[group.index(dim) + 1 :])
    outside = prod(size[each] for each in group[: group.index(dim)])
    return value.reshape(*value.shape[:index], outside, -1, inside, *value.shape[index + 1 :])


def packed(value: Tensor, index: int) -> Tensor:
    """Return a value in which three torch dims are one again."""
    return value.reshape(*value.shape[:index], -1, *value.shape[index + 3 :])


def in_parts(captured: CapturedModule, values: dict[Node, Any], node: Node, dim: str) -> list[Any]:
    """Return the results of an operator on each part of ``dim``."""
    results, size = [], sizes(captured, node)
    for part in range(PARTS):

        def local(operand: Node, part: int = part) -> Any:
            index, value = place(captured, operand, dim), values[operand]
            if index is None:
                return value
            return packed(unpacked(captured, value, operand, dim, size).chunk(PARTS, index + 1)[part], index)

        args = list(torch.fx.node.map_arg(node.args, local))
        target = node.target
        name = target.overloadpacket.__name__
        reduced = dim in operators(captured)[captured.operators[node.name]].reduced
        if (name == "linear" or name.startswith("conv")) and reduced and part and len(args) > 2:
            args[2] = None  # the bias is added once
        if name == "embedding" and reduced:
            results.append(_rows(args[0], args[1], part))
            continue
        if name == "scaled_dot_product_attention" and dim in captured.dims[node.args[0].name][-2]:
            target = partial(attend_rows, part) if args[5:6] == [True] else target
        results.append(target(*args, **torch.fx.node.map_arg(node.kwargs, local)))
    return results


def _rows(table: Tensor, indices: Tensor, part: int) -> Tensor:
    """Return the rows that a part of a table has, zeros for the others."""
    local = indices - part * len(table)
    here = (local >= 0) & (local < len(table))
    rows = torch.nn.functional.embedding(local.clamp(0, len(table) - 1), table)
    return rows * here.unsqueeze(-1)


def together(captured: CapturedModule, node: Node, dim: str, parts: list[Tensor], *, reduced: bool) -> Tensor:
    """Return one result of the parts': their sum where the dim is reduced, else one after the other."""
    if reduced:
        return sum(parts[1:], parts[0])
    index = place(captured, node, dim)
    if index is None:
        return parts[0]
    size = sizes(captured, node)
    return packed(torch.cat([unpacked(captured, each, node, dim, size) for each in parts], index + 1), index)


def check(captured: CapturedModule, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Check that every operator gives in two parts, along any dim that may be cut, what it gives whole; count them."""
    values = Values(captured, arguments(captured, module, inputs)).values
    every, tried = operators(captured), 0
    for node, whole in values.items():
        if node.name not in captured.operators or not isinstance(whole, Tensor):
            continue
        operator = every[captured.operators[node.name]]
        for dim, size in operator.dims:
            size = captured.batch if dim == BATCH else size
            if dim in operator.uncut or size % PARTS:
                continue
            parts = in_parts(captured, values, node, dim)
            result = together(captured, node, dim, parts, reduced=dim in operator.reduced)
            torch.testing.assert_close(result, whole, rtol=1e-14, atol=1e-12, msg=f"{operator.name} cut along {dim}")
            tried += 1
    return tried
