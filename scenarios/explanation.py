"""Why a plan: what `meshwise explain` says, section by section, as JSON-ready data."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scenarios.checking import check
from scenarios.errors import Fault, ScenarioError
from scenarios.prediction_interval import category, uncertainty
from scenarios.reader import parse
from scenarios.scenario import Scenario, layout_of
from scenarios.schema import PlanTable
from simulator.engine import simulate
from simulator.units import format_size
from strategies.completion import complete
from strategies.cost_model import SimulatedCost
from strategies.evaluation import Trial
from strategies.explanation.critical_path import critical_path
from strategies.explanation.device_time import device_time, difference
from strategies.explanation.guidelines import recommendations
from strategies.explanation.machine_part import MachinePart, machine_parts
from strategies.explanation.pareto_front import Tradeoff, device_front, memory_front
from strategies.explanation.ranking import Seen, fits, ranking
from strategies.explanation.relief import Relief, reliefs
from strategies.explanation.replan import Change, replan
from strategies.explanation.robust import Prospect, prospect, prospects
from strategies.explanation.runner_up import Alternative, alternatives, runner_up
from strategies.explanation.sensitivity import Outcome, Sensitivity, memory_sensitivity, sensitivity
from strategies.explanation.shadow_price import ShadowPrice, next_larger_memory, price_of_memory, prices_of_rates
from strategies.explanation.shortfall import Shortfall, shortfall
from strategies.explanation.uncertainty import Uncertainty
from strategies.explanation.why_not import WhyNot, why_not
from strategies.layout import Layout
from strategies.lowering import lower
from strategies.parallelism import Attention
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.recomputation import recomputation
from strategies.violation import Violation

Section = tuple[str, Any]
"""A name, and JSON-ready data."""

MAX_QUESTION = 2000
"""Characters of what is asked for with ``--why-not``."""
QUANTILE = 0.95
"""The quantile of step time that every plan is told with."""

MOST_OUT_OF_MEMORY = 0.05
"""The probability of lacking memory up to which a robust choice allows a plan."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Parameters
    ----------
    asked
        What another plan is to have, by field: why not that one? Empty for no such question.
    lost
        Devices that are lost: what now? 0 for no such question.
    price
        Of a device for an hour.
    """

    asked: Mapping[str, Any]
    lost: int = 0
    price: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether everything is explained that there is."""
        return not self.asked and not self.lost


def plan_fields(text: str) -> dict[str, Any]:
    """Return what a text such as ``tensor=8,pipeline=2`` asks of a layout, by field.

    Raises
    ------
    ScenarioError
        Where a field or a value is none of a plan's.

    >>> plan_fields("tensor=8, recompute=full")
    {'tensor': 8, 'recompute': <Recompute.FULL: 'full'>}
    """
    if len(text) > MAX_QUESTION:
        message = f"a question has at most {MAX_QUESTION} characters, met {len(text)}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]
    broken = next((part for part in parts if not re.fullmatch(r"\w+\s*=\s*.+", part)), None)
    if broken is not None:
        message = f"fields of a plan with values, as tensor=8,pipeline=2; met {broken!r}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    lines = (re.sub(r"\s*=\s*", ": ", part, count=1) for part in parts)
    document = parse("\n".join(lines).encode("utf-8", "surrogatepass"), "--why-not")
    table, faults = check(PlanTable, document)
    if faults or table is None:
        raise ScenarioError(tuple(faults))
    made = {"attention": Attention, "recompute": recomputation}
    given = [name for name in document.data if name in table.model_fields_set]
    return {name: made.get(name, lambda value: value)(getattr(table, name)) for name in given}


@dataclass(frozen=True, slots=True)
class RobustChoice:
    """The plan that is best at a quantile, of those that may lack memory so seldom; ``None`` where there is none."""

    quantile: float
    most: float
    best: Prospect | None
    ranked: tuple[Prospect, ...]

    @property
    def plan(self) -> Plan | None:
        """The chosen plan."""
        return self.best.trial.plan if self.best else None

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON-ready data."""
        return {
            "quantile": self.quantile,
            "most_out_of_memory": self.most,
            "best": _prospect(self.best) if self.best else None,
            "ranked": [_prospect(each) for each in self.ranked],
        }


def check_robust(quantile: float | None, most: float) -> None:
    """Raise ``ValueError`` where a quantile or a probability is none."""
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"--robust: a quantile lies between 0 and 1, met {quantile:g}; nearest: 0.95")
    if not 0 <= most <= 1:
        raise ValueError(f"--out-of-memory: a probability lies in [0, 1], met {most:g}; nearest: 0.05")


def robust_choice(value: Scenario, quantile: float, most: float) -> RobustChoice:
    """Return the layout of a scenario's space whose step time is least at a quantile, and those that were compared."""
    ranked = ranking(value.problem, value.search_settings.make_space())
    doubt = uncertainty(category(value.problem.cluster, value.assumptions))
    found = tuple(prospects(ranked, doubt, quantile, most))
    allowed = [each for each in found if each.allowed]
    return RobustChoice(quantile, most, min(allowed, key=lambda each: each.quantile, default=None), found)


