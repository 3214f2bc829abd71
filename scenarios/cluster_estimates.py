"""What a cluster file leaves out of how near kernels and links come to their data sheets, and what stands for it.

Nothing is ideal for want of a word: a figure of efficiency that is not stated is that of the accelerator which ``like``
names, or the median of those that the catalogue has timed (`simulator.catalog.typical`), and the result says so.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from scenarios.cluster_schema import AcceleratorTable, AttentionTable, ClusterTable, MatmulTable, MixedClusterTable
from scenarios.fabric_schema import LinkTable
from simulator.catalog import accelerator, estimated
from simulator.catalog.typical import (
    Efficiency,
    efficiency_of,
    timed_accelerators,
    typical_efficiency,
    typical_link,
)
from simulator.interconnect.kinds import NodeNetwork
from simulator.kernels.attention import AttentionModel
from simulator.kernels.matmul import MatmulModel
from simulator.link import Link

_DELAYS = ("latency", "launch")
N = TypeVar("N", bound=NodeNetwork)


def stated_efficiency(table: AcceleratorTable) -> Efficiency:
    """Return the efficiency of an accelerator that is written out: what it states, else what stands for it."""
    base = _base(table)
    matmul = _matmul(table.matmul) if "matmul" in table.model_fields_set else base.matmul
    attention = AttentionModel(**table.attention.model_dump())
    others = () if "kernel_bandwidth_default" in table.model_fields_set else base.kernel_bandwidth
    return Efficiency(
        launch=table.launch if "launch" in table.model_fields_set else base.launch,
        matmul=matmul,
        attention=attention if "attention" in table.model_fields_set else base.attention_beside(matmul),
        sustained=table.sustained if "sustained" in table.model_fields_set else base.sustained,
        kernel_bandwidth=tuple((dict(others) | table.kernel_bandwidth).items()),
    )


def _base(table: AcceleratorTable) -> Efficiency:
    return typical_efficiency() if table.like is None else efficiency_of(accelerator(table.like))


def _left_out(table: AcceleratorTable) -> tuple[str, ...]:
    """Return the figures of efficiency that a table does not state."""
    stated = table.model_fields_set - {"kernel_bandwidth"}
    if (
        "kernel_bandwidth_default" in stated
        or dict(_base(table).kernel_bandwidth).keys() <= table.kernel_bandwidth.keys()
    ):
        stated |= {"kernel_bandwidth"}
    return tuple(name for name in Efficiency._fields if name not in stated)


_OF_ITSELF = frozenset({"sharpness", "fractions"})
"""Figures that add to others of their table: without them nothing is ideal."""


def _ideal(table: AcceleratorTable) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the tables of efficiency that are stated in part, and what they leave out; an empty one means ideal."""
    for name in ("matmul", "attention"):
        part: MatmulTable | AttentionTable = getattr(table, name)
        if part.model_fields_set:
            missing = (field for field in type(part).model_fields if field not in part.model_fields_set | _OF_ITSELF)
            if names := tuple(missing):
                yield name, names


def _matmul(table: MatmulTable) -> MatmulModel:
    values = {name: getattr(table, name) for name in MatmulTable.model_fields}
    sharpness = math.inf if table.sharpness is None else table.sharpness
    return MatmulModel(**values | {"sharpness": sharpness, "fractions": tuple(table.fractions.items())})


def typical_delays(table: LinkTable, link: Link, *, inside: bool) -> Link:
    """Return a link with the latency and launch of timed links where its table states none."""
    typical = typical_link(inside=inside)
    return replace(link, **{name: getattr(typical, name) for name in _DELAYS if name not in table.model_fields_set})


def with_typical_delays(table: LinkTable, network: N) -> N:
    """Return a network inside a node whose link has the delays of timed ones where its table states none."""
    return replace(network, link=typical_delays(table, network.link, inside=True))


def estimates(table: ClusterTable | MixedClusterTable) -> Iterator[str]:
    """Yield in words what stands for figures that a cluster file leaves out."""
    for kind in table.node_types if isinstance(table, MixedClusterTable) else (table,):
        yield from _of_accelerator(kind.accelerator)
        links = (("intra_node", kind.intra_node), ("inter_node", kind.inter_node))
        for name, link in links:
            delays = [delay for delay in _DELAYS if delay not in link.model_fields_set]
            if delays:
                yield (
                    f"{name}: {_listed(delays)} not stated, taken as the median of the catalogue's timed links; "
                    "bandwidth taken as reached"
                )


def _of_accelerator(table: AcceleratorTable) -> Iterator[str]:
    if table.preset is not None:
        yield from estimated(table.preset)
        return
    for name, missing in _ideal(table):
        yield f"{table.name}: {name} without {_listed(missing)}, taken as ideal; left out as a whole it is typical"
    taken = _left_out(table)
    if not taken:
        return
    stated = "matmul" in table.model_fields_set
    fraction = table.matmul.fraction if stated else _base(table).matmul.fraction
    reach = f"products reach {fraction:.2f} of the peak in a burst"
    if table.like is not None:
        yield f"{table.name}: {_listed(taken)} not stated, taken from {table.like}; {reach}"
        return
    yield (
        f"{table.name}: {_listed(taken)} not stated, taken as the median of the {len(timed_accelerators())} "
        f"accelerators with timed kernels; {reach}; like: NAME takes those of one"
    )


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names)
