"""Published measurements of collectives: rows of JSON, which may be wrong or hostile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.files import JsonError, parse_json

_COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "p2p": Collective.SEND,
}
_INSIDE = (
    ("A100 SXM", "NVLink3", "dgx-a100-80gb"),
    ("A100", "NVLink3/NVSwitch", "dgx-a100-80gb"),
    ("H100 SXM", "NVLink4/NVSwitch", "dgx-h100"),
    ("H200 SXM", "NVLink4/NVSwitch", "dgx-h200"),
    ("B200 SXM", "NVLink5/NVSwitch", "dgx-b200"),
    ("GB200 SXM", "NVLink5/NVSwitch", "gb200-nvl72"),
    ("V100", "NVLink2", "dgx-1-v100-16gb"),
)
"""Prefixes of accelerator and intra-node link, and the machine in the catalogue; the first match counts."""
_BETWEEN = (
    ("A100 SXM 80GB (p4de", "EFA v1, 4x100 Gb/s per node", "aws-p4de"),
    ("H100 SXM", "EFA v2, 32x100 Gb/s per node", "aws-p5"),
    ("H100 SXM", "GPUDirect-TCPX, 4 x 200 Gb/s per node", "gcp-a3-high"),
    ("H200 SXM", "RoCE CX7, 8 x 400 Gb/s per node", "gcp-a3-ultra"),
)
"""Prefixes of accelerator and inter-node link, and the machine, for rows of several nodes."""
_MAX_RANKS = 4096
"""Most ranks of a row."""
_MAX_LINE = 10_000
"""Most characters of a line."""
_MAX_LINES = 1 << 20
"""Most lines of a file."""


class Timing(StrEnum):
    """Clock of a source: the device's over many runs, a profiler's of one kernel, or a host's.

    A profiled kernel includes waiting for the last rank; a host's clock includes launch and synchronisation.
    """

    DEVICE = "device"
    PROFILER = "profiler"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One measured collective on a machine of the catalogue.

    Parameters
    ----------
    source
        Who published it.
    machine, nodes, ranks
        The machine's name, and the number of its nodes and devices that take part, equally many on each node.
    size, seconds
        Bytes, counted as in `meshwise.simulator.collectives.choose`, and measured time.
    algorithm
        The algorithm that the source states, ``None`` where the library chose it.
    timing
        The clock.
    """

    source: str
    machine: str
    nodes: int
    ranks: int
    collective: Collective
    size: float
    seconds: float
    algorithm: Algorithm | None = None
    timing: Timing = Timing.DEVICE

    @property
    def group(self) -> tuple[int, ...]:
        """The devices that take part: the first ones of every node."""
        devices, devices_used = cluster(self.machine).first_node.devices, self.ranks // self.nodes
        return tuple(devices * node + rank for node in range(self.nodes) for rank in range(devices_used))


class Skipped(NamedTuple):
    """A line that is not used, counted from 1, and the reason."""

    line: int
    reason: str


def read_rows(lines: Iterable[str]) -> tuple[tuple[CollectiveRow, ...], tuple[Skipped, ...]]:
    """Return the rows that the model can predict, and the skipped lines with their reasons.

    ``lines`` are JSON objects with the fields ``source_id``, ``collective``, ``accelerator``,
    ``intra_node_link``, ``inter_node_link``, ``n_ranks``, ``n_nodes``, ``size_bytes``, ``time_us`` (or
    ``busbw_GBps``), ``algo`` and ``tool``. Nothing in them is run, and none makes this function raise.
    """
    rows, skipped = [], []
    for number, line in enumerate(lines, start=1):
        if number > _MAX_LINES:
            skipped.append(Skipped(number, f"at most {_MAX_LINES} lines are read"))
            break
        if not line.strip():
            continue
        try:
            rows.append(_parse_row(_parse_line(line)))
        except ValueError as reason:
            skipped.append(Skipped(number, str(reason)))
    return tuple(rows), tuple(skipped)


