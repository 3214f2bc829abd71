"""Programs of a step whose microbatches differ: each task as it is in the program of its microbatch's own load.

Programs of one plan at several levels of load have the same tasks on the same streams; only what a task takes and
moves depends on the level. A step in which levels differ takes each task from the program of its level. A task of
several data ranks, as an exchange of tokens between experts, is that of the largest level among them.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from meshwise.simulator.program import IntArray, Program
from meshwise.strategies.plan.mesh import Mesh, list_data_ranks


class UnlikeTasks(ValueError):
    """Programs of one plan at several levels that do not have the same tasks."""


def list_class_ranks(program: Program, mesh: Mesh) -> IntArray:
    """Return the data rank of the first rank of every rank class, shape [rank classes]."""
    representatives = [members.representative for members in program.rank_classes]
    return list_data_ranks(mesh)[representatives]


def place_levels(program: Program, class_ranks: IntArray, levels: IntArray) -> IntArray:
    """Return the level of every task.

    Parameters
    ----------
    class_ranks
        The row of ``levels`` of every rank class.
    levels
        The level of every microbatch of every data rank, shape [data ranks, microbatches]; a larger one is more work.
        Tasks of no microbatch have the largest of all.
    """
    stream_classes = np.array([stream.rank_class for stream in program.streams], dtype=np.int64)
    rows = class_ranks[stream_classes[program.stream_of]]
    microbatches = np.repeat(program.microbatch_of, np.diff(program.stream_start))
    values = np.where(microbatches < 0, levels.max(), levels[rows, microbatches])
    result: IntArray = np.maximum.reduceat(values, program.stream_start[:-1])
    return result


def mix_programs(programs: Sequence[Program], levels: IntArray) -> Program:
    """Return the program in which each task is as in the program of its level.

    Parameters
    ----------
    levels
        The index of a program for every task.

    Raises
    ------
    UnlikeTasks
        Where the programs do not have the same tasks.
    """
    first = programs[-1]
    for program in programs[:-1]:
        is_alike = program.streams == first.streams and all(
            np.array_equal(getattr(program, name), getattr(first, name))
            for name in ("microbatch_of", "stream_start", "stream_of", "predecessor_start", "predecessor_of")
        )
        if not is_alike or program.links != first.links:
            raise UnlikeTasks("passes of some length are cut into other tasks")
    tasks = np.arange(first.num_tasks)
    work_starts, flow_starts = (
        np.array([0, *accumulate(len(getattr(program, name)) for program in programs)]) for name in ("work", "flows")
    )
    work_of, flow_of = (
        np.stack([getattr(program, name) for program in programs])[levels, tasks] for name in ("work_of", "flow_of")
    )
    return replace(
        first,
        work=tuple(work for program in programs for work in program.work),
        flows=tuple(flow for program in programs for flow in program.flows),
        work_of=work_starts[levels] + work_of,
        flow_of=np.where(flow_of < 0, -1, flow_starts[levels] + flow_of),
    )
