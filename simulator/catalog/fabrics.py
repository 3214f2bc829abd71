"""How well NICs are used between nodes where nobody measured the cluster: by kind of fabric, from public nccl-tests.

The figures and their sources are in ``fabrics.json``. A well-built cluster keeps its bandwidth from 4 to 128 nodes, so
that no share declines with the number of nodes; what falls is the bandwidth of small messages, through the latency of
more steps.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.units import Dimension, parse

UNKNOWN_FABRIC = "unknown"


@dataclass(frozen=True, slots=True)
class FabricDefault:
    """Default figures of NICs on one kind of fabric.

    Parameters
    ----------
    kind
        Name of the kind, such as ``infiniband``.
    share, low, high
        Fraction of the line rate that large messages reach, and the range of it among the clusters that were measured.
    latency, launch
        Seconds of a step and of a collective's start over NICs, as in `Link`.
    source
        Where the share comes from.
    """

    kind: str
    share: float
    low: float
    high: float
    latency: float
    launch: float
    source: str

    __repr__ = brief_repr()

    def nic(self, rate: float) -> Link:
        """Return the NIC with a line rate in bytes/s.

        >>> fabric_default("infiniband").nic(50e9).bandwidth
        42000000000.0
        """
        return Link(self.latency, self.share * rate, self.launch)


def fabric_kinds() -> tuple[str, ...]:
    """Return the names of all kinds of fabric."""
    return tuple(_read_fabrics())


def fabric_default(kind: str) -> FabricDefault:
    """Return the default figures of a kind of fabric; ``ValueError`` names the known ones."""
    fabrics = _read_fabrics()
    if kind not in fabrics:
        raise ValueError(f"fabric is one of {', '.join(fabrics)}, met {kind[:40]}")
    return fabrics[kind]


@lru_cache(maxsize=1)
def _read_fabrics() -> dict[str, FabricDefault]:
    document: dict[str, Any] = json.loads(files(__package__).joinpath("fabrics.json").read_text("utf-8"))
    return {
        kind: FabricDefault(
            kind,
            entry["share"],
            entry["share_range"][0],
            entry["share_range"][1],
            parse(entry["latency"], Dimension.TIME),
            parse(entry["launch"], Dimension.TIME),
            entry["sources"]["share"],
        )
        for kind, entry in document.items()
    }
