"""The plain text that nccl-tests and rccl-tests print, read as runs of one collective each.

A text may hold several runs, the commands that started them, lines of ``NCCL_DEBUG=INFO`` and the tags that launchers
put before every line. Nothing in it is run, and none makes the reader raise: what cannot be used is skipped and told.
Lines ``# inter_node_link: 8 x 400 Gb/s InfiniBand`` state what the tools do not print; their names are the fields of
published rows.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from meshwise.simulator.calibration.collective_rows import Skipped

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "sendrecv",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
"""Programs of nccl-tests, without ``_perf``, that the model can predict, and the names of their operations."""
STATED_FIELDS = ("accelerator", "intra_node_link", "inter_node_link", "nic_gbps_per_device", "source_id")
"""Fields of published rows that a comment line of a text may state."""

MIN_SECONDS, MAX_SECONDS = 1e-9, 1e5
"""Seconds between which a measured collective lies."""
_MAX_LINES = 1 << 18
_MAX_LINE = 4000
_MAX_RUNS = 4096
_MAX_RANKS = 1 << 16

_TAG = re.compile(r"^\s*(?:>\s*|\[\d+,\d+\](?:<std(?:out|err)>)?:?|\d{1,5}:(?=\s))+")
"""Tags of mpirun ``--tag-output``, of srun ``--label``, and quotation marks of mails."""
_RANK_TAG = re.compile(r"\[\d{1,5}\]")
"""The tag of some launchers before every piece of output; PCI addresses in brackets contain letters or colons."""
_RANK = re.compile(
    r"Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s*\[[^\]]*\]\s*(.*\S)", re.IGNORECASE
)
_SETTINGS = re.compile(r"nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes", re.IGNORECASE)
_PROGRAM = re.compile(r"\b([a-z]+(?:_[a-z]+)?)_perf(?:_mpi)?\b")
_STARTS = re.compile(r"Collective test starting", re.IGNORECASE)
_ENDS = re.compile(r"Avg bus bandwidth|Collective test concluded", re.IGNORECASE)
_VERSION = re.compile(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_HEADERS_VERSION = re.compile(r"nccl-library=(\d)(\d\d)(\d\d)\b")
_ENVIRONMENT = re.compile(r"\b((?:NCCL|RCCL)_[A-Z0-9_]+)(?:=|\s+set (?:by environment )?to\s+)([^\s;]+)")
_STATED = re.compile(rf"^#?\s*({'|'.join(STATED_FIELDS)})\s*[:=]\s*(.{{1,200}})$")
_PROCESSES = re.compile(r"(?:^|\s)(?:-np?|--np|--ntasks|-c)[ =](\d+)\b")
_PER_NODE = re.compile(
    r"(?:^|\s)(?:-N|-npernode|--npernode|--ntasks-per-node|-ppn|--map-by ppr:|-map-by ppr:)[ =:]?(\d+)"
)
_TYPE = re.compile(r"u?int(8|32|64)|half|float|double|bfloat16|fp8_e[45]m[23]|f8e[45]m[23]|float8")
_NETWORKS = (
    (r"NET/IB\s*:\s*Using.*RoCE|/RoCE", "RoCE"),
    (r"NET/IB\s*:\s*Using.*\bIB\b|:1/IB\b", "InfiniBand"),
    (r"Provider is efa|NET/OFI.*efa|efa\.c", "EFA"),
    (r"FasTrak|TCPXO", "GPUDirect-TCPXO"),
    (r"GPUDirectTCPX|TCPX_", "GPUDirect-TCPX"),
    (r"\bcxi\b|libcxi", "Slingshot"),
    (r"Using network Socket|NCCL_NET=Socket|NCCL_IB_DISABLE=1", "TCP sockets"),
)
"""What lines of the library and its settings tell about the network between nodes."""
_TABLE = tuple((re.compile(pattern), words) for pattern, words in _NETWORKS)


class Message(NamedTuple):
    """Bytes of a message, and seconds with separate buffers and in place; None where a column has no figure."""

    size: float
    seconds: float | None
    in_place_seconds: float | None

    @property
    def time(self) -> float:
        """The out-of-place seconds, or those in place where only these were measured."""
        return self.seconds if self.seconds is not None else self.in_place_seconds or 0.0


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """One run of nccl-tests.

    Parameters
    ----------
    operation
        Name of the collective, one of the values of `OPERATIONS`.
    ranks, nodes, devices_per_node
        Devices that take part, distinct hosts, and devices on the host with the most.
    accelerator
        The name that the driver prints; empty where the list of devices is missing.
    library
        Name and version of the library, such as ``NCCL 2.21.5``; empty where not stated.
    algorithm, protocol
        ``NCCL_ALGO`` and ``NCCL_PROTO`` where the text sets them; else empty.
    network
        What the text tells about the network between nodes, in words; empty for nothing.
    stated
        Fields of `STATED_FIELDS` that comment lines state.
    settings
        All variables of the library that the text sets.
    line
        Line of the text at which the run's table begins, counted from 1.
    assumptions
        What the reader had to assume.
    """

    operation: str
    ranks: int
    nodes: int
    devices_per_node: int
    accelerator: str
    messages: tuple[Message, ...]
    library: str = ""
    algorithm: str = ""
    protocol: str = ""
    network: str = ""
    stated: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    line: int = 1
    assumptions: tuple[str, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What was read of a run so far."""

    line: int = 0
    program: str = ""
    command: str = ""
    threads: int = 1
    devices_per_thread: int = 1
    devices: list[tuple[int, str, str]] = field(default_factory=list)
    library: str = ""
    networks: list[str] = field(default_factory=list)
    stated: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)
    wrong: int = 0
    redop: str = ""


