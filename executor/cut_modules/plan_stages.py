"""At which modules of a user's module the stages of a plan begin, whose blocks are those of its captured graph."""

from typing import Any

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

    Raises
    ------
    CutError
        Where a stage has no block, or begins within a module that an earlier stage has begun.
    """
    blocks = _list_blocks(captured)
    starts: list[str] = []
    begun: set[str] = set()
    for number, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise CutError(f"plan: every stage has blocks of the module, met none in stage {number}")
        first = list_paths(blocks[stage.blocks[0]][0])
        start = next((path for path in first if path not in begun), None)
        if number and start is None:
            within = first[-1] if first else "forward"
            rule = "stages of a run begin where a module does"
            raise CutError(f"plan: {rule}, met stage {number}, which begins at {stage.blocks[0]} within {within}")
        starts.append(start or "")
        begun.update(path for block in stage.blocks for node in blocks[block] for path in list_paths(node))
    return tuple(starts[1:])


def _list_blocks(captured: CapturedModule) -> dict[str, list[Node]]:
    """Return the operators of every occurrence of a block, in order, by its name."""
    names = {block.name: block.names() for block in captured.graph.blocks}
    result: dict[str, list[Node]] = {}
    for node in captured.module.graph.nodes:
        if node.name in captured.operators:
            block = captured.operators[node.name].partition(".")[0]
            result.setdefault(names[block][captured.occurrence[node.name]], []).append(node)
    return result


class PlannedStagesStep(PipelinedStep):
    """A step of training of a module in the stages of its layout's plan; parameters are those of `TrainingStep`."""

    def _find_planned_cuts(self, microbatch: Any) -> tuple[str, ...]:
        assert self.layout.plan is not None
        structure = copy_structure(self.module)
        nearest = f"pipeline={self.layout.pipeline}"
        captured = capture_batch(structure, make_example(microbatch, self.layout.data), self.loss, nearest=nearest)
        require_same_module(self.layout.plan, captured, structure)
        return list_stage_starts(captured, self.layout.plan)
