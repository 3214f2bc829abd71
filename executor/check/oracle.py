"""The memory and the messages of one rank in a step, for a job of any size: the executor's trainer on fake tensors.

No figure comes from the simulator: parameters, gradients and optimizer states are those that torch makes, the peak is
that of torch's memory tracker, and communications are those that reach torch's dispatcher.

Fake tensors have shapes but no data, and a fake process group answers every collective at once, so one process can be
any rank of a job that does not exist. torch's ``MemTracker`` counts the bytes of every storage from its first use until
it is freed. The private interfaces of torch for this are all in this file (torch 2.13).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import _utils
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.weak import WeakIdKeyDictionary

from meshwise.executor.check.messages import Message, list_messages, list_tensors
from meshwise.executor.job import Job
from meshwise.executor.model.network import Network
from meshwise.executor.parallel.offload import HostMemory
from meshwise.executor.recording.accelerator import Accelerator
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.training import trainer as executor_trainer
from meshwise.executor.training.trainer import DTYPES, Trainer
from meshwise.simulator.brief import brief_repr


class _NoModules(ModTracker):
    """A tracker that ignores modules: the hooks of torch's own break a backward pass that is split."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _OneBucket:
    """A reducer that keeps its first bucket: to make new ones it would read their sizes from other ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class Tracker(MemTracker):
    """Counts live bytes and records messages; modules may run any number of times.

    ``MemTracker`` itself refuses a second forward pass, and so a second microbatch, for its statistics by module. It
    would also count the tensors of global shape on which DTensor infers layouts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()  # type: ignore[no-untyped-call]
        self.is_inferring, self.peak = False, 0
        self.messages: list[Message] = []
        self._uncounted: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def reset(self) -> None:
        """Reset the peak and the messages."""
        self.peak = 0
        self.messages.clear()

    def make_uncounted(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector that does not count."""
        vector: Tensor = self.uncount(torch.empty)(elements, dtype=dtype)
        self._uncounted[vector.untyped_storage()] = True
        return vector

    def leaves_out(self, tensor: Tensor) -> bool:
        """Return whether a tensor does not count."""
        return tensor.untyped_storage() in self._uncounted

    def _track(self, reftype: Any, t: Tensor) -> None:
        if isinstance(t, DTensor) or not self.leaves_out(t):
            super()._track(reftype, t)

    def _update_and_maybe_create_winfos(self, t: Tensor, *args: Any, **kwargs: Any) -> set[Any]:
        if not isinstance(t, DTensor) and self.leaves_out(t):  # an optimizer state on the host
            return set()
        return super()._update_and_maybe_create_winfos(t, *args, **kwargs)

    def _update_peak_stats(self, _: Any) -> None:
        self.peak = max(self.peak, self._curr_mem_snap.get(torch.device("cpu"), {"Total": 0})["Total"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_inferring:
            return func(*args, **kwargs or {})
        # an operator that reads only tensors of the host runs there, and so does not count what it makes
        if (tensors_read := list_tensors((args, kwargs))) and all(map(self.leaves_out, tensors_read)):
            host_result = func(*args, **kwargs or {})
            for tensor in list_tensors(host_result):
                self._uncounted[tensor.untyped_storage()] = True
            return host_result
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if result is not NotImplemented:
            self.messages += list_messages(func, args)
        return result

    def uncount(self, infer: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``infer`` as a function whose new tensors do not count."""

        def run_uncounted(*arguments: Any, **options: Any) -> Any:
            self.is_inferring = True
            try:
                return infer(*arguments, **options)
            finally:
                self.is_inferring = False

        return run_uncounted

    def wrap_unsynchronised(self, network: nn.Module, **options: Any) -> DistributedDataParallel:
        """Return ``network`` in DistributedDataParallel without its first broadcast and reduction, which read data."""
        module = DistributedDataParallel(network, init_sync=False, **options)
        ranks = tuple(dist.get_process_group_ranks(options["process_group"]))

        def reduce_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            self.messages.append(Message("all_reduce", ranks, bucket.buffer().nbytes))
            result: torch.futures.Future[Tensor] = torch.futures.Future()
            result.set_result(bucket.buffer())
            return result

        module.register_comm_hook(None, reduce_bucket)
        module.reducer = _OneBucket(module.reducer)  # type: ignore[assignment]
        return module


@contextmanager
def fake_rank(rank: int, ranks: int, replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[Tracker]:
    """Run the body as ``rank`` of ``ranks`` that do not exist, on tensors without data, and yield their tracker.

    Parameters
    ----------
    replacements
        Objects, the names of attributes and the values that these have meanwhile.
    """
    tracker, infer = Tracker(), "_propagate_tensor_meta_non_cached"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        # an equal mesh of another rank may have left entries there that name that rank's groups
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            for target, name, value in (
                *replacements,
                (DeviceMesh, "__init__", with_data(DeviceMesh.__init__)),
                (ShardingPropagator, infer, tracker.uncount(getattr(ShardingPropagator, infer))),
                (import_module("torch.optim.adam"), "_get_value", lambda step: 1.0),  # read for the bias correction
                (Tensor, "__float__", lambda tensor: 1.0),
            ):
                stack.enter_context(patch.object(target, name, value))
            for context in (FakeTensorMode(), tracker):
                stack.enter_context(context)
            yield tracker
    finally:
        dist.destroy_process_group()


def with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one that runs on tensors with data: a mesh reads the numbers of its ranks."""

    def run_with_data(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return run_with_data


def skip_shape_exchange(runtime: Any) -> None:
    """Make a pipeline's runtime take shapes as stated, instead of asking the neighbouring stages.

    After its own trial of shapes torch would also drop gradients before the first step; here they stay.
    """
    runtime._warmup_p2p = _skip_warmup
    for stage in runtime._stages:
        stage._post_metadata_inference_cleanup = lambda: None


def _skip_warmup(stages: Sequence[Any], *_: Any) -> None:
    modes: Any = getattr(_utils, "InferenceMode", None)  # new in torch 2.13
    for stage in stages if modes is not None else ():
        stage._inference_mode = modes.STATIC


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``; a storage that several tensors share counts once."""
    storages = {id(storage): storage for tensor in tensors for storage in get_untyped_storages(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


class _SilentHeart:
    """A heartbeat that nobody reads."""

    step = -1

    def beat(self, operation: str) -> None:
        """Do nothing."""


class FakeHostMemory(HostMemory):
    """Makes fake tensors on the host, which ``tracker`` does not count."""

    def __init__(self, recorder: Recorder, accelerator: Accelerator, *, tracker: Tracker) -> None:
        super().__init__(recorder, accelerator)
        self.tracker = tracker

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the host."""
        return self.tracker.make_uncounted(elements, dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host."""
        return self.tracker.leaves_out(tensor)

    def ensure_on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host: a copy, or the tensor itself where it is there."""
        return tensor if self.holds(tensor) else self.copy_to_host(tensor)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: those that stay from step to step, and the peak of a step.

    Main weights count in ``optimizer``, also where the shards of parameters are the main weights of a training in 16
    bits. ``steps`` are the counters of Adam, one fp32 number for each parameter tensor, which ``optimizer`` leaves out.
    """

    parameters: int
    gradients: int
    optimizer: int
    steps: int
    peak: int


@dataclass(frozen=True, slots=True)
class RankOracle:
    """The memory of a rank, and its messages in one step, in order."""

    memory: RankMemory
    messages: tuple[Message, ...]

    __repr__ = brief_repr()


class FakeTrainer(Trainer):
    """The executor's trainer as the only rank that exists."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Recorder(_SilentHeart()))  # type: ignore[arg-type]
        skip_shape_exchange(self.runtime)

    def read_oracle(self, tracker: Tracker) -> RankOracle:
        """Return the memory of the rank, and its messages in the step that was tracked."""
        state_values = (values.values() for values in self.optimizer.state.values())
        state_tensors = [value for values in state_values for value in values if isinstance(value, Tensor)]
        device_parameters = [
            parameter for parameter in self.parameters if not self.host.holds(to_local(parameter.detach()))
        ]
        main_weights = [
            parameter for parameter in device_parameters if parameter.dtype is not DTYPES[self.job.training.precision]
        ]
        memory = RankMemory(
            nbytes(device_parameters) - nbytes(main_weights),
            nbytes(p.grad for p in device_parameters if p.grad is not None),
            nbytes(value for value in state_tensors if value.dim()) + nbytes(main_weights),
            nbytes(value for value in state_tensors if not value.dim()),
            tracker.peak,
        )
        return RankOracle(memory, tuple(tracker.messages))


def _convert_network(network: Network, dtype: torch.dtype) -> Network:
    """Convert a network in place: ``Module.to`` refuses tensors with weak references, which the tracker has."""
    parameters: dict[Tensor, nn.Parameter] = {}  # a tied parameter is converted once
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.dtype is not dtype:
                setattr(module, name, parameters.setdefault(parameter, nn.Parameter(parameter.detach().to(dtype))))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return network


def rank_oracle(job: Job, rank: int, make_trainer: Callable[[Job], FakeTrainer] = FakeTrainer) -> RankOracle:
    """Return the memory and the messages of ``rank`` in any step but the first; ``make_trainer`` makes its trainer."""
    replacements = (
        (executor_trainer, "_device_mesh", with_data(executor_trainer._device_mesh)),
        (executor_trainer, "initialize", lambda network, seed: None),
        (Network, "to", _convert_network),
    )
    with fake_rank(rank, job.plan.mesh.num_ranks, replacements) as tracker:
        with (
            patch.object(executor_trainer, "DistributedDataParallel", tracker.wrap_unsynchronised),
            patch.object(executor_trainer, "HostMemory", partial(FakeHostMemory, tracker=tracker)),
        ):
            trainer = make_trainer(job)
        trainer.step(0)  # makes optimizer states
        tracker.reset()
        trainer.step(1)
        return trainer.read_oracle(tracker)
