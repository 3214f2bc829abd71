"""PipeDream and PipeDream-2BW: the steady state, and versions of the weights, counted action by action."""

import pytest

from meshwise.strategies.schedules.schedule import SCHEDULES, build_schedule
from meshwise.strategies.schedules.unsplit import keep_stashed_versions

from .closed_forms import one_f_one_b_in_flight, pipedream_bubble
from .unit_time import RANKS, UNEVEN, held, walk


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_step_without_flush_adds_its_work_alone(name: str, ranks: int) -> None:
    # n steps are one run of n m microbatches; in the steady state one more step takes m (F + B)
    for times in UNEVEN:
        microbatches = 2 * ranks
        two, three = (walk(build_schedule(name, ranks, steps * microbatches), times).step for steps in (2, 3))
        assert three - two == microbatches * times.total + pipedream_bubble(ranks, microbatches, times)
    value = build_schedule(name, ranks, 4 * ranks)
    assert held(value) == [one_f_one_b_in_flight(rank, ranks, 4 * ranks) for rank in range(ranks)]


def test_pipedream_keeps_the_weights_of_every_microbatch_in_flight() -> None:
    value = build_schedule("pipedream", 4, 16)
    assert [keep_stashed_versions(rank, 4) for rank in range(4)] == [4, 3, 2, 1] == held(value)
    assert [SCHEDULES["pipedream"].weight_versions(rank, 4) for rank in range(4)] == [4, 3, 2, 1]
    assert [SCHEDULES["pipedream_2bw"].weight_versions(rank, 4) for rank in range(4)] == [2, 2, 2, 2]
    assert [SCHEDULES["1f1b"].weight_versions(rank, 4) for rank in range(4)] == [1, 1, 1, 1]


def test_two_versions_suffice_where_weights_change_once_a_step() -> None:
    # 2BW: with m >= p microbatches a step, those in flight belong to at most two steps
    for ranks in (2, 4, 8):
        for microbatches in (ranks, ranks + 1, 3 * ranks):
            for order in build_schedule("pipedream_2bw", ranks, 4 * microbatches).orders:
                flying: set[int] = set()
                for action in order:
                    flying = flying | {action.microbatch} if action.kind == "F" else flying - {action.microbatch}
                    assert len({number // microbatches for number in flying}) <= 2
