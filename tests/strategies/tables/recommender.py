"""A small recommender on ideal devices that several tests share."""

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.model import build
from meshwise.strategies.plan.problem import Problem, Training

from ..problems import IDEAL

ROWS, HOTS, WIDTH = (4000, 1000, 60), (5, 2, 1), 16


def recommender(
    *,
    devices: int = 4,
    nodes: int = 1,
    batch: int = 32,
    rows: tuple[int, ...] = ROWS,
    hots: tuple[int, ...] = HOTS,
    popularity: float = 0.0,
    bandwidth: float = 1e9,
    pcie: float = 1e8,
    host_memory: float = 1e12,
    accelerator: Accelerator = IDEAL,
) -> Problem:
    """Return three tables of rows of 16 in fp32, and few dense layers, on devices with a slot to their host each."""
    spec = Dlrm(rows, hots, WIDTH, 8, (32, WIDTH), (32, 1), popularity=popularity)
    host = Host("host", host_memory, pcie=Pcie(Link(0.0, pcie)))
    cluster = build_homogeneous(
        "small", accelerator, host, nodes, devices, Link(1e-6, bandwidth), Link(2e-6, bandwidth / 4), devices
    )
    return Problem(build(spec, 1, "fp32"), cluster, Training(batch, 1, "fp32", "sgd"))
