"""The division of layers among pipeline stages as a mathematical program, and the critical paths of a division.

A critical path is the longest path through the passes of a schedule. The passes on a path do not depend on what they
take, so the length of any path is linear in the ticks of passes, and a step never ends before it: each critical path
is a linear lower bound on the step time of every division.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.engine.compiled import compile_loop, pays
from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.longest_path import Arrangement, Column, to_lists

FloatArray = NDArray[np.float64]


class CriticalPaths(NamedTuple):
    """For every pipeline rank the longest path that ends with the rank's last pass, and the ticks at which it ends.

    ``pass_counts`` and ``send_counts`` say how often it runs through each pass, and through the transfer of each pass's
    result: shape ``(ranks, 2 * stages)``, column ``2 * stage`` for a forward and 1 more for a backward.
    """

    end_ticks: FloatArray
    pass_counts: IntArray
    send_counts: IntArray


def find_critical_paths(arrangement: Arrangement, pass_ticks: FloatArray, send_ticks: FloatArray) -> CriticalPaths:
    """Return the critical paths of a step, given the ticks of its passes and of the transfers of their results.

    As in `meshwise.strategies.bounds.longest_path`, a pass starts when the previous pass of its rank has ended and its
    input has arrived; transfers of a rank in one direction follow one another.

    >>> from meshwise.strategies.bounds.longest_path import arrange_schedule
    >>> found = find_critical_paths(arrange_schedule("1f1b", 2, 2), np.array([1.0, 2.0, 1.0, 2.0]), np.zeros(4))
    >>> found.end_ticks.tolist(), found.pass_counts.tolist()
    ([9.0, 7.0], [[1, 1, 2, 2], [1, 0, 2, 2]])
    """
    num_actions, num_ranks = len(arrangement.code), arrangement.ranks
    work = (pass_ticks, send_ticks)
    # passes (2 * action) and transfers (1 more): when each ends, and the one that it waited for last
    nodes = (np.zeros(2 * num_actions), np.full(2 * num_actions, -1))
    # the last of these of every rank, of every direction of its transfers, and in every box; -1 for none
    last_events = (np.full(num_ranks, -1), np.full(2 * num_ranks, -1), np.full(arrangement.num_boxes, -1))
    result = CriticalPaths(np.zeros(num_ranks), *np.zeros((2, num_ranks, len(pass_ticks)), np.int64))
    # compiled on arrays where that pays; otherwise on lists, which Python walks faster than arrays
    if pays(num_actions):
        compile_loop(_walk)(arrangement, work, nodes, last_events)
        compile_loop(_trace)(arrangement.code, nodes, last_events[0], result)
        return result
    code, arrives, leaves = (column.tolist() for column in arrangement[:3])
    columns = arrangement._replace(code=code, receive_boxes=arrives, send_boxes=leaves)
    work, nodes, last_events, result = (to_lists(values) for values in (work, nodes, last_events, result))
    _walk(columns, work, nodes, last_events)
    _trace(columns.code, nodes, last_events[0], result)
    return CriticalPaths(*map(np.array, result))


def _walk(
    arranged: Arrangement,
    work: tuple[FloatArray, FloatArray],
    nodes: tuple[FloatArray, IntArray],
    latest: tuple[IntArray, IntArray, IntArray],
) -> None:
    """Fill the ends of passes and transfers, and what each of them waited for last."""
    code, receive_boxes, send_boxes, _, _ = arranged
    pass_ticks, send_ticks = work
    end_times, predecessors = nodes
    rank_events, channel_events, box_events = latest
    num_ranks = len(rank_events)
    for action in range(len(code)):
        pass_number = code[action] >> 1
        rank = (pass_number >> 1) % num_ranks
        latest_event, receive_event = rank_events[rank], box_events[receive_boxes[action]]
        if latest_event < 0 or (receive_event >= 0 and end_times[receive_event] > end_times[latest_event]):
            latest_event = receive_event
        predecessors[2 * action] = latest_event
        end_times[2 * action] = (end_times[latest_event] if latest_event >= 0 else 0.0) + pass_ticks[pass_number]
        rank_events[rank] = 2 * action
        if send_boxes[action]:
            send_event, channel_event = 2 * action, channel_events[2 * rank + (pass_number & 1)]
            if channel_event >= 0 and end_times[channel_event] > end_times[send_event]:
                send_event = channel_event
            predecessors[2 * action + 1] = send_event
            end_times[2 * action + 1] = end_times[send_event] + send_ticks[pass_number]
            channel_events[2 * rank + (pass_number & 1)] = box_events[send_boxes[action]] = 2 * action + 1


def _trace(code: Column, nodes: tuple[FloatArray, IntArray], rank_events: IntArray, result: CriticalPaths) -> None:
    """Fill the ends of ranks, and what lies on the way there."""
    end_times, predecessors = nodes
    end_ticks, pass_counts, send_counts = result
    for rank in range(len(rank_events)):
        event = rank_events[rank]
        end_ticks[rank] = end_times[event]
        while event >= 0:
            pass_number = code[event >> 1] >> 1
            if event & 1:
                send_counts[rank][pass_number] += 1
            else:
                pass_counts[rank][pass_number] += 1
            event = predecessors[event]


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of a step at which a pipeline rank's memory is fullest.

    ``num_alive`` are the microbatches whose activations each stage keeps then, 0 for stages of other ranks: shape
    ``(moments, stages)``. ``free_bytes`` are those that the rank has for activations and layers, of shape
    ``(moments,)``.
    """

    num_alive: IntArray
    free_bytes: FloatArray


