"""The sections of `meshwise explain` as JSON-ready data, and the question that they answer.

A question asks why this plan, why not another plan, or what to do when devices are lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import process_time
from typing import Any

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.fitting import (
    NothingFits,
    build_shortfall_document,
    describe_peak,
    explain_shortfall,
    proves_nothing_fits,
)
from meshwise.scenarios.interchange.targets import Acceptance
from meshwise.scenarios.intervals import (
    find_risk_limit,
    find_step_interval,
)
from meshwise.scenarios.memory_forecast import MemoryForecast, forecast_memory, forecast_plan, pick_judged
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.scenarios.simulation import describe_plan_tables, list_stage_memory
from meshwise.simulator.engine import simulate
from meshwise.simulator.program import collect_rarely
from meshwise.simulator.units import format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.explanation.alternatives import (
    Alternative,
    Tradeoff,
    device_front,
    find_runner_up,
    list_alternatives,
    memory_front,
)
from meshwise.strategies.explanation.critical_path import compare_times, critical_path, device_time
from meshwise.strategies.explanation.guidelines import recommendations
from meshwise.strategies.explanation.lost_devices import Change, replan
from meshwise.strategies.explanation.machine_parts import MachinePart, machine_parts
from meshwise.strategies.explanation.ranking import SpaceRanking, fits, ranking, search_best
from meshwise.strategies.explanation.sensitivity import (
    Outcome,
    Sensitivity,
    ShadowPrice,
    find_next_memory,
    memory_sensitivity,
    price_of_memory,
    prices_of_rates,
    sensitivity,
)
from meshwise.strategies.explanation.why_not import WhyNot, explain_why_not
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import recomputation
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.tables import Tables
from meshwise.strategies.search.driver import run_search
from meshwise.strategies.search.proposals import OutOfTime
from meshwise.strategies.search.table_search import has_bags

TABLE_SHARE = 0.4
"""The fraction of the time left that a search for placements of tables may take."""

MAX_QUESTION = 2000
"""Most characters of the text of ``--why-not``."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a plan: why not one with ``asked_fields``, or what now that ``num_lost`` devices are lost?

    No fields, or 0 devices, for no such question; ``price`` is that of a device for an hour.
    """

    asked_fields: Mapping[str, Any]
    num_lost: int = 0
    price: float = 1.0

    @property
    def is_general(self) -> bool:
        """Whether all sections are wanted: no other plan and no lost device is asked about."""
        return not self.asked_fields and not self.num_lost


def parse_question(text: str) -> dict[str, Any]:
    """Return the values by layout field that a text such as ``tensor=8,pipeline=2`` asks for.

    Raises
    ------
    ScenarioError
        Where a plan has no such field, or the field no such value.

    >>> parse_question("tensor=8, recompute=full")
    {'tensor': 8, 'recompute': <Recompute.FULL: 'full'>}
    """
    if len(text) > MAX_QUESTION:
        message = f"a question has at most {MAX_QUESTION} characters, met {len(text)}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    # a comma inside [...] or {...} belongs to a value, as in recompute={operators: [up, activation]}
    parts = [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text)]
    broken_part = next((part for part in parts if not re.fullmatch(r"\w+\s*=\s*.+", part)), None)
    if broken_part is not None:
        message = f"fields of a plan with values, as tensor=8,pipeline=2; met {broken_part!r}"
        raise ScenarioError((Fault("--why-not", 0, 0, "", message),))
    lines = (re.sub(r"\s*=\s*", ": ", part, count=1) for part in parts)
    # a command line may have bytes that are not UTF-8: the reader reports them, where a plain encode would fail
    document = parse_document("\n".join(lines).encode("utf-8", "surrogatepass"), "--why-not")
    table, faults = check_table(PlanTable, document)
    if faults or table is None:
        raise ScenarioError(tuple(faults))
    converters = {"attention": Attention, "recompute": recomputation}
    names = [name for name in document.data if name in table.model_fields_set]
    return {name: converters.get(name, lambda value: value)(getattr(table, name)) for name in names}


Section = tuple[str, Any]
"""A name, and JSON-ready data."""


class Explanation:
    """One explanation: the question, and what its sections share, such as the ranked plans of the space.

    ``time_left`` returns the seconds that are left; ``tell`` is called with a line about the current work.
    """

    def __init__(
        self, scenario: Scenario, question: Question, time_left: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        self.scenario, self.problem, self.question = scenario, scenario.problem, question
        self.time_left, self.tell = time_left, tell
        self.space = scenario.with_starts(scenario.make_space())
        self.costs = SimulatedCost(self.problem)

    def list_sections(self, plan: Plan | None) -> Iterator[Section]:
        """Yield the sections about a plan, by default about the best plan of the scenario's space.

        Raises
        ------
        NothingFits
            Where no plan fits, or ``plan`` does not.
        OutOfTime
            Where no seconds are left, after the rows known until then were yielded.
        """
        given_trial = None
        if plan is not None:
            self.tell("the given plan")
            if not self._fits(plan):
                self.tell("what would make it fit")
                raise self._explain_shortfall([recover_layout(self.problem, plan)])
            given_trial = self._evaluate_plan(plan)
            # sections that need no other plan come first: ranking the space may take all the time there is
            yield "plan", self._describe_plan(given_trial)
            yield from self._describe_step(given_trial)
        best_trial = self._find_best(plan)
        trial = given_trial or best_trial or self._find_sayable_own()
        if trial is None:
            trial = best_trial = self._search_best()
        layout = self._find_layout(trial)
        yield "plan", self._describe_plan(trial) | {"among": asdict(self.ranking.ranked_plans)}
        if given_trial is None:
            yield from self._describe_step(trial)
        if best_trial is not None and trial.plan != best_trial.plan:
            yield "best", self._compare_trials(trial, best_trial)
        if self.question.asked_fields:
            self.tell("plans that have what is asked for")
            answer = explain_why_not(self.ranking, trial, layout, self.question.asked_fields, self.space)
            yield "why_not", self._describe_why_not(answer, trial)
        if self.question.num_lost:
            self.tell("plans for the devices that are left")
            yield "replan", self._describe_replan(trial, layout)
        if self.question.is_general:
            yield from self._list_general_sections(trial, layout, best_trial)

    def _describe_plan(self, trial: Trial) -> dict[str, Any]:
        """Return the section about the plan itself."""
        document = {
            "document": trial.plan.to_json(),
            "peak_words": describe_peak(self.problem, trial.plan, trial.evaluation.peak_memory),
            "most_out_of_memory": find_risk_limit(self.problem),
        }
        return self._describe_trial(trial) | document

    def _describe_step(self, trial: Trial) -> Iterator[Section]:
        """Yield what fills memory, and where the time of a step goes: its critical path, and the time of devices."""
        timeline = simulate(lower(self.problem, trial.plan))
        yield "memory", list(map(asdict, list_stage_memory(timeline)))
        path = critical_path(lower(self.problem, trial.plan))
        stages = list(trial.plan.stages_at(path.position))
        yield "critical_path", {"seconds": path.sum_by_kind(), "pipeline_rank": path.position, "stages": stages}
        yield "device_time", device_time(timeline)
        yield from describe_plan_tables(self.problem, trial.plan).items()

    def _find_best(self, plan: Plan | None) -> Trial | None:
        """Rank known plans, ``plan`` and plans near them, and return the fastest one that fits."""
        self.tell("looking at plans of the space")
        best_layouts = search_best(self.costs, self.space, self.time_left)
        plan_layouts = [] if plan is None else [recover_layout(self.problem, plan)]
        table_trial = self._place_tables()
        self.ranking = self._rank_space([*plan_layouts, *best_layouts])
        self.tell("the fastest plan")
        trials = [trial for trial in (table_trial, self._find_fastest()) if trial is not None]
        return min(trials, key=lambda trial: trial.evaluation.step_time, default=None)

    def _place_tables(self) -> Trial | None:
        """Return the best placement of a recommender's tables, which no space has; ``None`` of other models."""
        if not has_bags(self.problem):
            return None
        self.tell("placements of embedding tables")
        seconds = TABLE_SHARE * self.time_left()
        return run_search(
            Tables(), self.problem, self.space, costs=self.costs, seconds=seconds, clock=process_time
        ).best

    def _list_general_sections(self, trial: Trial, layout: Layout, best_trial: Trial | None) -> Iterator[Section]:
        self.tell("the scenario's own plan")
        own_trial = self._evaluate_own()
        if own_trial is not None and own_trial.plan != trial.plan:
            yield "own_plan", self._compare_trials(trial, own_trial)
        self.tell("what more of each resource would save")
        parts = machine_parts(self.problem.cluster, self.problem.training.precision)
        prices = [*prices_of_rates(self.ranking, trial.plan, parts), price_of_memory(self.ranking, trial)]
        larger_trial = find_next_memory(self.ranking, trial)
        yield "shadow_prices", self._describe_prices(prices, trial, larger_trial)
        self.tell("what each decision is worth")
        next_best = find_runner_up(self.ranking, trial, layout, self._fits)
        yield "runner_up", self._describe_alternative(next_best) if next_best else None
        topic_alternatives: dict[str, Alternative] = {}
        yield from self._yield_rows("decisions", self._list_decisions(trial, layout, topic_alternatives))
        timeline = simulate(lower(self.problem, trial.plan))
        advice = recommendations(self.problem, trial.plan, timeline, topic_alternatives)
        yield "recommendation", list(map(asdict, advice))
        self.tell("less memory")
        yield from self._yield_rows("memory_front", map(self._describe_tradeoff, memory_front(self.ranking, trial)))
        # plans that share tables are not ranked, so that nothing says when another of them would be best
        if best_trial is not None and trial.plan == best_trial.plan and not trial.plan.embeddings:
            yield from self._yield_rows("sensitivity", self._list_sensitivities(trial, parts))
        if len(self.problem.cluster.nodes) == 1 and self.problem.cluster.num_nodes > 1:
            yield from self._yield_rows("device_front", self._list_device_front(trial))

    def _yield_rows(self, name: str, rows: Iterator[dict[str, Any]]) -> Iterator[Section]:
        """Yield a section of rows; where time is up or the user interrupts, a section of the rows known until then."""
        known_rows: list[dict[str, Any]] = []
        try:
            for row in rows:
                known_rows.append(row)
        except (OutOfTime, KeyboardInterrupt):
            yield name, known_rows
            raise
        yield name, known_rows

    @collect_rarely()
    def _rank_space(self, start_layouts: list[Layout]) -> SpaceRanking:
        def tell_count(count: int) -> None:
            self.tell(f"looking at plans of the space: {count}")

        return ranking(self.costs, self.space, start_layouts, seconds=self.time_left, on_seen=tell_count)

    def _search_best(self) -> Trial:
        """Search for a plan that fits where no ranked one does, rank the plans near it, and return the fastest."""
        if self.ranking.is_complete:
            raise self._explain_nothing()
        self.tell("looking for a plan that fits")
        result = run_search(
            BestFirst(), self.problem, self.space, costs=self.costs, seconds=self.time_left(), clock=process_time
        )
        if proves_nothing_fits(result):
            raise self._explain_nothing()
        if result.best is None:
            raise OutOfTime
        self.ranking = self._rank_space([recover_layout(self.problem, result.best.plan)])
        best_trial = self._find_fastest()
        assert best_trial is not None  # the plan that the search found is ranked, and fits
        return best_trial

    def _explain_nothing(self) -> NothingFits:
        self.tell("what would make a plan fit")
        candidates = sorted(self.ranking.candidates, key=lambda candidate: candidate.peak)
        return self._explain_shortfall([candidate.layout for candidate in candidates])

    def _explain_shortfall(self, layouts: list[Layout]) -> NothingFits:
        return NothingFits(explain_shortfall(self.problem, layouts, self.space.accepts, self.time_left))

    def _evaluate_own(self) -> Trial | None:
        """Return the scenario's own plan where it fits; it may lie outside the space."""
        own_plan = self.scenario.plan
        return self._evaluate_plan(own_plan) if own_plan is not None and self._fits(own_plan) else None

    def _find_sayable_own(self) -> Trial | None:
        """Return the scenario's own plan where it fits and the scenario's target, if it has one, can express it."""
        own_trial, acceptor = self._evaluate_own(), self.space.accepts
        is_sayable = own_trial is not None and (
            acceptor is None or not acceptor.list_refusals(self.problem, own_trial.plan)
        )
        return own_trial if is_sayable else None

    def _evaluate_plan(self, plan: Plan) -> Trial:
        # a search gives no time to plans beyond its margin, and some of them fit when they are replayed
        evaluation = Evaluation(self.costs.step_time(plan), self.costs.peak_memory(plan), self._fits(plan))
        return Trial(plan, evaluation, 0.0)

    def _forecast(self, plan: Plan) -> MemoryForecast:
        return forecast_memory(self.costs, plan)

    def _fits(self, plan: Plan) -> bool:
        """Return whether a plan fits, by the judgement of ``simulate`` and ``search``."""
        return self._forecast(plan).fits

    def _find_fastest(self) -> Trial | None:
        """Return the fastest ranked plan that fits, judged as a search judges what it found."""
        return pick_judged(self.costs, self.ranking.list_ascending(fits))

    def _find_layout(self, trial: Trial) -> Layout:
        plans = (
            (candidate.layout, self.ranking.complete_candidate(candidate)) for candidate in self.ranking.candidates
        )
        return next((layout for layout, plan in plans if plan == trial.plan), None) or recover_layout(
            self.problem, trial.plan
        )

    def _describe_trial(self, trial: Trial) -> dict[str, Any]:
        evaluation, devices = trial.evaluation, self.problem.cluster.accelerators
        forecast = self._forecast(trial.plan)
        return {
            "plan": trial.plan.describe(),
            "step_time": evaluation.step_time,
            "step_time_interval": list(
                find_step_interval(self.problem, evaluation.step_time, self.scenario.assumptions)
            ),
            "peak_memory": evaluation.peak_memory,
            "peak_reserved": forecast.reserved,
            "peak_device": forecast.device,
            "memory_capacity": min(device.memory for device in devices),
            "memory_usable": min(self.problem.usable_memory(device) for device in devices),
            "fits": forecast.fits,
            "out_of_memory": forecast.out_of_memory,
        }

    def _compare_trials(self, trial: Trial, other_trial: Trial) -> dict[str, Any]:
        """Return what is said of another plan, and by how many seconds each part of its step differs."""
        timelines = (simulate(lower(self.problem, compared.plan)) for compared in (trial, other_trial))
        device_times = map(device_time, timelines)
        margin = other_trial.evaluation.step_time / trial.evaluation.step_time - 1
        return self._describe_trial(other_trial) | {"margin": margin, "more_seconds": compare_times(*device_times)}

    def _describe_alternative(self, alternative: Alternative) -> dict[str, Any]:
        return self._describe_trial(alternative.trial) | {"decision": alternative.topic, "margin": alternative.margin}

    def _list_decisions(
        self, trial: Trial, layout: Layout, topic_alternatives: dict[str, Alternative]
    ) -> Iterator[dict[str, Any]]:
        """Yield for each topic the best plan that decides it otherwise; also add it to ``topic_alternatives``."""
        for alternative in list_alternatives(self.ranking, trial, layout, self._fits):
            topic_alternatives[alternative.topic] = alternative
            yield self._describe_alternative(alternative)

    def _describe_why_not(self, answer: WhyNot, trial: Trial) -> dict[str, Any]:
        target = self.scenario.target
        ability_text = f" and what {Acceptance(target, self.scenario.spec).can}" if target is not None else ""
        return {
            "asked": {
                name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in answer.asked_fields
            },
            "legal_plans": answer.num_legal,
            "all_legal_plans": answer.is_complete,
            "outside_space": answer.is_outside,
            "limits": f"the limits in search.space{ability_text}",
            "broken_rules": [{"field": rule.field, "message": rule.message} for rule in answer.broken_rules],
            "lacking": build_shortfall_document(self.problem, answer.trial.plan, answer.shortfall)
            if answer.shortfall and answer.trial
            else None,
            "plan": self._describe_trial(answer.trial) if answer.trial else None,
            "is_explained": answer.trial is not None and answer.trial.plan == trial.plan,
            "margin": answer.margin,
            "more_seconds": dict(answer.extra_seconds),
            "nearest": self._describe_trial(answer.nearest_trial) if answer.nearest_trial else None,
        }

    def _describe_prices(self, prices: list[ShadowPrice], trial: Trial, larger_trial: Trial | None) -> dict[str, Any]:
        forecast = self._forecast(trial.plan)
        rates = [price for price in prices if price.resource != "memory"]
        binding_price = max(rates, key=lambda price: price.saved_seconds)
        return {
            "prices": [
                {
                    "resource": price.resource,
                    "amount": price.amount,
                    "more": price.increment,
                    "saves": price.saved_seconds,
                    "fraction": price.saved_seconds / trial.evaluation.step_time,
                    "plan": price.plan.describe() if price.plan else None,
                }
                for price in prices
            ],
            "binding": binding_price.resource,
            "memory_binds": larger_trial is not None,
            "memory_used": forecast.device / forecast.capacity,
            "next_memory": self._describe_trial(larger_trial) if larger_trial else None,
        }

    def _list_sensitivities(self, trial: Trial, parts: tuple[MachinePart, ...]) -> Iterator[dict[str, Any]]:
        for part in parts:
            self.tell(f"{part.name} 20 % off")
            yield self._describe_sensitivity(sensitivity(self.ranking, trial.plan, part))
        devices = self.problem.cluster.accelerators
        words = " and ".join(dict.fromkeys(format_size(device.memory) for device in devices))
        yield self._describe_sensitivity(memory_sensitivity(self.ranking, trial, words))

    def _describe_sensitivity(self, result: Sensitivity) -> dict[str, Any]:
        return {
            "part": result.part,
            "speed": result.speed,
            "outcomes": [self._describe_outcome(outcome) for outcome in result.outcomes],
            "region": list(result.region),
            "reached": list(result.is_open_ended),
        }

    def _describe_outcome(self, outcome: Outcome) -> dict[str, Any]:
        best_trial = outcome.best
        return {
            "factor": outcome.factor,
            "stays": outcome.stays,
            "loses": outcome.loses,
            "fits": outcome.step_time is not None,
            "best": best_trial.plan.describe() if best_trial else None,
            "best_step_time": best_trial.evaluation.step_time if best_trial else None,
            "step_time": outcome.step_time,
        }

    def _describe_tradeoff(self, tradeoff: Tradeoff) -> dict[str, Any]:
        problem, plan = tradeoff.problem, tradeoff.trial.plan
        forecast = self._forecast(plan) if problem is self.problem else forecast_plan(problem, plan)
        return {
            "plan": tradeoff.trial.plan.describe(),
            "step_time": tradeoff.trial.evaluation.step_time,
            "peak_memory": tradeoff.trial.evaluation.peak_memory,
            "out_of_memory": forecast.out_of_memory,
            "devices": tradeoff.devices,
            "unit": problem.training.unit,
            "fits": forecast.fits,
            "cost_per_million_tokens": tradeoff.cost * self.question.price,
        }

    def _list_device_front(self, trial: Trial) -> Iterator[dict[str, Any]]:
        self.tell("fewer devices")
        for devices, tradeoff, ranked_plans in device_front(self.problem, self.space, trial, self.time_left):
            row = self._describe_tradeoff(tradeoff) if tradeoff else {"devices": devices, "fits": False}
            yield row | {"among": asdict(ranked_plans) if ranked_plans else None}
            self.tell(f"fewer devices than {devices}")

    def _describe_replan(self, trial: Trial, layout: Layout) -> dict[str, Any]:
        result = replan(self.problem, self.space, trial.plan, layout, self.question.num_lost, self.time_left)
        return {
            "lost": result.num_lost,
            "left": result.num_left,
            "best": _describe_change(result.best),
            "fewest_moves": _describe_change(result.fewest_moves),
            "break_even_steps": result.break_even,
            "sizes": list(result.sizes),
            "proven": result.is_proven,
            "whole": result.is_complete,
        }


def _describe_change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    migration = change.migration
    return {
        "plan": change.trial.plan.describe(),
        "document": change.trial.plan.to_json(),
        "step_time": change.trial.evaluation.step_time,
        "peak_memory": change.trial.evaluation.peak_memory,
        "devices": change.devices,
        "received": migration.received_bytes,
        "most_received": migration.max_received,
        "from_checkpoint": migration.lost_bytes,
        "migration_seconds": migration.seconds,
    }
