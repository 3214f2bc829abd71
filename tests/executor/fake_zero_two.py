"""The memory of one rank with ZeRO 2: the executor's own model whole, gradients and optimizer states as shards.

Nothing here is taken from the simulator but when a bucket is full. Parameters of a bucket lie in one piece; the
optimizer updates a rank's share of it in place, and the ranks gather all shares after it. Gradients of a bucket are
copied into one piece and freed when backward has made all of them, and reduced while it makes others.

References
----------
Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, sections 5.2
(gradients are reduced in buckets to the rank that updates them, and freed) and 7.2 (updated parameters are gathered).
DeepSpeed 0.16, ``runtime/zero/stage_1_and_2.py``: shares are views of flat parameters, every microbatch's gradients
are copied into a bucket, reduced and added to the rank's share, and a second bucket fills while one is reduced.
PyTorch 2, ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, ``foreach_reduce``: the copy, of a whole unit.
"""

from collections.abc import Sequence
from itertools import chain
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.executor.check.oracle import FakeTrainer, RankMemory, rank_oracle
from meshwise.executor.job import Job
from meshwise.executor.model.network import Network, cross_entropy
from meshwise.executor.training import optimizer
from meshwise.strategies.lowering.tasks.data_parallel import BUCKET_BYTES
from meshwise.strategies.plan.mesh import DATA


class Bucket:
    """Parameters in one piece, and this rank's share of them, which keeps the sum of its gradients."""

    def __init__(self, modules: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        self.group, self.parameters = group, [*chain.from_iterable(module.parameters() for module in modules)]
        sizes = [parameter.numel() for parameter in self.parameters]
        self.share = ceil(sum(sizes) / group.size())
        self.whole = torch.empty(self.share * group.size())
        for parameter, part in zip(self.parameters, self.whole[: sum(sizes)].split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
        self.shard = nn.Parameter(self.whole.narrow(0, group.rank() * self.share, self.share))

    @property
    def full(self) -> bool:
        """Whether backward has made all gradients."""
        return all(parameter.grad is not None for parameter in self.parameters)

    def reduce(self) -> Tensor:
        """Add this rank's share of the gradients to those of its shard; return what other ranks may still read."""
        padding = torch.empty(self.whole.numel() - sum(parameter.numel() for parameter in self.parameters))
        gradients = torch.cat([*(p.grad.flatten() for p in self.parameters if p.grad is not None), padding])
        for parameter in self.parameters:
            parameter.grad = None
        share = torch.empty(self.share)
        dist.reduce_scatter_tensor(share, gradients, group=self.group)
        self.shard.grad = share if self.shard.grad is None else self.shard.grad.add_(share)
        return gradients

    def gather(self) -> None:
        """Take the shares that other ranks have updated."""
        dist.all_gather_into_tensor(self.whole, self.shard.detach(), group=self.group)


class ZeroTwoTrainer(FakeTrainer):
    """The executor's network, whose gradients leave bucket by bucket while backward makes others."""

    buckets: Sequence[Bucket] = ()

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        (network,) = self.networks.values()
        self.network, group = network, self.mesh[DATA].get_group()
        self.buckets = [Bucket(modules, group) for modules in _filled(network)]
        self.reduced: Tensor | None = None
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._made(bucket))
        self.optimizer = optimizer.build_optimizer(job.training.optimizer, job.plan, self.parameters, group)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The shards that the rank updates: views of all parameters."""
        return [bucket.shard for bucket in self.buckets] or super().parameters

    def _replicate(self, stage: int, network: Network) -> nn.Module:
        return network

    def _made(self, bucket: Bucket) -> None:
        """Reduce a bucket that is full, when the one before it has been reduced."""
        if bucket.full:
            self.reduced = None
            gradients = bucket.reduce()
            self.reduced = gradients if self.job.plan.overlap_gradients else None

    def step(self, index: int) -> None:
        """Run one step; gradients are reduced after every microbatch."""
        size = self.job.plan.microbatch
        shape = (size * self.job.plan.num_microbatches, self.job.training.sequence)
        batch = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        for bucket in self.buckets:
            bucket.shard.grad = None
        for tokens, targets in zip(*(share.split(size) for share in batch), strict=True):
            (cross_entropy(self.network(tokens), targets) / self.job.plan.num_microbatches).backward()
            self.reduced = None
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.gather()


def _filled(network: Network) -> list[list[nn.Module]]:
    """Return the blocks whose gradients leave together, in the order of backward."""
    filled: list[list[nn.Module]] = [[]]
    for module in (network.head, *network.decoder_layers()[::-1], network.embedding):
        assert module is not None
        if sum(each.nbytes for block in filled[-1] for each in block.parameters()) >= BUCKET_BYTES:
            filled.append([])
        filled[-1].append(module)
    return filled


def zero_two_memory(job: Job, rank: int) -> RankMemory:
    """Return the memory of ``rank`` with ZeRO 2, of a plan of data parallelism alone."""
    return rank_oracle(job, rank, ZeroTwoTrainer).memory
