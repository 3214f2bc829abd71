"""Small problems and a made-up cost model for the tests of search."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np
from hypothesis import strategies as st

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.operator_graph import Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.bounds.group_bounds import FloatArray
from meshwise.strategies.evaluation import Evaluation, Resource
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.space import Space


def small_problem(
    nodes: int = 2,
    devices_per_node: int = 4,
    layers: int = 4,
    heads: int = 4,
    ffn: int = 8,
    sequence: int = 8,
    global_batch: int = 8,
) -> Problem:
    """Return a network of ``layers`` equal layers and a head, on a cluster."""
    tokens = (("batch", 1), ("sequence", sequence))
    x, y, z = (Tensor(name, ("batch", "sequence"), (1, sequence), "bf16") for name in "xyz")
    attention = Operator("attention", OperatorKind.NORM, (*tokens, ("heads", heads)), ("x",), ("y",), flops_per_point=2)
    up = Operator("up", OperatorKind.NORM, (*tokens, ("ffn", ffn)), ("y",), ("z",), flops_per_point=2)
    norm = Operator("norm", OperatorKind.NORM, tokens, ("z",), ("x",), flops_per_point=1)
    blocks = (
        Block("layers", (attention, up), (x, y, z), ("x",), ("z",), repeat=layers),
        Block("head", (norm,), (z, x), ("z",), ("x",)),
    )
    link = Link(latency=1e-6, bandwidth=1e10)
    accelerator = Accelerator("small", (("bf16", 1e12),), memory=1e9, memory_bandwidth=1e12)
    cluster = build_homogeneous("small", accelerator, Host("host", 1e10), nodes, devices_per_node, link, link)
    return Problem(OperatorGraph("small", blocks, sequence), cluster, Training(global_batch, sequence))


PROBLEMS = st.builds(
    small_problem,
    nodes=st.integers(1, 2),
    devices_per_node=st.integers(1, 6),
    layers=st.integers(1, 6),
    heads=st.sampled_from((1, 2, 3, 4, 6, 12)),
    ffn=st.sampled_from((4, 6, 12)),
    sequence=st.sampled_from((3, 8)),
    global_batch=st.integers(1, 12),
)

SPACES = st.builds(
    Space,
    core=st.just(True),
    data=st.none() | st.just((1, 2, 4)),
    tensor=st.none() | st.sets(st.integers(1, 6), min_size=1).map(tuple),
    pipeline=st.none() | st.just((1, 3, 4)),
    microbatch=st.none() | st.sets(st.integers(1, 6), min_size=1).map(tuple),
    schedule=st.none() | st.sets(st.sampled_from(("gpipe", "1f1b", "interleaved")), min_size=1).map(tuple),
    chunks=st.none() | st.sets(st.integers(1, 4), min_size=1).map(tuple),
    zero=st.none() | st.just((1,)),
    sequence_parallel=st.none() | st.just((True,)) | st.just((False,)),
)


def drawn(seed: int, plan: Plan, what: str) -> Random:
    """Return a generator that depends on nothing but its arguments."""
    return Random(f"{seed} {what} {plan.describe()}")


@dataclass
class FakeCost:
    """Made-up costs, drawn once for every plan; ``evaluated`` records what was simulated.

    ``levels`` is how many different step times there are (few: many ties), ``tight`` how near
    bounds come: 1 for bounds that are exact.
    """

    seed: int = 0
    levels: int = 1000
    tight: float = 0.5
    capacity: float = 1.0
    on_evaluate: Callable[[int], None] = lambda count: None
    evaluated: list[Plan] = field(default_factory=list)

    def step_time(self, plan: Plan) -> float:
        """Seconds from 1 to 2."""
        return 1 + drawn(self.seed, plan, "time").randrange(self.levels) / self.levels

    def peak_memory(self, plan: Plan) -> float:
        """Bytes from 0 to 1."""
        return drawn(self.seed, plan, "memory").random()

    def fits(self, plan: Plan) -> bool:
        """Whether the memory is at most the capacity."""
        return self.peak_memory(plan) <= self.capacity

    def plan_bound(self, plan: Plan) -> float:
        """Seconds, never above the step time."""
        slack = (1 - self.tight) * drawn(self.seed, plan, "bound").random()
        return self.step_time(plan) * (1 - slack)

    def family_bound(self, family: Layout) -> float:
        """Nothing is known of families."""
        return 0.0

    def busy_bound(self, family: Layout) -> float:
        """Nothing is known of families."""
        return 0.0

    def group_bounds(self, group: Group, limit: float = inf) -> FloatArray:
        """Nothing is known of groups but their members."""
        return np.where(group.member_mask, 0.0, inf)

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        """Seconds, of which no two are the same."""
        return {resource: drawn(self.seed, plan, resource).random() for resource in Resource}

    def longest_paths(self, plans: Sequence[Plan]) -> list[float]:
        """Seconds, half way from the bound to the step time."""
        return [(self.plan_bound(plan) + self.step_time(plan)) / 2 for plan in plans]

    def evaluate(self, plan: Plan) -> Evaluation:
        """Seconds and bytes."""
        self.on_evaluate(len(self.evaluated) + 1)
        self.evaluated.append(plan)
        fits = self.fits(plan)
        return Evaluation(self.step_time(plan) if fits else inf, self.peak_memory(plan), fits)