def looks_like_nccl_tests(text: str) -> bool:
    """Return whether a text is output of nccl-tests: a line of settings, of a device, or the head of a table.

    >>> looks_like_nccl_tests("# nThread 1 nGpus 8 minBytes 8"), looks_like_nccl_tests('{"collective": 1}')
    (True, False)
    """
    return bool(_SETTINGS.search(text) or _RANK.search(text) or re.search(r"#\s+size\s+count\b", text))


def read_nccl_tests(text: str) -> tuple[tuple[CollectiveRun, ...], tuple[Skipped, ...]]:
    """Return the runs of a text in order, and the parts that are skipped with line and reason.

    >>> text = '''# nThread 1 nGpus 2 minBytes 8
    ... #  Rank  0 Group  0 Pid  7 on alpha device  0 [0x1b] NVIDIA H100 80GB HBM3
    ... #  Rank  1 Group  0 Pid  7 on alpha device  1 [0x43] NVIDIA H100 80GB HBM3
    ... # Collective test starting: all_gather_perf
    ... #  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
    ...    1048576  131072  float  none  -1  25.0  41.9  21.0  0  18.0  58.2  29.1  N/A'''
    >>> (run,), skipped = read_nccl_tests(text)
    >>> run.operation, run.ranks, run.nodes, round(1e6 * run.messages[0].time), skipped
    ('all_gather', 2, 1, 25, ())
    """
    runs: list[CollectiveRun] = []
    skipped: list[Skipped] = []
    draft = _Draft()
    for number, raw_line in enumerate(text.splitlines(), start=1):
        if number > _MAX_LINES:
            skipped.append(Skipped(number, f"at most {_MAX_LINES} lines are read"))
            break
        line = _strip_tags(raw_line[:_MAX_LINE])
        if draft.messages and _begins_run(line):
            _finish(draft, runs, skipped)
            draft = _following(draft)
        _read_line(draft, line, number, skipped)
        if len(runs) >= _MAX_RUNS:
            skipped.append(Skipped(number, f"at most {_MAX_RUNS} runs are read"))
            return tuple(runs), tuple(skipped)
    _finish(draft, runs, skipped)
    if not runs and not skipped:
        skipped.append(Skipped(1, "output of nccl-tests has a table of size, count, type and time, met none"))
    return tuple(runs), tuple(skipped)


def _strip_tags(line: str) -> str:
    line = _TAG.sub("", line, count=1)
    return line if "Rank" in line or "NCCL INFO" in line else _RANK_TAG.sub(" ", line)


def _begins_run(line: str) -> bool:
    """Return whether a line belongs to what nccl-tests print, or a shell shows, before a table."""
    is_command = "_perf" in line and "concluded" not in line
    return bool(_SETTINGS.search(line) or _STARTS.search(line) or is_command or re.search(r"#\s+size\s+count\b", line))


def _following(draft: _Draft) -> _Draft:
    """Return the draft of a run after another in the same text: fields that comments state hold for all that follow."""
    return _Draft(stated=dict(draft.stated))


