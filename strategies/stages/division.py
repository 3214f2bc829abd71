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

from meshwise.simulator.engine.compiled import compiled, pays
from meshwise.simulator.program import IntArray
from meshwise.strategies.bounds.longest_path import Arrangement, Column, to_lists

FloatArray = NDArray[np.float64]


class CriticalPaths(NamedTuple):
    """For every pipeline rank the longest path that ends with the rank's last pass.

    Parameters
    ----------
    end_ticks
        Ticks at which the path ends, by rank.
    pass_counts, send_counts
        How often the path runs through each pass, and through the transfer of each pass's result: shape
        ``(ranks, 2 * stages)``, column ``2 * stage`` for a forward and 1 more for a backward.
    """

    end_ticks: FloatArray
    passes: IntArray
    sends: IntArray


class _Durations(NamedTuple):
    """Ticks of every pass, and of the transfer of what it makes."""

    ticks: FloatArray
    sends: FloatArray


class _Nodes(NamedTuple):
    """Passes (``2 * action``) and transfers (1 more): when each ends, and the one that it waited for last."""

    done: FloatArray
    before: IntArray


class _Latest(NamedTuple):
    """The last node of every rank, of every direction of its transfers, and what is in every box; -1 for none."""

    clock: IntArray
    channel: IntArray
    box: IntArray


def critical_paths(arranged: Arrangement, ticks: FloatArray, sends: FloatArray) -> CriticalPaths:
    """Return the critical paths of a step, given the ticks of its passes and of the transfers of their results.

    As in `meshwise.strategies.bounds.longest_path`, a pass starts when the previous pass of its rank has ended and its
    input has arrived; transfers of a rank in one direction follow one another.

    >>> from meshwise.strategies.bounds.longest_path import arrangement
    >>> found = critical_paths(arrangement("1f1b", 2, 2), np.array([1.0, 2.0, 1.0, 2.0]), np.zeros(4))
    >>> found.end_ticks.tolist(), found.passes.tolist()
    ([9.0, 7.0], [[1, 1, 2, 2], [1, 0, 2, 2]])
    """
    count, ranks = len(arranged.code), arranged.ranks
    work = _Durations(ticks, sends)
    nodes = _Nodes(np.zeros(2 * count), np.full(2 * count, -1))
    latest = _Latest(np.full(ranks, -1), np.full(2 * ranks, -1), np.full(arranged.boxes, -1))
    result = CriticalPaths(np.zeros(ranks), *np.zeros((2, ranks, len(ticks)), np.int64))
    # compiled on arrays where that pays; otherwise on lists, which Python walks faster than arrays
    if pays(count):
        compiled(_walk)(arranged, work, nodes, latest)
        compiled(_trace)(arranged.code, nodes, latest.clock, result)
        return result
    code, arrives, leaves = (column.tolist() for column in arranged[:3])
    columns = arranged._replace(code=code, arrives=arrives, leaves=leaves)
    work, nodes, latest, result = (to_lists(values) for values in (work, nodes, latest, result))
    _walk(columns, work, nodes, latest)
    _trace(columns.code, nodes, latest.clock, result)
    return CriticalPaths(*map(np.array, result))


def _walk(arranged: Arrangement, work: _Durations, nodes: _Nodes, latest: _Latest) -> None:
    """Fill the ends of passes and transfers, and what each of them waited for last."""
    code, arrives, leaves, _, _ = arranged
    ticks, sends = work
    done, before = nodes
    clock, channel, box = latest
    ranks = len(clock)
    for action in range(len(code)):
        now = code[action] >> 1
        rank = (now >> 1) % ranks
        last, came = clock[rank], box[arrives[action]]
        if last < 0 or (came >= 0 and done[came] > done[last]):
            last = came
        before[2 * action] = last
        done[2 * action] = (done[last] if last >= 0 else 0.0) + ticks[now]
        clock[rank] = 2 * action
        if leaves[action]:
            busy = channel[2 * rank + (now & 1)]
            sent = busy if busy >= 0 and done[busy] > done[2 * action] else 2 * action
            before[2 * action + 1] = sent
            done[2 * action + 1] = done[sent] + sends[now]
            channel[2 * rank + (now & 1)] = box[leaves[action]] = 2 * action + 1


def _trace(code: Column, nodes: _Nodes, clock: IntArray, result: CriticalPaths) -> None:
    """Fill the ends of ranks, and what lies on the way there."""
    done, before = nodes
    ends, passes, moved = result
    for rank in range(len(clock)):
        node = clock[rank]
        ends[rank] = done[node]
        while node >= 0:
            now = code[node >> 1] >> 1
            if node & 1:
                moved[rank][now] += 1
            else:
                passes[rank][now] += 1
            node = before[node]


@dataclass(frozen=True, eq=False)
class Moments:
    """The moments of a step at which a pipeline rank's memory is fullest.

    Parameters
    ----------
    num_alive
        Microbatches whose activations each stage keeps then, 0 for stages of other ranks: shape ``(moments, stages)``.
    free_bytes
        Bytes that the rank has for activations and layers, of shape ``(moments,)``.
    """

    alive: IntArray
    room: FloatArray


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

    arranged: Arrangement
    layers: int
    fewest: int
    most: int
    base_ticks: FloatArray
    layer: FloatArray
    again: FloatArray
    sends: FloatArray
    tail: FloatArray
    tail_layer: FloatArray
    kept: FloatArray
    kept_layer: FloatArray
    saved: FloatArray
    moments: tuple[Moments, ...]
    states: FloatArray

    @property
    def stages(self) -> int:
        """The number of stages, of all ranks."""
        return len(self.kept)

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.tail)

    @property
    def ways(self) -> int:
        """The number of ways to recompute a layer."""
        return len(self.again)

    def position(self, values: FloatArray) -> FloatArray:
        """Return values of stages summed over the stages of each pipeline rank."""
        result: FloatArray = values.reshape(-1, self.ranks).sum(axis=0)
        return result

    def ticks(self, counts: FloatArray, recomputed: FloatArray) -> FloatArray:
        """Return the ticks of every pass, given each stage's layers and how many each choice recomputes."""
        result = self.base_ticks + self.layer * np.repeat(counts, 2)
        result[1::2] += (self.again * recomputed).sum(axis=0)
        return result

    def paths(self, counts: FloatArray, recomputed: FloatArray) -> CriticalPaths:
        """Return the critical path of every pipeline rank."""
        return critical_paths(self.arranged, self.ticks(counts, recomputed), self.sends)

    def step(self, counts: Sequence[float] | FloatArray, recomputed: Sequence[Sequence[float]] | FloatArray) -> float:
        """Return the ticks of a step with ``counts`` layers a stage, ``recompute_counts[i]`` by recompute choice i."""
        given = np.asarray(counts, float), np.asarray(recomputed, float).reshape(self.ways, self.stages)
        tails = self.tail + self.tail_layer * self.position(given[0])
        return float((self.paths(*given).end_ticks + tails).max())

    def fits(self, counts: Sequence[float] | FloatArray, recomputed: Sequence[Sequence[float]] | FloatArray) -> bool:
        """Return whether every pipeline rank has the memory at each of its moments."""
        count, again = np.asarray(counts, float), np.asarray(recomputed, float).reshape(self.ways, self.stages)
        kept = self.kept + self.kept_layer * count - (self.saved * again).sum(axis=0)
        states = self.states * self.position(count)
        held = zip(self.moments, states, strict=True)
        return all(bool((each.alive @ kept + state <= each.room).all()) for each, state in held)
