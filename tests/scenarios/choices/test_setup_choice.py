"""The best setup is that of an enumeration of all plans on every machine and batch."""

from dataclasses import replace
from math import exp, expm1, inf
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.choices.front import dominates, list_front_points
from meshwise.scenarios.choices.question import Question, resize
from meshwise.scenarios.choices.setup_choice import State, choose_setup
from meshwise.scenarios.choices.spot import find_default_costs
from meshwise.scenarios.loader import load
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.search.objective import Bill, Machines, Objective

SMALL = """
name: small
model: {transformer: {layers: 4, hidden: 2048, heads: 16, ffn: 8192, vocab: 4096}}
training: {global_batch: 32, sequence: 1024, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-a100-80gb, nodes: 2, devices_per_node: 2}
search: {space: {core: true, recompute: [none], microbatch: [1, 4, 16]}}
"""
TOKENS = 1e8


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return load(str(path))


def enumerate_bills(scenario: Scenario, question: Question) -> list[Bill]:
    """Return the bill of the fastest plan of every setup that keeps the terms, by enumeration of all plans."""
    terms, bills = question.make_terms(scenario), []
    for setup in question.list_setups(scenario):
        best = setup.scenario.search("exhaustive").best
        assert best is not None
        for rates in setup.offers:
            goodput = reclaimed_goodput(question, setup.nodes) if rates.machines is Machines.SPOT else 1.0
            bills.append(terms.write_bill(rates, setup.batch, best.evaluation.step_time, goodput))
    return [bill for bill in bills if terms.is_met(bill)]


def reclaimed_goodput(question: Question, nodes: int) -> float:
    """Return the most that renewal theory expects, of many intervals between checkpoints, with the default costs."""
    assert question.reclaim_every is not None
    costs, mtbf = find_default_costs(), question.reclaim_every / nodes
    intervals = [costs.save - costs.blocking + 0.05 * number for number in range(100_000)]
    lost = costs.restart + costs.load + costs.save - costs.blocking
    return max(
        tau / (mtbf * exp(lost / mtbf) * expm1((tau + costs.blocking) / mtbf)) for tau in intervals if tau < 600 * mtbf
    )


DAY = 86400.0
QUESTIONS: list[dict[str, Any]] = [
    {"objective": Objective.TIME},
    {"objective": Objective.COST, "price": 2.0},
    {"objective": Objective.ENERGY},
    {"objective": Objective.DEVICES},
    {"objective": Objective.DEVICES, "deadline": 0.9},
    {"objective": Objective.COST, "price": 2.0, "deadline": 0.9},
    {"objective": Objective.TIME, "price": 2.0, "budget": 1.2},
    {"objective": Objective.TIME, "batches": (16, 32, 64)},
    {"objective": Objective.COST, "price": 1.0, "batches": (16, 64), "critical_batch": 32768.0},
    {"objective": Objective.ENERGY, "batches": (8, 32), "critical_batch": 16384.0, "deadline": 0.8},
    {"objective": Objective.COST, "price": 2.0, "spot": 0.8, "reclaim_every": 8 * 3600.0},
    {"objective": Objective.COST, "price": 2.0, "spot": 1.9, "reclaim_every": 1800.0},
    {"objective": Objective.COST, "spot": 0.8, "reclaim_every": 7200.0, "deadline": 0.9},
    {"objective": Objective.TIME, "price": 2.0, "spot": 0.8, "reclaim_every": 8 * 3600.0, "budget": 0.6},
    {
        "objective": Objective.DEVICES,
        "price": 2.0,
        "spot": 0.5,
        "reclaim_every": 7200.0,
        "deadline": 2.5,
        "budget": 0.4,
    },
]
"""Deadlines and budgets are fractions of what the scenario's own machine takes."""


