"""Small problems that several tests share."""

from simulator.cluster import Accelerator, Cluster, Host, Link
from simulator.models.transformer import Transformer, build
from strategies.problem import Problem
from strategies.training import Training

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
    **changes: object,
) -> Problem:
    """Return a small transformer on ``nodes`` times ``devices`` ideal accelerators."""
    sizes = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 256, "vocab": 128} | changes
    spec = Transformer(layers, tied_embeddings=tied, **sizes)  # type: ignore[arg-type]
    cluster = Cluster(
        "small", accelerator, Host("host", 1e12), nodes, devices, Link(1e-6, bandwidth), Link(2e-6, bandwidth / 4), nics
    )
    return Problem(build(spec, 32, precision), cluster, Training(batch, 32, precision))
