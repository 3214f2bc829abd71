"""Traces of torch.profiler (Kineto), one file per rank: written for other tools, and read as a measured timeline.

Written files are those that Holistic Trace Analysis loads. It reads ``distributedInfo.rank`` of a file, ``cat`` and
``dur`` of an event and, of a kernel, ``args.stream`` and ``args.correlation``, which its launch on the host has too. A
kernel counts as communication where its name begins as NCCL's do, and as memory where it begins with ``Memcpy``
(github.com/facebookresearch/HolisticTraceAnalysis, ``hta/common/trace_file.py``, ``hta/common/trace.py``,
``hta/utils/utils.py``). The simulator does not know when hosts launch kernels: each launch is written at the whole
microsecond before its kernel.

A measured kernel does not tell its stage, microbatch or mesh axis. Comparable are the time in which a rank computes,
and the time in which it only communicates, by collective: see `name_by_collective`. A kernel of NCCL lasts from its
launch on a rank, so that it includes waiting for other ranks.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwise.reports.traces.processes import Process, Row, rows, span_name, spans_by_class
from meshwise.simulator.collective import Collective
from meshwise.simulator.files import whole_file
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

STEP = "ProfilerStep#"
KERNEL, MEMCPY, LAUNCHES, ANNOTATION = "kernel", "gpu_memcpy", "cuda_runtime", "user_annotation"
NCCL = "ncclDevKernel_"
KERNELS = {
    Collective.ALL_REDUCE: "AllReduce",
    Collective.PUSH_PULL: "AllReduce",
    Collective.ALL_GATHER: "AllGather",
    Collective.REDUCE_SCATTER: "ReduceScatter",
    Collective.BROADCAST: "Broadcast",
    Collective.ALL_TO_ALL: "SendRecv",
    Collective.SEND: "SendRecv",
    Collective.SHIFT: "SendRecv",
}
"""Names of NCCL's kernels."""
_FIRST_STREAM = 7  # torch's own number of the default stream in traces
_HOST, _LANES = 1_000_000, 100
_RANK = "\x00"  # stands for the rank in the text of events: JSON has no such character
_SAMPLES = 500


def write_kineto(timeline: Timeline, folder: Path, chosen: Sequence[Process]) -> None:
    """Write ``rank.N.json`` for every process: a step on the host, and kernels with their launches.

    Raises
    ------
    OSError
        Where a file cannot be written.
    """
    spans, ranks = spans_by_class(timeline), sum(len(members.ranks) for members in timeline.rank_classes)
    texts: dict[int, str] = {}
    for process in sorted(chosen, key=lambda process: process.rank_class):
        if process.rank_class not in texts:
            texts = {process.rank_class: _text(_events(timeline, spans[process.rank_class]))}
        text = texts[process.rank_class].replace(_RANK, str(process.rank))
        head = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": process.rank, "world_size": ranks},
            "displayTimeUnit": "ms",
            "traceName": f"{timeline.source} step of {process.name}",
        }
        path = folder / f"rank.{process.rank}.json"
        with whole_file(path) as draft:
            draft.write_text(json.dumps(head)[:-1] + ', "traceEvents": [\n' + text + "\n]}\n", "utf-8", newline="\n")


