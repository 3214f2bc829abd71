"""All private interfaces of torch that the executor uses, and names that differ between its versions.

Checked with torch 2.13 and 2.11. ``torch.distributed.pipelining`` documents its schedule classes; the runtime that
takes any order of actions, and the actions themselves, are private.

Attention that also returns the logsumexp of its scores, which merging it with attention to other keys needs, runs on
torch's fused kernels. For devices and dtypes without one it is computed here by products of whole scores [1]_.

References
----------
.. [1] Dao 2023, "FlashAttention-2", section 2.3.2 (gradients from the output and the logsumexp).
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import REDUCE_GRAD, _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.recording.trace import Allocation, TraceEvent
from meshwise.strategies.schedules.schedule import ActionKind, Schedule


def make_own_store() -> HashStore:
    """Return a store of a process group of this process alone."""
    return HashStore()


def attention_by_products(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and the logsumexp of its scores.

    Shapes are ``(batch, heads, tokens, head_dim)`` and ``(batch, heads, tokens)``.
    """
    scores = _scores(query, key, causal=causal)
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp() @ value, logsumexp


def attention_gradients_by_products(
    gradient: Tensor, query: Tensor, out: Tensor, logsumexp: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, where the keys may be some of those behind ``out``."""
    probabilities = (_scores(query, key, causal=causal) - logsumexp.unsqueeze(-1)).exp()
    inner = (gradient * out).sum(-1, keepdim=True)
    score_gradient = probabilities * (gradient @ value.transpose(-1, -2) - inner) / math.sqrt(query.shape[-1])
    return score_gradient @ key, score_gradient.transpose(-1, -2) @ query, probabilities.transpose(-1, -2) @ gradient


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(future, float("-inf"))


def compile_in_place(module: nn.Module) -> nn.Module:
    """Return the user's own module where ``torch.compile`` has wrapped it, compiled by ``Module.compile`` instead.

    Its parameters and submodules then have the names that they have without a compiler.
    """
    if not isinstance(module, OptimizedModule):
        return module
    own_module: Any = module._orig_mod
    own_module._compiled_call_impl = module.dynamo_ctx(own_module._call_impl)
    return compile_in_place(own_module)


def ignore_in_data_parallel(module: nn.Module, names: Iterable[str]) -> None:
    """Have ``DistributedDataParallel`` leave parameters of a module alone, by their names."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of a module runs what a compiler made of it."""
    return module._compiled_call_impl is not None


reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Collectives of one tensor, by their names in torch 2.13, or in earlier versions."""

_COMMUNICATING = ("gloo:", "c10d::_", "_c10d_functional::")
_ITEMSIZE = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4}
"""Bytes of an element, by the profiler's name of the dtype."""


INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of the network interfaces, separated by commas, on which gloo listens and connects."""


class _OneWorker(type):
    """Builds a group of gloo as torch does, but with one worker thread; an instance is any group of gloo."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timeout, 1
        names = filter(None, os.environ.get(INTERFACE, "").split(","))
        devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
        options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class _OneWorkerGloo(metaclass=_OneWorker):
    """What torch takes for ``ProcessGroupGloo`` where it makes groups; it has no way to pass options of gloo."""


def limit_gloo_workers() -> None:
    """Give every group of gloo that this process makes from now on one worker thread instead of two.

    Two workers of a group can corrupt the heap of torch 2.13. When a collective is over and its waiter knows, the
    worker notes the collective's name in a string of the group, for the flight recorder, without a lock (in
    ``ProcessGroupGloo::runLoop``, ``lastCompletedWorkName``). If the other worker has by then run the next collective
    and does the same, both free the same old name. Names of up to 15 characters are not on the heap; the name of each
    all-gather of DTensor is, ``ALLGATHER_COALESCED``. It happens once in some million collectives, on busy cores, and
    shows later: "malloc(): unaligned tcache chunk detected" or "double free or corruption".

    All ranks start the collectives of a group in one order, so a single worker never waits for a later one. Different
    groups still run at the same time.
    """
    distributed_c10d.ProcessGroupGloo = _OneWorkerGloo  # type: ignore[assignment, misc]


class QuietStage(PipelineStage):
    """A pipeline stage that sends no first messages to its neighbours: its group has already had one of all its ranks.

    In torch 2.11 such a message goes to the rank itself where two stages in a row are on one rank, as in a schedule in
    a V, which gloo cannot send ("Pair is not connected").
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def backward_inputs_first(
    outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor], weights: Sequence[nn.Parameter]
) -> list[Tensor | None]:
    """Return the gradients of inputs, and add those of weights, which torch's pipelines compute after them."""
    found, groups = stage_backward_input(outputs, gradients, inputs, iter(weights))
    stage_backward_weight(iter(weights), groups)
    return list(found)


def list_turns(schedule: Schedule, position: int, stage: int) -> frozenset[int]:
    """Return the microbatches after whose forward a pipeline rank turns at once to a backward of the same stage."""
    turn = ActionKind.FORWARD, ActionKind.BACKWARD
    return frozenset(
        action.microbatch
        for action, successor in pairwise(schedule.orders[position])
        if (action.kind, successor.kind) == turn and action.stage == successor.stage == stage
    )


def build_runtime(
    stages: Sequence[PipelineStage],
    schedule: Schedule,
    loss: Callable[[Any, Tensor], Tensor],
    reduce_gradients: Callable[[int], None],
) -> Any:
    """Return torch's pipeline runtime, loaded with exactly the order of ``schedule``.

    It calls ``reduce_gradients(stage)`` once for each stage, after the stage's last backward.
    """
    runtime_class: Any = _PipelineScheduleRuntime
    result = runtime_class(list(stages), schedule.num_microbatches, loss_fn=loss, scale_grads=False)
    orders = {rank: [_Action.from_str(str(a)) for a in order] for rank, order in enumerate(schedule.orders)}
    result._prepare_schedule_with_comms(orders)
    stage_by_index = {stage.stage_index: stage for stage in stages}

    def reduce(action: _Action, _: object) -> None:
        stage_by_index[action.stage_index].perform_reduce_grad(1)  # reduces a sharded stage, does nothing for others
        reduce_gradients(action.stage_index)

    result.register_custom_function(REDUCE_GRAD, reduce)
    return result


def reduce_shards(module: nn.Module, *, is_last: bool) -> None:
    """Reduce the gradients that a backward pass left of a module of ``fully_shard``; the last one over replicas too.

    Parameters stay gathered. The hooks of ``fully_shard`` would do this, but they miss weight gradients that are
    computed apart from the backward pass, and torch's pipeline keeps whole gradients to the end of a step.
    """
    if not isinstance(module, FSDPModule):
        return
    module.set_requires_gradient_sync(True)
    module.set_requires_all_reduce(is_last)
    module.set_is_last_backward(True)  # each pass reduces; torch's pipeline sets it only at the end of a step
    state: Any = module._get_fsdp_state()
    for module_state in state._state_ctx.all_states:
        has_groups = hasattr(module_state, "_fsdp_param_groups")
        groups = module_state._fsdp_param_groups if has_groups else [module_state._fsdp_param_group]
        for group in filter(None, groups):
            group.post_backward()
    state._root_post_backward_final_callback()  # without it the last reduced gradients stay until the next reduction


def storage_number(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it lives; a fake tensor's storage has no address."""
    return int(tensor.untyped_storage()._cdata)


def detach_saved(tensor: Tensor) -> Tensor:
    """Return a saved tensor without its node of autograd's graph, for a hook to keep.

    An operator that saves its own result would otherwise make a cycle: the result keeps the operator's node, which
    keeps what the hook returned. Where autograd does not free the graph, as in a backward in two parts, nothing would.
    """
    return tensor.detach() if tensor.grad_fn is not None else tensor


@contextmanager
def trust_causal_hints() -> Iterator[None]:
    """Have ``nn.Transformer`` not look into masks, whether they are causal: an export has no numbers to look at.

    A mask that it does not know to be causal is applied as any other is.
    """
    with patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", _read_hint):
        yield


def _read_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return bool(is_causal)


def wait_collective(tensor: Tensor) -> Tensor:
    """Return a tensor after its collective, if it is the result of one, has ended."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the ranks along several axes of a mesh, in its order, as one axis; axes of one rank are left out."""
    wide_axes = tuple(axis for axis in axes if mesh[axis].size() > 1)
    if len(wide_axes) < 2:
        return mesh[wide_axes[0] if wide_axes else axes[-1]]
    return mesh[wide_axes]._flatten("_".join(wide_axes))


def attention_with_logsumexp(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention and the logsumexp of its scores, by torch's fused kernel where the device and dtype have one.

    Shapes are ``(batch, heads, tokens, head_dim)`` and ``(batch, heads, tokens)``.
    """
    if query.is_cpu:
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    elif query.dtype.itemsize == 2:
        out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    else:  # FlashAttention takes only 16 bits
        out, logsumexp = attention_by_products(query, key, value, causal=causal)
    return out, logsumexp


def attention_gradients(
    gradient: Tensor, query: Tensor, out: Tensor, logsumexp: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, where the keys may be some of all.

    ``out`` and ``logsumexp`` are those of attention over all keys.
    """
    if query.is_cpu:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query_gradient, key_gradient, value_gradient = backward(
            gradient, query, key, value, out, logsumexp, 0.0, causal
        )
        return query_gradient, key_gradient, value_gradient
    if query.dtype.itemsize == 2:
        seed, unused = (torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        lengths = (None, None, query.shape[2], key.shape[2], 0.0, causal, seed, unused)  # no dropout
        query_gradient, key_gradient, value_gradient = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(part.contiguous() for part in (gradient, query, key, value, out, logsumexp)), *lengths
        )
        return query_gradient, key_gradient, value_gradient
    return attention_gradients_by_products(gradient, query, out, logsumexp, key, value, causal=causal)


def has_kernel(operator: str, device: str) -> bool:
    """Return whether torch has a kernel of an operator for a kind of device.

    >>> has_kernel("aten::mm", "cpu"), has_kernel("aten::_no_such_product", "cpu")
    (True, False)
    """
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    is_known = torch._C._dispatch_has_kernel(operator)
    return is_known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def list_chunks(tensor: DTensor) -> list[Any]:
    """Return the offsets and sizes of this rank's chunks of ``tensor``, as torch's own checkpoints do."""
    result: list[Any] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return result


def read_trace_events(profiler: Any) -> list[TraceEvent]:
    """Return the events of a finished ``torch.profiler.profile`` that recorded shapes, in order of start."""
    raw = profiler.profiler.kineto_results.events()
    rows = [TraceEvent(e.name(), e.start_ns(), e.end_ns(), _count_message_bytes(e)) for e in raw]
    return sorted(rows, key=lambda row: row.start)


def _count_message_bytes(event: Any) -> int:
    """Return the bytes of the largest tensor that a communication reads or writes; 0 where shapes are unknown."""
    name: str = event.name()
    if not name.startswith(_COMMUNICATING) or not event.shapes():
        return 0
    tensors = zip(event.shapes(), event.dtypes(), strict=True)
    size = max((math.prod(shape) * _ITEMSIZE.get(dtype, 0) for shape, dtype in tensors if shape), default=0)
    is_gather = name.startswith("_c10d_functional::all_gather")  # its shapes are the input's, then the number of ranks
    return size * int(event.concrete_inputs()[1]) if is_gather else size


def read_allocations(profiler: Any, device: str) -> list[Allocation]:
    """Return the allocations and frees that a profiler saw on a kind of device, in order of time.

    Only the profiler's tree of events has their addresses.
    """
    result, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            if fields.device.type == device:
                result.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(result)
