"""Fully sharded data parallelism: gradients (ZeRO 2) and parameters (ZeRO 3) are kept as shards too.

With ZeRO 2 every microbatch's backward reduces its gradients bucket by bucket, because only shards of them are kept
[1]_. With ZeRO 3 a unit, one block of the network, is gathered before its forward and again before its backward, and
its gradients are reduced after it; its experts are gathered by the ranks that hold the same ones, after the rest of
it [2]_ [3]_.

A unit is gathered while the previous one of the same pass computes; the first unit of a pass when the rank turns to
that pass. A loss reads no parameters and is no part of a unit: what is gathered at the start of a backward that begins
with a loss arrives when the loss's own backward has ended. The reduction of a bucket runs beneath the backward of the
next bucket, and ends before the one after that begins; the next pass waits for all reductions. So a rank holds at most
two units' parameters and two buckets' gradients, however long communication takes, and where a core computes its
collectives itself. Some frameworks copy the gradients of a bucket into one piece when the previous reduction has
ended, reduce the copy, and then free the gradients.

Where backward is split, the gradients of weights fill buckets by the same rules; gradients of norms, which are made
with those of inputs, wait for the rest of their bucket. Units are gathered for the gradients of inputs, not for those
of weights, which read activations and gradients alone [4]_; units that stay gathered are released with the last
gradients of weights. Of passes that run in pairs each gathers its own units, the second when the rank turns to it, and
waits for its own communication alone: a rank then holds at most two units of each, and computes in one pass beneath
the communication of the other, whether gradients overlap or not.

With hybrid sharding states are shared by groups of neighbouring data ranks: gradients are reduced inside a group for
every microbatch, and summed over the groups' replicas once a step [5]_. Shards may come from host memory before the
gather, and gradients may go there after the reduction [6]_.

References
----------
.. [1] Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, sections 5
   and 7 (stages, and the bytes that each moves).
.. [2] Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023, sections 3.2 and 3.3
   (units, hybrid sharding, prefetch, limited gathers).
.. [3] PyTorch 2, ``torch.distributed.fsdp.fully_shard``: ``_root_pre_forward`` lets a pass's gathers wait for what was
   computed before, ``post_backward`` for the reduction before, ``finalize_backward`` for all; ``pre_backward`` of a
   unit gathers the next one when the gradient of its output is there, and ``foreach_reduce`` copies.
.. [4] Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 1 (a backward in two: what either part reads).
.. [5] Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud", VLDB 2022 (gradients are
   summed over replicas once, after the last microbatch).
.. [6] Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.program import Category, Change, IntArray
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.optimizer import begin_in_step
from meshwise.strategies.lowering.costs.recompute import BlockMemory
from meshwise.strategies.lowering.tasks.data_parallel import Filling, asks_for_overlap, overlaps
from meshwise.strategies.lowering.tasks.variants import (
    FIRST,
    FORWARD_PASS,
    JOINED,
    begin,
    first_and_last,
    joined,
    joins,
    kind_of,
    variants,
)
from meshwise.strategies.plan.mesh import DATA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.schedules.orders import Actions, actions
from meshwise.strategies.schedules.schedule import MAKES_GRADIENTS, ActionKind


class Sharing(NamedTuple):
    """What data ranks keep as shards besides the optimizer's states, and how they communicate.

    Parameters
    ----------
    gradients
        Whether every microbatch's backward reduces its gradients.
    parameters
        Whether parameters are gathered unit by unit.
    reshard
        Whether gathered parameters are released after a forward; else they stay from the first forward to the last
        gradients of weights, with whose reduction torch releases them.
    num_ahead
        Number of units gathered ahead, and of buckets whose reductions run beneath computing: 0 or 1.
    num_held
        Number of units that a rank has gathered ahead, and of buckets that it still has while it computes: 0 or 1. A
        framework gathers ahead also where a device computes its own collectives, though nothing is won.
    copies_gradients
        Whether the gradients of a bucket are copied into one piece before they are reduced.
    begins_gradients
        Whether gradients are allocated in the first backward of a step
        (`meshwise.strategies.lowering.costs.optimizer`).
    """

    gradients: bool = False
    parameters: bool = False
    reshard: bool = True
    ahead: int = 1
    held: int = 1
    copies: bool = False
    begins: bool = False

    def joins(self, rows: Actions) -> NDArray[np.bool_]:
        """Return, for every action, whether it finds or leaves other parameters gathered than most of its kind.

        Resharded: the last unit of a forward is kept where the backward that begins with it follows at once. Not
        resharded: the first forward of a stage gathers, and its last gradients of weights release.
        """
        if not self.parameters:
            return np.zeros(len(rows.kind), np.bool_)
        return joined(rows) if self.reshard else first_and_last(rows)

    def gathered(self, variant: int, units: int) -> tuple[bool, ...]:
        """Return, for every unit of a pass, in order, whether it is gathered for the pass.

        >>> from meshwise.strategies.lowering.tasks.variants import INPUTS
        >>> Sharing(True, True).gathered(INPUTS + JOINED, 3)
        (False, True, True)
        """
        found, which = joins(variant), variant % JOINED
        if not self.reshard:
            return (found and which == FORWARD_PASS,) * units
        return tuple(unit > 0 or which == FORWARD_PASS or not found for unit in range(units))

    def given_up(self, variant: int, units: int) -> tuple[bool, ...]:
        """Return, for every unit of a pass, in order, whether its gathered parameters are released after it.

        >>> Sharing(True, True).given_up(FORWARD_PASS + JOINED, 3)
        (True, True, False)
        """
        found, which = joins(variant), variant % JOINED
        if not self.reshard:
            return (found and which != FORWARD_PASS,) * units
        return tuple(unit < units - 1 or which != FORWARD_PASS or not found for unit in range(units))


def sharing(cluster: Cluster, training: Training, plan: Plan) -> Sharing:
    """Return what data ranks of a plan share besides the optimizer's states, and how.

    Parameters in host memory come unit by unit too, and gradients go there as they are made, whether shared or not.
    """
    on_host = any(plan.offload.parameters)
    gradients, parameters = ((plan.zero >= least and plan.shards > 1) or on_host for least in (2, 3))
    alone = on_host and plan.shards == 1
    ahead, held = overlaps(cluster, plan) or alone, asks_for_overlap(plan) or alone
    copies = gradients and plan.shards > 1 and training.conventions.flattens_gradients
    begins = begin_in_step(training, plan)
    return Sharing(gradients, parameters, plan.reshard_after_forward, int(ahead), int(held), copies, begins)


class Changes(NamedTuple):
    """What one block of a pass takes and gives back besides activations.

    Parameters
    ----------
    acquired, released
        Taken as it begins, and given back as it ends.
    gathered
        Taken as it first reads parameters: as it begins too, unless it begins with the backward of a loss.
    copied_bytes, released_late
        Bytes of gradients that are copied into one piece when it has ended, and what is given back after that.
    """

    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()
    gathered: tuple[Change, ...] = ()
    copied: int = 0
    left: tuple[Change, ...] = ()


NOTHING = Changes()
"""A block that takes and gives back nothing besides activations."""


def changes(
    shared: Sharing,
    training: Training,
    variant: int,
    parameters: Sequence[int],
    gradients: Sequence[Filling],
    shards: Sequence[int] = (),
    undeferred: Sequence[int] = (),
    kept: Sequence[int] = (),
) -> tuple[Changes, ...]:
    """Return what the blocks of a pass take and give back besides activations; empty where no block does.

    Parameters
    ----------
    parameters
        Bytes on a rank of every block's parameters where they are gathered, in the order of the pass.
    gradients
        How gradients fill buckets; gradients that leave with a block are whole until the next ones leave.
    shards
        Elements of every block whose gradients, a rank's share of them, go to the host when they are reduced; none
        where no gradients do. Shards of parameters that come from there are copied into what is gathered before the
        block begins, which needs more.
    undeferred
        Elements of every block, in the order of backward, whose gradients are made with those of inputs where backward
        is split: they wait for the rest of their bucket.
    lasting_elements
        Elements of every block, in the order of backward, whose gradients stay to the end of the step.
    """
    kind = kind_of(variant)
    acquired: list[list[Change]] = [[] for _ in parameters]
    released: list[list[Change]] = [[] for _ in parameters]
    gathered: list[list[Change]] = [[] for _ in parameters]
    left: list[list[Change]] = [[] for _ in parameters]
    copied = [0] * len(parameters)
    if shared.parameters and not (shared.reshard and kind is ActionKind.WEIGHT):
        comes, goes = (each(variant, len(parameters)) for each in (shared.gathered, shared.given_up))
        for unit, size in enumerate(parameters):
            change = Change(Category.PARAMETERS, size)
            if comes[unit]:
                gathered[max(unit - shared.held, 0)].append(change)
            if goes[unit]:
                released[unit].append(change)
    if shared.gradients and kind is ActionKind.INPUT:
        for block, elements in enumerate(undeferred):
            acquired[block].append(Change(Category.GRADIENTS, elements * training.gradient_bytes))
    if shared.gradients and kind in MAKES_GRADIENTS:
        ends = sorted({end for filling in gradients for end in filling.leaves})
        for filling in gradients:
            for block, (elements, end) in enumerate(zip(filling.elements, filling.leaves, strict=True)):
                there = undeferred[block] if kind is ActionKind.WEIGHT and filling.kind == DATA else 0
                acquired[block].append(Change(Category.GRADIENTS, (elements - there) * training.gradient_bytes))
                change = Change(Category.GRADIENTS, elements * training.gradient_bytes)
                gone = ends[min(ends.index(end) + shared.held, len(ends) - 1)]
                (left if shared.copies and gone == end else released)[gone - 1].append(change)
                copied[end - 1] += change.size * shared.copies
        for block, shard in enumerate(shards):  # every block is a bucket
            size, gone = shard * training.gradient_bytes, min(block + shared.held, len(shards) - 1)
            if gone > block:  # it comes out of the reduction
                (left if copied[block] else released)[block].append(Change(Category.GRADIENTS, -size))
                released[gone].append(Change(Category.GRADIENTS, size))
    if shared.begins and variant >= FIRST:
        for block, elements in enumerate(kept):
            size = elements * training.gradient_bytes
            if shared.gradients:  # a rank's share comes out of the reduction
                (left if copied[block] else released)[block].append(Change(Category.GRADIENTS, -size))
            else:
                acquired[block].append(Change(Category.GRADIENTS, size))
    if not any(map(any, (acquired, released, gathered))):
        return ()
    rows = zip(acquired, released, gathered, copied, left, strict=True)
    return tuple(Changes(_some(a), _some(r), _some(g), size, _some(after)) for a, r, g, size, after in rows)


def copy_ticks(accelerator: Accelerator, size: int) -> int:
    """Return the ticks in which so many bytes of gradients are copied into one piece: they are read and written."""
    if not size:
        return 0
    return max(to_ticks(accelerator.launch + 2 * size / accelerator.bandwidth(OperatorKind.ELEMENTWISE)), 1)


def _some(found: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes that are not of 0 bytes."""
    return tuple(change for change in found if change.size)


