"""Laws of every plan: how it is lowered, folded, contracted and simulated does not show in what comes out."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.engine import discrete_event, longest_path, simulate, step_time
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.cluster import LOSSLESS, Cluster
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Link, Mesh, Switch
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category, Program
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.pass_modes import PassMode
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.recomputation import SomeOperators
from meshwise.strategies.plan.rules import violations

from ..examples import examples
from .accounts import seconds, sums
from .plans import Case, Machine, Network, any_cases
from .symmetry import renamed

ROOT = Path(__file__).parents[2]
EXAMPLES = examples(100)
_GRADIENTS = CATEGORIES.index(Category.GRADIENTS)


class Lowered:
    """A case and the programs that laws compare, each made once."""

    def __init__(self, case: Case) -> None:
        self.small, self.plan = case.build()
        self.cost = SimulatedCost(self.small)
        self.drops = allocates_gradients(self.small.training, self.plan)
        program = partial(lower, self.small, self.plan, costs=self.cost.costs)
        self.chains, self.operators = program(), program(Granularity.OPERATOR)
        self.unfolded = program(folded=False)

    @cached_property
    def chained(self) -> Timeline:
        return simulate(self.chains)

    @cached_property
    def fine(self) -> Timeline:
        return simulate(self.operators)

    @cached_property
    def apart(self) -> Timeline:
        return simulate(self.unfolded)


def path(program: Program) -> int:
    return int(longest_path.finish_times(program)[1].max())


def bound_below_longest_path_below_discrete_event(it: Lowered) -> None:
    longest = step_time(it.chains, "longest_path")
    assert it.cost.plan_bound(it.plan) <= longest <= it.chained.step_time
    assert it.cost.longest_paths([it.plan]) == [longest]


def discrete_event_is_the_longest_path_without_sharing(it: Lowered) -> None:
    alone = replace(it.chains, flow_of=np.full(it.chains.num_tasks, -1), background=())
    events = discrete_event.finish_times(alone, every_event=True)
    for ours, theirs in zip(events, longest_path.finish_times(alone), strict=True):
        assert ours.tolist() == theirs.tolist()


def folded_is_unfolded(it: Lowered) -> None:
    assert it.chained.step_time == it.apart.step_time
    # groups of one class that share a link show as contention when unfolded, which the longest path leaves out
    assert path(it.unfolded) <= path(it.chains)


def contracted_is_original(it: Lowered) -> None:
    assert it.chained.step_time == it.fine.step_time
    assert path(it.chains) == path(it.operators)
    assert it.chains.num_tasks <= it.operators.num_tasks


def accounts_of_chains_are_those_of_operators(it: Lowered) -> None:
    assert sums(it.chained) == sums(it.fine)
    ours, theirs = seconds(it.chained, it.chains), seconds(it.fine, it.operators)
    rounding = 1e-9  # of a step: seconds are sums of float64
    if PassMode.GROUP in Cuts(it.cost.costs, it.plan, it.cost.costs.machine(it.plan), Granularity.CHAIN).pass_modes:
        rounding = 1e-3  # ranks that come first, and wait for others in a collective, are shown to wait before the pass
    assert {name: ours.get(name, 0.0) for name in theirs | ours} == pytest.approx(
        {name: theirs.get(name, 0.0) for name in theirs | ours}, rel=0, abs=rounding * it.chained.step_time
    )


def memory_peaks_as_the_search_is_told_and_returns_to_its_level(it: Lowered) -> None:
    for program, timeline in ((it.chains, it.chained), (it.operators, it.fine), (it.unfolded, it.apart)):
        assert timeline.peak_memory == it.cost.peak_memory(it.plan)
        held = np.zeros(len(program.rank_classes))
        for change in program.resident_memory:
            held[change.rank_class] += 0 if change.host else change.size
        # a framework that drops gradients drops those of a step before the next one
        left = [profile.usage[-1][_GRADIENTS] * it.drops for profile in timeline.memory]
        assert [profile.totals[-1] for profile in timeline.memory] == (held + left).tolist()


def every_byte_is_on_its_link(it: Lowered) -> None:
    apart = {link.name: link.bytes for link in it.apart.links}
    for timeline in (it.chained, it.fine):
        for link in timeline.links:
            assert link.bytes == pytest.approx(apart[link.name], rel=1e-9), link.name
        assert sum(link.count * link.bytes for link in timeline.links) == pytest.approx(sum(apart.values()), rel=1e-9)


def no_link_carries_more_than_it_can(it: Lowered) -> None:
    for timeline in (it.chained, it.fine, it.apart):
        assert all(link.utilisation <= 1 + 1e-9 for link in timeline.links)


LAWS = (
    bound_below_longest_path_below_discrete_event,
    discrete_event_is_the_longest_path_without_sharing,
    folded_is_unfolded,
    contracted_is_original,
    accounts_of_chains_are_those_of_operators,
    memory_peaks_as_the_search_is_told_and_returns_to_its_level,
    every_byte_is_on_its_link,
    no_link_carries_more_than_it_can,
)


def test_the_two_ways_of_a_port_are_apart_where_switches_gather() -> None:
    # between stages, slices of an activation are gathered over the tensor ranks: a switch that multicasts gets 1/4 of
    # it from every port and sends all of it to each, though all-reduces load both ways alike
    switch = Switch(Link(1e-6, 1.0, 5e-6), reduces=True)
    machine = Machine(2, 4, 1, switch, Crossbar(), 1e10, Host("host", 1e12), (), None, 1.0, (), LOSSLESS)
    layout = Layout(tensor=4, pipeline=2, schedule="naive", zero=1, scatter_gather=True, stages="even")
    it = Lowered(Case(Network(2, "flash", tied=False), machine, Training(1, 32, "fp32"), layout))
    every_byte_is_on_its_link(it)
    ways = {link.name: link.bytes for link in it.apart.links}
    assert ways["device 0 in"] > ways["device 0 out"]


def test_a_product_in_two_halves_does_not_wait_for_what_is_launched_between_them() -> None:
    # a host that takes a microsecond to launch a kernel is slower than these products: the second half is launched
    # with the first one, and runs when that ends, though the collective between them is launched later
    switch, slow = Switch(Link(1e-6, 1.0, 0.0), reduces=False), Host("host", 1e12, launch=1e-6)
    machine = Machine(2, 4, 1, switch, Crossbar(), 1e8, slow, (), None, 1.0, (), LOSSLESS)
    layout = Layout(tensor=4, pipeline=2, schedule="naive", order=("pipeline", "data", "tensor"))
    it = Lowered(Case(Network(2, "flash", tied=False), machine, Training(1, 32, "fp32"), layout))
    assert seconds(it.chained, it.chains)["device", "launch"] > 0
    accounts_of_chains_are_those_of_operators(it)


def test_what_begins_beside_a_collective_waits_for_what_that_waits_for() -> None:
    # a backward gathers the slices that arrive beside making again what its first operators read: neither begins
    # before they have arrived, as Megatron calls a stage's backward when it has received
    switch = Switch(Link(1e-6, 1.0, 0.0), reduces=False)
    machine = Machine(2, 2, 1, switch, Crossbar(), 1e8, Host("host", 1e12), (), None, 1.0, (), LOSSLESS)
    again = SomeOperators(("qkv", "projection"))
    layout = Layout(tensor=2, pipeline=2, schedule="naive", order=("pipeline", "data", "tensor"))
    layout = replace(layout, sequence_parallel=True, recompute=again, overlap_tensor=True)
    it = Lowered(Case(Network(2, "flash", tied=False), machine, Training(1, 32, "fp32"), layout))
    accounts_of_chains_are_those_of_operators(it)


def test_a_rank_that_comes_first_ends_first_where_every_collective_runs_beside_a_product() -> None:
    # devices 0 and 1, 2 and 3, 4 and 5 are tensor groups; of the two that send to the next stage one has a wire and the
    # other goes by a third device, 3 us later. Megatron's backward hides its all-reduces beneath products: the pass of
    # the rank that comes first ends 3 us before that of the other
    wires = ((0, 1), (2, 3), (4, 5), (0, 2), (1, 5), (5, 3), (0, 4))
    mesh = Mesh(Link(1e-6, 1.0, 3e-6), tuple((first, second, 1) for first, second in wires))
    machine = Machine(1, 6, 1, mesh, Crossbar(), 1e8, Host("host", 1e12), (), None, 1.0, (), LOSSLESS)
    layout = Layout(tensor=2, pipeline=3, schedule="gpipe", order=("pipeline", "data", "tensor"))
    it = Lowered(Case(Network(3, "flash", tied=False), machine, Training(4, 32, "fp32"), layout))
    contracted_is_original(it)
    assert sums(it.chained) == sums(it.fine)
    assert seconds(it.chained, it.chains) == pytest.approx(seconds(it.fine, it.operators), abs=1e-12)


@given(any_cases())
@EXAMPLES
def test_every_way_to_time_memory_and_bytes_agrees(case: Case) -> None:
    lowered = Lowered(case)
    assert not list(violations(lowered.small, case.layout))
    for law in LAWS:
        law(lowered)


@given(any_cases(ranks=8), st.integers(0, 10**6), st.booleans())
@EXAMPLES
def test_twice_any_bandwidth_is_never_slower_where_nothing_is_shared(case: Case, number: int, kind: bool) -> None:
    small, plan = case.build()
    faster = replace(small, cluster=widened(small.cluster, number, kind))
    times = [SimulatedCost(each).longest_paths([plan]) for each in (faster, small)]
    assert times[0] <= times[1]


SIMULATED = """
from random import Random
from meshwise.simulator.brief import to_full_text
from meshwise.simulator.engine import simulate
from meshwise.strategies.lowering.lower import lower
from tests.strategies.plans import any_case

