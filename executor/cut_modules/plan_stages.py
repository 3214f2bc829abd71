"""At which modules of a user's module the stages of a plan begin, whose blocks are those of its captured graph."""

from typing import Any, NamedTuple

from torch.fx import Node

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import (
    CutError,
    capture_batch,
    copy_structure,
    make_example,
    require_same_module,
)
from meshwise.executor.stages.export import list_paths
from meshwise.executor.stages.pipelined_step import PipelinedStep
from meshwise.strategies.plan.plan import Plan


def list_stage_starts(captured: CapturedModule, plan: Plan) -> tuple[str, ...]:
    """Return the names of the modules at which the stages of a plan after the first begin, as `ModuleLayout.cuts`.

    Where a block begins within a module, it is the module that begins nearest to it: the block of a layer has its
    norm, say, but not the sum before it.

    Raises
    ------
    CutError
        Where a stage has no block, or no module begins between two of them.
    """
    places = _list_places(captured)
    first_places: dict[str, int] = {}
    for place, node in enumerate(places.operators):
        for path in list_paths(node):
            first_places.setdefault(path, place)
    starts = [""]
    last = 0
    for number, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise CutError(f"plan: every stage has blocks of the module, met none in stage {number}")
        if not number:
            continue
        place = places.blocks[stage.blocks[0]]
        start = min(
            (path for path, first in first_places.items() if first > last),
            key=lambda path: abs(first_places[path] - place),
            default=None,
        )
        if start is None:
            raise CutError(f"plan: a stage of a run begins where a module does, met {stage.blocks[0]}")
        starts.append(start)
        last = first_places[start]
    return tuple(starts[1:])


class _Places(NamedTuple):
    """The operators of a captured module in order, and the place of the first one of every occurrence of a block."""

    operators: list[Node]
    blocks: dict[str, int]


def _list_places(captured: CapturedModule) -> _Places:
    names = {block.name: block.names() for block in captured.graph.blocks}
    operators = [node for node in captured.module.graph.nodes if node.name in captured.operators]
    blocks: dict[str, int] = {}
    for place, node in enumerate(operators):
        block = captured.operators[node.name].partition(".")[0]
        blocks.setdefault(names[block][captured.occurrence[node.name]], place)
    return _Places(operators, blocks)


class PlannedStagesStep(PipelinedStep):
    """A step of training of a module in the stages of its layout's plan; parameters are those of `TrainingStep`."""

    def _find_planned_cuts(self, microbatch: Any) -> tuple[str, ...]:
        assert self.layout.plan is not None
        structure = copy_structure(self.module)
        nearest = f"pipeline={self.layout.pipeline}"
        captured = capture_batch(structure, make_example(microbatch, self.layout.data), self.loss, nearest=nearest)
        require_same_module(self.layout.plan, captured, structure)
        return list_stage_starts(captured, self.layout.plan)
