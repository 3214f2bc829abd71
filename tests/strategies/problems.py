"""Small problems that several tests share."""

from dataclasses import replace

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import FULL_BISECTION, Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Fabric, Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.problem import Problem, Training

IDEAL = Accelerator("ideal", (("fp32", 1e12), ("bf16", 2e12)), memory=1e12, memory_bandwidth=1e12)


def problem(
    *,
    nodes: int = 1,
    devices: int = 8,
    nics: int = 8,
    layers: int = 8,
    batch: int = 32,
    bandwidth: float = 1e9,
    accelerator: Accelerator = IDEAL,
    tied: bool = False,
    precision: str = "fp32",
    fabric: Fabric = FULL_BISECTION,
    launch: float = 0.0,
    **changes: object,
) -> Problem:
    """Return a small transformer on ``nodes`` times ``devices`` ideal accelerators."""
    sizes = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 256, "vocab": 128} | changes
    spec = Transformer(layers, tied_embeddings=tied, **sizes)  # type: ignore[arg-type]
    host, inside, outside = Host("host", 1e12, launch=launch), Link(1e-6, bandwidth), Link(2e-6, bandwidth / 4)
    cluster = replace(
        build_homogeneous("small", accelerator, host, nodes, devices, inside, outside, nics), fabric=fabric
    )
    return on(cluster, spec, batch, precision)


def on(cluster: Cluster, spec: Transformer, batch: int, precision: str = "fp32") -> Problem:
    """Return a network on a cluster, for sequences of 32 tokens."""
    training = Training(batch, 32, precision)
    return Problem(build(spec, 32, training.dtype), cluster, training)
