"""Random small scenarios for the tests of search, of which a part of the plans fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute
from meshwise.strategies.search.space import Space, count_layouts, layouts

ROOM = 1e12
"""Bytes of a device that holds every plan."""


def small_scenario(seed: int) -> tuple[Problem, Space]:
    """Return a small transformer on a small cluster, and the core of its space."""
    return next(_fitting(Random(seed), range(2, 400), _usual_limits))


def usual_scenario(seed: int, plans: range = range(2, 400)) -> tuple[Problem, Space]:
    """Return a small transformer on a small cluster, and its usual space of so many plans, within a few limits."""
    return next(_fitting(Random(seed), plans, _few_limits))


def wide_scenario(seed: int, plans: range = range(2, 400)) -> tuple[Problem, Space]:
    """Return a small transformer on a small cluster, and a wide space of so many plans."""
    return next(_fitting(Random(seed), plans, _wide_limits))


def _fitting(draw: Random, plans: range, limits: Callable[[Random], Space]) -> Iterator[tuple[Problem, Space]]:
    """Yield scenarios of so many plans, with memory for all of them, most, half, one in ten or the leanest."""
    while True:
        problem, space = _problem(draw), limits(draw)
        if count_layouts(problem, space) not in plans:
            continue
        costs = SimulatedCost(problem)
        needs = sorted(costs.peak_memory(complete(problem, layout)) for layout in layouts(problem, space))
        part = draw.choice((1.0, 0.9, 0.5, 0.1, 0.0))
        yield replace(problem, cluster=_with_memory(problem.cluster, needs[int(part * (len(needs) - 1))])), space


def _with_memory(cluster: Cluster, memory: float) -> Cluster:
    nodes = (
        (replace(node, accelerator=replace(node.accelerator, memory=memory * node.accelerator.memory / ROOM)), number)
        for node, number in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def _problem(draw: Random) -> Problem:
    heads, hidden = draw.choice((2, 4)), draw.choice((64, 256))
    number, dense, layers = draw.choice((2, 4)), draw.choice((0, 0, 1)), draw.randint(1, 6)
    experts = Experts(number, 1, hidden, dense_layers=min(dense, layers - 1))
    spec = Transformer(
        layers,
        hidden,
        heads,
        heads,
        4 * hidden,
        vocab=512,
        tied_embeddings=draw.random() < 0.3,
        experts=experts if draw.random() < 0.25 else None,
    )
    batch = draw.choice((2, 4, 6, 8))
    return Problem(build(spec, 64, "bf16"), _cluster(draw), Training(batch, 64))


def _cluster(draw: Random) -> Cluster:
    """Return up to eight devices: alike, some slow, or of two kinds."""
    accelerator = Accelerator("small", (("bf16", 1e12),), memory=ROOM, memory_bandwidth=1e11)
    inside, outside = Link(1e-6, 10 ** draw.uniform(9, 11)), Link(5e-6, 10 ** draw.uniform(8, 10))
    nodes, devices = draw.choice(((1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 4)))
    host = Host("host", 1e10, launch=draw.choice((0.0, 5e-6)))
    cluster = build_homogeneous("small", accelerator, host, nodes, devices, inside, outside, draw.choice((1, devices)))
    if nodes > 1 and draw.random() < 0.2:
        other = replace(
            accelerator, name="other", peak_flops=(("bf16", 4e11),), memory=draw.choice((0.6, 1.0, 1.5)) * ROOM
        )
        node = cluster.first_node
        return replace(cluster, nodes=((node, nodes - 1), (replace(node, accelerator=other), 1)))
    slow = draw.sample(range(nodes * devices), draw.choice((0, 0, 1, 2)))
    return replace(cluster, speeds=tuple((device, draw.choice((0.5, 0.8))) for device in slow))


def _usual_limits(draw: Random) -> Space:
    return Space(core=True, zero=draw.choice((None, (0, 1, 2, 3))))


def _few_limits(draw: Random) -> Space:
    return Space(
        microbatch=draw.choice((None, (1,))),
        overlap_tensor=draw.choice((None, (False,))),
        reshard_after_forward=draw.choice((None, (True,))),
    )


def _wide_limits(draw: Random) -> Space:
    """Return a wide space with some limits, and with choices that only a limit can name."""
    schedules = ("1f1b", "interleaved", "zb1p", "zbv", "looped_bfs", "naive", "dualpipev", "interleaved_zero_bubble")
    recomputes = (Recompute.NONE, Recompute.FULL, FirstLayers(Recompute.FULL, 1), FirstLayers(Recompute.SELECTIVE, 2))
    offloads = (Offloading(optimizer=(0.5,)), Offloading((1.0,), (1.0,)), Offloading(activations=(1.0,)))
    return Space(
        wide=True,
        schedule=draw.choice((None, tuple(draw.sample(schedules, draw.randint(1, 4))))),
        microbatch=draw.choice((None, (1,), (1, 2))),
        recompute=draw.choice((None, tuple(draw.sample(recomputes, 2)))),
        zero=draw.choice((None, tuple(draw.sample(range(4), 2)))),
        zero_shards=draw.choice((None, (0, 2))),
        context=draw.choice((None, None, (1, 2))),
        tensor_rows=draw.choice((None, None, (1, 2))),
        offload=draw.choice(((Offloading(),), (Offloading(), draw.choice(offloads)), None)),
        overlap_gradients=draw.choice((None, (False, True))),
        overlap_tensor=draw.choice(((True,), (False, True), (False,))),
        scatter_gather=draw.choice((None, (False,))),
        reshard_after_forward=draw.choice((None, (True,))),
        devices=draw.choice((None, None, (2, 3, 4))),
    )
