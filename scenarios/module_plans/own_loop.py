"""The step of training in a loop of the user's own, whole on every rank, in stages, or with cut operators."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.strategies.plan.plan import Plan

if TYPE_CHECKING:
    from meshwise.executor.capture.captured import CapturedModule
    from meshwise.executor.cut_modules.cut_stages import CutStagesStep
    from meshwise.executor.cut_modules.plan_stages import PlannedStagesStep
    from meshwise.executor.cut_modules.step import CutStep
    from meshwise.executor.module_measures.figures import ModuleFigures
    from meshwise.executor.module_measures.live_module import LiveModule
    from meshwise.executor.module_measures.searched_step import SearchedStep
    from meshwise.executor.modules.layout import CutAxes, ModuleLayout
    from meshwise.executor.modules.step import TrainingStep
    from meshwise.scenarios.module_plans.choosing import PlannedRun
    from meshwise.simulator.operator_graph import OperatorGraph

SEARCH = "search"
"""The plan that is searched for."""


def parallelize(
    module: Any, plan: "Plan | ModuleLayout | str | Path | None" = None, **options: Any
) -> "TrainingStep | PlannedStagesStep | CutStep | CutStagesStep | SearchedStep":
    """Return the step of training of a module under a plan, in a loop of the user's own.

    It is called on every rank that a launcher such as torchrun has started. What it returns is called with the samples
    of the rank, and returns the loss of the global batch.

    Parameters
    ----------
    module
        A ``torch.nn.Module``, whole and with equal parameters on every rank; its forward takes a batch. Or a function
        that returns it, of which a rank makes only the parameters that it keeps where ranks share them.
    plan
        A plan or the file of one, words such as ``data=2,zero=3`` or ``data=2,tensor=2``, or a `ModuleLayout`; by
        default data parallelism over all ranks. Words with ``tensor`` have the shardings of operators searched for.
        ``search`` has the whole plan searched for at the first batch, for which the module is measured some seconds.
    options
        Those of `meshwise.executor.stages.parallelize.parallelize`: ``optimizer``, ``scheduler``, ``loss``,
        ``precision``, ``max_norm``, ``learning_rate`` and ``seed``.

    Raises
    ------
    ValueError
        Where the plan says what a step does not do, or has another number of ranks.
    """
    from meshwise.executor.cut_modules.cut_stages import make_cut_step
    from meshwise.executor.modules.layout import CUTS, ModuleLayout
    from meshwise.executor.modules.optimizers import make_adamw
    from meshwise.executor.modules.step import find_device
    from meshwise.executor.stages.parallelize import join_ranks, read_layout
    from meshwise.executor.stages.parallelize import parallelize as parallelize_whole
    from meshwise.executor.starting.construction import make_start
    from meshwise.scenarios.inputs.operator_cuts import choose_cuts
    from meshwise.scenarios.module_plans import plan_files

    join_ranks()
    if isinstance(plan, Path) or (isinstance(plan, str) and plan != SEARCH and "=" not in plan):
        plan = plan_files.read_layout(Path(plan))
    layout = plan if isinstance(plan, ModuleLayout) or plan == SEARCH else read_layout(plan)
    if isinstance(layout, ModuleLayout) and layout.operator_ranks == 1 and layout.plan is None:
        return parallelize_whole(module, layout, **options)
    start = make_start(module, options.get("seed", 0))
    if not isinstance(layout, ModuleLayout):
        return _search(start.build(), **options)

    def choose_plan(captured: "CapturedModule") -> Plan:
        samples = captured.batch // layout.data
        degrees = {name: getattr(layout, name) for name in ("data", "num_microbatches", *CUTS)}
        return choose_cuts(captured.graph, samples=samples, **degrees)

    learning_rate = options.pop("learning_rate", 1e-3)
    options["optimizer"] = options.get("optimizer") or make_adamw(learning_rate)
    return make_cut_step(start, layout, device=find_device(), choose_plan=choose_plan, **options)


def _search(module: Any, *, optimizer: Any = None, learning_rate: float = 1e-3, **options: Any) -> "SearchedStep":
    """Return the step whose plan is searched for at its first batch."""
    from meshwise.executor.module_measures.searched_step import SearchedStep
    from meshwise.executor.modules.optimizers import make_adamw
    from meshwise.scenarios.module_plans.planning import CALIBRATION_SECONDS

    factory = make_adamw(learning_rate) if optimizer is None else optimizer
    return SearchedStep(module, LiveSearch(), CALIBRATION_SECONDS, optimizer=factory, **options)


class LiveSearch:
    """The search for the plan of a module in a loop of the user's own, on all ranks that there are."""

    def __init__(self) -> None:
        self._captured: OperatorGraph | None = None
        self._cuts: dict[CutAxes, Plan] = {}
        self._why_not = ""

    def choose_cuts(self, live: "LiveModule") -> list[Plan]:
        """Return how the operators of the module may be cut; not at all where ranks are given samples of their own."""
        from meshwise.scenarios.module_plans.choosing import first_line
        from meshwise.scenarios.module_plans.cut_plans import choose_cut_plans

        try:
            self._captured = live.capture()
        except ValueError as error:
            self._why_not = first_line(error)
        if self._captured is not None and live.is_global:
            self._cuts = choose_cut_plans(self._captured, live.samples, [live.num_ranks])
        return list(self._cuts.values())

    def choose(self, live: "LiveModule", figures: "ModuleFigures") -> "PlannedRun":
        """Return the plan of a module from what was measured of it.

        Raises
        ------
        ValueError
            Where no plan divides the batch.
        """
        from meshwise.scenarios.module_plans.choosing import choose
        from meshwise.scenarios.module_plans.prediction import build_model

        model = build_model(figures, self._captured, live.samples, live.precision, live.device.type, self._why_not)
        has_weight = self._captured is not None and live.has_weight()
        return choose(
            replace(model, has_weight=has_weight, cut_plans=self._cuts),
            [live.num_ranks],
            require=live.require_cuts if live.is_global else None,
            keep=lambda layout: live.is_global or layout.data == layout.num_ranks,
        )