@dataclass(frozen=True, eq=False)
class DivisionProblem:
    """The division of a row of equal layers among the stages of a schedule, and of how many layers are recomputed.

    Ticks and bytes are linear in two kinds of numbers: the layers of every stage, and how many of them are recomputed
    by each recompute choice. Both are floats.

    Parameters
    ----------
    arrangement
        The schedule.
    num_layers
        Layers of all stages together.
    min_layers, max_layers
        Layers that a stage may have.
    base_ticks
        Ticks of the passes of every stage without its layers: column ``2 * stage``, and 1 more for a backward.
    layer_ticks
        Ticks that a layer adds to each pass.
    recompute_ticks
        Ticks that a recomputed layer adds to the backward of a stage: shape ``(recompute choices, stages)``.
    send_ticks
        Ticks of the transfer of each pass's result, in the columns of ``base_ticks``.
    tail_ticks, tail_layer_ticks
        Ticks after the last pass of every pipeline rank, and those that a layer on it adds.
    base_kept_bytes, layer_kept_bytes
        Bytes that a stage keeps for a microbatch without its layers, and for a layer that is not recomputed.
    saved_bytes
        Bytes fewer that a recomputed layer keeps: shape ``(recompute choices, stages)``.
    moments
        The fullest moments of every pipeline rank.
    state_bytes
        Bytes that a layer takes on every pipeline rank however many microbatches there are.
    """

    arrangement: Arrangement
    num_layers: int
    min_layers: int
    max_layers: int
    base_ticks: FloatArray
    layer_ticks: FloatArray
    recompute_ticks: FloatArray
    send_ticks: FloatArray
    tail_ticks: FloatArray
    tail_layer_ticks: FloatArray
    base_kept_bytes: FloatArray
    layer_kept_bytes: FloatArray
    saved_bytes: FloatArray
    moments: tuple[Moments, ...]
    state_bytes: FloatArray

    @property
    def num_stages(self) -> int:
        """The number of stages, of all ranks."""
        return len(self.base_kept_bytes)

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.tail_ticks)

    @property
    def num_recompute_choices(self) -> int:
        """The number of ways to recompute a layer."""
        return len(self.recompute_ticks)

    def sum_by_rank(self, values: FloatArray) -> FloatArray:
        """Return values of stages summed over the stages of each pipeline rank."""
        result: FloatArray = values.reshape(-1, self.num_ranks).sum(axis=0)
        return result

    def find_paths(self, counts: FloatArray, recompute_counts: FloatArray) -> CriticalPaths:
        """Return the critical path of every rank, given each stage's layers and how many each choice recomputes."""
        pass_ticks = self.base_ticks + self.layer_ticks * np.repeat(counts, 2)
        pass_ticks[1::2] += (self.recompute_ticks * recompute_counts).sum(axis=0)
        return find_critical_paths(self.arrangement, pass_ticks, self.send_ticks)

    def compute_step_ticks(
        self, counts: Sequence[float] | FloatArray, recompute_counts: Sequence[Sequence[float]] | FloatArray
    ) -> float:
        """Return the ticks of a step with ``counts`` layers a stage, ``recompute_counts[i]`` by recompute choice i."""
        layers, recomputed = self._to_arrays(counts, recompute_counts)
        tails = self.tail_ticks + self.tail_layer_ticks * self.sum_by_rank(layers)
        return float((self.find_paths(layers, recomputed).end_ticks + tails).max())

    def fits(
        self, counts: Sequence[float] | FloatArray, recompute_counts: Sequence[Sequence[float]] | FloatArray
    ) -> bool:
        """Return whether every pipeline rank has the memory at each of its moments."""
        layers, recomputed = self._to_arrays(counts, recompute_counts)
        saved_bytes = (self.saved_bytes * recomputed).sum(axis=0)
        kept_bytes = self.base_kept_bytes + self.layer_kept_bytes * layers - saved_bytes
        rank_moments = zip(self.moments, self.state_bytes * self.sum_by_rank(layers), strict=True)
        return all(bool((row.num_alive @ kept_bytes + state <= row.free_bytes).all()) for row, state in rank_moments)

    def _to_arrays(
        self, counts: Sequence[float] | FloatArray, recompute_counts: Sequence[Sequence[float]] | FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        recomputed = np.asarray(recompute_counts, float).reshape(self.num_recompute_choices, self.num_stages)
        return np.asarray(counts, float), recomputed
