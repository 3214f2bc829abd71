"""Builds one rank's part of a plan on torch.distributed, and runs its training steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from meshwise.executor.job import Job
from meshwise.executor.model.network import Network, cross_entropy, initialize
from meshwise.executor.parallel import context_parallel, expert_parallel, fully_sharded, tensor_parallel
from meshwise.executor.parallel.data_parallel import (
    Finish,
    GradientReducer,
    Unit,
    average,
    find_sharing,
)
from meshwise.executor.parallel.expert_parallel import split_experts
from meshwise.executor.parallel.offload import ActivationOffload, HostMemory, count_offloaded_layers
from meshwise.executor.parallel.sharded_states import (
    CombinedOptimizer,
    ShardedOptimizer,
    StatePlacement,
    average_shard,
    main_dtype,
)
from meshwise.executor.parallel.tied import TiedTable
from meshwise.executor.recording.accelerator import CORE, Accelerator
from meshwise.executor.recording.private_torch import QuietStage, build_runtime, list_turns, reduce_shards
from meshwise.executor.recording.recorder import Recorder
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.training import data, optimizer
from meshwise.executor.training.data import open_text
from meshwise.executor.training.optimizer import GradientPart, clip_gradients, list_gradient_parts
from meshwise.simulator.program import TaskKind
from meshwise.strategies.plan.mesh import (
    AXES,
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    TENSOR,
    TENSOR_ROWS,
    list_data_ranks,
)
from meshwise.strategies.plan.plan import Plan, count_host_blocks
from meshwise.strategies.plan.recomputation import find_stage_recompute

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


class MeasuredStage(QuietStage):
    """A pipeline stage that records its passes.

    ``turn_microbatches`` are the microbatches after whose forward a backward of the stage follows at once.
    """

    recorder: Recorder
    turn_microbatches: frozenset[int]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record one forward pass."""
        if isinstance(self.submod, fully_sharded.OpaqueStage):
            self.submod.prepare_forward(turns=fwd_chunk_id in self.turn_microbatches)
        with self.recorder.span(TaskKind.FORWARD, self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # backward starts from the loss and never reads the logits: free their memory now
            self.fwd_cache[fwd_chunk_id] = ((), self.fwd_cache[fwd_chunk_id][1])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record one backward pass."""
        if isinstance(self.submod, fully_sharded.OpaqueStage):
            self.submod.prepare_backward(is_last=kwargs["last_backward"])
        with self.recorder.span(TaskKind.BACKWARD, self.stage_index, bwd_chunk_id):
            result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if kwargs.get("full_backward", True):
                reduce_shards(self.submod, is_last=kwargs["last_backward"])
        # the stage's input is a receive buffer, which would keep its gradient to the end of the step
        for value in self.backward_state.get(bwd_chunk_id, ((),))[0]:
            value.grad = None
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run and record the weight gradients of one backward pass."""
        with self.recorder.span(TaskKind.WEIGHT_GRADIENT, self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            reduce_shards(self.submod, is_last=last_backward)


class Trainer:
    """Builds the stages of this rank and runs steps; every rank of the job makes one."""

    def __init__(self, job: Job, recorder: Recorder, accelerator: Accelerator = CORE) -> None:
        plan = job.plan
        self.job, self.recorder, self.accelerator = job, recorder, accelerator
        self.text = open_text(job.data, job.seed)
        self.mesh = _device_mesh(plan, accelerator.device.type)
        if plan.pipeline > 1:  # NCCL needs a first message among all ranks of a group before any between two
            dist.all_reduce(torch.zeros((), device=accelerator.device), group=self.mesh[PIPELINE].get_group())
        self.host = HostMemory(recorder, accelerator)
        self.position = self.mesh[PIPELINE].get_local_rank()
        self.activations = ActivationOffload(plan.actions, self.position, self.host)
        self.sharing = find_sharing(self.mesh, DATA)
        self.expert_sharing = find_sharing(self.mesh, EXPERT_DATA) if plan.expert > 1 else self.sharing
        self.data_rank = int(list_data_ranks(plan.mesh)[self.mesh.get_rank()])
        stages = plan.actions.list_stages(self.position)
        self.networks = {stage: self._build_network(stage) for stage in stages}
        self.table = TiedTable(plan, self.networks) if job.spec.tied_embeddings else None
        self.modules = {stage: self._replicate(stage, network) for stage, network in self.networks.items()}
        sizes = plan.microbatch if isinstance(plan.microbatch, tuple) else (plan.microbatch,) * plan.data
        self.sizes, self.microbatch = sizes, sizes[self.data_rank]
        self.reducer = GradientReducer(self._reduction, plan.overlap_gradients)
        self.runtime = build_runtime(
            [self._build_stage(stage) for stage in stages], plan.actions, self._compute_loss, self._reduce_gradients
        )
        self.optimizer = self._build_optimizer()
        self.is_first, self.is_last = 0 in stages, len(plan.stages) - 1 in stages

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter of this rank, each once."""
        return list(dict.fromkeys(p for network in self.networks.values() for p in network.parameters()))

    def _build_optimizer(self) -> Any:
        name, plan, placement = self.job.training.optimizer, self.job.plan, self._place_states()
        implementation = self.accelerator.optimizer_options
        if self._shares_states:
            units = [unit for stage in self.networks for unit in self._list_units(stage)]
            kind = optimizer.find_optimizer(name, implementation)
            return ShardedOptimizer([*units, *self._late_units], kind, placement or StatePlacement(self.host))
        sharings = self.sharing, self.expert_sharing
        optimizers = [
            optimizer.build_optimizer(name, plan, weights, sharing.shards.get_group(), placement, implementation)
            for weights, sharing in zip(split_experts(self.parameters), sharings, strict=True)
            if weights
        ]
        return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)

    def _build_network(self, stage: int) -> Network:
        job = self.job
        blocks = job.plan.stages[stage].blocks
        recompute_arguments = find_stage_recompute(job.plan.recompute, stage), self.recorder.make_checkpoint_contexts
        with self.accelerator.device:
            splits = job.plan.splits_backward
            network = Network(job.spec, job.training.sequence, blocks, *recompute_arguments, splits_backward=splits)
        dtype = DTYPES[job.training.precision]
        # `fully_shard`'s shards are main weights
        network.to(main_dtype(dtype) if self._fully_sharded(stage) else dtype)
        self._initialize(network)
        network.make_layer_context = partial(self._make_layer_context, network)
        if job.plan.tensor > 1:
            tensor_parallel.apply(network, self.mesh[TENSOR], job.plan.sequence_parallel)
        if job.spec.experts is not None:
            expert_parallel.apply(network, self.mesh, sequence_parallel=job.plan.sequence_parallel)
        if job.plan.attention is not None and job.plan.context > 1:
            group = self.mesh[CONTEXT].get_group()
            context_parallel.apply(network, group, job.plan.attention, job.training.sequence)
        if dtype.itemsize == 2 and job.training.gradient_bytes == 4 and not self._fully_sharded(stage):
            for parameter in network.parameters():
                parameter.grad_dtype = torch.float32
        return network

    def _initialize(self, network: Network) -> None:
        initialize(network, self.job.seed)

    def _fully_sharded(self, stage: int) -> bool:
        """Return whether ``fully_shard`` has the parameters of a stage: with ZeRO 2 and 3, or blocks on the host."""
        plan = self.job.plan
        return (plan.zero >= 2 and plan.shards > 1) or count_host_blocks(plan, stage) > 0

    def _make_layer_context(self, network: Network, number: int, layer: nn.Module) -> AbstractContextManager[None]:
        """Return the context under which a layer runs forward, which may move its activations to the host."""
        num_offloaded = count_offloaded_layers(self.job.plan, self.position, len(network.layers))
        if number >= num_offloaded:
            return nullcontext()
        name = list(network.layers)[number]
        return self.activations.offload_layer(layer, f"layers.{name}", num_offloaded - 1 - number)

    @property
    def _shares_states(self) -> bool:
        """Whether ranks shard only the optimizer states: ZeRO 1."""
        return self.job.plan.zero == 1 and self.job.plan.shards > 1

    @property
    def _reduction(self) -> Callable[[Unit], Finish]:
        """The function that begins to reduce the gradients of a unit."""
        if self.job.plan.gradient_reduction == optimizer.SERVER:
            return partial(average, on_server=True)
        return average_shard if self._shares_states else average

    def _place_states(self) -> StatePlacement | None:
        """Return where optimizer states are; ``None`` where they are beside the parameters, of the same precision."""
        offload = self.job.plan.offload
        on_host = offload.fraction_at("optimizer", self.position)
        if not on_host and DTYPES[self.job.training.precision].itemsize > 2:
            return None
        return StatePlacement(self.host, on_host, offload.step)

    def _replicate(self, stage: int, network: Network) -> nn.Module:
        plan, dtype = self.job.plan, DTYPES[self.job.training.precision]
        if self._fully_sharded(stage):
            num_offloaded = count_host_blocks(plan, stage)
            reshard = plan.reshard_after_forward and (plan.zero == 3 or num_offloaded > 0)
            fully_sharded.shard(
                network,
                self.sharing.states,
                experts=self.expert_sharing.states if plan.expert > 1 else None,
                reshard=reshard,
                dtype=dtype,
                num_offloaded=num_offloaded,
                host=self.host,
            )
            return network if plan.splits_backward else fully_sharded.OpaqueStage(network, reshard=reshard)
        if plan.replicas == 1 or not self._uses_buckets:
            return network
        group = self.sharing.replicas.get_group()
        return DistributedDataParallel(network, process_group=group, gradient_as_bucket_view=True)

    @property
    def _uses_buckets(self) -> bool:
        """Whether DistributedDataParallel averages gradients as backward makes them.

        It takes plain tensors that one stage uses, and reduces them in the precision of the parameters, which is not
        enough for 16 bits.
        """
        plan = self.job.plan
        is_wide = DTYPES[self.job.training.precision].itemsize > 2
        is_plain = plan.tensor == plan.expert == 1 and is_wide and (self.table is None or self.table.shared is None)
        is_decentral = plan.gradient_reduction != optimizer.SERVER
        is_overlapped = plan.overlap_gradients and not plan.splits_backward
        return is_plain and is_decentral and is_overlapped and not self._shares_states

    def _build_stage(self, index: int) -> MeasuredStage:
        plan, training, hidden = self.job.plan, self.job.training, self.job.spec.hidden
        dtype = DTYPES[training.precision]
        num_tokens = training.sequence // plan.context
        length = num_tokens // (plan.tensor if plan.sequence_parallel else 1)
        tokens = torch.empty(self.microbatch, num_tokens, dtype=torch.int64, device="meta")
        boundary = torch.empty(self.microbatch, length, hidden, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(self.microbatch, num_tokens, self.job.spec.vocab, dtype=dtype, device="meta")
        stage = MeasuredStage(
            self.modules[index],
            index,
            len(plan.stages),
            self.accelerator.device,
            # shapes are stated: torch's own inference of them runs a backward pass, which DistributedDataParallel
            # counts as the first ("rebuilt parameter indices size is not same")
            input_args=tokens if index == 0 else boundary,
            output_args=logits if index == len(plan.stages) - 1 else boundary,
            group=self.mesh[PIPELINE].get_group(),
        )
        stage.recorder = self.recorder
        stage.turn_microbatches = list_turns(plan.actions, self.position, index)
        return stage

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.recorder.loss_span():
            # gradients become means over data ranks, so a rank's loss is weighted by its share of the sequences
            share = self.microbatch * len(self.sizes) / sum(self.sizes)
            loss = cross_entropy(logits.to(main_dtype(logits.dtype)), targets)
            return loss * (share / self.job.plan.num_microbatches)

    def _reduce_gradients(self, stage: int) -> None:
        plan = self.job.plan
        if plan.tensor > 1:
            tensor_parallel.complete_gradients(self.networks[stage])
        module = self.modules[stage]
        if (plan.zero < 2 or plan.shards == 1) and not isinstance(module, DistributedDataParallel):
            for unit in self._list_units(stage):
                self.reducer.add_unit(unit)

    def _list_units(self, stage: int) -> list[Unit]:
        """Return the units of a stage whose gradients are reduced when its last backward has ended."""
        late_ids = {id(parameter) for unit in self._late_units for parameter in unit.parameters}
        dense, experts = split_experts(
            [weight for weight in self.modules[stage].parameters() if id(weight) not in late_ids]
        )
        units = Unit(tuple(dense), self.sharing), Unit(tuple(experts), self.expert_sharing)
        return [unit for unit in units if unit.parameters]

    @property
    def _late_units(self) -> list[Unit]:
        """The token table where two stages use it: its gradient is complete only when both have ended backward.

        Where ranks shard its states, both ends are one unit, and so cut alike.
        """
        if self.table is None or not self.table.is_split:
            return []
        shared = self.table.shared
        tables = (shared,) if shared is not None else self.table.ends if self._shares_states else ()
        return [Unit(tables, self.sharing)] if tables else []

    def _sum_gradients(self) -> None:
        """Finish all reductions of gradients; those of stages began as their last backward ended."""
        for unit in self._late_units:
            self.reducer.add_unit(unit)
        self.reducer.finish()
        if self.table is not None and self.table.is_split:
            self.table.sum_gradients()

    def zero_gradients(self) -> None:
        """Drop all gradients; views of buckets become zeros, or backward would make new tensors beside the buckets."""
        has_buckets = any(isinstance(module, DistributedDataParallel) for module in self.modules.values())
        self.optimizer.zero_grad(set_to_none=not has_buckets)

    def step(self, index: int) -> float | None:
        """Run training step ``index`` and return the loss over this rank's samples; ``None`` off the last stage."""
        training = self.job.training
        arrays = data.load_share(index, training.global_batch, training.sequence, self.data_rank, self.sizes, self.text)
        context, device = self.job.plan.context, self.accelerator.device
        token_index: Any = slice(None)
        if context > 1:
            rank = self.mesh[CONTEXT].get_local_rank()
            token_index = context_parallel.list_positions(rank, context, training.sequence)
        # a contiguous copy: torch's pipeline compares strides with those of the stage's example input
        tokens, targets = (torch.from_numpy(array[:, token_index].copy()).to(device) for array in arrays)
        self.zero_gradients()
        losses: list[Tensor] = []
        with loss_parallel() if self.job.plan.tensor > 1 else nullcontext():
            self.runtime.step(
                *((tokens,) if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        self.recorder.heartbeat.beat("gradients")
        self._sum_gradients()
        with self.recorder.span(TaskKind.OPTIMIZER):
            if training.gradient_clipping:
                self._clip_gradients()
            optimizer.set_learning_rate(self.optimizer, self.job.learning_rate.rate_at(index, training.optimizer))
            self.optimizer.step()
        return sum(float(to_local(loss.detach())) for loss in losses) if self.is_last else None

    def _clip_gradients(self) -> None:
        """Clip all gradients by their global norm."""
        parts = list(list_gradient_parts(self.parameters))
        if isinstance(self.optimizer, ShardedOptimizer):
            cuts = {id(part.parameter): part.axes for part in parts}
            parts = [
                GradientPart(p, gradient, (*cuts[id(p)], axis)) for p, gradient, axis in self.optimizer.gradient_parts
            ]
        copies = self.table.copies if self.table is not None else ()
        axes = (TENSOR, EXPERT, self.sharing.axis, self.expert_sharing.axis)
        clip_gradients(parts, self.mesh, tuple(dict.fromkeys(axes)), PIPELINE, copies)


def _device_mesh(plan: Plan, kind: str) -> DeviceMesh:
    names = [name for name in AXES if name != TENSOR_ROWS]
    sizes = tuple(plan.mesh.size(name) for name in names)
    return init_device_mesh(kind, sizes, mesh_dim_names=tuple(names))