def _read_line(draft: _Draft, line: str, number: int, skipped: list[Skipped]) -> None:
    if match := _RANK.search(line):
        if len(draft.devices) < _MAX_RANKS:
            draft.devices.append((int(match[1]), match[2][:200], match[4][:80]))
        return
    if match := _SETTINGS.search(line):
        draft.threads, draft.devices_per_thread = (min(int(value[:6]), _MAX_RANKS) for value in match.groups())
        return
    if match := _STATED.match(line.strip()):
        draft.stated[match[1]] = match[2].strip()
        return
    if match := _PROGRAM.search(line):
        draft.program = match[1]
        if "starting" not in line:
            draft.command = line
    elif draft.command.rstrip().endswith("\\") or re.search(r"\b(mpirun|mpiexec|srun)\b", line):
        draft.command = f"{draft.command.rstrip(chr(92) + ' ')} {line.strip()}"[:_MAX_LINE]
    for name, value in _ENVIRONMENT.findall(line):
        draft.settings[name] = value.strip("'\"")[:100]
    _read_words(draft, line)
    if re.search(r"^\W*size\s+count\b", line):
        draft.columns = line.replace("#wrong", "wrong").strip(" #\t").split()
        draft.line = draft.line or number
    elif re.match(r"\s*\d+\s+\d+\s+[a-z]", line):
        reason = _read_row(draft, line.split(), number)
        if reason:
            skipped.append(Skipped(number, reason))


def _read_words(draft: _Draft, line: str) -> None:
    if match := _VERSION.search(line):
        draft.library = f"{match[1]} {match[2]}"
    elif (match := _HEADERS_VERSION.search(line)) and not draft.library:
        draft.library = f"NCCL {match[1]}.{int(match[2])}.{int(match[3])}"
    for pattern, words in _TABLE:
        if words not in draft.networks and pattern.search(line):
            draft.networks.append(words)


def _read_row(draft: _Draft, cells: Sequence[str], number: int) -> str:
    """Read one line of a table into the draft; return why it is skipped, or nothing."""
    if not _TYPE.fullmatch(cells[2]):
        return ""
    columns = draft.columns or _guess_columns(cells)
    table: dict[str, list[str]] = {}
    for name, cell in zip(columns, cells, strict=False):
        table.setdefault(name, []).append(cell)
    seconds, in_place = (_parse_seconds(table.get("time", []), index) for index in (0, 1))
    size = float(cells[0][:20])
    if size == 0:
        return ""
    if seconds is None and in_place is None:
        return f"a line of a table has a time in us, met {' '.join(cells)[:60]!r}"
    draft.line = draft.line or number
    draft.redop = table.get("redop", [""])[0]
    draft.wrong += sum(cell.isascii() and cell.isdigit() and int(cell[:9]) > 0 for cell in table.get("wrong", []))
    rates = [_parse_number(table.get(name, [""])[0]) for name in ("algbw", "busbw")]
    if rates[0] and rates[1] is not None:
        draft.ratios.append((rates[0], rates[1] / rates[0]))
    if len(draft.messages) < _MAX_LINES:
        draft.messages.append(Message(size, seconds, in_place))
    return ""


def _guess_columns(cells: Sequence[str]) -> list[str]:
    """Return the columns of a table without head, by how many cells stand before the first time."""
    words = [name for name, is_there in (("redop", not _is_number(cells[3])),) if is_there] if len(cells) > 3 else []
    if words and len(cells) > 4 and re.fullmatch(r"-?\d+", cells[4]):
        words.append("root")
    return ["size", "count", "type", *words, *("time", "algbw", "busbw", "wrong") * 2]


def _is_number(cell: str) -> bool:
    return _parse_number(cell) is not None


def _parse_number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?(e[-+]?[0-9]{1,3})?", cell) else None


def _parse_seconds(cells: Sequence[str], index: int) -> float | None:
    microseconds = _parse_number(cells[index]) if len(cells) > index else None
    return microseconds * 1e-6 if microseconds and MIN_SECONDS <= microseconds * 1e-6 <= MAX_SECONDS else None


