"""Copies between ranks and their hosts while passes run: activations, parameters, gradients.

Activations of a block leave when its forward has ended and come back before its backward, through
two buffers on the device, each as large as the most that one block keeps. A forward fills a buffer,
which is free again when its copy has ended; a backward reads one, which is free again when it has
ended; the copy for it starts when a buffer is free. So a block's forward waits until the copy of the
block before the last one has ended, and a block's activations come while the block before computes.
Where a microbatch's backward follows its forward at once, its last two blocks are still in the
buffers and move nowhere: Megatron-LM too offloads fewer layers than there are.

Parameters of a block come before its forward and again before its backward, its shard before the
gather where ZeRO 3 shares them, and its gradients leave when they are made, or reduced, all at the
moments that `fully_sharded` says. The host adds those of a later microbatch to what it has: it
reads two and writes one.

References
----------
TransformerEngine, ``pytorch/cpu_offload.py``, ``AsyncDoubleBufferGroupOffloadHandler`` (two buffers in
turns, a stream for either direction, one group ahead); Megatron-LM, ``cpu_offloading_num_layers``.
Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1 (activations, parameters and gradients in host memory).
PyTorch 2, ``CPUOffloadPolicy`` (shards are copied before the gather, reduced gradients after it).
"""

from typing import NamedTuple

from simulator.program import Category, Change
from strategies.lowering.cuts import Cuts
from strategies.lowering.data import Bucket
from strategies.lowering.machine import Rank
from strategies.lowering.offload import ACTIVATIONS, GRADIENTS, PARAMETERS, SQUARES_ON_HOST, SUM
from strategies.lowering.optimizer import updated_parameters
from strategies.lowering.skeleton import Slot
from strategies.mesh import EXPERT_DATA
from strategies.offloading import TO_HOST


class HostCopy(NamedTuple):
    """Bytes of a copy, what it is called, and what the host holds more from its start and less from its end."""

    size: float
    name: str
    stage: int
    acquired: tuple[Change, ...] = ()
    released: tuple[Change, ...] = ()


def host_copy(cuts: Cuts, slot: Slot, rank: Rank) -> HostCopy:
    """Return what the task of a slot copies for a rank, or what its host reads and writes."""
    training = cuts.training
    if slot.what == SQUARES_ON_HOST:
        elements = cuts.on_host[slot.site.position].parameters
        return HostCopy(elements * training.gradient_bytes, "norm of gradients on host", -1)
    stage, number = slot.key
    names = cuts.plan.stages[stage].blocks
    if slot.what == ACTIVATIONS:
        away = cuts.costs.stage(cuts.plan, stage, rank).blocks[number].away
        held = (Change(Category.ACTIVATIONS, away, host=True),)
        if slot.site.kind == TO_HOST:
            return HostCopy(away, f"activations of {names[number]} to host", stage, acquired=held)
        return HostCopy(away, f"activations of {names[number]} from host", stage, released=held)
    if slot.what == PARAMETERS:
        block = cuts.plan_costs.stages[stage].blocks[number]
        shard = updated_parameters(cuts.plan, block.parameters, block.experts)
        return HostCopy(shard * training.shard_bytes, f"parameters of {names[number]} from host", stage)
    assert slot.what in (GRADIENTS, SUM)
    bucket = cuts.buckets(stage)[number]
    size = _shard(cuts, bucket) * training.gradient_bytes
    if slot.what == SUM:
        return HostCopy(3 * size, f"gradients of {bucket.last} added on host", stage)
    return HostCopy(size, f"gradients of {bucket.last} to host", stage)


def _shard(cuts: Cuts, bucket: Bucket) -> int:
    """Return the elements of a rank's share of the gradients of a bucket."""
    return updated_parameters(cuts.plan, bucket.parameters, bucket.parameters if bucket.kind == EXPERT_DATA else 0)
