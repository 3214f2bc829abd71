"""The division of layers among stages as a mathematical program: what its numbers are, and what a choice takes.

The longest path through the passes of a schedule: not only how long it is, but what lies on it.

A path keeps its passes whatever they take, so that its length is linear in the ticks of passes, and the end of a
step is never before it.
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
    """For every pipeline rank the path that ends with its last pass.

    Parameters
    ----------
    ends
        Ticks at which it ends.
    passes, sends
        How often it goes through each pass, and through the transfer of what each makes: shape
        ``(ranks, 2 * stages)``, columns ``2 * stage`` and 1 more for a backward.
    """

    ends: FloatArray
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
    """Return the longest paths of a step whose passes, and transfers of what they make, take so many ticks.

    As in `meshwise.strategies.bounds.longest_path`: a pass starts when the one before it on its rank has ended and what
    it needs has arrived; transfers of a rank in one direction follow one another.

    >>> from meshwise.strategies.bounds.longest_path import arrangement
    >>> found = critical_paths(arrangement("1f1b", 2, 2), np.array([1.0, 2.0, 1.0, 2.0]), np.zeros(4))
    >>> found.ends.tolist(), found.passes.tolist()
    ([9.0, 7.0], [[1, 1, 2, 2], [1, 0, 2, 2]])
    """
    count, ranks = len(arranged.code), arranged.ranks
    work = _Durations(ticks, sends)
    nodes = _Nodes(np.zeros(2 * count), np.full(2 * count, -1))
    latest = _Latest(np.full(ranks, -1), np.full(2 * ranks, -1), np.full(arranged.boxes, -1))
    result = CriticalPaths(np.zeros(ranks), *np.zeros((2, ranks, len(ticks)), np.int64))
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
    """Moments at which a pipeline rank holds most: shape ``(moments, stages)``, and bytes.

    Parameters
    ----------
    alive
        Microbatches of which each stage then keeps activations; 0 for stages of other ranks.
    room
        Bytes that are left for what they keep, on a rank without layers.
    """

    alive: IntArray
    room: FloatArray


@dataclass(frozen=True, eq=False)
class DivisionProblem:
    """Equal layers in a row that are to be divided among the stages of a schedule; and how many are recomputed.

    Everything is linear in two kinds of numbers: the layers of a stage, and how many of them are recomputed in each
    of some ways. Ticks and bytes are floats.

    Parameters
    ----------
    arranged
        The schedule.
    layers
        Layers in all.
    fewest, most
        Layers that a stage may have.
    ends
        Ticks of the passes of every stage besides its layers: columns ``2 * stage``, and 1 more for a backward.
    layer
        Ticks that a layer adds to each of them.
    again
        Ticks that a recomputed layer adds to the backward of a stage: shape ``(ways, stages)``.
    sends
        Ticks of the transfer of what each pass makes, in the columns of ``ends``.
    tail, tail_layer
        Ticks after the last pass of every pipeline rank, and what a layer on it adds.
    kept, kept_layer
        Bytes that a stage keeps for a microbatch besides its layers, and for a layer that is not recomputed.
    saved
        Bytes that a recomputed layer saves of them: shape ``(ways, stages)``.
    moments
        Of every pipeline rank.
    states
        Bytes that a layer takes on every pipeline rank whatever the microbatches are.
    """

    arranged: Arrangement
    layers: int
    fewest: int
    most: int
    ends: FloatArray
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
        """Stages of all ranks."""
        return len(self.kept)

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.tail)

    @property
    def ways(self) -> int:
        """Ways in which a layer may be recomputed."""
        return len(self.again)

    def position(self, values: FloatArray) -> FloatArray:
        """Return what stages have, summed over those of each rank."""
        result: FloatArray = values.reshape(-1, self.ranks).sum(axis=0)
        return result

    def ticks(self, counts: FloatArray, recomputed: FloatArray) -> FloatArray:
        """Return the ticks of every pass."""
        result = self.ends + self.layer * np.repeat(counts, 2)
        result[1::2] += (self.again * recomputed).sum(axis=0)
        return result

    def paths(self, counts: FloatArray, recomputed: FloatArray) -> CriticalPaths:
        """Return the critical path of every rank."""
        return critical_paths(self.arranged, self.ticks(counts, recomputed), self.sends)

    def step(self, counts: Sequence[float] | FloatArray, recomputed: Sequence[Sequence[float]] | FloatArray) -> float:
        """Return the ticks of a step: ``counts`` layers a stage, ``recomputed[way]`` of them in each way."""
        given = np.asarray(counts, float), np.asarray(recomputed, float).reshape(self.ways, self.stages)
        tails = self.tail + self.tail_layer * self.position(given[0])
        return float((self.paths(*given).ends + tails).max())

    def fits(self, counts: Sequence[float] | FloatArray, recomputed: Sequence[Sequence[float]] | FloatArray) -> bool:
        """Return whether every rank has room at every moment."""
        count, again = np.asarray(counts, float), np.asarray(recomputed, float).reshape(self.ways, self.stages)
        kept = self.kept + self.kept_layer * count - (self.saved * again).sum(axis=0)
        states = self.states * self.position(count)
        held = zip(self.moments, states, strict=True)
        return all(bool((each.alive @ kept + state <= each.room).all()) for each, state in held)
