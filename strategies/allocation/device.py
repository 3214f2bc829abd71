"""What a device holds beside the allocator's segments: the runtime's context, and the buffers of communicators.

Workspaces of matrix products are none of it: torch takes them from its allocator (``aten/src/ATen/cuda/CUDABlas.cpp``,
``getCurrentCUDABlasLtHandle`` and ``getCUDABlasLtWorkspace``), and Transformer Engine as a tensor.
"""

from meshwise.strategies.plan.mesh import EXPERT, EXPERT_DATA, GROUPS
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

MIB = 2**20

CONTEXT_BYTES = 400 * MIB
"""A CUDA context with the kernels that a process has loaded: "around 400MB" since CUDA 11.7, which loads them as they
are called (pytorch/pytorch issue 109888, 2023-09), about 300 MB in issues 107667 (2023) and 20532 (V100, 2019). Before
that all kernels were loaded: more than 1000 MB (issue 107667)."""

RECEIVE_BYTES, SEND_BYTES = 10 * MIB, 2 * MIB
"""Bytes of a connection of one channel to one peer: NCCL keeps a ring of slots for each of its protocols where it
receives, 4 MiB simple, 4.7 MiB LL128 and 0.5 MiB LL (``src/init.cc``, DEFAULT_BUFFSIZE and the others), in pages of
2 MiB, and one page where it sends: allocations of 10485760 and 2097152 bytes in NVIDIA/nccl issue 1685 (2025-04)."""

COLLECTIVE_CHANNELS = 24
"""Channels of collectives between GPUs of one node with NVSwitch (log of 8 A100 in NVIDIA/nccl-tests issue 100)."""
EXCHANGE_CHANNELS = 32
"""Channels to every peer of an all-to-all in a node of 8 H100 (NVIDIA/nccl issue 1685: 7 peers and 32 channels of
12 MiB are 2.8 GB, and 3.3 were measured)."""
SENDING_CHANNELS = 2
"""Channels of a send to a peer on another node, whose buffers all peers share (NVIDIA/nccl issue 1450), and "2 p2p
channels per peer" in the log of issue 1189."""


def count_overhead(problem: Problem, plan: Plan) -> int:
    """Return the bytes that a device holds beside the allocator's segments.

    At least what its runtime takes before the first tensor (`Accelerator.reserved`); 0 where it states none, as a CPU.
    """
    reserved = min(int(device.reserved) for device in problem.cluster.accelerators)
    if not reserved or any(device.computes_collectives for device in problem.cluster.accelerators):
        return reserved
    return max(reserved, CONTEXT_BYTES + count_communicator_bytes(problem, plan))


def count_communicator_bytes(problem: Problem, plan: Plan) -> int:
    """Return the bytes of the buffers of all communicators of a rank: one for every group, and one for all ranks.

    A ring has one peer from which it receives and one to which it sends.
    """
    if plan.mesh.num_ranks == 1:
        return 0
    connection = RECEIVE_BYTES + SEND_BYTES
    num_local = min(problem.cluster.nodes[0][0].devices, plan.mesh.num_ranks)
    num_rings = 1
    for kind, axes in GROUPS.items():
        size = 1
        for axis in axes:
            size *= plan.mesh.size(axis)
        if size > 1 and kind != EXPERT and not (kind == EXPERT_DATA and plan.mesh.size(EXPERT) == 1):
            num_rings += 1
    total = num_rings * COLLECTIVE_CHANNELS * connection
    if plan.mesh.size(EXPERT) > 1:
        total += (min(plan.mesh.size(EXPERT), num_local) - 1) * EXCHANGE_CHANNELS * connection
    if plan.pipeline > 1:
        total += 2 * SENDING_CHANNELS * connection
    return total
