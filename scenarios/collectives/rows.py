"""Measured collectives of any machine: rows of JSON, or the text of nccl-tests, each with the cluster it ran on.

The words of a row for its accelerator and links are read by the same functions as those of published training runs. A
word that is not known never drops a row: the nearest one is taken and told.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.published.machine import build_machine
from meshwise.scenarios.published.row import Row
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.collective_rows import Skipped
from meshwise.simulator.calibration.nccl_tests import (
    MAX_SECONDS,
    MIN_SECONDS,
    CollectiveRun,
    looks_like_nccl_tests,
    read_nccl_tests,
)
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.files import JsonError, parse_json
from meshwise.simulator.machine.cluster import Cluster

OPERATIONS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "p2p": Collective.SEND,
    "sendrecv": Collective.SHIFT,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.BROADCAST,
}
"""Names of operations in rows and texts. A reduce is a broadcast run backwards: the same steps and bytes."""
_ALIASES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "a2a": "all_to_all",
    "sendreceive": "sendrecv",
    "send": "p2p",
    "pointtopoint": "p2p",
    "bcast": "broadcast",
}
MAX_RANKS = 16_384
_MAX_BYTES = 64 * 2**20
_MAX_LINE = 10_000
_MAX_ROWS = 1 << 18
HOST_CLOCK = 66e-6
"""Seconds that a host's clock reads beside a collective (docs/collective_accuracy.md, all sources that host-timed)."""


@dataclass(frozen=True, slots=True)
class MeasuredMessage:
    """One measured message and the cluster that its row describes; all devices of the cluster take part.

    ``overhead`` are seconds that the clock of the measurement reads beside the collective. ``known`` tells whether the
    accelerator and the operation were named by words that are known.
    """

    line: int
    source: str
    name: str
    collective: Collective
    ranks: int
    nodes: int
    size: float
    seconds: float
    machine: Cluster
    algorithm: Algorithm | None = None
    overhead: float = 0.0
    assumptions: tuple[str, ...] = ()
    known: bool = True
    fabric_stated: bool = False

    __repr__ = brief_repr()


def is_collective_file(path: str | Path) -> bool:
    """Return whether a file holds measured collectives: rows with a field ``collective``, or nccl-tests text."""
    try:
        with open(path, "rb") as file:
            head = file.read(256 * 1024).decode("utf-8", "replace")
    except OSError:
        return False
    first_line = next((line for line in head.splitlines() if line.strip()), "")
    if first_line.lstrip().startswith("{"):
        return '"collective"' in first_line
    return looks_like_nccl_tests(head)


