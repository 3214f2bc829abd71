"""Steps under loads that vary: one length is that of an ordinary step, and the laws of waiting, order and spread."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.engine import step_time
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.loads import loaded_costs
from meshwise.strategies.loads.lengths import Lengths
from meshwise.strategies.loads.levels import Level, build_level_problem
from meshwise.strategies.loads.loaded_costs import LoadedCosts
from meshwise.strategies.loads.loaded_step import DEVICES, EXPERTS, LENGTHS, LoadedStep
from meshwise.strategies.loads.loads import Loads, Stragglers
from meshwise.strategies.loads.spread import LogNormal, Measured
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training

from ..problems import IDEAL

ENGINES = ("discrete_event", "longest_path")
SEQUENCE, BATCH = 64, 16
SPEC = Transformer(4, 64, 8, 8, 256, 128, tied_embeddings=False, positions="rotary")
MIXTURE = replace(SPEC, experts=Experts(8, 2, 64))
CLUSTER = build_homogeneous("small", IDEAL, Host("host", 1e12), 1, 8, Link(1e-6, 1e9), Link(2e-6, 2.5e8), 8)
LAYOUTS = {
    "data": Layout(data=8, microbatch=1),
    "sharded": Layout(data=8, microbatch=1, zero=3),
    "pipeline": Layout(data=2, pipeline=4, microbatch=1, schedule="1f1b"),
    "tensor": Layout(data=2, tensor=2, pipeline=2, microbatch=2, schedule="1f1b", sequence_parallel=True),
    "context": Layout(data=2, context=4, microbatch=2),
    "uneven": Layout(data=2, tensor=4, microbatch=(3, 1)),
}


def make_problem(spec: Transformer = SPEC, sequence: int = SEQUENCE) -> Problem:
    training = Training(BATCH, sequence, "fp32")
    return Problem(build(spec, sequence, training.dtype), CLUSTER, training)


def make_plan(name: str, spec: Transformer = SPEC) -> Plan:
    return complete(make_problem(spec), LAYOUTS[name])


def weigh(name: str, loads: Loads, spec: Transformer = SPEC) -> LoadedStep:
    return LoadedCosts(make_problem(spec), spec, loads).weigh(make_plan(name, spec))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("packing", ["none", "pack", "fixed"])
def test_one_full_length_is_the_ordinary_step(name: str, packing: str) -> None:
    ordinary = SimulatedCost(make_problem()).evaluate(make_plan(name))
    step = weigh(name, Loads(Lengths((SEQUENCE,), (1.0,)), packing))
    assert set(step.step_times) == {ordinary.step_time}
    assert (step.num_simulated, step.waiting, step.padding) == (1, (), 0.0)
    assert step.peak_memory == ordinary.peak_memory


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_short_length_is_the_step_of_a_shorter_sequence(name: str) -> None:
    ordinary = SimulatedCost(make_problem(sequence=32)).evaluate(make_plan(name))
    step = weigh(name, Loads(Lengths((32,), (1.0,))))
    assert set(step.step_times) == {ordinary.step_time}
    assert step.peak_memory == ordinary.peak_memory
    # 16 sequences of 32 tokens in each step
    assert step.tokens_per_second == pytest.approx(BATCH * 32 / ordinary.step_time)


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_ranks_apart_take_the_same_step(name: str) -> None:
    problem, plan = make_problem(), make_plan(name)
    folded, apart = (lower(problem, plan, apart=is_apart) for is_apart in (False, True))
    assert len(apart.rank_classes) > len(folded.rank_classes) or name == "uneven"
    assert step_time(apart) == step_time(folded)


MIXED = Lengths((8, 24, 64), (0.5, 0.3, 0.2))


@pytest.mark.parametrize("order", ["arrival", "sorted", "balance"])
@pytest.mark.parametrize("packing", ["none", "pack"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_lie_between_those_of_the_least_and_the_full_load(
    monkeypatch: pytest.MonkeyPatch, name: str, packing: str, order: str
) -> None:
    # as longest paths: on shared links a transfer that is late may meet others, so that less work may take longer
    monkeypatch.setattr(loaded_costs, "MOST_EVENTS", 0)
    full = SimulatedCost(make_problem()).step_time(make_plan(name)) * (1 + 1e-12)
    step = weigh(name, Loads(MIXED, packing, order, draws=6))
    least = weigh(name, Loads(Lengths((8,), (1.0,)), packing))
    assert all(min(least.step_times) <= seconds <= full for seconds in step.step_times)
    assert step.find_quantile(0.1) <= step.median <= step.high == max(step.step_times)
    for _, seconds in step.waiting:  # the slowest data rank takes at least the mean of all
        assert 0 <= seconds < step.median


@pytest.mark.parametrize("name", LAYOUTS)
def test_long_steps_share_links_as_full_sequences_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    costs = LoadedCosts(make_problem(), SPEC, Loads(Lengths((24, 64), (0.5, 0.5)), draws=8))
    events = costs.weigh(make_plan(name))
    monkeypatch.setattr(loaded_costs, "MOST_EVENTS", 0)
    paths = costs.weigh(make_plan(name))
    full, alone = (SimulatedCost(make_problem(), engine).step_time(make_plan(name)) for engine in ENGINES)
    assert (events.engine, paths.engine) == ENGINES
    # of a factor on all: exact for full sequences, and where no link is shared for all others too
    assert paths.step_times == pytest.approx(events.step_times, rel=1e-12 if full == alone else 0.1)


def test_waiting_is_the_longest_less_the_mean() -> None:
    # two data ranks with one sample each: where one has 64 tokens and the other 8, both wait for the longer one, so
    # that the step takes what one of 64 takes, and half of the difference from one of 8 is waited for
    problem = replace(make_problem(), training=Training(2, SEQUENCE, "fp32"))
    plan = complete(problem, Layout(data=2, tensor=4, microbatch=1))
    cost = LoadedCosts(problem, SPEC, Loads(Lengths((8, 64), (0.5, 0.5)), draws=8, seed=1))
    step = cost.weigh(plan)
    long, short = (
        SimulatedCost(replace(problem, graph=build(SPEC, tokens, "fp32"))).step_time(plan) for tokens in (64, 8)
    )
    tokens = [draw.sequences.tokens.tolist() for draw in cost.draws if draw.sequences is not None]
    assert step.step_times == tuple(long if 64 in row else short for row in tokens)
    assert any(sorted(row) == [8, 64] for row in tokens)
    median = int(np.argsort(step.step_times, kind="stable")[3])
    assert sorted(tokens[median]) == [8, 64]  # of this seed
    assert dict(step.waiting)[LENGTHS] == pytest.approx((long - short) / 2)


def test_padding_is_that_of_hand() -> None:
    problem = replace(make_problem(), training=Training(2, SEQUENCE, "fp32"))
    plan = complete(problem, Layout(data=1, tensor=8, microbatch=2))
    costs = LoadedCosts(problem, SPEC, Loads(Lengths((8, 64), (0.5, 0.5)), draws=20))
    rows = [sorted(draw.sequences.tokens.tolist()) for draw in costs.draws if draw.sequences is not None]
    num_mixed, num_long, num_short = (rows.count(row) for row in ([8, 64], [64, 64], [8, 8]))
    # a mixed microbatch has 72 tokens of 128, the others have no padding
    computed = 128 * (num_mixed + num_long) + 16 * num_short
    assert num_mixed > 0
    assert costs.weigh(plan).padding == pytest.approx(56 * num_mixed / computed)
    fixed = replace(costs.loads, packing="fixed")
    share = (72 * num_mixed + 128 * num_long + 16 * num_short) / (20 * 128)
    assert LoadedCosts(problem, SPEC, fixed).weigh(plan).padding == pytest.approx(1 - share)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["none", "pack"]))
def test_balance_is_never_slower_than_arrival(seed: int, packing: str) -> None:
    # ranks of this plan meet once a step, so that the one with most work decides; work is balanced by its FLOP, which
    # are its time but for launches and for links
    orders = (Loads(MIXED, packing, order, draws=4, seed=seed) for order in ("arrival", "balance"))
    arrival, balance = (weigh("data", loads).step_times for loads in orders)
    assert all(second <= 1.01 * first for first, second in zip(arrival, balance, strict=True))


def test_a_wider_spread_at_the_same_mean_is_never_faster() -> None:
    narrow, middle, wide = (
        weigh("data", Loads(Lengths((32 - width, 32 + width), (0.5, 0.5)), draws=12)) for width in (1, 16, 30)
    )
    assert narrow.mean < middle.mean < wide.mean
    assert dict(narrow.waiting)[LENGTHS] < dict(middle.waiting)[LENGTHS] < dict(wide.waiting)[LENGTHS]


def test_packed_attention_follows_the_squares() -> None:
    # a sequence of 8 samples of 8 tokens: products compute all 64 tokens, and attention 8 * 64 of 64 * 64 pairs
    level = build_level_problem(make_problem(), SPEC, Level(SEQUENCE, 8 * 64 / 64**2))
    # FLOP of attention: in 4 layers for each pair 2 products of a multiply and an add in 64 widths
    attention = 4 * 64**2 * 2 * 2 * 64
    assert make_problem().graph.flops - level.graph.flops == pytest.approx(attention * (1 - 1 / 8))
    step = weigh("data", Loads(Lengths((8,), (1.0,)), "pack"))
    assert set(step.step_times) == {SimulatedCost(level).step_time(make_plan("data"))}
    assert (step.padding, step.num_simulated) == (0.0, 1)


def test_experts_wait_for_the_most_loaded() -> None:
    layout = Layout(data=8, expert=8, microbatch=2)
    problem = make_problem(MIXTURE)
    plan = complete(problem, layout)
    values = (1.0, 2.0, 3.0, 4.0)
    step = LoadedCosts(problem, MIXTURE, Loads(imbalance=Measured(values), draws=4)).weigh(plan)
    fixed = []
    for value in values:
        spec = replace(MIXTURE, experts=replace(MIXTURE.experts, imbalance=value))  # type: ignore[type-var]
        fixed.append(SimulatedCost(make_problem(spec)).step_time(plan))
    assert sorted(step.step_times) == fixed  # each of four draws is one of four measured loads
    assert fixed == sorted(fixed)
    assert dict(step.waiting)[EXPERTS] == pytest.approx(fixed[1] - fixed[0])
    narrow = LoadedCosts(problem, MIXTURE, Loads(imbalance=LogNormal(2.0, 2.1))).weigh(plan)
    wide = LoadedCosts(problem, MIXTURE, Loads(imbalance=LogNormal(2.0, 3.9))).weigh(plan)
    assert narrow.high < wide.high


def test_slow_devices_are_those_of_the_machine() -> None:
    loads = Loads(stragglers=Stragglers(0.2, Measured((2.0,))), draws=12)
    problem, plan = make_problem(), make_plan("data")
    costs = LoadedCosts(problem, SPEC, loads)
    step, even = costs.weigh(plan), SimulatedCost(problem).step_time(plan)
    for draw, seconds in zip(costs.draws, step.step_times, strict=True):
        speeds = tuple((device, 1 / factor) for device, factor in draw.slowdowns)
        slowed = replace(problem, cluster=replace(problem.cluster, speeds=speeds))
        assert seconds == SimulatedCost(slowed).step_time(plan)
        assert (seconds > even) == bool(speeds)
    assert dict(step.waiting)[DEVICES] == pytest.approx(step.median - even)


def test_what_one_load_draws_does_not_change_what_another_draws() -> None:
    lengths = Loads(MIXED, draws=3)
    both = replace(lengths, stragglers=Stragglers(0.5, Measured((2.0,))))
    first, second = (LoadedCosts(make_problem(), SPEC, loads).draws for loads in (lengths, both))
    assert [row.sequences.tokens.tolist() for row in first if row.sequences is not None] == [
        row.sequences.tokens.tolist() for row in second if row.sequences is not None
    ]


def test_packed_sequences_arrive_in_any_order() -> None:
    # packing lists the sequences of long samples first; shuffled, early ones are as heavy as late ones on average
    costs = LoadedCosts(make_problem(), SPEC, Loads(MIXED, "pack", draws=64))
    pairs = np.stack([draw.sequences.pairs for draw in costs.draws if draw.sequences is not None])
    halves, deviation = pairs.reshape(64, 2, -1).mean(axis=(0, 2)), pairs.std() / np.sqrt(64 * BATCH / 2)
    assert abs(halves[0] - halves[1]) < 4 * deviation * np.sqrt(2)
    assert pairs.max() == SEQUENCE**2 > pairs.min()


def test_samples_are_cut_to_the_sequence() -> None:
    step = weigh("data", Loads(Lengths((8, 64, 200), (0.5, 0.25, 0.25)), "fixed", draws=8))
    assert step.cut == 0.25
    drawn = LoadedCosts(make_problem(), SPEC, Loads(Lengths((8, 64, 200), (0.5, 0.25, 0.25)), "fixed", draws=8)).draws
    own = sum(int(draw.sequences.tokens.sum()) for draw in drawn if draw.sequences is not None)
    assert max(int(draw.sequences.tokens.max()) for draw in drawn if draw.sequences is not None) == SEQUENCE
    assert step.padding == pytest.approx(1 - own / (8 * BATCH * SEQUENCE))


def test_equal_seeds_are_equal_steps() -> None:
    steps = [weigh("data", Loads(MIXED, draws=4, seed=seed)) for seed in (1, 1, 2)]
    assert steps[0] == steps[1] != steps[2]


def test_a_pipeline_without_a_flush_is_refused() -> None:
    plan = complete(make_problem(), Layout(data=2, pipeline=4, microbatch=1, schedule="pipedream"))
    with pytest.raises(ValueError, match="lengths that vary need a schedule with a flush, met pipedream"):
        LoadedCosts(make_problem(), SPEC, Loads(MIXED)).weigh(plan)
