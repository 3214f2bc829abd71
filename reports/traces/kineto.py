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

from meshwise.reports.traces.processes import (
    PROCESS,
    Process,
    Row,
    arrange_rows,
    encode_events,
    estimate_bytes,
    group_spans,
    span_name,
)
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


def write_kineto(timeline: Timeline, folder: Path, selection: Sequence[Process]) -> None:
    """Write ``rank.N.json`` for every process: a step on the host, and kernels with their launches.

    Raises
    ------
    OSError
        Where a file cannot be written.
    """
    spans, ranks = group_spans(timeline), sum(len(members.ranks) for members in timeline.rank_classes)
    texts: dict[int, str] = {}
    for process in sorted(selection, key=lambda process: process.rank_class):
        if process.rank_class not in texts:
            texts = {process.rank_class: encode_events(_trace_events(timeline, spans[process.rank_class]))}
        text = texts[process.rank_class].replace(PROCESS, str(process.rank))
        head = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": process.rank, "world_size": ranks},
            "displayTimeUnit": "ms",
            "traceName": f"{timeline.source} step of {process.name}",
        }
        path = folder / f"rank.{process.rank}.json"
        with whole_file(path) as draft:
            draft.write_text(json.dumps(head)[:-1] + ', "traceEvents": [\n' + text + "\n]}\n", "utf-8", newline="\n")


def estimate_size(timeline: Timeline, selection: Sequence[Process]) -> int:
    """Return the approximate bytes of `write_kineto`."""
    return round(estimate_bytes(timeline, selection, lambda spans: encode_events(_trace_events(timeline, spans)), 400))


def parse_collective(span: Span) -> Collective:
    """Return the collective of a span of communication: the first word after the prefix of its operators.

    >>> text = "layers.0: all_reduce output"
    >>> parse_collective(Span(0, StreamKind.TENSOR, TaskKind.TENSOR_COMMUNICATION, 0, 0, text, 0, 1)).value
    'all_reduce'
    """
    words = span.operators.rpartition(": ")[2].split()
    return Collective(words[0]) if words and words[0] in set(Collective) else Collective.SEND


