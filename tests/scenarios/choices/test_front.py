"""The front of setups: by brute force on random figures, and what is left open by plans that were not found."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.choices.front import dominates, list_front_points
from meshwise.scenarios.choices.question import Question
from meshwise.scenarios.choices.setup_choice import Choice, choose_setup, list_front_trials
from meshwise.scenarios.loader import load
from meshwise.strategies.evaluation import Evaluation, Trial

SMALL = """
name: small
model: {transformer: {layers: 4, hidden: 2048, heads: 16, ffn: 8192, vocab: 4096}}
training: {global_batch: 32, sequence: 1024, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-a100-80gb, nodes: 2, devices_per_node: 2}
search: {space: {core: true, recompute: [none], microbatch: [4]}}
"""
FIGURES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=12)


@given(FIGURES)
def test_a_set_of_figures_has_a_front_that_beats_all_others(rows: list[tuple[int, ...]]) -> None:
    figures = [tuple(map(float, row)) for row in rows]
    front = [row for row in figures if not any(dominates(other, row) for other in figures)]
    assert front
    for row in figures:
        assert row in front or any(dominates(other, row) for other in front)
        assert not dominates(row, row)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), max_size=12))
def test_trials_on_the_front_are_those_of_brute_force(rows: list[tuple[int, int, bool]]) -> None:
    plan = load("starter").plan
    assert plan is not None
    trials = [Trial(plan, Evaluation(float(time), float(size), fits), 0.0) for time, size, fits in rows]
    front = [(trial.evaluation.step_time, trial.evaluation.peak_memory) for trial in list_front_trials(trials)]
    fitting = {(float(time), float(size)) for time, size, fits in rows if fits}
    assert front == sorted(row for row in fitting if not any(dominates(other, row) for other in fitting))


def find_choice(tmp_path: Path) -> Choice:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    question = Question(nodes=(1, 2), tokens=1e8, price=2.0, compares=True)
    return choose_setup(load(str(path)), question, seconds=None)


def test_a_plan_that_was_not_found_leaves_open_what_it_may_beat(tmp_path: Path) -> None:
    """A setup whose bound is at half its step time may cost half as much, as fast as the other at least."""
    choice = find_choice(tmp_path)
    assert [(point.is_on_front, point.is_proven) for point in list_front_points(choice)] == [(True, True)] * 2
    first, second = choice.answers
    opened = replace(choice, answers=(replace(first, bound=first.bound / 4), second))
    by_nodes = {point.answer.setup.nodes: point for point in list_front_points(opened)}
    assert not by_nodes[1].is_proven  # its own plan may be another
    assert not by_nodes[2].is_proven  # 1 node may be as fast, for less money
    slow = replace(choice, answers=(replace(first, bound=0.999 * first.bound), second))
    assert {point.answer.setup.nodes: point.is_proven for point in list_front_points(slow)} == {1: False, 2: True}


def test_the_interval_of_a_run_is_that_of_its_steps(tmp_path: Path) -> None:
    for point in list_front_points(find_choice(tmp_path)):
        low, high = point.interval
        assert low < point.bill.seconds < high and point.money_interval is not None and point.bill.cost is not None
        assert abs(point.money_interval[1] / point.bill.cost - high / point.bill.seconds) < 1e-9
