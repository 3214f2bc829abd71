"""Programs of a step whose microbatches differ: each task as it is in the program of its microbatch's own load.

Programs of one plan at several levels of load have the same tasks on the same streams; only what a task takes and
moves depends on the level. A step in which levels differ takes each task from the program of its level. A task of
several data ranks, as an exchange of tokens between experts, is that of the largest level among them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from meshwise.simulator.engine import step_time
from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.steady_state import find_window
from meshwise.simulator.engine.step_graph import StepGraph, compile_program, solo_durations
from meshwise.simulator.program import IntArray, Program
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

    def time_step(self, levels: IntArray, engine: str) -> float:
        """Return the seconds of a step whose microbatches have some levels, by an engine by name.

        ``levels`` has a row for each data rank, or one row for all, and a column for each microbatch.
        """
        if levels.min() == levels.max():
            return step_time(self.programs[int(levels.max())], engine)
        task_levels = self._place_levels(levels)
        if engine != "longest_path":
            return step_time(self.mix(task_levels), engine)
        durations = self._durations[task_levels, np.arange(self._last.num_tasks)]
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

    def _place_levels(self, levels: IntArray) -> IntArray:
        """Return the level of every task; tasks of no microbatch have the largest of all."""
        ranks, microbatches = self._cells
        values = np.where(microbatches < 0, levels.max(), levels[ranks, microbatches])
        result: IntArray = np.maximum.reduceat(values, self._last.stream_start[:-1])
        return result

    def mix(self, task_levels: IntArray) -> Program:
        """Return the program in which each task is as in the program of its level."""
        tasks = np.arange(self._last.num_tasks)
        work_starts, flow_starts = (
            np.array([0, *accumulate(len(getattr(program, name)) for program in self.programs)])
            for name in ("work", "flows")
        )
        work_of, flow_of = (
            np.stack([getattr(program, name) for program in self.programs])[task_levels, tasks]
            for name in ("work_of", "flow_of")
        )
        return replace(
            self._last,
            work=tuple(work for program in self.programs for work in program.work),
            flows=tuple(flow for program in self.programs for flow in program.flows),
            work_of=work_starts[task_levels] + work_of,
            flow_of=np.where(flow_of < 0, -1, flow_starts[task_levels] + flow_of),
        )