@pytest.mark.parametrize("fields", QUESTIONS, ids=[f"{number}" for number in range(len(QUESTIONS))])
def test_the_choice_is_that_of_an_enumeration(scenario: Scenario, fields: dict[str, Any]) -> None:
    question = Question(**({"nodes": (1, 2, 4), "tokens": TOKENS} | fields | {"deadline": inf, "budget": inf}))
    own = enumerate_bills(scenario, replace(question, nodes=(2,), batches=()))[0]
    question = replace(
        question,
        deadline=fields.get("deadline", inf) * own.seconds,
        budget=fields.get("budget", inf) * (own.cost or 1.0),
    )
    expected = min(enumerate_bills(scenario, question), key=lambda bill: bill.rank(question.objective))
    choice = choose_setup(scenario, question, seconds=None)
    assert choice.best is not None and choice.best.bill is not None and choice.gap == pytest.approx(0.0, abs=1e-9)
    assert choice.best.bill.rank(question.objective) == pytest.approx(expected.rank(question.objective), rel=1e-6)
    assert choice.best.bill.machines is expected.machines
    assert all(answer.state is not State.OPEN for answer in choice.answers)


@pytest.mark.parametrize("fields", QUESTIONS, ids=[f"{number}" for number in range(len(QUESTIONS))])
def test_the_front_is_that_of_an_enumeration(scenario: Scenario, fields: dict[str, Any]) -> None:
    limits = {"deadline": inf, "budget": inf, "compares": True}
    question = Question(**({"nodes": (1, 2, 4), "tokens": TOKENS} | fields | limits))
    terms, rows = question.make_terms(scenario), []
    for setup in question.list_setups(scenario):
        best = setup.scenario.search("exhaustive").best
        assert best is not None
        for rates in setup.offers:
            goodput = reclaimed_goodput(question, setup.nodes) if rates.machines is Machines.SPOT else 1.0
            bill = terms.write_bill(rates, setup.batch, best.evaluation.step_time, goodput)
            figures = (bill.seconds, bill.devices, bill.cost or 0.0, best.evaluation.peak_memory)
            rows.append(((setup.nodes, setup.batch, bill.machines), figures))
    expected = {name for name, figures in rows if not any(dominates(other, figures) for _, other in rows)}
    points = list_front_points(choose_setup(scenario, question, seconds=None))
    found = {
        (point.answer.setup.nodes, point.answer.setup.batch, point.bill.machines)
        for point in points
        if point.is_on_front
    }
    assert len(points) == len(rows) and found == expected and all(point.is_proven for point in points)


def test_terms_that_nothing_keeps_name_the_nearest_setup(scenario: Scenario) -> None:
    question = Question(Objective.DEVICES, nodes=(1, 2), tokens=TOKENS, deadline=1e-3)
    choice = choose_setup(scenario, question, seconds=None)
    assert choice.best is None and choice.nearest is not None and choice.nearest.setup.nodes == 2
    assert {answer.state for answer in choice.answers} == {State.MISSES_TERMS} and choice.lower_bound == inf


def test_without_an_objective_every_setup_has_its_own_best_plan(scenario: Scenario) -> None:
    question = Question(nodes=(1, 2, 4), tokens=TOKENS, compares=True)
    choice = choose_setup(scenario, question, seconds=None)
    for answer in choice.answers:
        best = answer.setup.scenario.search("exhaustive").best
        assert answer.best is not None and best is not None
        assert answer.best.evaluation.step_time == best.evaluation.step_time