def _parse_line(line: str) -> Mapping[str, Any]:
    if len(line) > _MAX_LINE:
        raise ValueError(f"a line has at most {_MAX_LINE} characters, met {len(line)}")
    try:
        document = parse_json(line)
    except JsonError as error:
        raise ValueError(f"a line is a JSON object: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"a line is a JSON object, met {type(document).__name__}")
    return document


def _parse_row(fields: Mapping[str, Any]) -> CollectiveRow:
    tool, algorithm = _read_text(fields, "tool", ""), _read_text(fields, "algo", "")
    if "DeepEP" in tool or "nvbandwidth" in tool:
        raise ValueError(f"measured with {tool[:20]}, not a collective of NCCL")
    name = _read_text(fields, "collective")
    if name not in _COLLECTIVES:
        raise ValueError(f"collective is one of {', '.join(_COLLECTIVES)}, met {name[:40]!r}")
    ranks, nodes = _read_count(fields, "n_ranks"), _read_count(fields, "n_nodes")
    machine = _find_machine(fields, nodes)
    per_node = ranks // nodes
    if ranks < 2 or ranks % nodes:
        raise ValueError(f"n_nodes divides n_ranks >= 2, met {ranks} on {nodes}")
    if name == "p2p" and ranks != 2:
        raise ValueError(f"a p2p has 2 ranks, met {ranks}")
    if per_node > cluster(machine).first_node.devices:
        raise ValueError(f"a node of {machine} has {cluster(machine).first_node.devices} devices, met {per_node}")
    size = _read_number(fields, "size_bytes", 1)
    return CollectiveRow(
        source=_read_text(fields, "source_id")[:100],
        machine=machine,
        nodes=nodes,
        ranks=ranks,
        collective=_COLLECTIVES[name],
        size=size,
        seconds=_parse_seconds(fields, name, ranks, size),
        algorithm=_parse_algorithm(algorithm),
        timing=_classify_clock(tool),
    )


def _classify_clock(tool: str) -> Timing:
    if "profiler" in tool:
        return Timing.PROFILER
    return Timing.DEVICE if "nccl-tests" in tool else Timing.HOST


def _find_machine(fields: Mapping[str, Any], nodes: int) -> str:
    accelerator = _read_text(fields, "accelerator")
    link_field, machines = ("intra_node_link", _INSIDE) if nodes == 1 else ("inter_node_link", _BETWEEN)
    link = _read_text(fields, link_field)
    for accelerator_prefix, link_prefix, name in machines:
        if accelerator.startswith(accelerator_prefix) and link.startswith(link_prefix):
            return name
    raise ValueError(f"no machine of the catalogue: {accelerator[:40]}, {link[:40]}")


def _parse_seconds(fields: Mapping[str, Any], name: str, ranks: int, size: float) -> float:
    """Return the stated time, or the time that follows from the bus bandwidth as nccl-tests define it."""
    if "time_us" in fields:
        return _read_number(fields, "time_us", 1e-3) * 1e-6
    rounds = {"all_reduce": 2.0, "p2p": ranks / (ranks - 1)}.get(name, 1.0)
    return rounds * (ranks - 1) / ranks * size / (_read_number(fields, "busbw_GBps", 1e-6) * 1e9)


def _parse_algorithm(name: str) -> Algorithm | None:
    """Return the algorithm that a source names; NCCL's in-switch ones are called NVLS."""
    if not name:
        return None
    if name.startswith("NVLS"):
        return Algorithm.IN_SWITCH
    if name.startswith("Ring"):
        return Algorithm.RING
    raise ValueError(f"algo is NVLS or Ring, met {name[:40]!r}")


def _read_text(fields: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is a text, met {'nothing' if value is None else type(value).__name__}")
    return value


def _read_count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or not 1 <= value <= _MAX_RANKS:
        raise ValueError(f"{key} is a whole number from 1 to {_MAX_RANKS}, met {str(value)[:20]}")
    return value


def _read_number(fields: Mapping[str, Any], key: str, minimum: float) -> float:
    value: Any = fields.get(key)
    if type(value) not in (int, float) or not minimum <= value <= 1e18:
        raise ValueError(f"{key} is a number from {minimum:g} to 1e18, met {str(value)[:20]}")
    return float(value)
