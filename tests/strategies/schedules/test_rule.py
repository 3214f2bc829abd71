"""Every published schedule runs every action once, finishes, and says for which sizes it exists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.schedules.rule import Placement, ScheduleRule, place_stages
from meshwise.strategies.schedules.schedule import KINDS, SCHEDULES, Schedule, build_rank_order, build_schedule

from ...pace import measure_cpu
from .unit_time import ONE, walk


@st.composite
def published(draw: st.DrawFn, most_ranks: int, most_microbatches: int) -> Schedule:
    """Draw sizes of a published schedule, and of them the nearest that exist."""
    rule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    ranks = draw(st.integers(1, most_ranks))
    wanted = draw(st.integers(1, most_microbatches))
    fewest, most = rule.chunks
    chunks = draw(st.integers(fewest, most or 3))
    return build_schedule(rule.name, ranks, rule.condition.find_nearest(ranks, wanted), chunks)


@given(published(8, 24))
@settings(max_examples=60, deadline=None)
def test_every_action_runs_once_and_weights_come_last(value: Schedule) -> None:
    rule = SCHEDULES[value.name]
    chunks = value.num_stages // value.num_ranks
    assert value.stage_ranks == place_stages(rule.placement, value.num_ranks, chunks)
    places = {action: index for order in value.orders for index, action in enumerate(order)}
    assert len(places) == sum(map(len, value.orders))
    forward, backward, inputs, weights = KINDS
    seen = {(action.stage, action.microbatch): set[str]() for action in places}
    for stage, kind, microbatch in places:
        seen[stage, microbatch].add(kind.value)
    assert set(seen) == {(s, m) for s in range(value.num_stages) for m in range(value.num_microbatches)}
    assert all(kinds in ({"F", "B"}, {"F", "I", "W"}) for kinds in seen.values())
    assert rule.splits_backward or all(action.kind in (forward, backward) for action in places)
    for stage, kind, microbatch in places:
        if kind is weights:
            assert places[stage, kind, microbatch] > places[stage, inputs, microbatch]
        if kind is not forward:
            assert places[stage, kind, microbatch] > places[stage, forward, microbatch]


@given(published(8, 24))
@settings(max_examples=40, deadline=None)
def test_text_round_trip(value: Schedule) -> None:
    assert Schedule.parse(str(value), value.name) == value


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("naive", (4, 2, 2), "naive: chunks(2) = 1 does not hold; nearest: 1"),
        ("gpipe", (4, 0, 1), "gpipe: microbatches(0) >= 1 does not hold; nearest: 1"),
        ("gpipe", (0, 1, 1), "gpipe: pipeline(0) >= 1 does not hold; nearest: 1"),
        ("1f1b", (4, 2, 1), "1f1b: microbatches(2) >= pipeline(4) does not hold; nearest: 4"),
        ("pipedream_2bw", (4, 3, 1), "pipedream_2bw: microbatches(3) >= pipeline(4) does not hold; nearest: 4"),
        (
            "interleaved",
            (4, 11, 2),
            "interleaved: microbatches(11) % (11 // pipeline(4)) = 0 does not hold; nearest: 10",
        ),
        ("interleaved", (4, 2, 2), "interleaved: microbatches(2) >= pipeline(4) does not hold; nearest: 4"),
        ("interleaved", (4, 8, 0), "interleaved: chunks(0) >= 1 does not hold; nearest: 1"),
        (
            "interleaved_zero_bubble",
            (4, 11, 2),
            "interleaved_zero_bubble: microbatches(11) % (11 // pipeline(4)) = 0 does not hold; nearest: 10",
        ),
        ("zbv", (4, 8, 3), "zbv: chunks(3) = 2 does not hold; nearest: 2"),
        ("zbv", (4, 8, 1), "zbv: chunks(1) = 2 does not hold; nearest: 2"),
        ("dualpipev", (4, 8, 3), "dualpipev: chunks(3) = 2 does not hold; nearest: 2"),
        ("dualpipev", (4, 6, 2), "dualpipev: microbatches(6) >= 2 * pipeline(4) does not hold; nearest: 8"),
        ("dualpipev", (4, 0, 2), "dualpipev: microbatches(0) >= 1 does not hold; nearest: 8"),
    ],
)
def test_a_violation_is_the_equation_that_fails(name: str, sizes: tuple[int, int, int], message: str) -> None:
    rule = SCHEDULES[name]
    assert rule.find_violation(*sizes) == message
    if name in ("1f1b", "pipedream_2bw"):  # there is an order all the same, and Megatron-LM runs it
        walk(build_schedule(name, *sizes), ONE)
    else:
        with pytest.raises(ValueError) as caught:
            build_schedule(name, *sizes)
        assert str(caught.value) == message


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.integers(0, 40), st.integers(0, 4))
def test_the_nearest_size_is_legal(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    rule, size = SCHEDULES[name], {"chunks": chunks, "microbatches": microbatches}
    for _ in size:
        message = rule.find_violation(ranks, size["microbatches"], size["chunks"])
        if message is not None:
            field = message.removeprefix(f"{name}: ").partition("(")[0]
            size[field] = int(message.rpartition("nearest: ")[2])
    assert rule.find_violation(ranks, size["microbatches"], size["chunks"]) is None


def test_every_rule_is_known_by_its_own_name() -> None:
    assert all(rule.name == name and rule.source for name, rule in SCHEDULES.items())
    assert {name for name, rule in SCHEDULES.items() if rule.is_asynchronous} == {"pipedream", "pipedream_2bw"}
    assert {name for name, rule in SCHEDULES.items() if rule.placement is Placement.V} == {"zbv", "dualpipev"}


def test_only_dualpipev_overlaps_and_in_its_main_part() -> None:
    value = build_schedule("dualpipev", 2, 8, 2)
    # per rank m - 2p + r + 1 turns of two pairs and p - r - 1 of one: 2 * 5 + 1, and 2 * 6 without the first
    assert [sum(value.find_rank(pair[0].stage) == rank for pair in value.overlapped_pairs) for rank in range(2)] == [
        11,
        11,
    ]
    others = [rule for rule in SCHEDULES.values() if rule.name != "dualpipev"]
    assert all(build_schedule(rule.name, 2, 4, rule.chunks[0]).overlapped_pairs == () for rule in others)


@pytest.mark.parametrize("rule", SCHEDULES.values(), ids=lambda rule: rule.name)
def test_orders_of_sixteen_ranks_are_made_at_once(rule: ScheduleRule) -> None:
    def seconds() -> float:
        with measure_cpu() as spent:
            for rank in range(16):
                build_rank_order(rule.name, rank, 16, 64, rule.chunks[0])
        return spent.seconds

    assert min(seconds() for _ in range(5)) < 0.020
