"""Which nodes of a captured program run in which pipeline stage, and which values cross the boundaries."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from executor.capture.captured import Captured
from executor.capture.updates import Update
from executor.operators.layouts import Layouts
from strategies.plan import Stage


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One stage of a program.

    Parameters
    ----------
    nodes
        What it runs, in order.
    parameters
        The parameters that it reads; another stage may read one too.
    updates
        The buffers that it renews.
    received, sent
        Roots that come from the stage before and go to the next one, in the order in which they are made: all that
        is still alive, also what this stage only passes on.
    """

    nodes: tuple[Node, ...]
    parameters: frozenset[str]
    updates: tuple[Update, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]


def stage_programs(captured: Captured, layouts: Layouts, stages: tuple[Stage, ...]) -> tuple[StageProgram, ...]:
    """Return the program of every stage."""
    stage_of_block = {block: index for index, stage in enumerate(stages) for block in stage.blocks}
    nodes = [node for node in captured.program.graph.nodes if node.name in captured.operators]
    placed = _place(captured, nodes, stage_of_block)
    made = {name: placed[node] for node in nodes for name in layouts.values(node) if node.name in captured.operators}
    last: dict[str, int] = {}
    for node in nodes:
        for root in layouts.read_by(node):
            last[root] = max(last.get(root, 0), placed[node])
    last[layouts.loss] = len(stages) - 1
    result = []
    for index in range(len(stages)):
        crossing = [
            tuple(root for root, start in made.items() if start <= at < last.get(root, start))
            for at in (index - 1, index)
        ]
        own = tuple(node for node in nodes if placed[node] == index)
        read = {root for node in own for root in layouts.read_by(node)}
        updates = tuple(each for each in captured.updates if made.get(layouts.root.get(each.reads, ""), 0) == index)
        result.append(StageProgram(own, frozenset(read & captured.parameters.keys()), updates, *crossing))
    return tuple(result)


def _place(captured: Captured, nodes: list[Node], stage_of_block: Mapping[str, int]) -> dict[Node, int]:
    """Return the stage of every operator: that of its block."""
    repeats = {block.name: block.repeat for block in captured.graph.blocks}
    placed: dict[Node, int] = {}
    for node in nodes:
        block = captured.operators[node.name].rpartition(".")[0]
        occurrence = f"{block}.{captured.occurrence[node.name]}" if repeats[block] > 1 else block
        placed[node] = stage_of_block[occurrence]
    return placed