for seed in range(20):
    timeline = simulate(lower(*any_case(Random(seed).choice).build()))
    spans = timeline.spans[:: len(timeline.spans) // 5]
    print(to_full_text((timeline.step_time, timeline.peak_memory, timeline.links, spans)))
"""


def test_the_same_seed_gives_the_same_bytes_under_five_hash_seeds() -> None:
    found = set()
    for seed in range(5):
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", SIMULATED], env=environment, capture_output=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().splitlines()) == 20


def widened(cluster: Cluster, number: int, kind: bool) -> Cluster:
    """Return the cluster with one link twice as wide, or all links of its kind."""
    network = interconnect(cluster)
    chosen = number % network.num_links
    links = [link for link in range(network.num_links) if kind and network.kind(link) == network.kind(chosen)]
    twice = tuple((network.name(link), 2.0) for link in links or [chosen])
    return replace(cluster, link_speeds=cluster.link_speeds + twice)


@given(any_cases(ranks=8), st.randoms(use_true_random=False))
@EXAMPLES
def test_who_is_called_what_changes_nothing(case: Case, random: Random) -> None:
    plain, other = (lower(*each.build()) for each in (case, renamed(case, random)))
    assert path(plain) == pytest.approx(path(other), rel=1e-7)  # loads are added up in another order
    assert step_time(plain) == pytest.approx(step_time(other), rel=1e-7)