def _trace_events(timeline: Timeline, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Yield the step, then the kernel of every span and its launch; spans of hosts become host events only."""
    step = {"cat": ANNOTATION, "name": f"{STEP}0", "tid": _HOST, "ts": 0.0, "dur": timeline.length * 1e6}
    yield {"pid": 0, "ph": "X", **step, "args": {}}
    for correlation, row in enumerate(arrange_rows(spans), 1):
        start, length = row.start / 1000, (row.end - row.start) / 1000
        base_fields = {"pid": 0, "ph": "X"}
        if row.span.kind is TaskKind.LAUNCH or row.span.stream is StreamKind.HOST:
            tid = _HOST + 1 + row.lane
            yield {**base_fields, "cat": "cpu_op", "name": span_name(row.span), "tid": tid, "ts": start, "dur": length}
            continue
        launch = {"cat": LAUNCHES, "name": "cudaLaunchKernel", "tid": _HOST, "ts": row.start // 1000, "dur": 0}
        yield {**base_fields, **launch, "args": {"correlation": correlation}}
        yield {**base_fields, **_kernel_event(row, correlation), "ts": start, "dur": length}


def _kernel_event(row: Row, correlation: int) -> dict[str, Any]:
    span = row.span
    stream = _FIRST_STREAM + list(StreamKind).index(span.stream) * _LANES + row.lane
    name, extra = span_name(span), {}
    if span.kind is TaskKind.HOST_COPY:
        to_host = span.stream is StreamKind.TO_HOST
        name = f"Memcpy {'DtoH (Device -> Pinned)' if to_host else 'HtoD (Pinned -> Device)'} {span.operators}"
    elif span.kind.communicates:
        collective = parse_collective(span)
        name, extra = f"{NCCL}{KERNELS[collective]} {name}", {"Collective name": collective.value}
    arguments = {"stream": stream, "correlation": correlation, "device": 0, **extra}
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
_REQUIREMENT = "a Kineto trace as torch.profiler exports it"


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
        document = _read_document(path)
        rank = _read_rank(path, document)
        if rank in ranks:
            raise ValueError(f"{path}: distributedInfo.rank: every rank once, met {rank} again")
        ranks[rank] = _read_step(path, document["traceEvents"])
    classes = tuple(RankClass(f"rank {rank}", (), (rank,)) for rank in sorted(ranks))
    spans = [span._replace(rank_class=index) for index, rank in enumerate(sorted(ranks)) for span in ranks[rank][1]]
    spans.sort(key=lambda span: (span.start, span.end, span.rank_class))
    return Timeline("measured", classes, tuple(spans), (), max(length for length, _ in ranks.values()), "nccl")


def name_by_collective(timeline: Timeline) -> Timeline:
    """Return a timeline with the names of `read_kineto`: computation, copies, and communication by collective."""
    spans = [_rename_span(span) for span in timeline.spans if span.kind is not TaskKind.LAUNCH]
    return replace(timeline, spans=tuple(span for span in spans if span.stream is not StreamKind.HOST))


def name_operation(span: Span) -> tuple[str, str]:
    """Return kind and operation of a span, predicted or measured."""
    if span.kind.computes:
        return "compute", "compute"
    if span.kind is TaskKind.HOST_COPY:
        return str(span.kind), "host copy"
    return "communication", span.operators


def select_ranks(timeline: Timeline, ranks: Iterable[int]) -> Timeline:
    """Return a timeline restricted to some of its ranks.

    Raises
    ------
    ValueError
        Where it lacks one of them.
    """
    selection = set(ranks)
    selected_ranks = [tuple(rank for rank in members.ranks if rank in selection) for members in timeline.rank_classes]
    if missing := selection - {rank for members in selected_ranks for rank in members}:
        total = sum(len(members.ranks) for members in timeline.rank_classes)
        raise ValueError(f"a trace is of a rank from 0 to {total - 1}, met rank {min(missing)}")
    numbers = {
        old_index: new_index
        for new_index, old_index in enumerate(index for index, members in enumerate(selected_ranks) if members)
    }
    classes = tuple(timeline.rank_classes[old_index]._replace(ranks=selected_ranks[old_index]) for old_index in numbers)
    spans = tuple(
        span._replace(rank_class=numbers[span.rank_class]) for span in timeline.spans if span.rank_class in numbers
    )
    return replace(timeline, rank_classes=classes, spans=spans, memory=(), hosts=(), host_memory=())


def _rename_span(span: Span) -> Span:
    if not span.kind.communicates:
        return span
    collective = parse_collective(span)
    is_transfer = collective in _TRANSFERS
    name = SEND_AND_RECEIVE if is_transfer else "all_reduce" if collective is Collective.PUSH_PULL else collective.value
    kind = TaskKind.PIPELINE_COMMUNICATION if is_transfer else TaskKind.DATA_COMMUNICATION
    return span._replace(kind=kind, operators=name)


def _read_document(path: Path) -> dict[str, Any]:
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
        raise ValueError(f"{path}: {_REQUIREMENT}, met no JSON: {str(error)[:80]}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path}: {_REQUIREMENT}, met no list traceEvents")
    return document


def _read_rank(path: Path, document: dict[str, Any]) -> int:
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if type(rank) is not int or rank < 0:
        raise ValueError(f"{path}: distributedInfo.rank: the number of a rank, met {str(rank)[:40]}")
    return rank


def _read_step(path: Path, events: list[Any]) -> tuple[float, list[Span]]:
    """Return the length of a step in s and its kernels, of rank class 0."""
    steps, kernels = [], []
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            raise ValueError(f"{path}: traceEvents[{index}]: an object, met {type(event).__name__}")
        category, name = event.get("cat"), event.get("name")
        if event.get("ph") != "X" or not isinstance(name, str):
            continue
        if category == "user_annotation" and name.startswith(STEP):
            steps.append(_read_times(path, index, event))
        elif category == "kernel" or category in _COPIES:
            kernels.append((*_read_times(path, index, event), *_classify_kernel(name, str(category))))
    if not steps or not kernels:
        raise ValueError(f"{path}: {_REQUIREMENT} of GPUs: {STEP}N and kernels, met {len(steps)} and {len(kernels)}")
    begin, end = sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]
    spans = []
    for start, kernel_end, stream, kind, operators in kernels:
        if (start < end and kernel_end > begin) or begin <= start == kernel_end < end:
            interval = max(start - begin, 0.0), min(kernel_end, end) - begin
            spans.append(Span(0, stream, kind, -1, -1, operators, *interval))
    return end - begin, spans


def _read_times(path: Path, index: int, event: dict[str, Any]) -> tuple[float, float]:
    """Return start and end in s; Kineto counts microseconds."""
    microseconds = []
    for name in ("ts", "dur"):
        value = event.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise ValueError(f"{path}: traceEvents[{index}].{name}: microseconds from 0 on, met {str(value)[:40]}")
        microseconds.append(float(value))
    return microseconds[0] / 1e6, (microseconds[0] + microseconds[1]) / 1e6


def _classify_kernel(name: str, category: str) -> tuple[StreamKind, TaskKind, str]:
    if category in _COPIES and not ("DtoD" in name or category == "gpu_memset"):
        return StreamKind.TO_HOST if "DtoH" in name else StreamKind.FROM_HOST, TaskKind.HOST_COPY, "copy"
    match = _NCCL.match(name)
    if match is None:
        return StreamKind.COMPUTE, TaskKind.FORWARD, name
    collective = _COLLECTIVES.get(match[1], match[1])
    if collective == SEND_AND_RECEIVE:
        return StreamKind.SEND_FORWARD, TaskKind.PIPELINE_COMMUNICATION, collective
    return StreamKind.DATA, TaskKind.DATA_COMMUNICATION, collective
