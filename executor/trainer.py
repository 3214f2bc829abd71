"""One rank's share of a plan, built on torch.distributed and stepped."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from executor import clipping, data, fully_sharded, optimizer, tensor_parallel
from executor.activation_offload import ActivationOffload, layers_away
from executor.data_parallel import GradientReducer, local
from executor.host_memory import HostMemory
from executor.job import Job
from executor.model import Network, cross_entropy, initialize
from executor.private_torch import flattened, runtime
from executor.recorder import Recorder
from executor.split_optimizer import main_type
from simulator.program import TaskKind
from strategies.lowering.on_host import blocks_on_host
from strategies.mesh import DATA, PIPELINE, REPLICA, TENSOR
from strategies.plan import Plan
from strategies.recomputation import of_stage

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


class MeasuredStage(PipelineStage):
    """A pipeline stage whose passes are recorded."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record one forward pass."""
        with self.recorder.span(TaskKind.FORWARD, self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last:  # backward starts from the loss: logits kept until then are memory that nothing reads
            self.fwd_cache[fwd_chunk_id] = ((), self.fwd_cache[fwd_chunk_id][1])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record one backward pass."""
        with self.recorder.span(TaskKind.BACKWARD, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record the gradients of weights of one backward pass."""
        with self.recorder.span(TaskKind.WEIGHT_GRADIENT, self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Trainer:
    """Builds the stages of this rank and runs steps; every rank of the job makes one."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        plan = job.plan
        self.job, self.recorder = job, recorder
        self.mesh = _device_mesh(plan)
        self.replicas = flattened(self.mesh, (REPLICA, DATA))
        self.host = HostMemory(recorder)
        self.position = self.mesh[PIPELINE].get_local_rank()
        self.activations = ActivationOffload(plan, self.position, self.host)
        self.data_rank = self.replicas.get_local_rank()
        stages = plan.schedule.stages_of(self.position)
        self.networks = {stage: self._network(stage) for stage in stages}
        self.modules = {stage: self._replicate(stage, network) for stage, network in self.networks.items()}
        sizes = plan.microbatch if isinstance(plan.microbatch, tuple) else (plan.microbatch,) * plan.data
        self.sizes, self.microbatch = sizes, sizes[self.data_rank]
        server = plan.gradient_reduction == optimizer.SERVER
        self.reducer = GradientReducer(self.replicas.get_group(), plan.overlap_gradients, server=server)
        self.runtime = runtime(
            [self._stage(stage) for stage in stages], plan.schedule, self._loss, self._reduce_gradients
        )
        shards = self.mesh[DATA].get_group()
        self.optimizer = optimizer.build(job.training.optimizer, plan, self.parameters, shards, self._states())
        self.is_first, self.is_last = 0 in stages, len(plan.stages) - 1 in stages

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that this rank steps."""
        return [parameter for network in self.networks.values() for parameter in network.parameters()]

    def _network(self, stage: int) -> Network:
        job = self.job
        blocks = job.plan.stages[stage].blocks
        contexts = self.recorder.checkpoint_contexts
        network = Network(job.spec, job.training.sequence, blocks, of_stage(job.plan.recompute, stage), contexts)
        dtype = DTYPES[job.training.precision]
        network.to(main_type(dtype) if self._fully_sharded(stage) else dtype)  # shards are the main weights
        initialize(network, job.seed)
        network.keeping = partial(self._keeping, network)
        if job.plan.tensor > 1:
            tensor_parallel.apply(network, self.mesh[TENSOR], job.plan.sequence_parallel)
        if dtype.itemsize == 2 and job.training.gradient_bytes == 4 and not self._fully_sharded(stage):
            for parameter in network.parameters():
                parameter.grad_dtype = torch.float32
        return network

    def _fully_sharded(self, stage: int) -> bool:
        """Return whether torch's ``fully_shard`` keeps the parameters of a stage."""
        plan = self.job.plan
        return (plan.zero >= 2 and plan.shards > 1) or blocks_on_host(plan, stage) > 0

    def _keeping(self, network: Network, number: int, layer: nn.Module) -> AbstractContextManager[None]:
        """Return the context under which a layer runs forward: its activations may go to the host."""
        away = layers_away(self.job.plan, self.position, len(network.layers))
        if number >= away:
            return nullcontext()
        name = list(network.layers)[number]
        return self.activations.layer(layer, f"layers.{name}", away - 1 - number)

    def _states(self) -> optimizer.States | None:
        """Return where optimizer states are; None where they are with the parameters, and as precise as these."""
        offload = self.job.plan.offload
        on_host = offload.at("optimizer", self.position)
        if not on_host and DTYPES[self.job.training.precision].itemsize > 2:
            return None
        return optimizer.States(self.host, on_host, offload.step)

    def _replicate(self, stage: int, network: Network) -> nn.Module:
        plan, dtype = self.job.plan, DTYPES[self.job.training.precision]
        half = dtype.itemsize == 2
        if self._fully_sharded(stage):
            away = blocks_on_host(plan, stage)
            mesh = self.mesh[REPLICA, DATA] if plan.replica > 1 else self.mesh[DATA]
            reshard = plan.reshard_after_forward and (plan.zero == 3 or away > 0)
            mixed = fully_sharded.mixed(dtype) if half else None
            fully_sharded.shard(network, mesh, reshard=reshard, precision=mixed, away=away, host=self.host)
            return network if plan.splits_backward else fully_sharded.Whole(network)
        # DistributedDataParallel reduces gradients in the precision of parameters
        flat = plan.tensor > 1 or plan.splits_backward or plan.gradient_reduction == optimizer.SERVER or half
        if plan.data == 1 or flat or not plan.overlap_gradients:
            return network
        return DistributedDataParallel(network, process_group=self.replicas.get_group(), gradient_as_bucket_view=True)

    def _stage(self, index: int) -> MeasuredStage:
        plan, training, hidden = self.job.plan, self.job.training, self.job.spec.hidden
        dtype = DTYPES[training.precision]
        length = training.sequence // (plan.tensor if plan.sequence_parallel else 1)
        tokens = torch.empty(self.microbatch, training.sequence, dtype=torch.int64, device="meta")
        between = torch.empty(self.microbatch, length, hidden, dtype=dtype, device="meta", requires_grad=True)
        stage = MeasuredStage(
            self.modules[index],
            index,
            len(plan.stages),
            torch.device("cpu"),
            # shapes are stated because torch's own inference of them runs a backward pass that
            # DistributedDataParallel counts: "rebuilt parameter indices size is not same"
            input_args=tokens if index == 0 else between,
            output_args=between,
            group=self.mesh[PIPELINE].get_group(),
        )
        stage.recorder = self.recorder
        return stage

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self.recorder.loss_span():
            share = self.microbatch * len(self.sizes) / sum(self.sizes)  # of a mean over ranks
            return cross_entropy(logits.to(main_type(logits.dtype)), targets) * (share / self.job.plan.num_microbatches)

    def _reduce_gradients(self, stage: int) -> None:
        plan = self.job.plan
        if plan.tensor > 1:
            tensor_parallel.complete_gradients(self.networks[stage])
        if plan.zero < 2 or plan.shards == 1:
            self.reducer.stage_done(self.modules[stage])

    def step(self, index: int) -> float | None:
        """Run training step ``index`` and return the loss over this rank's samples; None off the last stage."""
        training = self.job.training
        arrays = data.share(index, training.global_batch, training.sequence, self.data_rank, self.sizes)
        tokens, targets = (torch.from_numpy(array.copy()) for array in arrays)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        with loss_parallel() if self.job.plan.tensor > 1 else nullcontext():
            self.runtime.step(
                *((tokens,) if self.is_first else ()),
                target=targets if self.is_last else None,
                losses=losses,
                return_outputs=False,
            )
        self.recorder.heartbeat.beat("gradients")
        self.reducer.finish()
        with self.recorder.span(TaskKind.OPTIMIZER):
            if training.gradient_clipping:
                clipping.clip(self.parameters, self.mesh, (TENSOR, DATA), PIPELINE)
            self.optimizer.step()
        return sum(float(local(loss.detach())) for loss in losses) if self.is_last else None


def _device_mesh(plan: Plan) -> DeviceMesh:
    axes = [(name, 1) for name in (PIPELINE, REPLICA, DATA, TENSOR) if name not in dict(plan.mesh.axes)]
    axes += list(plan.mesh.axes)
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