def read_messages(path: str | Path) -> tuple[tuple[MeasuredMessage, ...], tuple[Skipped, ...]]:
    """Return the measured messages of a file, and the lines that are skipped with their reasons.

    Raises
    ------
    ScenarioError
        Where the file cannot be read, is longer than 64 MiB, or no message can be predicted.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {error.strerror}"),)) from None
    if len(content) > _MAX_BYTES:
        raise ScenarioError((Fault(str(path), 0, 0, "", f"a file has at most {_MAX_BYTES} bytes, met more"),))
    messages, skipped = parse_messages(content.decode("utf-8", "replace"), Path(path).stem)
    if not messages:
        line, reason = skipped[0] if skipped else Skipped(1, "the file is empty")
        message = f"a file of collectives has measurements that can be used, met none; {len(skipped)} skipped: {reason}"
        raise ScenarioError((Fault(str(path), line, 1, "", message),))
    return messages, skipped


def parse_messages(text: str, source: str) -> tuple[tuple[MeasuredMessage, ...], tuple[Skipped, ...]]:
    """Return the messages of a text of rows or of nccl-tests, and what is skipped; ``source`` names the text."""
    skipped: list[Skipped] = []
    messages: list[MeasuredMessage] = []
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), start=1):
            if number > _MAX_ROWS:
                skipped.append(Skipped(number, f"at most {_MAX_ROWS} lines are read"))
                break
            if line.strip():
                try:
                    messages.append(_parse_row(line, number, source))
                except ValueError as reason:
                    skipped.append(Skipped(number, str(reason)))
        return tuple(messages), tuple(skipped)
    runs, skipped_lines = read_nccl_tests(text)
    skipped.extend(skipped_lines)
    for run in runs:
        try:
            messages.extend(_build_messages(run, source))
        except ValueError as reason:
            skipped.append(Skipped(run.line, str(reason)))
    return tuple(messages), tuple(skipped)


def _parse_row(line: str, number: int, source: str) -> MeasuredMessage:
    if len(line) > _MAX_LINE:
        raise ValueError(f"a line has at most {_MAX_LINE} characters, met {len(line)}")
    try:
        fields = parse_json(line)
    except JsonError as error:
        raise ValueError(f"a line is a JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a line is a JSON object, met {type(fields).__name__}")
    row = Row(fields)
    tool = row.text("tool")
    if "deepep" in tool or "nvbandwidth" in tool:
        raise ValueError(f"measured with {tool[:20]}, not a collective of a communication library")
    name, known = _find_operation(row)
    ranks = row.count("n_ranks", MAX_RANKS)
    if ranks is None:
        raise ValueError("n_ranks is a number above 0, met none")
    if OPERATIONS[name] is Collective.SEND and ranks != 2:
        raise ValueError(f"a send has 2 ranks, met {ranks}")
    nodes = row.count("n_nodes", MAX_RANKS) or 1
    if not row.states("n_nodes"):
        row.assume("n_nodes 1 (not stated)")
    size = row.number("size_bytes")
    if size is None:
        raise ValueError("size_bytes is a number above 0, met none")
    machine, assumptions, machine_known = find_machine(fields, ranks, nodes)
    row.assumed.extend(assumptions)
    algorithm = find_algorithm(row.text("algo"), row)
    is_device_timed = "nccl-tests" in tool or "rccl-tests" in tool or "profiler" in tool or not tool
    return MeasuredMessage(
        line=number,
        source=str(fields.get("source_id") or source)[:100],
        name=name,
        collective=OPERATIONS[name],
        ranks=ranks,
        nodes=nodes,
        size=size,
        seconds=_read_seconds(row, name, ranks, size),
        machine=machine,
        algorithm=algorithm,
        overhead=0.0 if is_device_timed else HOST_CLOCK,
        assumptions=tuple(row.assumed),
        known=known and machine_known,
        fabric_stated=nodes == 1 or row.states("inter_node_link"),
    )


def _find_operation(row: Row) -> tuple[str, bool]:
    """Return the operation of a row, and whether its word is known; an unknown one is told with the nearest."""
    words = row.text("collective")
    compact_name = words.replace("_", "").replace("-", "").replace(" ", "")
    by_compact_name = {name.replace("_", ""): name for name in OPERATIONS} | _ALIASES
    if compact_name in by_compact_name:
        return by_compact_name[compact_name], True
    nearest = next(iter(get_close_matches(compact_name, by_compact_name, n=1, cutoff=0.5)), None)
    if nearest is None:
        raise ValueError(f"collective is one of {', '.join(OPERATIONS)}, met {words[:40]!r}")
    row.assume(f"collective {words[:40]!r} taken as {by_compact_name[nearest]}, the nearest known")
    return by_compact_name[nearest], False


def _read_seconds(row: Row, name: str, ranks: int, size: float) -> float:
    """Return the stated time, or that which follows from a stated bandwidth as nccl-tests define it."""
    microseconds = row.number("time_us")
    if microseconds is not None:
        if not MIN_SECONDS <= microseconds * 1e-6 <= MAX_SECONDS:
            raise ValueError(f"time_us lies in 0.001 to 1e11, met {microseconds:g}")
        return microseconds * 1e-6
    bus_rate, rate = row.number("busbw_GBps"), row.number("algbw_GBps")
    factor = {"all_reduce": 2.0 * (ranks - 1) / ranks}.get(name, (ranks - 1) / ranks)
    if name in ("p2p", "sendrecv", "broadcast", "reduce"):
        factor = 1.0
    if rate is None and bus_rate is None:
        raise ValueError("time_us is a number above 0, met none, and neither algbw_GBps nor busbw_GBps")
    seconds = size / (rate * 1e9) if rate is not None else factor * size / ((bus_rate or 1.0) * 1e9)
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise ValueError(
            f"a collective takes {MIN_SECONDS:g} to {MAX_SECONDS:g} s, met {seconds:g} s from its bandwidth"
        )
    return seconds


_ALGORITHMS = (("nvls", Algorithm.IN_SWITCH), ("collnet", Algorithm.IN_SWITCH), ("sharp", Algorithm.IN_SWITCH))


def find_algorithm(words: str, row: Row) -> Algorithm | None:
    """Return the algorithm that words such as ``NVLSTree`` name; None where they leave it to the library."""
    words = words.strip().lower()
    if not words:
        return None
    if "," in words or words.startswith("^"):
        row.assume(f"algo {words[:40]!r} leaves the choice to the library")
        return None
    for prefix, algorithm in (*_ALGORITHMS, ("ring", Algorithm.RING), ("tree", Algorithm.TREE)):
        if words.startswith(prefix) or (prefix == "sharp" and "sharp" in words):
            return algorithm
    row.assume(f"algo {words[:40]!r} not known, taken as the library's choice; known: ring, tree, nvls, collnet")
    return None


def find_machine(fields: Mapping[str, Any], ranks: int, nodes: int) -> tuple[Cluster, tuple[str, ...], bool]:
    """Return the cluster of a row, the assumptions it rests on, and whether its accelerator is known.

    Every device of the cluster takes part: a row of 2 of the 8 devices of a node has a node of 2 devices with their
    share of its NICs.

    Raises
    ------
    ValueError
        Where nodes do not divide the ranks.
    """
    if ranks < 2 or ranks % nodes:
        raise ValueError(f"n_nodes divides n_ranks >= 2, met {ranks} on {nodes}")
    names = ("accelerator", "intra_node_link", "inter_node_link", "nic_gbps_per_device", "source_id")
    words = tuple((name, str(fields[name])[:400]) for name in names if isinstance(fields.get(name), str | int | float))
    return _find_machine(words, ranks, nodes)


@lru_cache(maxsize=1024)
def _find_machine(words: tuple[tuple[str, str], ...], ranks: int, nodes: int) -> tuple[Cluster, tuple[str, ...], bool]:
    fields: dict[str, Any] = dict(words) | {"devices_per_node": ranks // nodes, "n_devices": ranks}
    row = Row(fields)
    machine = build_machine(row, ranks)
    is_known = bool(row.reading("accelerator").word)
    return machine, tuple(line for line in row.assumed if _concerns_links(line)), is_known


def _concerns_links(assumption: str) -> bool:
    """Return whether an assumption about a row concerns its links: kernels and hosts' launches do not matter here."""
    return not any(word in assumption for word in ("framework", "launch", "accel_mem_gb", "torch", "compile"))


