"""What is said of a choice: only what is known."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.scenarios.choices.question import Question
from meshwise.scenarios.choices.report import describe_misfit, list_header, list_rows
from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer, State, choose_setup
from meshwise.scenarios.loader import load

SMALL = """
name: small
model: {transformer: {layers: 4, hidden: 2048, heads: 16, ffn: 8192, vocab: 4096}}
training: {global_batch: 32, sequence: 1024, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-a100-80gb, nodes: 2, devices_per_node: 2}
search: {space: {core: true, recompute: [none], microbatch: [4]}}
"""
HUGE = SMALL.replace("layers: 4, hidden: 2048", "layers: 96, hidden: 16384").replace("ffn: 8192", "ffn: 65536")


def choose(tmp_path: Path, text: str, question: Question) -> Choice:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return choose_setup(load(str(path)), question, seconds=None)


def forget(answer: SetupAnswer) -> SetupAnswer:
    """Return an answer as it is before any plan was found."""
    return replace(answer, best=None, bills=(), bill=None, trials=(), bound=answer.bound / 2, state=State.OPEN)


def test_time_that_ran_out_before_a_plan_is_not_a_lack_of_memory(tmp_path: Path) -> None:
    choice = choose(tmp_path, SMALL, Question(nodes=(1, 2), tokens=1e8))
    ended = replace(choice, best=None, answers=tuple(map(forget, choice.answers)), wall_time=30.0)
    words = "time ran out after 30 s, before a plan was found that fits; whether one does is not known"
    assert describe_misfit(ended) == words
    one = replace(ended, answers=(replace(ended.answers[0], state=State.NOTHING_FITS), ended.answers[1]))
    assert describe_misfit(one) == words


def test_nothing_fits_names_the_memory_and_an_empty_space_its_limit(tmp_path: Path) -> None:
    unfit = choose(tmp_path, HUGE, Question(nodes=(1, 2), tokens=1e8))
    assert {answer.state for answer in unfit.answers} == {State.NOTHING_FITS}
    assert describe_misfit(unfit).startswith("no plan fits on any of 2 setups; on 2 nodes nothing fits: the plan that")
    assert "too little" in describe_misfit(unfit)
    empty = choose(tmp_path, SMALL.replace("microbatch: [4]", "microbatch: [5]"), Question(nodes=(1, 2)))
    assert {answer.state for answer in empty.answers} == {State.NO_PLAN}
    assert describe_misfit(empty).endswith("; without search.space.microbatch there are some")


def test_a_setup_that_is_not_the_best_shows_what_is_proven_of_it(tmp_path: Path) -> None:
    question = Question(nodes=(1, 2), tokens=1e8, price=2.0, compares=True)
    choice = choose(tmp_path, SMALL, question)
    rows = {answer.setup.nodes: row for answer, row in zip(choice.answers, list_rows(choice), strict=True)}
    assert choice.best is not None and choice.best.setup.nodes == 2
    assert not any(">=" in cell or "<=" in cell or " to " in cell for cell in rows[2])
    worse = replace(choice.answers[0], bound=choice.answers[0].bound / 2, state=State.WORSE)
    row = dict(zip(list_header(choice), list_rows(replace(choice, answers=(worse, choice.answers[1])))[0], strict=True))
    steps = 1e8 / (32 * 1024)
    assert row["step time"].startswith(">= ") and row["cost"].startswith(">= $")
    least = 4 * 2.0 / 2 * steps * worse.bound / 3600  # 2 devices of 2 dollars an hour
    assert float(row["cost"].removeprefix(">= $")) == pytest.approx(least, rel=0.01)
    opened = replace(worse, state=State.OPEN)
    row = dict(
        zip(list_header(choice), list_rows(replace(choice, answers=(opened, choice.answers[1])))[0], strict=True)
    )
    assert " to " in row["step time"] and " to $" in row["cost"]