def test_a_machine_that_is_resized_keeps_its_margin_and_drops_its_plan(scenario: Scenario) -> None:
    larger = resize(scenario, 4, 64)
    assert (larger.problem.cluster.num_nodes, larger.problem.training.global_batch, larger.plan) == (4, 64, None)
    assert larger.problem.memory_margin == scenario.problem.memory_margin
    assert resize(scenario, 2, 32) is scenario


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": Objective.COST}, "price: minimize cost needs the price of a device-hour"),
        ({"budget": 10.0, "tokens": 1e9}, "price: a budget needs the price"),
        ({"deadline": DAY}, "tokens: a deadline is about a whole run"),
        ({"tokens": 0.0}, "tokens is more than 0, met 0"),
        ({"spot": 0.8}, "reclaim_every: spot machines are reclaimed, and their bill needs"),
        ({"reclaim_every": 3600.0}, "spot: reclaims are of spot machines and need their price, met none"),
        ({"spot": 0.8, "reclaim_every": 0.0}, "reclaim_every is more than 0, met 0"),
        ({"price": -1.0}, "price is more than 0, met -1"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_it_lacks(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Question(**fields)


def test_energy_of_an_accelerator_without_a_figure_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cpu.yaml"
    path.write_text(SMALL.replace("dgx-a100-80gb", "local-cpu").replace("bf16", "fp32"))
    with pytest.raises(ValueError, match="minimize energy: the catalog has no power of CPU core"):
        Question(Objective.ENERGY).list_setups(load(str(path)))


LARGE = """
name: large
model: {transformer: {layers: 8, hidden: 8192, heads: 64, ffn: 32768, vocab: 4096}}
training: {global_batch: 16, sequence: 1024, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 1}
"""
"""Fits with optimizer states on the host alone."""


def test_a_plan_that_needs_the_host_is_found_below_a_cutoff(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(LARGE)
    scenario = load(str(path))
    best = scenario.search("best_first").best
    assert best is not None and best.plan.offload
    seconds = 1.02 * best.evaluation.step_time
    settings = replace(scenario.search_settings, algorithm="best_first", options=(("cutoff", seconds),))
    result = replace(scenario, search_settings=settings).search()
    assert result.best is not None and result.best.evaluation.step_time == best.evaluation.step_time
    question = Question(Objective.DEVICES, nodes=(1, 2), tokens=1e9, deadline=1e9 / (16 * 1024) * seconds)
    choice = choose_setup(scenario, question, seconds=None)
    assert choice.best is not None and choice.best.setup.nodes == 1


def test_a_deadline_of_just_what_a_run_takes_is_kept_and_a_shorter_one_names_it(scenario: Scenario) -> None:
    question = Question(Objective.TIME, nodes=(1, 2), tokens=TOKENS)
    best = choose_setup(scenario, question, seconds=None).best
    assert best is not None and best.bill is not None
    kept = choose_setup(scenario, replace(question, deadline=best.bill.seconds), seconds=None)
    assert kept.best is not None and kept.best.bill == best.bill
    missed = choose_setup(scenario, replace(question, deadline=0.99 * best.bill.seconds), seconds=None)
    assert missed.best is None and missed.nearest is not None and missed.nearest.bill == best.bill


def test_failures_leave_the_bound_of_a_bill_lower(tmp_path: Path) -> None:
    path = tmp_path / "failing.yaml"
    path.write_text(
        SMALL + "run: {steps: 10000, failures: {software_mtbf: 600 s}, checkpoint: {interval: 60 s, blocking: 2 s, "
        "load: 2 s}, recovery: {detection: 5 s, restart: 20 s, repair: 1 h}}\n"
    )
    choice = choose_setup(load(str(path)), Question(Objective.TIME, nodes=(1, 2), tokens=TOKENS), seconds=None)
    assert choice.best is not None and choice.best.bill is not None and 0.5 < choice.best.bill.goodput < 1
    assert choice.gap is not None and 0 < choice.gap <= 1 / choice.best.bill.goodput - 1 + 1e-9


def test_a_setup_without_a_proof_is_open_though_its_search_ended(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a faster plan was judged to lack memory: the bound is then below the plan that was found."""
    search = Scenario.search_plan

    def search_loosely(value: Scenario, **options: Any) -> Any:
        result = search(value, **options)
        return replace(result, lower_bound=None if result.lower_bound is None else 0.5 * result.lower_bound)

    monkeypatch.setattr(Scenario, "search_plan", search_loosely)
    choice = choose_setup(scenario, Question(nodes=(1, 2), tokens=TOKENS, compares=True), seconds=None)
    assert choice.best is not None and choice.gap is not None and choice.gap > 0
    assert [answer.state for answer in choice.answers if answer is not choice.best] == [State.OPEN]