def _build_messages(run: CollectiveRun, source: str) -> Iterator[MeasuredMessage]:
    if run.ranks > MAX_RANKS:
        raise ValueError(f"a run has at most {MAX_RANKS} ranks, met {run.ranks}")
    stated, row = dict(run.stated), Row({})
    network = stated.get("inter_node_link") or run.network
    fields: dict[str, Any] = dict(stated) | {"accelerator": run.accelerator, "inter_node_link": network}
    nodes = run.nodes if run.ranks % run.nodes == 0 else math.gcd(run.ranks, run.nodes)
    if nodes != run.nodes:
        row.assume(f"{nodes} nodes with equally many devices, for {run.nodes} do not divide {run.ranks} ranks")
    machine, assumptions, known = find_machine(fields, run.ranks, nodes)
    algorithm = find_algorithm(run.algorithm, row)
    if dict(run.settings).get("NCCL_P2P_DISABLE") == "1":
        row.assume("NCCL_P2P_DISABLE=1 is not modelled: devices of a node reach each other as if it were not set")
        known = False
    for message in run.messages:
        yield MeasuredMessage(
            line=run.line,
            source=stated.get("source_id", source),
            name=run.operation,
            collective=OPERATIONS[run.operation],
            ranks=run.ranks,
            nodes=nodes,
            size=message.size,
            seconds=message.time,
            machine=machine,
            algorithm=algorithm,
            assumptions=(*run.assumptions, *row.assumed, *assumptions),
            known=known,
            fabric_stated=nodes == 1 or bool(network) or "nic_gbps_per_device" in stated,
        )
