"""Chooses the layout of a module by the simulator: `choose`.

Every layout has a lower bound of its step time, which takes little to compute. Layouts are simulated from the least
bound on, until no other can be among the two fastest.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.scenarios.module_plans.layouts import (
    Choices,
    find_choices,
    list_layouts,
    list_other_schedules,
    list_refusals,
)
from meshwise.scenarios.module_plans.prediction import Estimate, ModuleModel, Prediction, StepPredictor
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.mesh import DATA, OPERATOR_AXES, PIPELINE, Axis, Mesh
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

SCHEDULED = 4
"""Pipelines of which other schedules are tried: the fastest ones with 1F1B."""

OFFLOAD_LINE = "offload: its memory is predicted; copies to and from the host, and work there, were not measured"

Requirement = Callable[[ModuleLayout], None]
"""Raises `ValueError` where a layout that cuts operators cannot run."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The plan of a run and what it is predicted to take.

    Parameters
    ----------
    prediction, runner_up
        Of the plan, and of the next best of a search; ``None`` where there are none.
    num_plans
        Plans that were compared; 1 for a plan that was given.
    tokens
        Tokens of a step, where the data are tokens.
    assumptions
        What the prediction rests on.
    failure
        Why nothing could be predicted, or empty.
    """

    layout: ModuleLayout
    prediction: Prediction | None = None
    runner_up: Prediction | None = None
    num_plans: int = 0
    tokens: int | None = None
    assumptions: tuple[str, ...] = ()
    failure: str = ""

    __repr__ = brief_repr("layout", "prediction", "num_plans")

    def list_assumptions(self) -> list[str]:
        """Return what the prediction rests on, or why there is none."""
        return [*self.assumptions, *([f"not predicted: {self.failure}"] if self.failure else [])]

    def list_reasons(self) -> list[str]:
        """Return why the plan was chosen, a line each."""
        if self.prediction is None or self.num_plans < 2 or self.runner_up is None:
            return []
        runner_up, chosen = self.runner_up, self.prediction
        if not chosen.fits:
            return [f"the least memory of {self.num_plans} plans, none of which fits"]
        compared = "does not fit" if not runner_up.fits else _compare(runner_up.step_time, chosen.step_time)
        return [f"fastest of {self.num_plans} plans; next {runner_up.layout.describe()}, {compared}"]


def _compare(slower: float, faster: float) -> str:
    """Return how much slower a time is.

    >>> _compare(1.25, 1.0)
    '25 % slower'
    """
    return f"{slower / faster - 1:.0%} slower".replace("%", " %")


def predict_layout(model: ModuleModel, layout: ModuleLayout, tokens: int | None = None) -> PlannedRun:
    """Return a layout that was given, with its prediction."""
    lines = (*model.assumptions, *([OFFLOAD_LINE] if layout.offload else []))
    return PlannedRun(layout, StepPredictor(model).predict(layout), None, 1, tokens, lines)


def choose(
    model: ModuleModel,
    numbers: Sequence[int],
    tokens: int | None = None,
    *,
    require: Requirement | None = None,
    keep: Callable[[ModuleLayout], bool] = lambda layout: True,
) -> PlannedRun:
    """Return the fastest layout that fits, with its prediction; else the one with the least memory.

    Parameters
    ----------
    numbers
        Numbers of ranks.
    require
        Called with a layout that cuts operators before it is chosen; without it none is tried.
    keep
        Whether a layout is tried.
    """
    num_layers = sum(block.layer for block in model.graph.blocks)
    choices = find_choices(
        numbers,
        model.figures,
        num_layers,
        is_captured=model.is_captured,
        cut_axes=() if require is None or model.cut_graph is None else tuple(model.cut_plans),
        has_weight=model.has_weight,
    )
    refusals = () if model.figures is None else tuple(list_refusals(model.figures))
    search = _Search(model, choices, keep)
    while True:
        best, runner_up = search.find_two_best()
        if best.layout.operator_ranks == 1 or require is None:
            break
        try:
            require(best.layout)
            break
        except ValueError as error:
            refusals = (*refusals, f"not tried: operators cut over ranks, as {first_line(error)}")
            search = _Search(model, replace(choices, cut_axes=()), keep)
    assumptions = (*model.assumptions, *refusals)
    return PlannedRun(best.layout, best, runner_up, search.num_plans, tokens, assumptions)


class _Search:
    """A search of all layouts of a module."""

    def __init__(self, model: ModuleModel, choices: Choices, keep: Callable[[ModuleLayout], bool]) -> None:
        self.model, self.choices, self.keep = model, choices, keep
        self.predictor = StepPredictor(model)
        self.num_plans = 0
        self._predictions: dict[ModuleLayout, Prediction] = {}

    def find_two_best(self) -> tuple[Prediction, Prediction | None]:
        """Return the best layout and the next one.

        Raises
        ------
        ValueError
            Where there is none.
        """
        layouts = [layout for layout in self._list_whole_plans() if self.keep(layout)]
        if not layouts:
            ranks = f"{' or '.join(map(str, self.choices.data))} ranks"
            raise ValueError(f"no plan of {ranks} divides a batch of {self.model.batch}")
        estimates = [self.predictor.estimate(layout) for layout in layouts]
        estimates += list(self._list_partly_recomputed(estimates))
        pipelines = [estimate for estimate in estimates if estimate.layout.pipeline > 1 and estimate.fits]
        fastest = self._find_fastest(pipelines, SCHEDULED) if self.model.figures is not None else []
        others = [
            other
            for prediction in fastest
            for other in list_other_schedules(prediction.layout, self.choices)
            if prediction.layout.operator_ranks == 1
        ]
        estimates += [self.predictor.estimate(layout) for layout in dict.fromkeys(others)]
        self.num_plans = len(estimates)
        fitting = [estimate for estimate in estimates if estimate.fits]
        two_best = self._find_fastest(fitting, 2)
        if len(two_best) < 2:
            least = sorted((item for item in estimates if not item.fits), key=lambda item: item.peak_memory)
            two_best += map(self._simulate, islice(least, 2 - len(two_best)))
        return two_best[0], two_best[1] if len(two_best) > 1 else None

    def _list_partly_recomputed(self, estimates: Sequence[Estimate]) -> Iterator[Estimate]:
        """Yield layouts that compute again as few blocks as fit, where none of them do not fit and all of them do.

        Of captured operators products and attention may be kept besides; then all blocks are tried too.
        """
        fitting = {estimate.layout for estimate in estimates if estimate.fits}
        for estimate in estimates:
            layout = estimate.layout
            if estimate.fits or replace(layout, recompute=Recompute.FULL) not in fitting:
                continue
            yield from self._find_fewest(layout, Recompute.FULL)
            if self.model.is_captured:
                whole = self.predictor.estimate(replace(layout, recompute=Recompute.SELECTIVE))
                if whole.fits:
                    yield whole
                    yield from self._find_fewest(layout, Recompute.SELECTIVE)

    def _find_fewest(self, layout: ModuleLayout, kind: Recompute) -> Iterator[Estimate]:
        """Yield a layout with the fewest blocks of a stage that fit, if they are fewer than all, which do."""
        best: Estimate | None = None
        too_few, enough = 0, self.predictor.count_stage_blocks(layout)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            estimate = self.predictor.estimate(replace(layout, recompute=FirstLayers(kind, middle)))
            if estimate.fits:
                best, enough = estimate, middle
            else:
                too_few = middle
        if best is not None:
            yield best

    def _list_whole_plans(self) -> Iterable[ModuleLayout]:
        """Yield all layouts; where operators are cut, with how they are."""
        for layout in list_layouts(self.model.batch, self.choices):
            if layout.operator_ranks == 1:
                yield layout
            elif (planned := self._cut(layout)) is not None:
                yield planned

    def _cut(self, layout: ModuleLayout) -> ModuleLayout | None:
        """Return a layout with the shardings of its operators; ``None`` where no operator can be cut over them."""
        plan = self.model.cut_plans.get(layout.cut_axes)
        if plan is None:
            return None
        own_axes = (axis for axis in plan.mesh.axes if axis.name in OPERATOR_AXES)
        mesh = Mesh((Axis(PIPELINE, layout.pipeline), Axis(DATA, layout.data), *own_axes))
        microbatch = self.model.batch // layout.data // layout.num_microbatches
        plan = replace(plan, mesh=mesh, microbatch=microbatch, num_microbatches=layout.num_microbatches)
        return replace(layout, plan=plan)

    def _find_fastest(self, estimates: Sequence[Estimate], number: int) -> list[Prediction]:
        """Return so many of the fastest, in order; of equally fast ones the first comes first."""
        found: list[tuple[float, int, Prediction]] = []
        for place, estimate in sorted(enumerate(estimates), key=lambda item: item[1].least_time):
            if len(found) == number and estimate.least_time > found[-1][0]:
                break
            prediction = self._simulate(estimate)
            found = sorted([*found, (prediction.step_time, place, prediction)], key=lambda row: row[:2])[:number]
        return [prediction for *_, prediction in found]

    def _simulate(self, estimate: Estimate) -> Prediction:
        known = self._predictions.get(estimate.layout)
        if known is None:
            known = self._predictions[estimate.layout] = self.predictor.simulate(estimate)
        return known


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
