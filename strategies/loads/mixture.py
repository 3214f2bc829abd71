"""Programs of a step whose microbatches differ: each task as it is in the program of its microbatch's own load.

Programs of one plan at several levels of load have the same tasks on the same streams; only what a task takes and
moves depends on the level. A step in which loads differ takes each task from the program of its level; between two
levels ticks and bytes are interpolated. A task of several data ranks, as an exchange of tokens between experts, is that
of the largest load among them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil, floor

import numpy as np

from meshwise.simulator.engine import step_time
from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.steady_state import find_window
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, solo_durations
from meshwise.simulator.program import Flow, IntArray, Program, Work
from meshwise.strategies.loads.lengths import FloatArray
from meshwise.strategies.plan.mesh import Mesh, list_data_ranks

_COLUMNS = ("microbatch_of", "stream_start", "stream_of", "predecessor_start", "predecessor_of")
"""Columns of a program that do not depend on the load."""


class Mixture:
    """The programs of one plan's step at several levels, the least load first, and the steps that they make up.

    Parameters
    ----------
    mesh
        The plan's mesh, where programs have data ranks apart; None where all data ranks have the same load.

    Raises
    ------
    ValueError
        Where the programs do not have the same tasks.
    """

    def __init__(self, programs: Sequence[Program], mesh: Mesh | None) -> None:
        last = programs[-1]
        for program in programs[:-1]:
            is_alike = all(np.array_equal(getattr(program, name), getattr(last, name)) for name in _COLUMNS)
            if not is_alike or (program.streams, program.links) != (last.streams, last.links):
                raise ValueError("passes of some length are cut into other tasks than those of another")
        self.programs, self._last = programs, last
        # the row of a matrix of levels of every rank class
        representatives = [members.representative for members in last.rank_classes]
        self._class_ranks = np.zeros(len(representatives), np.int64)
        if mesh is not None:
            self._class_ranks = list_data_ranks(mesh)[representatives]

    def time_step(self, loads: FloatArray, engine: str) -> float:
        """Return the seconds of a step whose microbatches have some loads, by an engine by name.

        ``loads`` has a row for each data rank, or one row for all, and a column for each microbatch: the index of a
        level, or a number between those of two.
        """
        largest = float(loads.max())
        if loads.min() == largest and largest.is_integer():
            return step_time(self.programs[int(largest)], engine)
        task_loads = self._place_loads(loads)
        if engine != "longest_path":
            return step_time(self.mix(task_loads), engine)
        lower, upper, share = _split_loads(task_loads)
        tasks = np.arange(self._last.num_tasks)
        durations = _interpolate(self._durations[lower, tasks], self._durations[upper, tasks], share)
        return find_window(self._last, walk_graph(replace(self._graph, durations=durations)).ends).step_time

    @cached_property
    def _graph(self) -> StepGraph:
        return compile_program(self._last)

    @cached_property
    def _durations(self) -> IntArray:
        """Ticks of every task at every level, shape [levels, tasks]."""
        return np.stack([solo_durations(program) for program in self.programs])

    @cached_property
    def _cells(self) -> tuple[IntArray, IntArray]:
        """The data rank and the microbatch of every stream of every task; microbatch -1 for none."""
        stream_classes = np.array([stream.rank_class for stream in self._last.streams], dtype=np.int64)
        microbatches = np.repeat(self._last.microbatch_of, np.diff(self._last.stream_start))
        return self._class_ranks[stream_classes[self._last.stream_of]], microbatches

    def _place_loads(self, loads: FloatArray) -> FloatArray:
        """Return the load of every task; tasks of no microbatch have the largest of all."""
        ranks, microbatches = self._cells
        values = np.where(microbatches < 0, loads.max(), loads[ranks, microbatches])
        result: FloatArray = np.maximum.reduceat(values, self._last.stream_start[:-1])
        return result

    def mix(self, task_loads: FloatArray) -> Program:
        """Return the program in which each task takes the ticks of its load; their pieces are those of a level."""
        tasks = np.arange(self._last.num_tasks)
        lower, upper, _ = _split_loads(task_loads)
        columns = [
            np.stack([getattr(program, name) for program in self.programs])[levels, tasks]
            for name in ("work_of", "flow_of")
            for levels in (lower, upper)
        ]
        loads, load_of = np.unique(task_loads, return_inverse=True)
        rows, row_of = np.unique(np.stack([load_of, *columns]), axis=1, return_inverse=True)
        works, flows, flow_of = [], list[Flow](), []
        for load, *indices in zip(loads[rows[0]].tolist(), *rows[1:].tolist(), strict=True):
            pair, share = [self.programs[floor(load)], self.programs[ceil(load)]], load - floor(load)
            first_work, second_work = (program.work[index] for program, index in zip(pair, indices[:2], strict=True))
            works.append(_mix_works(first_work, second_work, share))
            flow_of.append(len(flows) if min(indices[2:]) >= 0 else -1)
            if min(indices[2:]) >= 0:
                first_flow, second_flow = (
                    program.flows[index] for program, index in zip(pair, indices[2:], strict=True)
                )
                flows.append(_mix_flows(first_flow, second_flow, share))
        row_of = row_of.ravel()
        flow_rows = np.array(flow_of, dtype=np.int64)[row_of]
        return replace(self._last, work=tuple(works), flows=tuple(flows), work_of=row_of, flow_of=flow_rows)


def _split_loads(loads: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the levels below and above loads, and the share of the one above."""
    lower = np.floor(loads).astype(np.int64)
    return lower, np.ceil(loads).astype(np.int64), loads - lower


def _interpolate(lower: IntArray, upper: IntArray, share: FloatArray) -> IntArray:
    """Return ticks between those of two levels, in whole ticks.

    >>> _interpolate(np.array([10]), np.array([20]), np.array([0.25])).tolist()
    [12]
    """
    result: IntArray = np.rint(lower + share * (upper - lower)).astype(np.int64)
    return result


def _mix_works(first: Work, second: Work, share: float) -> Work:
    duration = round(first.duration + share * (second.duration - first.duration))
    return first if first is second else Work(first.kind, first.stage, duration, first.pieces)


def _mix_flows(first: Flow, second: Flow, share: float) -> Flow:
    """Return the bytes between those of two levels; those of the nearer one where they take other ways."""
    links = [[link for link, _ in flow.usage] for flow in (first, second)]
    if links[0] != links[1]:
        return second if share > 0.5 else first
    pairs = zip(first.usage, second.usage, strict=True)
    usage = tuple((link, size + share * (other_size - size)) for (link, size), (_, other_size) in pairs)
    return Flow(usage, first.unit + share * (second.unit - first.unit))