def nothing_fits_in(value: Scenario) -> dict[str, Any]:
    """Return why no layout of a scenario's space fits, and the cheapest changes that make one fit."""
    found = ranking(value.problem, value.search_settings.make_space())
    candidates = sorted(found.candidates, key=lambda each: each.peak)
    return nothing_fits(value.problem, [each.layout for each in candidates])


class Nothing(Exception):
    """Nothing fits: carries what is known as JSON-ready data."""

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(document["reason"])
        self.document = document


def explanation(
    value: Scenario, plan: Plan | None, question: Question, seconds: Callable[[], float], tell: Callable[[str], None]
) -> Iterator[Section]:
    """Yield what is to be said of a plan, or of the best one of the scenario's space.

    Parameters
    ----------
    seconds
        How many are left for what takes long: fewer devices, lost devices.
    tell
        Called with what is being done.

    Raises
    ------
    Nothing
        Where nothing fits, or the plan does not.
    """
    yield from _Explanation(value, question, seconds, tell).sections(plan)


class _Explanation:
    """What sections share."""

    def __init__(
        self, value: Scenario, question: Question, seconds: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        self.value, self.problem, self.question = value, value.problem, question
        self.seconds, self.tell = seconds, tell
        self.space = value.search_settings.make_space()
        self.uncertainty: Uncertainty = uncertainty(category(self.problem.cluster, value.assumptions))

    def sections(self, plan: Plan | None) -> Iterator[Section]:
        if plan is not None:
            self._check_fits(plan)
        self.tell("looking at all plans of the space")
        self.ranking = ranking(self.problem, self.space, seen=_counting(self.tell))
        self.tell("the fastest plan")
        best = self.ranking.fastest(fits)
        trial = (best or self._own()) if plan is None else self._evaluated(plan)
        if trial is None:
            raise Nothing(nothing_fits(self.problem, [each.layout for each in self._least()]))
        layout = self._layout(trial)
        yield "plan", self._trial(trial) | {"document": trial.plan.to_json(), "plans": len(self.ranking.candidates)}
        path = critical_path(lower(self.problem, trial.plan))
        stages = list(trial.plan.stages_at(path.position))
        yield "critical_path", {"seconds": path.by_kind(), "pipeline_rank": path.position, "stages": stages}
        yield "device_time", device_time(simulate(lower(self.problem, trial.plan)))
        if best is not None and trial.plan != best.plan:
            yield "best", self._compared(trial, best)
        if self.question.asked:
            self.tell("plans that have what is asked for")
            found = why_not(self.ranking, trial, layout, self.question.asked)
            yield "why_not", self._why_not(found)
        if self.question.lost:
            self.tell("plans for the devices that are left")
            yield "replan", self._replan(trial, layout)
        if self.question.whole:
            yield from self._whole(trial, layout, best)

    def _whole(self, trial: Trial, layout: Layout, best: Trial | None) -> Iterator[Section]:
        self.tell("the scenario's own plan")
        own = self._own()
        if own is not None and own.plan != trial.plan:
            yield "own_plan", self._compared(trial, own)
        self.tell("what more of each resource would save")
        parts = machine_parts(self.problem.cluster, self.problem.training.precision)
        prices = [*prices_of_rates(self.ranking, trial.plan, parts), price_of_memory(self.ranking, trial)]
        larger = next_larger_memory(self.ranking, trial)
        yield "shadow_prices", self._prices(prices, trial, larger)
        self.tell("what each decision is worth")
        second = runner_up(self.ranking, trial, layout)
        yield "runner_up", self._alternative(second) if second else None
        others = {each.decision: each for each in alternatives(self.ranking, trial, layout)}
        yield "decisions", [self._alternative(each) for each in others.values()]
        timeline = simulate(lower(self.problem, trial.plan))
        found = recommendations(self.problem, trial.plan, timeline, others)
        yield "recommendation", [{name: getattr(each, name) for name in each.__slots__} for each in found]
        self.tell("less memory")
        yield "memory_front", [self._tradeoff(each) for each in memory_front(self.ranking, trial)]
        if best is not None and trial.plan == best.plan:
            yield "sensitivity", list(self._sensitivities(trial, parts))
        if len(self.problem.cluster.nodes) == 1 and self.problem.cluster.num_nodes > 1:
            yield "device_front", list(self._devices(trial))

    def _check_fits(self, plan: Plan) -> None:
        if not SimulatedCost(self.problem).fits(plan):
            self.tell("what would make it fit")
            raise Nothing(nothing_fits(self.problem, [layout_of(self.problem, plan)]))

    def _own(self) -> Trial | None:
        """Return the scenario's own plan where it fits, which may be outside the space."""
        own = self.value.plan
        return self._evaluated(own) if own is not None and SimulatedCost(self.problem).fits(own) else None

    def _least(self) -> list[Any]:
        self.tell("what would make a plan fit")
        return sorted(self.ranking.candidates, key=lambda each: each.peak)

    def _evaluated(self, plan: Plan) -> Trial:
        return Trial(plan, SimulatedCost(self.problem).evaluate(plan), 0.0)

    def _layout(self, trial: Trial) -> Layout:
        plans = ((each.layout, self.ranking.plan(each)) for each in self.ranking.candidates)
        return next((layout for layout, plan in plans if plan == trial.plan), None) or layout_of(
            self.problem, trial.plan
        )

    def _trial(self, trial: Trial) -> dict[str, Any]:
        at, found = trial.evaluation, prospect(self.ranking, trial, self.uncertainty, QUANTILE, MOST_OUT_OF_MEMORY)
        low = self.uncertainty.step_time_quantile(at.step_time, 1 - QUANTILE)
        high = self.uncertainty.step_time_quantile(at.step_time, QUANTILE)
        return {
            "plan": trial.plan.describe(),
            "step_time": at.step_time,
            "step_time_interval": [low, high],
            "peak_memory": at.peak_memory,
            "memory_capacity": self.problem.cluster.accelerator.memory,
            "fits": at.fits,
            "out_of_memory": found.out_of_memory,
        }

    def _compared(self, trial: Trial, other: Trial) -> dict[str, Any]:
        """Return another plan, and where it takes more time or less."""
        spent = [device_time(simulate(lower(self.problem, each.plan))) for each in (trial, other)]
        margin = other.evaluation.step_time / trial.evaluation.step_time - 1
        return self._trial(other) | {"margin": margin, "more_seconds": difference(*spent)}

    def _alternative(self, found: Alternative) -> dict[str, Any]:
        return self._trial(found.trial) | {"decision": found.decision, "margin": found.margin}

    def _why_not(self, found: WhyNot) -> dict[str, Any]:
        return {
            "asked": {name: _plain(value) for name, value in found.asked},
            "legal_plans": found.legal,
            "broken_rules": [_rule(each) for each in found.broken],
            "lacking": _lacking(found.lacking) if found.lacking else None,
            "plan": self._trial(found.trial) if found.trial else None,
            "margin": found.margin,
            "more_seconds": dict(found.more),
            "nearest": self._trial(found.nearest) if found.nearest else None,
        }

    def _prices(self, prices: list[ShadowPrice], trial: Trial, larger: Trial | None) -> dict[str, Any]:
        device = self.problem.cluster.accelerator
        rates = [each for each in prices if each.resource != "memory"]
        binding = max(rates, key=lambda each: each.saves)
        faster = larger is not None
        return {
            "prices": [
                {
                    "resource": each.resource,
                    "amount": each.amount,
                    "more": each.more,
                    "saves": each.saves,
                    "fraction": each.saves / trial.evaluation.step_time,
                    "plan": each.plan.describe() if each.plan else None,
                }
                for each in prices
            ],
            "binding": binding.resource,
            "memory_binds": faster,
            "memory_used": trial.evaluation.peak_memory / device.memory,
            "next_memory": self._trial(larger) if larger else None,
        }

    def _sensitivities(self, trial: Trial, parts: tuple[MachinePart, ...]) -> Iterator[dict[str, Any]]:
        for part in parts:
            self.tell(f"{part.name} 20 % off")
            yield self._sensitivity(sensitivity(self.ranking, trial.plan, part))
        words = format_size(self.problem.cluster.accelerator.memory)
        yield self._sensitivity(memory_sensitivity(self.ranking, trial, words))

    def _sensitivity(self, found: Sensitivity) -> dict[str, Any]:
        return {
            "part": found.part,
            "speed": found.speed,
            "outcomes": [self._outcome(each) for each in found.outcomes],
            "region": list(found.region),
            "reached": list(found.reached),
        }

    def _outcome(self, found: Outcome) -> dict[str, Any]:
        best = found.best
        return {
            "factor": found.factor,
            "stays": found.stays,
            "loses": found.loses,
            "fits": found.step_time is not None,
            "best": best.plan.describe() if best else None,
            "best_step_time": best.evaluation.step_time if best else None,
            "step_time": found.step_time,
        }

    def _tradeoff(self, found: Tradeoff) -> dict[str, Any]:
        return {
            "plan": found.trial.plan.describe(),
            "step_time": found.trial.evaluation.step_time,
            "peak_memory": found.trial.evaluation.peak_memory,
            "devices": found.devices,
            "fits": found.fits,
            "cost_per_million_tokens": found.cost * self.question.price,
        }

    def _devices(self, trial: Trial) -> Iterator[dict[str, Any]]:
        self.tell("fewer devices")
        for devices, found in device_front(self.problem, self.space, trial, self.seconds):
            self.tell(f"fewer devices than {devices}")
            yield self._tradeoff(found) if found else {"devices": devices, "fits": False}

    def _replan(self, trial: Trial, layout: Layout) -> dict[str, Any]:
        found = replan(self.problem, self.space, trial.plan, layout, self.question.lost, self.seconds)
        return {
            "lost": found.lost,
            "left": found.left,
            "best": _change(found.best),
            "fewest_moves": _change(found.fewest_moves),
            "break_even_steps": found.break_even,
            "sizes": list(found.sizes),
            "proven": found.proven,
        }


def nothing_fits(problem: Problem, tried: list[Layout]) -> dict[str, Any]:
    """Return why none of some layouts fits, the least first, and the cheapest changes that make one fit."""
    if not tried:
        reason = "nothing fits: the search space is empty; the limits in search.space allow no legal plan"
        return {"reason": reason, "lacking": None, "plan": None, "changes": []}
    plan = complete(problem, tried[0])
    lacking = shortfall(problem, plan)
    changes = reliefs(problem, tried)
    return {
        "reason": f"nothing fits: {plan.describe()}: {lacking_in_words(lacking)}",
        "plan": plan.describe(),
        "lacking": _lacking(lacking),
        "changes": [_relief(each) for each in changes],
    }


def lacking_in_words(found: Shortfall) -> str:
    """Return in one line which device lacks how much, for what, and when."""
    stages = ", ".join(map(str, found.stages))
    held = ", ".join(f"{name} {format_size(size)}" for name, size in found.held if size)
    lacks = format_size(found.lacks)
    return (
        f"stage {stages} needs {format_size(found.needs)}, a device has {format_size(found.has)}, {lacks} too little "
        f"({held}; at {found.time:.3g} s, {found.during})"
    )


def _lacking(found: Shortfall) -> dict[str, Any]:
    return {
        "stages": list(found.stages),
        "needs": found.needs,
        "has": found.has,
        "lacks": found.lacks,
        "held": dict(found.held),
        "time": found.time,
        "during": found.during,
        "words": lacking_in_words(found),
    }


def _relief(found: Relief) -> dict[str, Any]:
    return {
        "change": found.change,
        "plan": found.plan.describe(),
        "step_time": found.step_time,
        "peak_memory": found.peak_memory,
        "devices": found.devices,
        "device_seconds": found.cost,
        "machine": found.machine,
    }


def _prospect(found: Prospect) -> dict[str, Any]:
    return {
        "plan": found.trial.plan.describe(),
        "step_time": found.trial.evaluation.step_time,
        "quantile": found.quantile,
        "peak_memory": found.trial.evaluation.peak_memory,
        "out_of_memory": found.out_of_memory,
        "allowed": found.allowed,
    }


def _change(found: Change | None) -> dict[str, Any] | None:
    if found is None:
        return None
    moved = found.migration
    return {
        "plan": found.trial.plan.describe(),
        "document": found.trial.plan.to_json(),
        "step_time": found.trial.evaluation.step_time,
        "peak_memory": found.trial.evaluation.peak_memory,
        "devices": found.devices,
        "received": moved.received,
        "most_received": moved.most,
        "from_checkpoint": moved.lost,
        "migration_seconds": moved.seconds,
    }


def _rule(found: Violation) -> dict[str, str]:
    return {"field": found.field, "message": found.message}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _counting(tell: Callable[[str], None]) -> Seen:
    return lambda count: tell(f"looking at all plans of the space: {count}")