def estimated_size(timeline: Timeline, chosen: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_kineto`: the number of spans times their mean length in a sample."""
    spans = timeline.spans
    sample = [spans[index] for index in range(0, len(spans), max(len(spans) // _SAMPLES, 1))]
    each = len(_text(_events(timeline, sample))) / max(len(sample), 1)
    counted = [len(found) for found in spans_by_class(timeline)]
    return round(sum(400 + each * counted[process.rank_class] for process in chosen))


def collective_of(span: Span) -> Collective:
    """Return the collective of a span of communication: the first word after the prefix of its operators.

    >>> text = "layers.0: all_reduce output"
    >>> collective_of(Span(0, StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 0, 0, text, 0, 1)).value
    'all_reduce'
    """
    words = span.operators.rpartition(": ")[2].split()
    return Collective(words[0]) if words and words[0] in set(Collective) else Collective.SEND


def _text(events: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(
        json.dumps(event, separators=(",", ":")).replace('"pid":0', f'"pid":{_RANK}', 1) for event in events
    )


def _events(timeline: Timeline, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the step, then the kernel of every span and its launch; spans of hosts become host events only."""
    step = {"cat": ANNOTATION, "name": f"{STEP}0", "tid": _HOST, "ts": 0.0, "dur": timeline.length * 1e6}
    yield {"pid": 0, "ph": "X", **step, "args": {}}
    for correlation, row in enumerate(rows(spans), 1):
        start, length = row.start / 1000, (row.end - row.start) / 1000
        place = {"pid": 0, "ph": "X"}
        if row.span.kind is TaskKind.LAUNCH or row.span.stream is StreamKind.HOST:
            tid = _HOST + 1 + row.lane
            yield {**place, "cat": "cpu_op", "name": span_name(row.span), "tid": tid, "ts": start, "dur": length}
            continue
        launch = {"cat": LAUNCHES, "name": "cudaLaunchKernel", "tid": _HOST, "ts": row.start // 1000, "dur": 0}
        yield {**place, **launch, "args": {"correlation": correlation}}
        yield {**place, **_kernel(row, correlation), "ts": start, "dur": length}


def _kernel(row: Row, correlation: int) -> dict[str, Any]:
    span = row.span
    stream = _FIRST_STREAM + list(StreamKind).index(span.stream) * _LANES + row.lane
    name, more = span_name(span), {}
    if span.kind is TaskKind.HOST_COPY:
        to_host = span.stream is StreamKind.TO_HOST
        name = f"Memcpy {'DtoH (Device -> Pinned)' if to_host else 'HtoD (Pinned -> Device)'} {span.operators}"
    elif span.kind.communicates:
        collective = collective_of(span)
        name, more = f"{NCCL}{KERNELS[collective]} {name}", {"Collective name": collective.value}
    arguments = {"stream": stream, "correlation": correlation, "device": 0, **more}
    if span.bytes:
        arguments["bytes"] = span.bytes
    category = MEMCPY if span.kind is TaskKind.HOST_COPY else KERNEL
    return {"cat": category, "name": name, "tid": stream, "args": arguments}


MAX_BYTES = 2**30
"""Bytes of a file, after it is unpacked."""
SEND_AND_RECEIVE = "send and receive"
"""Transfers, shifts and all-to-alls: NCCL runs all of them by one kernel."""
_TRANSFERS = {Collective.SEND, Collective.SHIFT, Collective.ALL_TO_ALL}
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
_COLLECTIVES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": SEND_AND_RECEIVE,
}
_COPIES = ("gpu_memcpy", "gpu_memset")
_HELD = "a Kineto trace as torch.profiler exports it"


def read_kineto(paths: Sequence[Path | str]) -> Timeline:
    """Return one step of the ranks whose traces are in ``paths`` (.json or .json.gz), one rank class per rank.

    Of several steps in a file (``ProfilerStep#N``) the one of median length is read, from its start on the host. Late
    kernels of the previous step fall into it and stand for its own late kernels, as steps repeat.

    Raises
    ------
    ValueError
        Where a file is no such trace, has no step or no kernel, or two are of one rank.
    """
    ranks: dict[int, tuple[float, list[Span]]] = {}
    for path in map(Path, paths):
        document = _document(path)
        rank = _rank(path, document)
        if rank in ranks:
            raise ValueError(f"{path}: distributedInfo.rank: every rank once, met {rank} again")
        ranks[rank] = _step(path, document["traceEvents"])
    classes = tuple(RankClass(f"rank {rank}", (), (rank,)) for rank in sorted(ranks))
    spans = [span._replace(rank_class=index) for index, rank in enumerate(sorted(ranks)) for span in ranks[rank][1]]
    spans.sort(key=lambda span: (span.start, span.end, span.rank_class))
    return Timeline("measured", classes, tuple(spans), (), max(length for length, _ in ranks.values()), "nccl")


def by_collective(timeline: Timeline) -> Timeline:
    """Return a timeline with the names of `read_kineto`: computation, copies, and communication by collective."""
    spans = [_plain(span) for span in timeline.spans if span.kind is not TaskKind.LAUNCH]
    return replace(timeline, spans=tuple(span for span in spans if span.stream is not StreamKind.HOST))


def called(span: Span) -> tuple[str, str]:
    """Return kind and operation of a span, predicted or measured."""
    if span.kind.computes:
        return "compute", "compute"
    if span.kind is TaskKind.HOST_COPY:
        return str(span.kind), "host copy"
    return "communication", span.operators


def among(timeline: Timeline, ranks: Iterable[int]) -> Timeline:
    """Return a timeline restricted to some of its ranks.

    Raises
    ------
    ValueError
        Where it lacks one of them.
    """
    wanted = set(ranks)
    kept = [tuple(rank for rank in members.ranks if rank in wanted) for members in timeline.rank_classes]
    if missing := wanted - {rank for members in kept for rank in members}:
        total = sum(len(members.ranks) for members in timeline.rank_classes)
        raise ValueError(f"a trace is of a rank from 0 to {total - 1}, met rank {min(missing)}")
    numbers = {old: new for new, old in enumerate(index for index, members in enumerate(kept) if members)}
    classes = tuple(timeline.rank_classes[old]._replace(ranks=kept[old]) for old in numbers)
    spans = tuple(s._replace(rank_class=numbers[s.rank_class]) for s in timeline.spans if s.rank_class in numbers)
    return replace(timeline, rank_classes=classes, spans=spans, memory=(), hosts=(), host_memory=())


def _plain(span: Span) -> Span:
    if not span.kind.communicates:
        return span
    collective = collective_of(span)
    transfer = collective in _TRANSFERS
    name = SEND_AND_RECEIVE if transfer else "all_reduce" if collective is Collective.PUSH_PULL else collective.value
    kind = TaskKind.PIPELINE_COMMUNICATION if transfer else TaskKind.DATA_COMMUNICATION
    return span._replace(kind=kind, operators=name)


def _document(path: Path) -> dict[str, Any]:
    try:
        # a larger file is not read at all, and a packed one only up to the limit: a few kB may unpack to gigabytes
        data = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b" " * (MAX_BYTES + 1)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: the file cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path}: a trace has at most {MAX_BYTES} bytes, met more")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {_HELD}, met no JSON: {str(error)[:80]}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path}: {_HELD}, met no list traceEvents")
    return document


def _rank(path: Path, document: dict[str, Any]) -> int:
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if type(rank) is not int or rank < 0:
        raise ValueError(f"{path}: distributedInfo.rank: the number of a rank, met {str(rank)[:40]}")
    return rank


def _step(path: Path, events: list[Any]) -> tuple[float, list[Span]]:
    """Return the length of a step in s and its kernels, of rank class 0."""
    steps, kernels = [], []
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"{path}: traceEvents[{index}]: an object, met {type(event).__name__}")
        category, name = event.get("cat"), event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        if category == "user_annotation" and name.startswith(STEP):
            steps.append(_times(path, index, event))
        elif category == "kernel" or category in _COPIES:
            kernels.append((*_times(path, index, event), *_kind(name, str(category))))
    if not steps or not kernels:
        raise ValueError(f"{path}: {_HELD} of GPUs: {STEP}N and kernels, met {len(steps)} and {len(kernels)}")
    begin, end = sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
    spans = []
    for start, stop, stream, kind, operators in kernels:
        if (start < end and stop > begin) or begin <= start == stop < end:
            where = max(start - begin, 0.0), min(stop, end) - begin
            spans.append(Span(0, stream, kind, -1, -1, operators, *where))
    return end - begin, spans


def _times(path: Path, index: int, event: dict[str, Any]) -> tuple[float, float]:
    """Return start and end in s; Kineto counts microseconds."""
    found = []
    for name in ("ts", "dur"):
        value = event.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise ValueError(f"{path}: traceEvents[{index}].{name}: microseconds from 0 on, met {str(value)[:40]}")
        found.append(float(value))
    return found[0] / 1e6, (found[0] + found[1]) / 1e6


def _kind(name: str, category: str) -> tuple[StreamKind, TaskKind, str]:
    if category in _COPIES and not ("DtoD" in name or category == "gpu_memset"):
        return StreamKind.TO_HOST if "DtoH" in name else StreamKind.FROM_HOST, TaskKind.HOST_COPY, "copy"
    match = _NCCL.match(name)
    if match is None:
        return StreamKind.COMPUTE, TaskKind.FORWARD, name
    collective = _COLLECTIVES.get(match[1], match[1])
    if collective == SEND_AND_RECEIVE:
        return StreamKind.SEND_FORWARD, TaskKind.PIPELINE_COMMUNICATION, collective
    return StreamKind.DATA, TaskKind.DATA_COMMUNICATION, collective
