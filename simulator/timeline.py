"""Timelines of a step, simulated or measured: spans on streams, memory over time, bytes on links.

A `Window` is the part of a run that stands for one step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.memory import MemoryProfile, peak_total, program_host_memory, program_memory
from meshwise.simulator.memory import cut_profile as cut_memory
from meshwise.simulator.program import Deferred, HostClass, IntArray, Program, RankClass, TaskKind
from meshwise.simulator.spans import (
    TASK_KINDS,
    Occupancy,
    Span,
    SpanColumns,
    Spans,
    cut_columns,
    program_columns,
    to_columns,
)
from meshwise.simulator.units import TICKS_PER_SECOND, to_seconds

if TYPE_CHECKING:
    import pandas as pd


class Window(NamedTuple):
    """The ticks from ``begin`` to ``end``, which hold ``steps`` whole steps.

    Parameters
    ----------
    repeats
        Whether the run repeats itself after the window, so that all later steps take exactly as long. If not, the
        window holds so many steps that their mean is close to the mean of all.
    """

    begin: int
    end: int
    steps: int = 1
    repeats: bool = True

    @property
    def ticks(self) -> int:
        """Ticks of one step, the mean of ``steps``, rounded down."""
        return (self.end - self.begin) // self.steps

    @property
    def step_time(self) -> float:
        """Seconds of one step, the mean of ``steps``."""
        return (self.end - self.begin) / self.steps / TICKS_PER_SECOND


_OPTIONAL_KINDS = (TaskKind.EXPERT_COMMUNICATION, TaskKind.CONTEXT_COMMUNICATION)


@dataclass(frozen=True)
class LinkUse:
    """Use of each link of a class of ``count`` in one step: its byte/s, its bytes, and the fraction of its capacity."""

    name: str
    count: int
    bandwidth: float
    bytes: float
    utilisation: float


@dataclass(frozen=True)
class Timeline:
    """Spans and memory of one step.

    Parameters
    ----------
    source
        ``"simulated"`` or ``"measured"``.
    rank_classes
        Rank classes to which ``rank_class`` of spans is an index; measured timelines have one rank a class.
    spans
        Spans in order of start.
    memory
        Device memory of every rank class.
    step_time
        Seconds from the start of the step to the end of its last task; in a steady state, from one step to the next.
    engine
        Engine or backend that ran it: ``discrete_event``, ``longest_path``, ``gloo``, ``nccl``.
    links
        Use of every link; empty for a measured timeline.
    hosts, host_memory
        Host classes, and the memory of the step on each.
    steps
        Number of consecutive steps in the spans: in a steady state, the steps of one period.
    begin
        Seconds of training before the first span: above 0 if the spans are cut out of a steady state.
    repeats
        Whether all later steps take as long; if not, the step time is the mean of ``steps``.
    """

    source: str
    rank_classes: tuple[RankClass, ...]
    spans: Sequence[Span]
    memory: Sequence[MemoryProfile]
    step_time: float
    engine: str
    links: Sequence[LinkUse] = ()
    hosts: tuple[HostClass, ...] = ()
    host_memory: Sequence[MemoryProfile] = ()
    steps: int = 1
    begin: float = 0.0
    repeats: bool = True

    __repr__ = brief_repr("source", "engine", "step_time", "steps", "rank_classes")

    @property
    def length(self) -> float:
        """Seconds that the spans show."""
        return self.steps * self.step_time

    @property
    def peak_memory(self) -> float:
        """Largest number of bytes in use on any rank."""
        return peak_total(self.memory)

    @property
    def bottleneck(self) -> LinkUse | None:
        """The link with the highest utilisation; ``None`` if no link carries anything."""
        busiest_link = max(self.links, key=lambda link: link.utilisation, default=None)
        return busiest_link if busiest_link is not None and busiest_link.bytes else None

    @cached_property
    def columns(self) -> SpanColumns:
        """The spans as columns."""
        return to_columns(self.spans)

    def find_span(self, rank_class: int, time: float) -> Span | None:
        """Return the span that a rank class runs at a time in seconds, or ``None``.

        Of several spans it prefers one that computes, and of those the latest to start.
        """
        columns = self.columns
        # Ticks are whole: rounding undoes the error of seconds as floats at the very start of a span.
        moment = round(time * columns.per_second) if columns.per_second > 1 else time
        rows = np.flatnonzero((columns.rank_class == rank_class) & (columns.start <= moment) & (moment < columns.end))
        if not len(rows):
            return None
        computes = np.array([kind.computes for kind in TASK_KINDS])[columns.kind[rows]]
        return columns.select(rows[np.lexsort((columns.start[rows], computes))[-1:]]).to_spans()[0]

    @cached_property
    def _occupancy(self) -> Occupancy:
        return Occupancy(self.columns, len(self.rank_classes))

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        return np.array([len(members.ranks) for members in self.rank_classes], np.int64)

    @cached_property
    def _busy_times(self) -> dict[frozenset[TaskKind], NDArray[np.float64]]:
        return {}

    def _sum_seconds(self, kinds: Iterable[TaskKind]) -> NDArray[np.float64]:
        """Return for every rank class the seconds in which it runs at least one span of ``kinds``."""
        key = frozenset(kinds)
        if key not in self._busy_times:
            # Kept by set of kinds, for each sum passes over all spans.
            is_counted = np.array([kind in key for kind in TASK_KINDS])
            self._busy_times[key] = self._occupancy.seconds(is_counted[self.columns.kind])
        return self._busy_times[key]

    def busy_time(self, rank_class: int, kinds: Iterable[TaskKind] | None = None) -> float:
        """Return the seconds in which ``rank_class`` runs at least one span of ``kinds``; ``None`` for all kinds."""
        return float(self._sum_seconds(TaskKind if kinds is None else kinds)[rank_class])

    @cached_property
    def bubble(self) -> float:
        """Fraction of the step, over all ranks, in which a rank neither computes nor communicates inside its stage."""
        busy_kinds = [kind for kind in TaskKind if kind.computes or kind.inside_passes]
        total = int(self._ranks.sum()) * self.length
        busy_seconds = float(self._sum_seconds(busy_kinds) @ self._ranks)
        return 1 - busy_seconds / total if total else 0.0

    def exposed_communication(self) -> dict[TaskKind, float]:
        """Return, by kind, the seconds of communication per step that no computing hides, as a mean over ranks.

        Expert and context communication, which not every plan has, are listed only if there are any.
        """
        compute_kinds = {kind for kind in TaskKind if kind.computes}
        ranks = max(int(self._ranks.sum()), 1) * self.steps
        result: dict[TaskKind, float] = {}
        for kind in TaskKind:
            if kind.communicates and (kind not in _OPTIONAL_KINDS or self._sum_seconds([kind]).any()):
                exposed_seconds = self._sum_seconds(compute_kinds | {kind}) - self._sum_seconds(compute_kinds)
                result[kind] = float(exposed_seconds @ self._ranks) / ranks
        return result

    def order(self, rank_class: int) -> tuple[tuple[TaskKind, int, int], ...]:
        """Return (kind, stage, microbatch) of the forwards and backwards of a rank, in order of start."""
        columns = self.columns
        passes = [TASK_KINDS.index(kind) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD)]
        rows = np.flatnonzero((columns.rank_class == rank_class) & np.isin(columns.kind, passes))
        rows = rows[np.lexsort((columns.end[rows], columns.start[rows]))]
        actions = np.stack([columns.kind[rows], columns.stage[rows], columns.microbatch[rows]], axis=1)
        # A pass cut into several tasks counts once.
        is_new = np.append(True, np.any(actions[1:] != actions[:-1], axis=1))[: len(rows)]
        return tuple((TASK_KINDS[kind], stage, microbatch) for kind, stage, microbatch in actions[is_new].tolist())

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with a row for every span."""
        import pandas as pd

        return pd.DataFrame(self.columns.to_table())


