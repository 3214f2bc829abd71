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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.program import Category, Change, IntArray
from meshwise.strategies.lowering.tasks.data_parallel import BucketFilling, asks_for_overlap, overlaps_gradients
from meshwise.strategies.lowering.tasks.variants import (
    FIRST_OFFSET,
    FORWARD_PASS,
    JOINED_OFFSET,
    find_first_gradients,
    find_joined,
    find_stage_ends,
    is_joined,
    kind_of,
    list_variants,
)
from meshwise.strategies.plan.mesh import DATA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.schedules.orders import Actions
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
    num_ahead: int = 1
    num_held: int = 1
    copies_gradients: bool = False
    begins_gradients: bool = False

    def list_variants(self, rows: Actions) -> IntArray:
        """Return the variant of every action of all pipeline ranks."""
        begins = FIRST_OFFSET * (find_first_gradients(rows) & self.begins_gradients)
        return list_variants(rows, self.find_special_passes(rows)) + begins

    def find_special_passes(self, rows: Actions) -> NDArray[np.bool_]:
        """Return, for every action, whether it finds or leaves other parameters gathered than most of its kind.

        Resharded: the last unit of a forward is kept where the backward that begins with it follows at once. Not
        resharded: the first forward of a stage gathers, and its last gradients of weights release.
        """
        if not self.parameters:
            return np.zeros(len(rows.kind), np.bool_)
        return find_joined(rows) if self.reshard else find_stage_ends(rows)

    def list_gathered(self, variant: int, units: int) -> tuple[bool, ...]:
        """Return, for every unit of a pass, in order, whether it is gathered for the pass.

        >>> from meshwise.strategies.lowering.tasks.variants import INPUTS
        >>> Sharing(True, True).list_gathered(INPUTS + JOINED_OFFSET, 3)
        (False, True, True)
        """
        is_special, base_variant = is_joined(variant), variant % JOINED_OFFSET
        if not self.reshard:
            return (is_special and base_variant == FORWARD_PASS,) * units
        return tuple(unit > 0 or base_variant == FORWARD_PASS or not is_special for unit in range(units))

    def list_released(self, variant: int, units: int) -> tuple[bool, ...]:
        """Return, for every unit of a pass, in order, whether its gathered parameters are released after it.

        >>> Sharing(True, True).list_released(FORWARD_PASS + JOINED_OFFSET, 3)
        (True, True, False)
        """
        is_special, base_variant = is_joined(variant), variant % JOINED_OFFSET
        if not self.reshard:
            return (is_special and base_variant != FORWARD_PASS,) * units
        return tuple(unit < units - 1 or base_variant != FORWARD_PASS or not is_special for unit in range(units))


def find_sharing(cluster: Cluster, training: Training, plan: Plan, *, begins_gradients: bool) -> Sharing:
    """Return what data ranks of a plan share besides the optimizer's states, and how.

    Parameters in host memory come unit by unit too, and gradients go there as they are made, whether shared or not.
    ``begins_gradients`` says whether gradients are allocated in the first backward of a step.
    """
    has_host_parameters = plan.offloads_parameters
    gradients, parameters = ((plan.zero >= min_zero and plan.shards > 1) or has_host_parameters for min_zero in (2, 3))
    is_unshared = has_host_parameters and plan.shards == 1
    num_ahead, num_held = overlaps_gradients(cluster, plan) or is_unshared, asks_for_overlap(plan) or is_unshared
    copies_gradients = gradients and plan.shards > 1 and training.conventions.flattens_gradients
    return Sharing(
        gradients,
        parameters,
        plan.reshard_after_forward,
        int(num_ahead),
        int(num_held),
        copies_gradients,
        begins_gradients,
    )


class BlockChanges(NamedTuple):
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
    copied_bytes: int = 0
    released_late: tuple[Change, ...] = ()


NO_CHANGES = BlockChanges()
"""A block that takes and gives back nothing besides activations."""


def list_changes(
    shared_states: Sharing,
    training: Training,
    variant: int,
    parameters: Sequence[int],
    gradients: Sequence[BucketFilling],
    shards: Sequence[int] = (),
    undeferred: Sequence[int] = (),
    lasting_elements: Sequence[int] = (),
) -> tuple[BlockChanges, ...]:
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
    released_late: list[list[Change]] = [[] for _ in parameters]
    copied_bytes = [0] * len(parameters)
    if shared_states.parameters and not (shared_states.reshard and kind is ActionKind.WEIGHT):
        is_gathered, is_released = (
            list_units(variant, len(parameters))
            for list_units in (shared_states.list_gathered, shared_states.list_released)
        )
        for unit, size in enumerate(parameters):
            change = Change(Category.PARAMETERS, size)
            if is_gathered[unit]:
                gathered[max(unit - shared_states.num_held, 0)].append(change)
            if is_released[unit]:
                released[unit].append(change)
    if shared_states.gradients and kind is ActionKind.INPUT:
        for block, elements in enumerate(undeferred):
            acquired[block].append(Change(Category.GRADIENTS, elements * training.gradient_bytes))
    if shared_states.gradients and kind in MAKES_GRADIENTS:
        ends = sorted({end for filling in gradients for end in filling.bucket_ends})
        for filling in gradients:
            for block, (elements, end) in enumerate(zip(filling.elements, filling.bucket_ends, strict=True)):
                undeferred_elements = undeferred[block] if kind is ActionKind.WEIGHT and filling.kind == DATA else 0
                acquired[block].append(
                    Change(Category.GRADIENTS, (elements - undeferred_elements) * training.gradient_bytes)
                )
                change = Change(Category.GRADIENTS, elements * training.gradient_bytes)
                release_block = ends[min(ends.index(end) + shared_states.num_held, len(ends) - 1)]
                (released_late if shared_states.copies_gradients and release_block == end else released)[
                    release_block - 1
                ].append(change)
                copied_bytes[end - 1] += change.size * shared_states.copies_gradients
        for block, shard in enumerate(shards):  # every block is a bucket
            size, release_block = shard * training.gradient_bytes, min(block + shared_states.num_held, len(shards) - 1)
            if release_block > block:  # it comes out of the reduction
                (released_late if copied_bytes[block] else released)[block].append(Change(Category.GRADIENTS, -size))
                released[release_block].append(Change(Category.GRADIENTS, size))
    if shared_states.begins_gradients and variant >= FIRST_OFFSET:
        for block, elements in enumerate(lasting_elements):
            size = elements * training.gradient_bytes
            if shared_states.gradients:  # a rank's share comes out of the reduction
                (released_late if copied_bytes[block] else released)[block].append(Change(Category.GRADIENTS, -size))
            else:
                acquired[block].append(Change(Category.GRADIENTS, size))
    if not any(map(any, (acquired, released, gathered))):
        return ()
    rows = zip(acquired, released, gathered, copied_bytes, released_late, strict=True)
    return tuple(
        BlockChanges(
            _drop_empty(begin_changes),
            _drop_empty(end_changes),
            _drop_empty(gather_changes),
            size,
            _drop_empty(late_changes),
        )
        for begin_changes, end_changes, gather_changes, size, late_changes in rows
    )


def _drop_empty(change_list: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes that are not of 0 bytes."""
    return tuple(change for change in change_list if change.size)
