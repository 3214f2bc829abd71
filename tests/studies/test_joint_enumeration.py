"""The study of the joint search against enumeration: its verdicts, and one problem of few plans."""

from random import Random

import pytest

from .joint_enumeration import Comparison, build_random_problem, compare, list_step_times, main


@pytest.mark.parametrize(
    ("best_time", "lower_bound", "verdict"),
    [
        (1.0, 0.5, "equal"),
        (0.9, 0.5, "faster"),  # by a schedule that was not enumerated
        (1.1, 0.5, "slower"),
        (1.0, 1.01, "bound above a plan"),
        (1.1, 1.1, "bound above a plan"),
        (0.9, 0.9, "faster"),
    ],
)
def test_verdicts_by_hand(best_time: float, lower_bound: float, verdict: str) -> None:
    assert Comparison(0, 10, 1.0, best_time, lower_bound).verdict == verdict


def test_a_problem_is_that_of_its_seed_and_differs_from_the_next() -> None:
    assert build_random_problem(Random(1)) == build_random_problem(Random(1))
    assert len({repr(build_random_problem(Random(seed)).training) for seed in range(20)}) > 3


def test_a_problem_of_47_plans() -> None:
    comparison = compare(5)
    assert comparison.num_plans == len(list(list_step_times(build_random_problem(Random(5))))) == 47
    assert comparison.verdict == "equal"


@pytest.mark.parametrize("seed", [41, 88])
def test_the_gradient_of_an_input_that_no_operator_makes_counts(seed: int) -> None:
    # both were slower than enumerated while the sum of that gradient was not among the costs of operators
    assert compare(seed).verdict in ("equal", "faster")


def test_a_line_a_problem_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--problems", "1", "--first", "8"]) == 0
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith("8: 47 plans, equal, best 19.5 s")
    assert summary == "1 problems, 47 plans, 0 proven: {'equal': 1}"
