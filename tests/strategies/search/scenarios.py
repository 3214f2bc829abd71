"""Random small scenarios for the tests of search."""

from dataclasses import replace
from random import Random

from simulator.accelerator import Accelerator
from simulator.cluster import homogeneous
from simulator.host import Host
from simulator.link import Link
from simulator.models.transformer import Transformer, build
from strategies.offloading import Offloading
from strategies.problem import Problem
from strategies.recomputation import FirstLayers, Recompute
from strategies.search import Space
from strategies.training import Training


def small_scenario(seed: int) -> tuple[Problem, Space]:
    """Return a small transformer on a small cluster, with memory for some of its plans, and limits of a space."""
    draw = Random(seed)
    heads, hidden = draw.choice((2, 4)), draw.choice((64, 256))
    spec = Transformer(
        draw.randint(1, 6), hidden, heads, heads, 4 * hidden, vocab=512, tied_embeddings=draw.random() < 0.3
    )
    sequence, batch = 64, draw.choice((2, 4, 6, 8))
    memory = draw.choice((1e9, 3e7, 1e7)) * (hidden / 256)
    accelerator = Accelerator("small", (("bf16", 1e12),), memory=memory, memory_bandwidth=1e11)
    inside, outside = Link(1e-6, 10 ** draw.uniform(9, 11)), Link(5e-6, 10 ** draw.uniform(8, 10))
    nodes, devices = draw.choice(((1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 4)))
    host = Host("host", 1e10, launch=draw.choice((0.0, 5e-6)))
    cluster = homogeneous("small", accelerator, host, nodes, devices, inside, outside, draw.choice((1, devices)))
    zero = draw.choice((None, (0, 1, 2, 3)))
    slow = draw.sample(range(nodes * devices), draw.choice((0, 0, 1, 2)))
    cluster = replace(cluster, speeds=tuple((device, draw.choice((0.5, 0.8))) for device in slow))
    return Problem(build(spec, sequence, "bf16"), cluster, Training(batch, sequence)), Space(zero=zero)


def wide_limits(seed: int) -> Space:
    """Return a wide space with some limits, so that a small scenario has tens or hundreds of layouts."""
    draw = Random(seed)
    schedules = ("1f1b", "interleaved", "zb1p", "zbv", "looped_bfs", "naive", "dualpipev", "interleaved_zero_bubble")
    recomputes = (Recompute.NONE, Recompute.FULL, FirstLayers(Recompute.FULL, 1), FirstLayers(Recompute.SELECTIVE, 2))
    offloads = (Offloading(optimizer=(0.5,)), Offloading((1.0,), (1.0,)), Offloading(activations=(1.0,)))
    return Space(
        wide=True,
        schedule=tuple(draw.sample(schedules, 2)),
        microbatch=(draw.choice((1, 2)),),
        recompute=tuple(draw.sample(recomputes, 2)),
        zero=tuple(draw.sample(range(4), 2)),
        zero_shards=draw.choice(((0,), (0, 2))),
        offload=draw.choice(((Offloading(),), (Offloading(), draw.choice(offloads)))),
        overlap_gradients=draw.choice(((True,), (False, True))),
        overlap_tensor=draw.choice(((True,), (False, True))),
        scatter_gather=(False,),
        reshard_after_forward=(True,),
        devices=draw.choice((None, (2, 3, 4))),
    )
