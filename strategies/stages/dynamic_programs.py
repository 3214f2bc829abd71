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

from collections.abc import Sequence
from math import ceil
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
    states: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {0: [(0.0, 0.0, ())]}
    for row in times:
        next_states: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for num_used, rows in states.items():
            for n in range(min(num_layers - num_used + 1, len(row))):
                if np.isfinite(row[n]):
                    stage_time = float(row[n])
                    extended_rows = [
                        (
                            time_sum + stage_time,
                            max(latency, time_sum + num_microbatches * stage_time),
                            (*prefix_counts, n),
                        )
                        for time_sum, latency, prefix_counts in rows
                    ]
                    next_states.setdefault(num_used + n, []).extend(extended_rows)
        states = {num_used: _drop_dominated_divisions(rows) for num_used, rows in next_states.items()}
    if num_layers not in states:
        return None
    _, time, counts = min(states[num_layers], key=lambda row: row[1])
    return Partition(counts, time)


def _drop_dominated_divisions(
    rows: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Return the rows that no other row beats in sum and latency."""
    pareto_rows: list[tuple[float, float, tuple[int, ...]]] = []
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

    Parameters
    ----------
    transition_times
        Time between a layer with one option and the next layer with another, ``transition_times[one][other]``; by
        default 0.

    >>> choose_options([[(1.0, 4.0), (2.0, 1.0)]] * 3, 9.0)
    LayerChoice(options=(0, 1, 0), time=4.0, memory=9.0)
    """
    option_choices: dict[int, list[LayerChoice]] = {-1: [LayerChoice((), 0.0, 0.0)]}
    for options in layers:
        longer_choices: dict[int, list[LayerChoice]] = {}
        for option, (time, memory) in enumerate(options):
            rows = [
                LayerChoice((*choice.options, option), choice.time + time + transition_time, choice.memory + memory)
                for last_option, choices in option_choices.items()
                for transition_time in [
                    transition_times[last_option][option] if transition_times is not None and last_option >= 0 else 0.0
                ]
                for choice in choices
                if choice.memory + memory <= limit
            ]
            longer_choices[option] = _drop_dominated_choices(rows)
        option_choices = longer_choices
    return min(
        (choice for rows in option_choices.values() for choice in rows),
        key=lambda choice: (choice.time, choice.memory),
        default=None,
    )


def choose_options_on_grid(layers: Sequence[LayerOptions], limit: float) -> LayerChoice | None:
    """Return the fastest options where every layer's bytes are rounded up to megabytes, as published.

    >>> choose_options_on_grid([[(1.0, 0.4 * 2**20), (2.0, 0.0)]] * 3, 2.0 * 2**20).options
    (0, 1, 0)
    """
    grid_layers = [[(time, float(ceil(memory / GRID_BYTES))) for time, memory in options] for options in layers]
    choice = choose_options(grid_layers, limit // GRID_BYTES)
    if choice is None:
        return None
    return choice._replace(
        memory=sum(options[option][1] for options, option in zip(layers, choice.options, strict=True))
    )


def _drop_dominated_choices(rows: list[LayerChoice]) -> list[LayerChoice]:
    """Return the choices that no other choice beats in memory and time, by ascending memory."""
    pareto_choices: list[LayerChoice] = []
    for row in sorted(rows, key=lambda row: (row.memory, row.time, row.options)):
        if not pareto_choices or row.time < pareto_choices[-1].time:
            pareto_choices.append(row)
    return pareto_choices
