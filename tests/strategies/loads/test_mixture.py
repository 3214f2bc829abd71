"""Mixtures of programs: every task is that of its own level, by either engine."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import simulate, step_time
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import Program, TaskKind
from meshwise.simulator.units import to_seconds
from meshwise.strategies.loads.mixture import Mixture
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout

from ..problems import problem

SPEC = Transformer(8, 64, 8, 8, 256, 128, tied_embeddings=False)
PROBLEMS = [replace(problem(), graph=build(replace(SPEC, max_positions=32), tokens, "fp32")) for tokens in (8, 16, 32)]
PLAN = complete(PROBLEMS[-1], Layout(data=2, pipeline=4, microbatch=4, schedule="1f1b"))
NUM_MICROBATCHES = 4


def lower_all(*, apart: bool) -> list[Program]:
    return [lower(level, PLAN, apart=apart) for level in PROBLEMS]


MIXTURE = Mixture(lower_all(apart=True), PLAN.mesh)
LOADS = st.lists(st.floats(0, 2), min_size=2 * NUM_MICROBATCHES, max_size=2 * NUM_MICROBATCHES)
LEVELS = st.lists(st.integers(0, 2), min_size=2 * NUM_MICROBATCHES, max_size=2 * NUM_MICROBATCHES)


def count_busy(program: Program, rank: int, microbatch: int) -> float:
    """Return the seconds that the first stage's rank of a data rank computes for a microbatch."""
    spans = simulate(program, "longest_path").spans
    kinds = (TaskKind.FORWARD, TaskKind.BACKWARD)
    rank_class = next(
        index for index, members in enumerate(program.rank_classes) if members.stages == (0,) and rank in members.ranks
    )
    return sum(
        span.end - span.start
        for span in spans
        if span.rank_class == rank_class and span.microbatch == microbatch and span.kind in kinds
    )


@settings(max_examples=20, deadline=None)
@given(LEVELS)
def test_every_microbatch_takes_what_its_level_takes(rows: list[int]) -> None:
    levels = np.array(rows).reshape(2, NUM_MICROBATCHES)
    loads = levels.astype(float)
    mixed = MIXTURE.mix(MIXTURE._place_loads(loads))
    for rank in range(2):
        for microbatch in range(NUM_MICROBATCHES):
            expected = count_busy(MIXTURE.programs[levels[rank, microbatch]], rank, microbatch)
            assert count_busy(mixed, rank, microbatch) == pytest.approx(expected, rel=1e-9)
    # two ways to the longest path: of the mixed program, and of the last program with the ticks of the others
    assert MIXTURE.time_step(loads, "longest_path") == step_time(mixed, "longest_path")
    assert MIXTURE.time_step(loads, "discrete_event") == step_time(mixed, "discrete_event")


@settings(max_examples=20, deadline=None)
@given(LOADS, LOADS)
def test_a_step_with_more_work_takes_no_less(first: list[float], second: list[float]) -> None:
    least, most = (
        np.array([pick(pair) for pair in zip(first, second, strict=True)]).reshape(2, -1) for pick in (min, max)
    )
    assert MIXTURE.time_step(least, "longest_path") <= MIXTURE.time_step(most, "longest_path")


def test_one_row_stands_for_all_data_ranks() -> None:
    folded, row = Mixture(lower_all(apart=False), None), np.array([[0, 2, 1.25, 0]])
    assert folded.time_step(row, "longest_path") == MIXTURE.time_step(np.repeat(row, 2, 0), "longest_path")


@settings(max_examples=20, deadline=None)
@given(LOADS)
def test_both_ways_to_a_longest_path_interpolate_alike(rows: list[float]) -> None:
    loads = np.array(rows).reshape(2, NUM_MICROBATCHES)
    mixed = MIXTURE.mix(MIXTURE._place_loads(loads))
    # a task with bytes rounds its latency and its transfer by themselves: to a tick or two of each
    seconds = MIXTURE.time_step(loads, "longest_path")
    assert abs(seconds - step_time(mixed, "longest_path")) <= 2 * to_seconds(mixed.num_tasks)


def test_lengths_between_levels_take_what_their_own_program_takes() -> None:
    # 24 tokens lie halfway between 16 and 32: attention is a square, all else is linear in tokens but for launches
    own = lower(replace(problem(), graph=build(replace(SPEC, max_positions=32), 24, "fp32")), PLAN)
    for engine in ("longest_path", "discrete_event"):
        between = MIXTURE.time_step(np.full((2, NUM_MICROBATCHES), 1.5), engine)
        assert between == pytest.approx(step_time(own, engine), rel=0.01)


def test_programs_of_other_tasks_are_refused() -> None:
    other = lower(PROBLEMS[0], complete(PROBLEMS[0], Layout(data=2, pipeline=4, microbatch=2, schedule="1f1b")))
    with pytest.raises(ValueError, match="cut into other tasks"):
        Mixture([other, lower(PROBLEMS[1], PLAN)], None)
