"""Which nodes of a captured program run in which pipeline stage, and which values cross the boundaries."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from executor.capture.captured import Captured
from executor.operators.layouts import Layouts
from strategies.plan import Stage


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One stage of a program.

    Parameters
    ----------
    nodes
        What it runs, in order.
    received, sent
        Roots that come from the stage before and go to the next one, in the order in which they are made: all that
        is still alive, also what this stage only passes on.
    """

    nodes: tuple[Node, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]


def stage_programs(captured: Captured, layouts: Layouts, stages: tuple[Stage, ...]) -> tuple[StageProgram, ...]:
    """Return the program of every stage.

    Raises
    ------
    ValueError
        Where two stages read one parameter.
    """
    stage_of_block = {block: index for index, stage in enumerate(stages) for block in stage.blocks}
    nodes = [node for node in captured.program.graph.nodes if node.name in captured.operators]
    placed = _place(captured, nodes, stage_of_block)
    _check_parameters(captured, layouts, placed)
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
        result.append(StageProgram(tuple(node for node in nodes if placed[node] == index), *crossing))
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


def _check_parameters(captured: Captured, layouts: Layouts, placed: Mapping[Node, int]) -> None:
    users: dict[str, set[int]] = {}
    for node, stage in placed.items():
        for root in layouts.read_by(node):
            if root in captured.parameters:
                users.setdefault(root, set()).add(stage)
    for root, stages in users.items():
        if len(stages) > 1:
            name, met = captured.parameters[root], ", ".join(map(str, sorted(stages)))
            raise ValueError(f"stages: a parameter is read in one stage, met {name} in the stages {met}")
