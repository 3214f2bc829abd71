"""The sections of `meshwise explain` as JSON-ready data, and the question that they answer.

A question asks why this plan, why not another plan, or what to do when devices are lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import process_time
from typing import Any

from meshwise.scenarios.files.checking import check
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import parse
from meshwise.scenarios.fitting import Nothing, nothing_fits, nothing_is_known_to_fit, shortfall_document
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.intervals import out_of_memory_of, risk_limit, uncertainty_of
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.simulator.engine import simulate
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Trial
from meshwise.strategies.explanation.alternatives import (
    Alternative,
    Tradeoff,
    alternatives,
    device_front,
    memory_front,
    prospect,
    runner_up,
)
from meshwise.strategies.explanation.critical_path import critical_path, device_time, difference
from meshwise.strategies.explanation.guidelines import recommendations
from meshwise.strategies.explanation.lost_devices import Change, replan
from meshwise.strategies.explanation.machine_parts import MachinePart, machine_parts
from meshwise.strategies.explanation.ranking import Seen, SpaceRanking, fits, ranking, search_best
from meshwise.strategies.explanation.sensitivity import (
    Outcome,
    Sensitivity,
    ShadowPrice,
    memory_sensitivity,
    next_larger_memory,
    price_of_memory,
    prices_of_rates,
    sensitivity,
)
from meshwise.strategies.explanation.uncertainty import Uncertainty
from meshwise.strategies.explanation.why_not import WhyNot, why_not
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import layout_of
from meshwise.strategies.plan.layout import Layout, Violation
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import recomputation
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.driver import OutOfTime, search

MAX_QUESTION = 2000
"""Most characters of the text of ``--why-not``."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a plan.

    Parameters
    ----------
    asked_fields
        Values by field of another plan: why not that one? Empty for no such question.
    num_lost
        Number of lost devices: what now? 0 for no such question.
    price
        Price of a device for an hour.
    """

    asked: Mapping[str, Any]
    lost: int = 0
    price: float = 1.0

    @property
    def whole(self) -> bool:
        """Whether all sections are wanted: no other plan and no lost device is asked about."""
        return not self.asked and not self.lost


def plan_fields(text: str) -> dict[str, Any]:
    """Return the values by layout field that a text such as ``tensor=8,pipeline=2`` asks for.

    Raises
    ------
    ScenarioError
        Where a plan has no such field, or the field no such value.

    >>> plan_fields("tensor=8, recompute=full")
    {'tensor': 8, 'recompute': <Recompute.FULL: 'full'>}
    """
    if len(text) > MAX_QUESTION:
        message = f"a question has at most {MAX_QUESTION} characters, met {len(text)}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    # a comma inside [...] or {...} belongs to a value, as in recompute={operators: [up, activation]}
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]
    broken = next((part for part in parts if not re.fullmatch(r"\w+\s*=\s*.+", part)), None)
    if broken is not None:
        message = f"fields of a plan with values, as tensor=8,pipeline=2; met {broken!r}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    lines = (re.sub(r"\s*=\s*", ": ", part, count=1) for part in parts)
    # a command line may have bytes that are not UTF-8: the reader reports them, where a plain encode would fail
    document = parse("\n".join(lines).encode("utf-8", "surrogatepass"), "--why-not")
    table, faults = check(PlanTable, document)
    if faults or table is None:
        raise ScenarioError(tuple(faults))
    made = {"attention": Attention, "recompute": recomputation}
    given = [name for name in document.data if name in table.model_fields_set]
    return {name: made.get(name, lambda value: value)(getattr(table, name)) for name in given}


Section = tuple[str, Any]
"""A name, and JSON-ready data."""

QUANTILE = 0.95
"""The quantile of step time in what is said of every plan; the interval goes from 1 - `QUANTILE` to it."""


def explanation(
    value: Scenario, plan: Plan | None, question: Question, seconds: Callable[[], float], tell: Callable[[str], None]
) -> Iterator[Section]:
    """Yield the sections about a plan, by default about the best plan of the scenario's space.

    Parameters
    ----------
    time_left
        Returns the seconds that are left.
    tell
        Called with a line about the current work.

    Raises
    ------
    NothingFits
        Where no plan fits, or ``plan`` does not.
    OutOfTime
        Where no seconds are left, after the rows known until then were yielded.
    """
    yield from _Explanation(value, question, seconds, tell).sections(plan)


class _Explanation:
    """One explanation: the question, and what its sections share, such as the ranked plans of the space."""

    def __init__(
        self, value: Scenario, question: Question, seconds: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        self.value, self.problem, self.question = value, value.problem, question
        self.seconds, self.tell = seconds, tell
        self.space = value.with_starts(value.make_space())
        self.costs = SimulatedCost(self.problem)
        self.uncertainty: Uncertainty = uncertainty_of(self.problem, value.assumptions)

    def sections(self, plan: Plan | None) -> Iterator[Section]:
        given = None
        if plan is not None:
            self.tell("the given plan")
            self._check_fits(plan)
            given = self._evaluated(plan)
            # sections that need no other plan come first: ranking the space may take all the time there is
            yield "plan", self._describe_plan(given)
            yield from self._describe_step(given)
        best = self._find_best(plan)
        trial = given or best or self._own_in_words()
        if trial is None:
            trial = best = self._searched()
        layout = self._layout(trial)
        yield "plan", self._describe_plan(trial) | {"among": asdict(self.ranking.among)}
        if given is None:
            yield from self._describe_step(trial)
        if best is not None and trial.plan != best.plan:
            yield "best", self._compared(trial, best)
        if self.question.asked:
            self.tell("plans that have what is asked for")
            found = why_not(self.ranking, trial, layout, self.question.asked, self.space)
            yield "why_not", self._why_not(found, trial)
        if self.question.lost:
            self.tell("plans for the devices that are left")
            yield "replan", self._replan(trial, layout)
        if self.question.whole:
            yield from self._whole(trial, layout, best)

    def _describe_plan(self, trial: Trial) -> dict[str, Any]:
        """Return the section about the plan itself."""
        document = {"document": trial.plan.to_json(), "most_out_of_memory": risk_limit(self.problem)}
        return self._trial(trial) | document

    def _describe_step(self, trial: Trial) -> Iterator[Section]:
        """Yield where the time of a step goes: its critical path, and the time of its devices."""
        path = critical_path(lower(self.problem, trial.plan))
        stages = list(trial.plan.stages_at(path.position))
        yield "critical_path", {"seconds": path.by_kind(), "pipeline_rank": path.position, "stages": stages}
        yield "device_time", device_time(simulate(lower(self.problem, trial.plan)))

    def _find_best(self, plan: Plan | None) -> Trial | None:
        """Rank known plans, ``plan`` and plans near them, and return the fastest one that fits."""
        self.tell("looking at plans of the space")
        best = search_best(self.problem, self.space, self.seconds)
        given = [] if plan is None else [layout_of(self.problem, plan)]
        self.ranking = self._ranked([*given, *best])
        self.tell("the fastest plan")
        return self.ranking.fastest(fits)

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
        others: dict[str, Alternative] = {}
        yield from self._partly("decisions", self._decisions(trial, layout, others))
        timeline = simulate(lower(self.problem, trial.plan))
        found = recommendations(self.problem, trial.plan, timeline, others)
        yield "recommendation", [{name: getattr(each, name) for name in each.__slots__} for each in found]
        self.tell("less memory")
        yield from self._partly("memory_front", map(self._tradeoff, memory_front(self.ranking, trial)))
        if best is not None and trial.plan == best.plan:
            yield from self._partly("sensitivity", self._sensitivities(trial, parts))
        if len(self.problem.cluster.nodes) == 1 and self.problem.cluster.num_nodes > 1:
            yield from self._partly("device_front", self._devices(trial))

    def _partly(self, name: str, rows: Iterator[dict[str, Any]]) -> Iterator[Section]:
        """Yield a section of rows; where time is up or the user interrupts, a section of the rows known until then."""
        known: list[dict[str, Any]] = []
        try:
            for row in rows:
                known.append(row)
        except (OutOfTime, KeyboardInterrupt):
            yield name, known
            raise
        yield name, known

    def _ranked(self, around: list[Layout]) -> SpaceRanking:
        return ranking(self.problem, self.space, around, seconds=self.seconds, seen=_counting(self.tell))

    def _searched(self) -> Trial:
        """Search for a plan that fits where no ranked one does, rank the plans near it, and return the fastest."""
        if self.ranking.whole:
            raise self._nothing()
        self.tell("looking for a plan that fits")
        found = search(BestFirst(), self.problem, self.space, seconds=self.seconds(), clock=process_time)
        if nothing_is_known_to_fit(found):
            raise self._nothing()
        if found.best is None:
            raise OutOfTime
        self.ranking = self._ranked([layout_of(self.problem, found.best.plan)])
        best = self.ranking.fastest(fits)
        assert best is not None  # the plan that the search found is ranked, and fits
        return best

    def _nothing(self) -> Nothing:
        self.tell("what would make a plan fit")
        least = sorted(self.ranking.candidates, key=lambda each: each.peak)
        return Nothing(nothing_fits(self.problem, [each.layout for each in least], self.space.accepts, self.seconds))

    def _check_fits(self, plan: Plan) -> None:
        if not self.costs.fits(plan):
            self.tell("what would make it fit")
            accepts = self.space.accepts
            raise Nothing(nothing_fits(self.problem, [layout_of(self.problem, plan)], accepts, self.seconds))

    def _own(self) -> Trial | None:
        """Return the scenario's own plan where it fits; it may lie outside the space."""
        own = self.value.plan
        return self._evaluated(own) if own is not None and self.costs.fits(own) else None

    def _own_in_words(self) -> Trial | None:
        """Return the scenario's own plan where it fits and the scenario's target, if it has one, can express it."""
        own, accepts = self._own(), self.space.accepts
        said = own is not None and (accepts is None or not accepts.refusals(self.problem, own.plan))
        return own if said else None

    def _evaluated(self, plan: Plan) -> Trial:
        return Trial(plan, self.costs.evaluate(plan), 0.0)

    def _layout(self, trial: Trial) -> Layout:
        plans = ((each.layout, self.ranking.plan(each)) for each in self.ranking.candidates)
        return next((layout for layout, plan in plans if plan == trial.plan), None) or layout_of(
            self.problem, trial.plan
        )

    def _trial(self, trial: Trial) -> dict[str, Any]:
        limit = risk_limit(self.problem)
        most = 1.0 if limit is None else limit
        at, found = trial.evaluation, prospect(self.problem, trial, self.uncertainty, QUANTILE, most)
        low = self.uncertainty.step_time_quantile(at.step_time, 1 - QUANTILE)
        high = self.uncertainty.step_time_quantile(at.step_time, QUANTILE)
        return {
            "plan": trial.plan.describe(),
            "step_time": at.step_time,
            "step_time_interval": [low, high],
            "peak_memory": at.peak_memory,
            "memory_capacity": self.problem.cluster.accelerator.memory,
            "memory_usable": self.problem.usable(self.problem.cluster.accelerator),
            "fits": at.fits,
            "out_of_memory": found.out_of_memory,
        }

    def _compared(self, trial: Trial, other: Trial) -> dict[str, Any]:
        """Return what is said of another plan, and by how many seconds each part of its step differs."""
        spent = [device_time(simulate(lower(self.problem, each.plan))) for each in (trial, other)]
        margin = other.evaluation.step_time / trial.evaluation.step_time - 1
        return self._trial(other) | {"margin": margin, "more_seconds": difference(*spent)}

    def _alternative(self, found: Alternative) -> dict[str, Any]:
        return self._trial(found.trial) | {"decision": found.decision, "margin": found.margin}

    def _decisions(self, trial: Trial, layout: Layout, others: dict[str, Alternative]) -> Iterator[dict[str, Any]]:
        """Yield for each topic the best plan that decides it otherwise; also add it to ``topic_alternatives``."""
        for each in alternatives(self.ranking, trial, layout):
            others[each.decision] = each
            yield self._alternative(each)

    def _why_not(self, found: WhyNot, trial: Trial) -> dict[str, Any]:
        return {
            "asked": {name: _plain(value) for name, value in found.asked},
            "legal_plans": found.legal,
            "all_legal_plans": found.whole,
            "outside_space": found.outside,
            "limits": self._limits(),
            "broken_rules": [_rule(each) for each in found.broken],
            "lacking": shortfall_document(self.problem, found.lacking) if found.lacking else None,
            "plan": self._trial(found.trial) if found.trial else None,
            "is_explained": found.trial is not None and found.trial.plan == trial.plan,
            "margin": found.margin,
            "more_seconds": dict(found.more),
            "nearest": self._trial(found.nearest) if found.nearest else None,
        }

    def _limits(self) -> str:
        """Return in words what limits the plans of the space."""
        target = self.value.target
        can = f" and what {Acceptance(target, self.value.spec).can}" if target is not None else ""
        return f"the limits in search.space{can}"

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
            "out_of_memory": out_of_memory_of(self.problem, found.trial.evaluation.peak_memory),
            "devices": found.devices,
            "fits": found.fits,
            "cost_per_million_tokens": found.cost * self.question.price,
        }

    def _devices(self, trial: Trial) -> Iterator[dict[str, Any]]:
        self.tell("fewer devices")
        for devices, found, among in device_front(self.problem, self.space, trial, self.seconds):
            told = self._tradeoff(found) if found else {"devices": devices, "fits": False}
            yield told | {"among": asdict(among) if among else None}
            self.tell(f"fewer devices than {devices}")

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
            "whole": found.whole,
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
    return lambda count: tell(f"looking at plans of the space: {count}")
