"""Traces as torch.profiler (Kineto) writes them, a file a rank: what Holistic Trace Analysis loads.

It asks of a file for ``distributedInfo.rank``, of an event for ``cat``, ``dur`` and, of kernels, ``args.stream`` and
``args.correlation``, which a launch on the host has too; kernels are communication where their name begins as NCCL's
do, and memory where it begins with ``Memcpy`` (github.com/facebookresearch/HolisticTraceAnalysis,
``hta/common/trace_file.py``, ``hta/common/trace.py``, ``hta/utils/utils.py``). The simulator does not know when
hosts launch kernels: each launch stands at the whole microsecond before its kernel.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reports.traces.processes import Process, Row, rows, span_name, spans_by_class
from simulator.collective_kinds import Collective
from simulator.program import StreamKind, TaskKind
from simulator.timeline import Span, Timeline
from simulator.whole_file import whole_file

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
"""What NCCL's kernels are called."""
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
    """Return about how many bytes `write_kineto` will write: spans counted, their length from a sample."""
    spans = timeline.spans
    sample = [spans[index] for index in range(0, len(spans), max(len(spans) // _SAMPLES, 1))]
    each = len(_text(_events(timeline, sample))) / max(len(sample), 1)
    counted = [len(found) for found in spans_by_class(timeline)]
    return round(sum(400 + each * counted[process.rank_class] for process in chosen))


def collective_of(span: Span) -> Collective:
    """Return what a span of communication runs: the first word after what it belongs to.

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
    """Yield the step, then of every span its kernel and what launched it; what hosts do is theirs alone."""
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
