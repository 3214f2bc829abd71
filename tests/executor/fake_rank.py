"""The memory of one rank of a job of any size: the executor's own trainer on tensors without data.

Fake tensors have shapes and no storage, and a fake process group answers every collective at
once, so that one process can be any rank of a thousand. torch's ``MemTracker`` counts the
bytes of every storage from its first use until it is freed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor import trainer as executor_trainer
from executor.job import Job
from executor.model import Network
from executor.recorder import Recorder
from executor.trainer import DTYPES, Trainer


class SilentHeart:
    """Beats for nobody."""

    def beat(self, operation: str) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: what stays from step to step, and the most at any moment of a step.

    ``steps`` are the counters that Adam keeps, one fp32 number a parameter tensor; ``optimizer``
    is without them.
    """

    parameters: int
    gradients: int
    optimizer: int
    steps: int
    peak: int

    @property
    def activations(self) -> int:
        """Everything else at the peak."""
        return self.peak - self.parameters - self.gradients - self.optimizer - self.steps


class Tracker(MemTracker):
    """Counts live bytes; modules may run any number of times.

    ``MemTracker`` itself refuses a second forward pass, as every microbatch is one, for its
    statistics by module; and it counts the global shapes on which DTensor infers layouts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inferring, self.peak = False, 0

    def _pre_fw_hook(self, *_: Any) -> None: ...

    def _post_fw_hook(self, *_: Any) -> None: ...

    def _pre_bw_hook(self, *_: Any) -> None: ...

    def _post_bw_hook(self, *_: Any) -> None: ...

    def _update_peak_stats(self, _: Any) -> None:
        self.peak = max(self.peak, self._curr_mem_snap.get(torch.device("cpu"), {"Total": 0})["Total"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inferring:
            return func(*args, **kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def quiet(self, infer: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``infer`` with what it makes left uncounted."""

        def uncounted(*arguments: Any) -> Any:
            self.inferring = True
            try:
                return infer(*arguments)
            finally:
                self.inferring = False

        return uncounted


class FakeTrainer(Trainer):
    """The executor's trainer, without what needs other ranks or data."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Recorder(SilentHeart()))  # type: ignore[arg-type]
        self.runtime._warmup_p2p = _no_warmup
        for stage in self.runtime._stages:  # which drops gradients before the first step, as if they were of a trial
            stage._post_metadata_inference_cleanup = lambda: None

    def prepare(self) -> None:
        """Make gradients and optimizer states, as after any step; buckets hold gradients where there are some."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        if any(isinstance(module, DistributedDataParallel) for module in self.modules.values()):
            self.optimizer.zero_grad(set_to_none=True)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of this rank for one step."""
        size = (self.job.training.global_batch // self.job.plan.data, self.job.training.sequence)
        return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)

    def run(self) -> None:
        """Run one step without its loss's value, which a fake tensor does not have."""
        tokens, targets = self.batch()
        with loss_parallel() if self.job.plan.tensor > 1 else nullcontext():
            self.runtime.step(
                *((tokens,) if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=[],
                return_outputs=False,
            )
        self.reducer.finish()
        self.optimizer.step()

    def memory(self, peak: int) -> RankMemory:
        """Return what stays on the rank, with the ``peak`` of a step."""
        state = getattr(self.optimizer, "optim", self.optimizer).state
        states = [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
        return RankMemory(
            nbytes(self.parameters),
            nbytes(p.grad for p in self.parameters if p.grad is not None),
            nbytes(value for value in states if value.dim()),
            nbytes(value for value in states if not value.dim()),
            peak,
        )


def rank_memory(job: Job, rank: int) -> RankMemory:
    """Return the memory of ``rank`` in any step but the first."""
    return measured_rank(job, rank, FakeTrainer)


def measured_rank(job: Job, rank: int, make: Callable[[Job], FakeTrainer]) -> RankMemory:
    """Return the memory of ``rank`` in a step of the trainer that ``make`` makes."""
    tracker = Tracker()
    with _fake_group(job, rank, tracker), FakeTensorMode(), tracker:
        trainer = make(job)
        trainer.prepare()
        tracker.peak = 0
        trainer.run()
        return trainer.memory(tracker.peak)


@contextmanager
def _fake_group(job: Job, rank: int, tracker: Tracker) -> Iterator[None]:
    """Run the body as ``rank`` of a group that does not exist, on a trainer that can be faked."""
    default = torch.get_default_dtype()
    infer = "_propagate_tensor_meta_non_cached"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job.plan.mesh.num_ranks)
    try:
        torch.set_default_dtype(DTYPES[job.training.precision])
        make_mesh = _really(executor_trainer._device_mesh)
        with ExitStack() as patches:
            for target, name, value in (
                (executor_trainer, "_device_mesh", make_mesh),
                (executor_trainer, "initialize", lambda network, seed: None),
                (executor_trainer, "DistributedDataParallel", _unsynchronised),
                (Network, "to", lambda network, dtype: network),
                (DeviceMesh, "__init__", _really(DeviceMesh.__init__)),
                (ShardingPropagator, infer, tracker.quiet(getattr(ShardingPropagator, infer))),
            ):
                patches.enter_context(patch.object(target, name, value))
            # Adam reads its step counter for the bias correction
            patches.enter_context(patch("torch.optim.adam._get_value", lambda step: 1.0))
            yield
    finally:
        torch.set_default_dtype(default)
        dist.destroy_process_group()


def _unsynchronised(network: nn.Module, **options: Any) -> DistributedDataParallel:
    """Return ``network`` as DistributedDataParallel without what reads data: the first broadcast, the reduction."""
    module = DistributedDataParallel(network, init_sync=False, **options)
    module.register_comm_hook(None, _reduced)
    return module


def _reduced(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    result.set_result(bucket.buffer())
    return result


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` on tensors with data: the ranks of a mesh are numbers that it reads."""

    def real(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return real


def _no_warmup(stages: Sequence[Any], *_: Any) -> None:
    """Take shapes as stated, where torch's runtime asks its neighbours."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, one that several share once."""
    storages = {id(storage): storage for tensor in tensors for storage in get_untyped_storages(tensor)}
    return sum(storage.nbytes() for storage in storages.values())