class PassMemory(NamedTuple):
    """Bytes of one pass of one stage on one rank: its lasting change, and its peak above the level before it."""

    change: int
    peak: int


def pass_memory(blocks: Sequence[BlockMemory], held: Sequence[Changes], kind: ActionKind) -> PassMemory:
    """Return the memory of a pass whose blocks, in its order, keep activations and also have ``block_changes``.

    >>> block = BlockMemory(kept=10, recomputed=5, forward=20, backward=20)
    >>> unit = (Change(Category.PARAMETERS, 7),)
    >>> pass_memory([block, block], [Changes((), unit, unit)] * 2, ActionKind.FORWARD)
    PassMemory(change=20, peak=47)
    >>> head = BlockMemory(kept=10, recomputed=0, forward=20, backward=30, loss=5)
    >>> pass_memory([head], [Changes((), unit, unit)], ActionKind.BACKWARD)
    PassMemory(change=-10, peak=32)
    """
    level = peak = 0
    for memory, each in zip(blocks, held or (NOTHING,) * len(blocks), strict=True):
        taken, given = memory.changes(kind)
        level += taken + memory.working(kind) + _size(each.acquired)
        peak = max(peak, level)
        level += _size(each.gathered) - memory.of_loss(kind)
        peak = max(peak, level)
        level -= given + memory.working(kind) - memory.of_loss(kind) + _size(each.released)
        peak = max(peak, level + each.copied)
        level -= _size(each.left)
    return PassMemory(level, peak)


def _size(found: Sequence[Change]) -> int:
    """Return the bytes of changes together."""
    return sum(change.size for change in found)


def peak_of_passes(plan: Plan, shared: Sharing, stages: Sequence[Mapping[int, PassMemory]]) -> IntArray:
    """Return the most bytes that each pipeline rank holds beyond the resident ones.

    Parameters
    ----------
    stages
        For every stage, the memory of its passes by variant.
    """
    rows = actions(plan.schedule, plan.pipeline, plan.num_microbatches, plan.chunks)
    table = np.zeros((len(stages), 2 * FIRST, 2), np.int64)
    for stage, passes in enumerate(stages):
        table[stage, list(passes)] = list(passes.values())
    chosen = table[rows.stage, variants(rows, shared.joins(rows)) + FIRST * (begin(rows) & shared.begins)]
    before = np.cumsum(chosen[:, 0]) - chosen[:, 0]
    before -= np.repeat(before[rows.start[:-1]], np.diff(rows.start))  # of other ranks
    held = before + chosen[:, 1]
    result: IntArray = np.maximum.reduceat(held, rows.start[:-1])
    return result