def build_timeline(
    program: Program, starts: IntArray, ends: IntArray, engine: str, window: Window | None = None
) -> Timeline:
    """Return the timeline of a program whose tasks start and end at these ticks.

    Spans, memory and links are computed at their first use.

    Parameters
    ----------
    window
        The part of the run to show; ``None`` for all of it.
    """
    shown_window = window or Window(0, int(ends.max(initial=0)))
    return Timeline(
        source="simulated",
        rank_classes=program.rank_classes,
        spans=Spans(partial(_build_columns, program, starts, ends, window)),
        memory=Deferred(partial(_build_profiles, program_memory, program, starts, ends, window)),
        step_time=shown_window.step_time,
        engine=engine,
        links=Deferred(partial(_list_link_uses, program, shown_window.step_time)),
        hosts=program.hosts,
        host_memory=Deferred(partial(_build_profiles, program_host_memory, program, starts, ends, window)),
        steps=shown_window.steps,
        begin=to_seconds(shown_window.begin),
        repeats=shown_window.repeats,
    )


def _build_columns(program: Program, starts: IntArray, ends: IntArray, window: Window | None) -> SpanColumns:
    """Return the spans of all pieces, cut at the window."""
    columns = program_columns(program, starts, ends)
    return columns if window is None else cut_columns(columns, window.begin, window.end)


def _build_profiles(
    memory: Callable[[Program, IntArray, IntArray], tuple[MemoryProfile, ...]],
    program: Program,
    starts: IntArray,
    ends: IntArray,
    window: Window | None,
) -> Iterable[MemoryProfile]:
    """Return the memory profiles of a program, cut at the window."""
    profiles = memory(program, starts, ends)
    if window is None:
        return profiles
    return [cut_memory(profile, to_seconds(window.begin), to_seconds(window.end)) for profile in profiles]


def _list_link_uses(program: Program, step_time: float) -> list[LinkUse]:
    """Return the use of every link in one step: by flows, and by transfers inside tasks."""
    link_bytes = np.zeros(len(program.links))
    link_bytes[: len(program.traffic)] = program.traffic
    run_counts = np.bincount(program.flow_of[program.flow_of >= 0], minlength=len(program.flows)).tolist()
    steps = 1 if program.steps is None else len(program.steps.tasks)
    for flow, count in zip(program.flows, run_counts, strict=True):
        for link, size in flow.usage:
            # All steps of a program have the same flows.
            link_bytes[link] += count // steps * size
    return [
        LinkUse(link.name, link.count, link.bandwidth, size, size / (link.bandwidth * step_time) if step_time else 0.0)
        for link, size in zip(program.links, link_bytes.tolist(), strict=True)
    ]
