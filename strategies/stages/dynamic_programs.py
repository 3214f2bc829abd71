"""Published dynamic programs: the layers of every pipeline stage, and an option for every layer of a stage.

The programs that divide layers among stages are each exact for their own formula. All take ``times[stage, n]``, the
time of a microbatch on a stage with ``n`` layers, ``inf`` where that is not allowed. They return the layers of every
stage and the value of the formula; ``None`` where no division is allowed.

`choose_options` chooses an option, such as a recomputation, for every layer of a stage within its memory: Galvatron's
dynamic program over layers and memory [5]_. Galvatron counts memory in megabytes and rounds each layer's up, so that
many layers lose many megabytes; here lists keep all pairs of memory and time that no other pair dominates, which is
exact.

References
----------
.. [1] Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.1
   (bottleneck).
.. [2] Tarnawski et al., "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021 (bottleneck,
   with memory in ``times``).
.. [3] Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning", OSDI 2022,
   section 5.2 (sum and slowest).
.. [4] Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", PPoPP 2021, section 4
   (pivot).
.. [5] Miao et al., "Galvatron: efficient transformer training over multiple GPUs using automatic parallelism", VLDB
   2023, section 3.3.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from math import ceil, isfinite
from typing import NamedTuple

import numpy as np

from meshwise.strategies.stages.division import FloatArray


class Partition(NamedTuple):
    """The layers of every stage, and the time by a formula."""

    counts: tuple[int, ...]
    time: float


def minimize_sum(times: FloatArray, num_layers: int) -> Partition | None:
    """Return the division with the least sum of times over stages."""
    return _divide_layers(times, num_layers, np.add)


def minimize_bottleneck(times: FloatArray, num_layers: int) -> Partition | None:
    """Return the division with the fastest bottleneck: PipeDream's steady state [1]_, and Piper's time per sample [2]_.

    >>> minimize_bottleneck(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3)
    Partition(counts=(2, 1), time=2.0)
    """
    return _divide_layers(times, num_layers, np.maximum)


def _divide_layers(times: FloatArray, num_layers: int, combine: np.ufunc) -> Partition | None:
    """Return the division of least time, where ``combine`` adds a stage's time to that of the stages before it.

    The state of the program is the number of layers that the stages so far have.
    """
    best_times = np.full(num_layers + 1, np.inf)
    best_times[0] = 0.0
    layers_before = np.subtract.outer(np.arange(num_layers + 1), np.arange(times.shape[1]))
    stage_choices = []
    for row in times:
        table = combine(np.where(layers_before >= 0, best_times[layers_before], np.inf), row)
        stage_choices.append(table.argmin(axis=1))
        best_times = table.min(axis=1)
    if not np.isfinite(best_times[num_layers]):
        return None
    counts: list[int] = []
    for choices in reversed(stage_choices):
        counts.append(int(choices[num_layers - sum(counts)]))
    return Partition(tuple(reversed(counts)), float(best_times[num_layers]))


def minimize_sum_and_slowest(times: FloatArray, num_layers: int, num_microbatches: int) -> Partition | None:
    """Return the division that is least by Alpa's formula [3]_: the sum over stages, and the slowest stage again.

    The slowest stage counts ``num_microbatches - 1`` times. As published, the program minimises the sum for every time
    that the slowest stage may take, until that time alone is too much.

    >>> minimize_sum_and_slowest(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3, 10)
    Partition(counts=(2, 1), time=22.0)
    """
    best_partition: Partition | None = None
    for slowest_time in np.unique(times[np.isfinite(times)]):
        if best_partition is not None and (num_microbatches - 1) * slowest_time >= best_partition.time:
            break
        partition = minimize_sum(np.where(times <= slowest_time, times, np.inf), num_layers)
        if partition is None:
            continue
        max_time = max(float(row[n]) for row, n in zip(times, partition.counts, strict=True))
        total_time = partition.time + (num_microbatches - 1) * max_time
        if best_partition is None or total_time < best_partition.time:
            best_partition = Partition(partition.counts, total_time)
    return best_partition


def minimize_pivot(times: FloatArray, num_layers: int, num_microbatches: int) -> Partition | None:
    """Return the division with the least latency by DAPPLE [4]_: that of the pivot, the stage for which it is longest.

    The latency for a pivot is the sum of the stages before it, plus ``num_microbatches`` times its own time. Lists
    keep all pairs of a sum and a latency that no other pair dominates, which is exact.

    >>> minimize_pivot(np.array([[9, 1, 2, 3], [9, 2, 4, 6.0]]), 3, 10)
    Partition(counts=(2, 1), time=22.0)
    """
    states: dict[int, list[_Row]] = {0: [(0.0, 0.0, ())]}
    for row in times:
        next_states: defaultdict[int, list[_Row]] = defaultdict(list)
        for num_used, rows in states.items():
            for n, stage_time in enumerate(row[: num_layers - num_used + 1].tolist()):
                if isfinite(stage_time):
                    next_states[num_used + n] += [
                        (time_sum + stage_time, max(latency, time_sum + num_microbatches * stage_time), (*counts, n))
                        for time_sum, latency, counts in rows
                    ]
        states = {num_used: _drop_dominated(rows) for num_used, rows in next_states.items()}
    if num_layers not in states:
        return None
    _, time, counts = min(states[num_layers], key=lambda row: row[1])
    return Partition(counts, time)


_Row = tuple[float, float, tuple[int, ...]]
"""Two costs, and the choices that have them."""


def _drop_dominated(rows: list[_Row]) -> list[_Row]:
    """Return the rows that no other row beats in both costs, by the first cost."""
    pareto_rows: list[_Row] = []
    for row in sorted(rows):
        if not pareto_rows or row[1] < pareto_rows[-1][1]:
            pareto_rows.append(row)
    return pareto_rows


GRID_BYTES = 2.0**20
"""The unit in bytes by which Galvatron counts memory."""


class LayerChoice(NamedTuple):
    """The option of every layer, with the time and memory of all layers."""

    options: tuple[int, ...]
    time: float
    memory: float


LayerOptions = Sequence[tuple[float, float]]
"""The time and the bytes of a layer with each of its options."""


def choose_options(
    layers: Sequence[LayerOptions], limit: float, transition_times: Sequence[Sequence[float]] | None = None
) -> LayerChoice | None:
    """Return the fastest options of layers that need at most ``limit`` bytes; ``None`` where none fit.

    ``transition_times[one][other]`` is the time between a layer with one option and the next layer with another, by
    default 0.

    >>> choose_options([[(1.0, 4.0), (2.0, 1.0)]] * 3, 9.0)
    LayerChoice(options=(0, 1, 0), time=4.0, memory=9.0)
    """
    # memory, time and options so far, by the last option
    option_rows: dict[int, list[_Row]] = {-1: [(0.0, 0.0, ())]}
    for options in layers:
        longer_rows: dict[int, list[_Row]] = {option: [] for option in range(len(options))}
        for last_option, rows in option_rows.items():
            for option, (time, memory) in enumerate(options):
                transition_time = 0.0
                if transition_times is not None and last_option >= 0:
                    transition_time = transition_times[last_option][option]
                longer_rows[option] += [
                    (row_memory + memory, row_time + time + transition_time, (*row_options, option))
                    for row_memory, row_time, row_options in rows
                    if row_memory + memory <= limit
                ]
        option_rows = {option: _drop_dominated(rows) for option, rows in longer_rows.items()}
    best_row = min(chain(*option_rows.values()), key=lambda row: (row[1], row[0]), default=None)
    return None if best_row is None else LayerChoice(best_row[2], best_row[1], best_row[0])


def choose_options_on_grid(layers: Sequence[LayerOptions], limit: float) -> LayerChoice | None:
    """Return the fastest options where every layer's bytes are rounded up to megabytes, as published.

    >>> choose_options_on_grid([[(1.0, 0.4 * 2**20), (2.0, 0.0)]] * 3, 2.0 * 2**20).options
    (0, 1, 0)
    """
    grid_layers = [[(time, float(ceil(memory / GRID_BYTES))) for time, memory in options] for options in layers]
    choice = choose_options(grid_layers, limit // GRID_BYTES)
    if choice is None:
        return None
    memory = sum(options[option][1] for options, option in zip(layers, choice.options, strict=True))
    return choice._replace(memory=memory)
