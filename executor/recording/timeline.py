"""Reads what the ranks measured in a profiled step as one Timeline on one clock, and sums it by kind of task."""

import json
from pathlib import Path
from typing import Any

from meshwise.executor.device import read_memory_size
from meshwise.executor.job import result_file
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.plan.plan import Plan

SpanRow = list[Any]
Key = tuple[bool, int, int, int]


def read_timeline(plan: Plan, folder: Path) -> Timeline:
    """Return the measured timeline of the job in ``folder``: a class for each rank, in seconds from the first start.

    A transfer lasts from when both ends are ready to when the receiver has it. Ranks of one host share its clock; the
    clocks of several hosts are aligned at the barrier before the step, which all ranks leave at the same time.
    """
    ranks = range(plan.mesh.num_ranks)
    results = [json.loads(result_file(folder, rank).read_text()) for rank in ranks]
    _align_clocks(results)
    first_start = min(result["start"] for result in results)
    _match_transfers(plan, results)
    spans = [_build_span(rank, row, first_start) for rank in ranks for row in results[rank]["spans"]]
    return Timeline(
        source="measured",
        rank_classes=tuple(
            RankClass(f"rank {rank}", plan.actions.list_stages(plan.mesh.coordinate(rank, PIPELINE)), (rank,))
            for rank in ranks
        ),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.end, span.rank_class))),
        memory=tuple(_build_profile(rank, len(ranks), results[rank], first_start) for rank in ranks),
        step_time=(max(result["end"] for result in results) - first_start) / 1e9,
        engine=results[0]["engine"],
    )


def _build_span(rank: int, row: SpanRow, first_start: int) -> Span:
    stream, kind, stage, microbatch, name, start, end, size = row
    times = (start - first_start) / 1e9, (end - first_start) / 1e9
    return Span(rank, StreamKind(stream), TaskKind(kind), stage, microbatch, name, *times, size)


def _align_clocks(results: list[dict[str, Any]]) -> None:
    """Convert the times of all ranks, in place, to the clock of rank 0's host: all left the same barrier at once.

    Of each host the rank counts that left the barrier first.
    """
    clock_starts: dict[str, int] = {}
    for result in results:
        clock_starts[result["clock"]] = min(result["start"], clock_starts.get(result["clock"], result["start"]))
    for result in results:
        offset = clock_starts[results[0]["clock"]] - clock_starts[result["clock"]]
        result["start"], result["end"] = result["start"] + offset, result["end"] + offset
        for row in result["spans"]:
            row[5:7] = [row[5] + offset, row[6] + offset]
        for point in result["memory"]:
            point[0] += offset


def _match_transfers(plan: Plan, results: list[dict[str, Any]]) -> None:
    """Cut sends and receives, in place, to the time in which both ends took part in the transfer."""
    sends: dict[Key, SpanRow] = {}
    receives: dict[Key, SpanRow] = {}
    for rank, result in enumerate(results):
        for row in result["spans"]:
            stream, is_forward = row[0], row[0] in (StreamKind.SEND_FORWARD, StreamKind.RECEIVE_FORWARD)
            column = rank - plan.mesh.coordinate(rank, PIPELINE) * plan.mesh.stride(PIPELINE)
            if stream in (StreamKind.SEND_FORWARD, StreamKind.SEND_BACKWARD):
                sends[is_forward, row[2], row[3], column] = row
            elif stream in (StreamKind.RECEIVE_FORWARD, StreamKind.RECEIVE_BACKWARD):
                receives[is_forward, row[2], row[3], column] = row
    for key, receive in receives.items():
        send = sends.get(key)
        if send is None:  # it was sent in the step before, as steps without a flush do
            continue
        start = min(max(send[5], receive[5]), receive[6])
        send[5:7] = receive[5:7] = [start, receive[6]]


def _build_profile(rank: int, ranks: int, result: dict[str, Any], first_start: int) -> MemoryProfile:
    resident = [float(result["resident"].get(category, 0)) for category in CATEGORIES]
    times, usage = [0.0], [tuple(resident)]
    for instant, change in result["memory"]:
        times.append(max((instant - first_start) / 1e9, times[-1]))
        usage.append(tuple(base + growth for base, growth in zip(resident, change, strict=True)))
    capacity = result["capacity"] or read_memory_size() / ranks
    return MemoryProfile(rank, capacity, tuple(times), tuple(usage))


def sum_busy_times(timeline: Timeline) -> dict[TaskKind, float]:
    """Return the seconds of a step that each kind of task runs, on average over ranks; absent kinds never run."""
    total = sum(len(rank_class.ranks) for rank_class in timeline.rank_classes) * timeline.steps
    times = {}
    for kind in TaskKind:
        busy_times = (
            timeline.busy_time(index, [kind]) * len(rank_class.ranks)
            for index, rank_class in enumerate(timeline.rank_classes)
        )
        if seconds := sum(busy_times) / total:
            times[kind] = seconds
    return times
