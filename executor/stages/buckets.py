"""Averages gradients over data ranks in buckets, each as soon as the last backward of a step has made its gradients.

Buckets have the size of those of torch's ``DistributedDataParallel`` [1]_, which counts passes of its own and so does
not run under a pipeline, where forwards of other microbatches lie between a forward and its backward.

References
----------
.. [1] Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, section 4.2.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are sent together, at least."""


class GradientBuckets:
    """The buckets of a stage.

    Parameters
    ----------
    parameters
        The trained parameters of a stage, in the order of forward.
    group
        The ranks that have the same ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        self._buckets: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed(list(parameters)):
            if self._buckets[-1] and size >= BUCKET_BYTES:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
        self._bucket_of = {id(parameter): place for place, bucket in enumerate(self._buckets) for parameter in bucket}
        for bucket in self._buckets:
            for parameter in bucket:
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._note_gradient)
        self._is_last = False
        self._missing: list[set[int]] = []
        self._works: dict[int, tuple[dist.Work | None, Tensor]] = {}

    def begin_last(self) -> None:
        """Reduce gradients from now on: the backward that begins is the last one of the step."""
        self._is_last = True
        self._missing = [set(map(id, bucket)) for bucket in self._buckets]

    def _note_gradient(self, parameter: Tensor) -> None:
        if not self._is_last:
            return
        place = self._bucket_of[id(parameter)]
        self._missing[place].discard(id(parameter))
        # buckets leave in one order on all ranks, or their sums would be of different buckets
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            self._launch(len(self._works))

    def _launch(self, place: int) -> None:
        gradients = [parameter.grad.flatten() for parameter in self._buckets[place] if parameter.grad is not None]
        flat = torch.cat(gradients) if gradients else self._buckets[place][0].new_zeros(0)
        work = dist.all_reduce(flat, group=self.group, async_op=True) if gradients else None
        self._works[place] = work, flat

    def finish(self) -> None:
        """Reduce what is left, and return when all gradients are means over the ranks."""
        for place in range(len(self._works), len(self._buckets)):
            self._launch(place)
        num_ranks = self.group.size()
        for place, bucket in enumerate(self._buckets):
            work, flat = self._works[place]
            if work is not None:
                work.wait()
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            pieces = torch.split(flat.div_(num_ranks), [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self._works.clear()
        self._is_last = False
