"""The best setup from Python."""

from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.choices.setup_choice import Choice, State
from meshwise.strategies.search.driver import SearchResult
from meshwise.strategies.search.objective import Objective

SMALL = """
name: small
model: {transformer: {layers: 4, hidden: 512, heads: 8, ffn: 2048, vocab: 1024}}
training: {global_batch: 16, sequence: 256, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1, devices_per_node: 2}
search: {space: {core: true}ASKED}
"""


def write(folder: Path, asked: str = "") -> str:
    path = folder / "s.yaml"
    path.write_text(SMALL.replace("ASKED", asked))
    return str(path)


def test_keywords_ask_for_a_setup_and_algorithms_for_a_plan(tmp_path: Path) -> None:
    scenario = load(write(tmp_path))
    plan, choice = scenario.search("best_first"), scenario.search(minimize="cost", price=2.0, tokens="1B", nodes=[1, 2])
    assert isinstance(plan, SearchResult) and isinstance(choice, Choice)
    assert plan.best is not None and choice.best is not None and plan.gap == 0 and choice.gap == pytest.approx(0)
    own = next(answer for answer in choice.answers if answer.setup.nodes == 1)
    assert choice.best.evaluation.step_time > 0 and choice.best.plan.mesh.num_ranks <= choice.best.setup.devices
    if own is choice.best:
        assert own.plan == plan.best.plan


def test_keywords_replace_fields_of_the_file(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, ", minimize: cost, price: 2, tokens: 1B, deadline: 30d"))
    choice = scenario.search()
    assert isinstance(choice, Choice) and choice.question.objective is Objective.COST
    assert (choice.question.price, choice.terms.tokens, choice.terms.deadline) == (2.0, 1e9, 30 * 86400.0)
    other = scenario.search(minimize="devices", nodes="1..2", deadline=3600 * 24)
    assert isinstance(other, Choice) and other.question.objective is Objective.DEVICES and other.terms.deadline == 86400
    plan = scenario.search_plan()
    assert isinstance(plan, SearchResult)


def test_front_searches_every_setup_to_its_end(tmp_path: Path) -> None:
    choice = load(write(tmp_path)).search(nodes="1..2", front=True, minimize="devices")
    assert isinstance(choice, Choice) and all(answer.is_proven for answer in choice.answers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimize": "money"}, "minimize is one of time, cost, devices, energy, met money"),
        ({"nodes": "4..2"}, "nodes holds numbers or ranges"),
        ({"minimize": "time", "budget": 3}, "budget is for searches of the least time on one machine, met 3 beside"),
        ({"spot": 0.5}, "reclaim_every: spot machines are reclaimed"),
    ],
)
def test_bad_keywords_are_told(options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path)).search(**options)


def test_an_answer_without_a_plan_says_so(tmp_path: Path) -> None:
    choice = load(write(tmp_path).replace("s.yaml", "s.yaml")).search(
        nodes=1, tokens="1B", deadline=1.0, minimize="time"
    )
    assert isinstance(choice, Choice) and choice.best is None and choice.answers[0].state is State.MISSES_TERMS
