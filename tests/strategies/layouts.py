"""Layouts in which every field is drawn, and groups of them, for a small network on machines of eight free devices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from meshwise.simulator.collective import Collective, CollectiveCurve
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.composition import COMPOSITIONS
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Crossbar, Link, Switch
from meshwise.simulator.models.model import build
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.group import Group, select_passes, select_states
from meshwise.strategies.plan.layout import GRADIENT_REDUCTIONS, Layout, StepDecisions
from meshwise.strategies.plan.offloading import NO_OFFLOADING, WHOLE_FRACTION, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import PerStage
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.tables.embeddings import NO_EMBEDDINGS, parse_embeddings

from .plans import EXPERTS, OFFLOADINGS, ORDERS, RECOMPUTATIONS, SEQUENCE, Machine, Network, any_machine

RANKS, LAYERS, BATCH = 8, 8, 24

V = "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1 \n 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"
SPLIT_V = "0F0 3F0 3I0 0I0 3W0 0W0 0F1 3F1 3I1 0I1 0W1 3W1 \n 1F0 2F0 2I0 1I0 1W0 2W0 1F1 2F1 2I1 1I1 1W1 2W1"
LOOP = "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1 \n 1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"
HALVES = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 \n 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"
WRITTEN = (V, SPLIT_V, LOOP, HALVES)
"""Orders of two microbatches and four stages, which lie on two ranks in three ways."""

USUAL = ("gpipe", "1f1b", "interleaved")
"""Schedules that are drawn more often than others, for parts of the cost model are asked of these alone."""

OFFLOADS = (*OFFLOADINGS, Offloading(activations=(1.0, 0.0)), Offloading(optimizer=(0.0, 1.0)))
EVEN = Machine(1, RANKS, RANKS, Switch(Link(1e-6, 1.0)), Crossbar(), 1e9, Host("host", 1e12))
"""A machine on which all ranks of a stage are alike, so that paths are walked without programs."""

TABLES = (NO_EMBEDDINGS, NO_EMBEDDINGS, parse_embeddings("sparse"), parse_embeddings("rows"))
"""Placements of the table of words, where data ranks alone divide the work."""

SMALL_HOST = 4e6
"""Bytes of a host that has room for the optimizer states of some plans and not of others."""


def any_problem(draw: Random) -> Problem:
    """Return a network of eight layers on a machine of eight free devices."""
    training = Training(
        BATCH,
        SEQUENCE,
        draw.choice(["fp32", "bf16"]),
        draw.choice(["adamw", "sgd", "adafactor"]),
        gradient_clipping=draw.choice([False, True]),
        framework=draw.choice(sorted(FRAMEWORKS)),
        frozen=draw.random() < 0.1,
        gathers_logits=draw.choice([False, True]),
        composed=draw.choice([(), tuple(COMPOSITIONS)]),
    )
    network = Network(LAYERS, draw.choice(["flash", "unfused", "experts"]), draw.choice([False, True]))
    machine = EVEN if draw.choice([False, True]) else any_machine(draw.choice, RANKS)
    cluster = vary_nodes(machine.cluster(), draw)
    return Problem(build(network.spec(), SEQUENCE, training.dtype), cluster, training)


def vary_nodes(cluster: Cluster, draw: Random) -> Cluster:
    """Return a cluster in which hosts may be small, the nodes after the first slower, and collectives measured."""
    ((node, count),) = cluster.nodes
    node = replace(node, host=replace(node.host, memory=draw.choice([node.host.memory, SMALL_HOST])))
    slow = replace(node.accelerator, name="slow", memory=0.75 * node.accelerator.memory, memory_bandwidth=5e11)
    slow = replace(slow, reserved=draw.choice([slow.reserved, 3e5]))
    cluster = replace(cluster, collectives=draw.choice([(), any_curves(draw)]))
    if count == 1 or draw.choice([False, True]):
        return replace(cluster, nodes=((node, count),))
    return replace(cluster, nodes=((node, 1), (replace(node, accelerator=slow), count - 1)))


def any_curves(draw: Random) -> tuple[CollectiveCurve, ...]:
    """Return measured times of some collectives on groups of some sizes."""
    pairs = [(collective, ranks) for collective in Collective for ranks in (2, 4, RANKS) if draw.random() < 0.3]
    return tuple(
        CollectiveCurve(collective, ranks, ((1e3, draw.uniform(1e-6, 1e-4)), (1e6, draw.uniform(1e-4, 1e-2))))
        for collective, ranks in pairs
    )


def is_legal(problem: Problem, layout: Layout) -> bool:
    """Return whether a layout breaks no rule."""
    return next(violations(problem, layout), None) is None


def any_layout(problem: Problem, draw: Random) -> Layout:
    """Return a layout on all free devices or on half of them, legal or not: every field is drawn."""
    ranks = draw.choice([RANKS, RANKS, RANKS // 2])
    pipeline = draw.choice([1, 2, 2, 4])
    tensor = draw.choice(sizes_below(ranks // pipeline, (1, 2, 2, 4)))
    rows = draw.choice(sizes_below(ranks // pipeline // tensor, (1, 1, 1, 2)))
    context = draw.choice(sizes_below(ranks // pipeline // tensor // rows, (1, 1, 1, 2)))
    data, zero = ranks // (pipeline * tensor * rows * context), draw.choice([0, 1, 2, 3])
    has_experts = any(
        "experts" in dict(operator.dims) for block in problem.graph.blocks for operator in block.operators
    )
    expert = draw.choice(sizes_below(data, (1, 2, EXPERTS))) if has_experts and rows == 1 else 1
    schedule = draw.choice(draw.choice([[*SCHEDULES], USUAL, WRITTEN if pipeline == 2 else USUAL]))
    rule = SCHEDULES.get(schedule)
    chunks = draw.randint(rule.chunks[0], rule.chunks[1] or LAYERS // pipeline) if rule and pipeline > 1 else 1
    stages = pipeline * chunks if rule else 4
    sizes = [rows * size for size in ((1, 2, 3, 4, 6) if rule else (BATCH // 2 // data // rows,))]
    uneven = tuple(size for _ in range(data // expert) for size in [draw.choice(sizes)] * expert)
    apart = PerStage(tuple(draw.choice(RECOMPUTATIONS) for _ in range(stages)))
    cuts = sorted(draw.choice(range(LAYERS + 1)) for _ in range(stages - 1))
    sequence_parallel = tensor > 1 == rows and draw.choice([False, True])
    devices = problem.cluster.free_devices[: RANKS if ranks == RANKS or draw.random() < 0.5 else ranks]
    placement = tuple(draw.choice([devices[::-1], draw.sample(devices, len(devices))])[:ranks])
    degrees = {"context": context, "expert": expert, "tensor_rows": rows}
    return Layout(
        **degrees,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        microbatch=draw.choice([*sizes, uneven]),
        schedule=schedule,
        chunks=chunks,
        zero=zero,
        sequence_parallel=sequence_parallel,
        recompute=draw.choice([*RECOMPUTATIONS, apart]),
        attention=draw.choice(list(Attention)),
        overlap_gradients=draw.choice([False, True]),
        scatter_gather=draw.choice([False, True]),
        stages=draw.choice(["even", "balanced", tuple(b - a for a, b in pairwise([0, *cuts, LAYERS]))]),
        order=draw.choice([order for order in ORDERS if all(degrees[name] == 1 or name in order for name in degrees)]),
        placement=draw.choice([(), (), placement]) if ranks == RANKS else placement,
        offload=draw.choice([NO_OFFLOADING, draw.choice(OFFLOADS)]),
        zero_shards=draw.choice([0, 0, *sizes_below(data, (2, 4))]) if zero else 0,
        reshard_after_forward=zero < 3 or draw.choice([False, True]),
        gradient_reduction="all_reduce" if zero else draw.choice(GRADIENT_REDUCTIONS),
        overlap_tensor=sequence_parallel and draw.choice([False, True]),
        embeddings=NO_EMBEDDINGS if has_experts or ranks > data else draw.choice(TABLES),
    )


def sizes_below(most: int, sizes: Sequence[int]) -> list[int]:
    """Return those of some sizes of an axis that are at most the ranks left for it."""
    return [size for size in sizes if size <= most]


def groups_are_defined(layout: Layout) -> bool:
    """Return whether a layout may be a member of a group: all ranks have one microbatch, all stages one choice."""
    return isinstance(layout.microbatch, int) and not isinstance(layout.recompute, PerStage)


def group_of_one(layout: Layout) -> Group:
    """Return the group whose one member is a layout."""
    return Group(layout, (select_passes(layout),), (select_states(layout),), np.ones((1, 1), np.bool_))


def any_group(problem: Problem, layout: Layout, draw: Random) -> Group:
    """Return a group of a layout's degrees and schedule, of which it is a member."""
    passes = tuple(
        StepDecisions(
            recompute=draw.choice(RECOMPUTATIONS),
            overlap_tensor=draw.choice([False, True]),
            offload=Offloading(activations=draw.choice([(), WHOLE_FRACTION, (0.5,)])),
        )
        for _ in range(2)
    )
    away = (
        NO_OFFLOADING,
        NO_OFFLOADING,
        Offloading((0.5,)),
        Offloading(WHOLE_FRACTION),
        Offloading(WHOLE_FRACTION, (0.5,)),
    )
    states = tuple(
        StepDecisions(
            zero=draw.choice([0, 1, 2, 3]),
            reshard_after_forward=draw.choice([False, True]),
            overlap_gradients=draw.choice([False, True]),
            gradient_reduction=draw.choice(GRADIENT_REDUCTIONS),
            offload=draw.choice(away),
        )
        for _ in range(3)
    )
    passes, states = (select_passes(layout), *passes), (select_states(layout), *states)
    group = Group(layout, passes, states, np.ones((len(passes), len(states)), np.bool_))
    legal = [
        [is_legal(problem, group.build_layout(row, at)) for at in range(len(states))] for row in range(len(passes))
    ]
    return replace(group, member_mask=np.array(legal))