def _finish(draft: _Draft, runs: list[CollectiveRun], skipped: list[Skipped]) -> None:
    """Append the run of a draft, or the reason why it is none."""
    if not draft.messages:
        if draft.devices or (draft.program and draft.columns):
            skipped.append(Skipped(draft.line or 1, "a run has lines of size, count, type and time, met none"))
        return
    assumptions: list[str] = []
    try:
        runs.append(_build_run(draft, assumptions))
    except ValueError as reason:
        skipped.append(Skipped(draft.line, str(reason)))


def _build_run(draft: _Draft, assumptions: list[str]) -> CollectiveRun:
    ranks, nodes, per_node = _count_devices(draft, assumptions)
    operation = _find_operation(draft, ranks, assumptions)
    names = list(dict.fromkeys(name for _, _, name in draft.devices))
    if len(names) > 1:
        assumptions.append(f"devices of several kinds, all taken as {names[0]}: {', '.join(names[:4])}")
    if draft.wrong:
        assumptions.append(f"{draft.wrong} messages had wrong results")
    settings = draft.settings
    return CollectiveRun(
        operation=operation,
        ranks=ranks,
        nodes=nodes,
        devices_per_node=per_node,
        accelerator=draft.stated.get("accelerator", names[0] if names else ""),
        messages=tuple(draft.messages),
        library=draft.library,
        algorithm=settings.get("NCCL_ALGO", ""),
        protocol=settings.get("NCCL_PROTO", ""),
        network=" ".join(draft.networks[:1]) if nodes > 1 else "",
        stated=tuple(draft.stated.items()),
        settings=tuple(settings.items()),
        line=draft.line,
        assumptions=tuple(assumptions),
    )


def _count_devices(draft: _Draft, assumptions: list[str]) -> tuple[int, int, int]:
    """Return ranks, nodes and devices a node: from the list of devices, else from the command, else from bandwidths."""
    listed = len(draft.devices)
    numbers = [rank for rank, _, _ in draft.devices]
    if len(set(numbers)) < listed:
        rank, times = Counter(numbers).most_common(1)[0]
        raise ValueError(
            f"ranks are listed once each, met rank {rank} {times} times: built without MPI, "
            "every process measured alone"
        )
    hosts = [len(list(group)) for _, group in groupby(sorted(host for _, host, _ in draft.devices))]
    processes = _PROCESSES.search(draft.command)
    started = int(processes[1][:6]) * draft.threads * draft.devices_per_thread if processes else 0
    if listed and (started <= listed or (max(numbers) + 1 == listed and not started > listed)):
        return listed, len(hosts), max(hosts)
    per_node_match = _PER_NODE.search(draft.command)
    per_node = int(per_node_match[1][:6]) * draft.threads * draft.devices_per_thread if per_node_match else 0
    ranks = started or _infer_ranks(draft.ratios) or draft.threads * draft.devices_per_thread
    per_node = per_node or (max(hosts) if hosts else min(ranks, 8))
    if ranks < 2 and not started and not listed:
        raise ValueError("a run lists its devices, or its command their number, met neither")
    nodes = max(1, -(-ranks // per_node))
    assumptions.append(f"{ranks} ranks on {nodes} nodes, for the list of devices has {listed}")
    return min(ranks, _MAX_RANKS), nodes, min(per_node, ranks)


def _infer_ranks(ratios: Sequence[tuple[float, float]]) -> int:
    """Return the ranks of an all-reduce from bus over algorithm bandwidth, 2 (n - 1) / n, at the fastest message.

    >>> _infer_ranks([(371.23, 1.875), (0.01, 0.0)])
    16
    """
    best = max(ratios, default=(0.0, 0.0))
    return round(2 / (2 - best[1])) if best[0] >= 10 and 1.2 < best[1] < 1.99 else 0


def _find_operation(draft: _Draft, ranks: int, assumptions: list[str]) -> str:
    if draft.program:
        if draft.program not in OPERATIONS:
            raise ValueError(f"{draft.program[:40]}_perf is not modelled; modelled are {', '.join(OPERATIONS)}")
        return OPERATIONS[draft.program]
    _, ratio = max(draft.ratios, default=(0.0, 0.0))
    expected = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks, "broadcast": 1.0}
    if draft.redop == "none":
        expected = {"all_gather": (ranks - 1) / ranks, "broadcast": 1.0}
    name = min(expected, key=lambda operation: abs(expected[operation] - ratio))
    assumptions.append(f"{name}, for bus bandwidths are {ratio:.2f} of algorithm bandwidths (no program named)")
    return name
