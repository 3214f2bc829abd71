"""The division of layers among stages as a mathematical program: what its numbers are, and what a choice takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.program import IntArray
from strategies.stages.critical_path import CriticalPaths, FloatArray, critical_paths
from strategies.walk import Arrangement


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
