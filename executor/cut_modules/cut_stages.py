"""One step of training of a module whose operators are cut, in stages, with shards of states, or computed again.

Each data rank is a group of ranks with parts of the operators. What runs is the graph of a rank's parts
(`meshwise.executor.cut_modules.cut_graph`) in the place of that of the whole module.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.capture.captured import CaptureError
from meshwise.executor.capture.source_lines import add_nearest
from meshwise.executor.cut_modules.captures import (
    CutError,
    capture_batch,
    check_start,
    copy_structure,
    find_weight,
    make_example,
    require_same_module,
    require_samples,
)
from meshwise.executor.cut_modules.cut_graph import build_cut_graph
from meshwise.executor.cut_modules.elementwise import require_elementwise
from meshwise.executor.cut_modules.part_form import PartForm
from meshwise.executor.cut_modules.part_values import PartValues
from meshwise.executor.cut_modules.plan_choice import PlanChoice, agree_on_plan, keep_operator_axes
from meshwise.executor.cut_modules.plan_stages import PlannedStagesStep, list_stage_starts
from meshwise.executor.cut_modules.step import CutStep
from meshwise.executor.cut_modules.whole_states import put_parts
from meshwise.executor.modules.batches import count_samples
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import LossKind
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.local_stage import sum_gradients
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.stages.export import StepGraph, export_step
from meshwise.executor.stages.pipelined_step import PipelinedStep
from meshwise.executor.starting.construction import Start


def make_cut_step(
    module: nn.Module | Start, layout: ModuleLayout, *, choose_plan: PlanChoice | None = None, **options: Any
) -> "PlannedStagesStep | CutStagesStep | CutStep":
    """Return the step of training of a module under a layout with a plan, or that needs one; see `CutStep`."""
    if layout.operator_ranks == 1:
        return PlannedStagesStep(module, layout, **options)
    options["choose_plan"] = choose_plan
    return (CutStagesStep if layout.is_staged else CutStep)(module, layout, **options)


class CutStagesStep(PipelinedStep):
    """A step of training; parameters are those of `TrainingStep`, and ``choose_plan`` that of `CutStep`.

    Ranks are numbered by stages first, then by data; those with parts of the same operators follow each other.
    """

    cuts_operators = True

    def __init__(
        self, module: nn.Module | Start, layout: ModuleLayout, *, choose_plan: PlanChoice | None = None, **options: Any
    ) -> None:
        if layout.plan is None and choose_plan is None:
            raise ValueError("a module is cut as a plan's shardings say, met none; nearest: meshwise train")
        super().__init__(module, layout, **options)
        self.choose_plan = choose_plan

    @property
    def _operator_axes(self) -> dict[str, int]:
        return self.layout.operator_axes

    def _export(self, microbatch: Any, num_items: Tensor | None) -> StepGraph:
        """Return the graph of this rank's parts, which the module has from now on."""
        nearest = f"data={self.num_ranks}"
        example = make_example(microbatch, 1)
        require_samples(count_samples(example), "a data rank")
        structure = copy_structure(self.module)
        whole = self._export_weight(structure, example)
        captured = capture_batch(structure, example, self.loss, nearest=nearest)
        plan = self.layout.plan
        if plan is None:
            assert self.choose_plan is not None
            check_start(self.module, self._values, example, self.loss, nearest=nearest)
            plan = agree_on_plan(self.choose_plan, captured)
        self._cuts = self.layout.cuts or list_stage_starts(captured, plan)
        plan = keep_operator_axes(plan)
        require_same_module(plan, captured, self.module)
        self._ranks = RankMesh(self._mesh[tuple(self._operator_axes)])
        try:
            step, self._program = build_cut_graph(
                captured, self.module, plan, self._ranks, self.device, whole=whole, kind=self._loss_kind
            )
        except CaptureError as error:
            raise CutError(add_nearest(str(error), nearest)) from error
        put_parts(self.module, self._program.parts)
        if self._values is not None:
            self._values = PartValues(self._values, self._program.placements, self._ranks)
        self._form = PartForm(self._program, self._aliases)
        return step

    def _export_weight(self, structure: nn.Module, example: Any) -> StepGraph | None:
        """Return the graph that computes the weight of the loss; ``None`` for a mean over samples."""
        kind = LossKind.LABELS if self._loss_kind is LossKind.SHARES else self._loss_kind
        if kind is LossKind.SAMPLES and not find_weight(structure, example, self.loss):
            return None
        return export_step(structure, self.loss, example, kind)

    def _sum_parts(self) -> None:
        for parameters in self._list_parameters():
            gradients = {name: to_local(p.grad) for name, p in parameters.items() if p.grad is not None}
            sum_gradients(self._ranks, gradients, self._program.summed_axes)
        self._ranks.records.clear()

    def _count_copies(self, name: str) -> int:
        return self._program.placements[name].count_copies(self._ranks)

    def _gather_state(self, name: str, state: Tensor) -> Tensor:
        assert self._form is not None
        return self._form.gather(name, state)

    def _build_optimizer(self) -> tuple[Optimizer, LRScheduler | None]:
        optimizer, scheduler = super()._build_optimizer()
        require_elementwise(optimizer)
        return optimizer, scheduler
