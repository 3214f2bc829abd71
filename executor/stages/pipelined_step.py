"""One step of training of a user's module in stages: a pipeline, and data parallelism of every stage.

A rank has the parameters of its own stages only: the user's module loses the others. Of a module that is built without
its parameters a rank makes no others: an export needs shapes alone, and what the first batch shows of the loss is found
by values that operators are given one parameter at a time (`meshwise.executor.starting.trials`). Passes run in the
order of the plan on torch's pipeline runtime.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.modules.batches import split_evenly
from meshwise.executor.modules.blocks import list_blocks, require_blocks
from meshwise.executor.modules.courses import broadcast_states
from meshwise.executor.modules.evaluation import EvaluateFunction
from meshwise.executor.modules.losses import LossError, LossKind, StepLoss, WeightedLoss, list_batch_norms
from meshwise.executor.modules.quiet import KeepDouble
from meshwise.executor.modules.sharding import DTYPES, average_scalars
from meshwise.executor.modules.states import SAFETENSORS, is_distributed, write_module
from meshwise.executor.modules.step import CLIP_EPSILON, TrainingStep
from meshwise.executor.parallel.module_offload import BlockOffload
from meshwise.executor.recording.private_torch import QuietStage, build_runtime, list_turns
from meshwise.executor.recording.tensors import to_local, to_whole
from meshwise.executor.recording.weight_files import find_aliases
from meshwise.executor.stages.buckets import GradientBuckets
from meshwise.executor.stages.cuts import choose_cuts, list_operators
from meshwise.executor.stages.export import ExportError, StepGraph, export_step, list_inputs
from meshwise.executor.stages.parts import StageNodes, divide_graph, list_parameter_names, splits_by_inputs
from meshwise.executor.stages.stage import Stage, StageShards, make_examples
from meshwise.executor.stages.tied import TiedParameters
from meshwise.executor.starting.construction import fill_parameters
from meshwise.executor.starting.fakes import copy_without_values, make_fake_mode
from meshwise.executor.starting.shards import fill_shard, make_room
from meshwise.strategies.plan.recomputation import PerStage
from meshwise.strategies.schedules.schedule import find_rule


def copy_skeleton(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters have shapes and no data; buffers are copied."""
    empty = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, dict(empty))


def _do_nothing() -> None:
    """Compute nothing."""


class _PipelineStage(QuietStage):
    """A stage of torch's pipeline that tells its shards, or its buckets, which backward is the last one."""

    buckets: GradientBuckets | None = None
    activations: BlockOffload | None = None
    turn_microbatches: frozenset[int] = frozenset()
    """Those after whose forward a backward of the stage follows at once."""

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Run one forward pass."""
        if isinstance(self.submod, StageShards):
            self.submod.prepare_forward(turns=fwd_chunk_id in self.turn_microbatches)
        if self.activations is not None:
            self.activations.begin_pass(self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """Run one backward pass."""
        is_last = bool(options["last_backward"])
        if isinstance(self.submod, StageShards):
            self.submod.prepare_backward(is_last=is_last)
        if self.buckets is not None and is_last and options.get("full_backward", True):
            self.buckets.begin_last()
        result = super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        # the stage's inputs are receive buffers, which would keep their gradients to the end of the step
        for value in self.backward_state.get(bwd_chunk_id, ((),))[0]:
            value.grad = None
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        if gradients:  # messages are contiguous, and gradients of transposed values may not be
            self.bwd_cache[bwd_chunk_id] = tuple(item if item is None else item.contiguous() for item in gradients)
        return result


class PipelinedStep(TrainingStep):
    """A step of training of a module in stages; parameters are those of `TrainingStep`.

    Ranks are numbered by stages first: those of one stage, which have samples of their own, follow each other. All
    stages of a pipeline are called with the same samples.
    """

    @property
    def _keeps_parts(self) -> bool:
        return True

    def _find_loss_kind(self, batch: Any) -> None:
        find = super()._find_loss_kind
        self._try(lambda: find(batch), lambda _: self._loss_kind is not LossKind.SAMPLES)

    def _check_loss(self, batch: Any) -> bool:
        check = super()._check_loss
        return self._try(lambda: check(batch), bool)

    def _begin(self, batch: Any) -> tuple[Optimizer, LRScheduler | None]:
        """Export the module on the first batch, cut it, and keep this rank's stages."""
        self._find_loss_kind(batch)
        self._require_whole_statistics()
        self._check_loss(batch)
        broadcast_states(self.module)
        layout = self.layout
        self._whole, self._aliases = copy_skeleton(self.module), find_aliases(self.module)
        if layout.zero:
            self._require_one_dtype()
        sizes = {"pipeline": layout.pipeline, "replica": layout.data // layout.shards, "shard": layout.shards}
        sizes |= self._operator_axes
        self._mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        microbatch = split_evenly(batch, layout.num_microbatches, "microbatches")[0]
        self._cuts = layout.cuts or self._find_planned_cuts(microbatch)
        num_items = self._count_items(batch) if self._loss_kind is LossKind.SHARES else None
        with KeepDouble() if self.precision == "fp64" else nullcontext():
            step = self._export(microbatch, num_items)
        self._require_equal_buffers(step)
        position = self._mesh["pipeline"].get_local_rank()
        self._group = self._mesh["pipeline"].get_group()
        dist.all_reduce(torch.zeros((), device=self.device), group=self._group)  # NCCL needs one among all ranks first
        actions = layout.actions
        all_nodes = self._divide(step, actions.num_stages)
        stage_names = [list_parameter_names(step, nodes.operators) for nodes in all_nodes]
        self._tied = TiedParameters(stage_names, actions.stage_ranks, position, self._mesh)
        self._activations = self._make_block_offload(position)
        own_places = actions.list_stages(position)
        self._fill_own([stage_names[place] for place in own_places], stage_names, is_first=position == 0)
        stages = self._build_stages(step, {place: all_nodes[place] for place in own_places})
        self._input_names = step.inputs
        self._buckets: dict[int, GradientBuckets] = {}
        runtime_stages = [self._wrap(step, place, stage, all_nodes) for place, stage in stages.items()]
        self._runtime = build_runtime(runtime_stages, actions, self._add_loss, lambda _: None)
        self._is_first, self._is_last = 0 in stages, actions.num_stages - 1 in stages
        self._stages = stages
        self._keep_own(frozenset(chain.from_iterable(stage_names)), frozenset(step.updates), is_first=position == 0)
        self._values = None
        self._step_loss: StepLoss | None = None
        return self._build_optimizer()

    @property
    def _operator_axes(self) -> dict[str, int]:
        """The sizes of the axes over which operators are cut."""
        return {}

    def _export(self, microbatch: Any, num_items: Tensor | None) -> StepGraph:
        """Return the graph of a microbatch."""
        if self._values is not None:
            copy = copy_without_values(self.module, make_fake_mode(), self.device)
            try:
                return export_step(copy, self.loss, microbatch, self._loss_kind, num_items)
            except ExportError as error:
                if self.device.type == "cpu":
                    raise
                # operators of other devices may lack what tells shapes alone
                self._fill(f"its export needs values ({error})")
        return export_step(self.module, self.loss, microbatch, self._loss_kind, num_items)

    def _find_planned_cuts(self, microbatch: Any) -> tuple[str, ...]:
        """Return the modules at which the stages of a plan begin; none for stages of about equal work."""
        return ()

    @property
    def _has_shards(self) -> bool:
        """Whether data ranks share the parameters of a stage."""
        return self.layout.data > 1 and self.layout.zero > 0

    def _fill_own(
        self, own_names: Sequence[Sequence[str]], all_names: Sequence[Sequence[str]], *, is_first: bool
    ) -> None:
        """Give the parameters of this rank's stages their first values, unless shards of them get these.

        Parameters
        ----------
        own_names, all_names
            Names of the parameters of this rank's stages, and of all.
        is_first
            Whether this rank has those that no stage reads.
        """
        if self._values is None:
            return
        read = set(chain.from_iterable(all_names))
        names = set[str]() if self._has_shards else set(chain.from_iterable(own_names))
        if is_first:
            names |= {name for name, _ in self.module.named_parameters() if name not in read}
        fill_parameters(self.module, self._values, names, self.device)

    def _divide(self, step: StepGraph, num_stages: int) -> tuple[StageNodes, ...]:
        own_blocks = {id(block) for block in list_blocks(self.module)}
        blocks = frozenset(name for name, part in self.module.named_modules() if id(part) in own_blocks)
        operators = list_operators(step)
        cuts = choose_cuts(step, operators, num_stages, self._cuts, blocks)
        stages = divide_graph(step, operators, cuts, blocks)
        counts, choice = [len(nodes.blocks) for nodes in stages], self.layout.recompute
        pairs = zip(counts, choice.stages, strict=True) if isinstance(choice, PerStage) else [(max(counts), choice)]
        for count, stage_choice in pairs:
            require_blocks(count, stage_choice)
        return stages

    def _watch_buffers(self) -> None:
        """Watch none: `_require_equal_buffers` knows from the graph which ones forward renews."""

    def _require_equal_buffers(self, step: StepGraph) -> None:
        """Raise where ranks would have different buffers: each renews them from its own samples."""
        names = [name for name in step.updates if self.module.get_buffer(name).is_floating_point()]
        if names and (self.layout.data > 1 or self.layout.num_microbatches > 1):
            raise LossError(
                f"buffers of a module in stages are equal on all ranks, met {names[0]}, which forward changes with the "
                "samples of a rank; nearest: data=1,num_microbatches=1"
            )

    def _require_whole_statistics(self) -> None:
        norms = list_batch_norms(self.module)
        if norms and (self.layout.data > 1 or self.layout.num_microbatches > 1):
            name, norm = norms[0]
            raise LossError(
                f"{name} ({type(norm).__name__}) takes statistics over a batch, which stages divide, met "
                f"{self.layout.describe()}; nearest: pipeline=1"
            )

    @property
    def _boundary_dtype(self) -> torch.dtype | None:
        """The dtype of floats between stages: shards in 16 bits compute in them, else it is that of the graph."""
        return DTYPES[self.precision] if self._is_cast and self._has_shards else None

    def _build_stages(self, step: StepGraph, own_nodes: dict[int, StageNodes]) -> dict[int, Stage]:
        """Return the stages of this rank; a parameter of several of them is copied for all but the first."""
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        stages: dict[int, Stage] = {}
        used = Counter(
            name for nodes in own_nodes.values() for name in set(list_parameter_names(step, nodes.operators))
        )
        for place, nodes in own_nodes.items():
            recompute = self.layout.find_recompute(place)
            stages[place] = Stage(
                step,
                nodes,
                parameters,
                buffers,
                recompute=recompute,
                dtype=self._boundary_dtype,
                copies_outputs=find_rule(self.layout.schedule).splits_backward,
            )
            if self._activations is not None:
                self._activations.wrap([part for part in stages[place].pieces if part.name], stages[place])
            for name in stages[place].list_parameters():
                used[name] -= 1
                if used[name]:  # a later stage reads it too
                    original = parameters[name]
                    parameters[name] = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
        return stages

    def _wrap(self, step: StepGraph, place: int, stage: Stage, all_nodes: Sequence[StageNodes]) -> _PipelineStage:
        """Return a stage for torch's pipeline, sharded, or with buckets for its gradients."""
        layout, nodes, dtype = self.layout, all_nodes[place], self._boundary_dtype
        submodule: nn.Module = stage
        if self._has_shards:
            submodule = StageShards(stage, layout, self._shard_mesh, self.precision, self.device)
            if self._values is not None:
                make_room(submodule, self.device)
                for name, parameter in stage.list_parameters().items():
                    fill_shard(parameter, name, self._values)
        inputs = make_examples(nodes.received, dtype) or (torch.empty(0, device="meta"),)
        outputs = make_examples(nodes.results or nodes.sent, None if nodes.results else dtype)
        result = _PipelineStage(
            submodule, place, len(all_nodes), self.device, input_args=inputs, output_args=outputs, group=self._group
        )
        if place and find_rule(layout.schedule).splits_backward and not splits_by_inputs(step, nodes):
            result.dw_builder = lambda: _do_nothing  # backward of inputs makes all gradients then
        result.turn_microbatches = list_turns(layout.actions, self._mesh["pipeline"].get_local_rank(), place)
        result.activations = self._activations
        if layout.data > 1 and not layout.zero:
            trained = [parameter for parameter in stage.list_parameters().values() if parameter.requires_grad]
            self._buckets[place] = result.buckets = GradientBuckets(trained, self._mesh["replica"].get_group())
        return result

    @property
    def _shard_mesh(self) -> DeviceMesh:
        return self._mesh["shard"] if self.layout.shards == self.layout.data else self._mesh["replica", "shard"]

    def _keep_own(self, read_names: frozenset[str], renewed_names: frozenset[str], *, is_first: bool) -> None:
        """Give the user's module the parameters of this rank's stages, and none of the others.

        What no stage reads is on the first ranks. A buffer that a stage renews is on the ranks of that stage.
        """
        own: dict[str, nn.Parameter] = {}
        for parameters in reversed(self._list_parameters()):
            own |= parameters
        self._state_names = tuple(self.module.state_dict())
        first_names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for name, parameter in list(self.module.named_parameters(remove_duplicate=False)):
            first_name = first_names[id(parameter)]
            is_idle = first_name not in read_names and is_first
            owner, _, attribute = name.rpartition(".")
            self.module.get_submodule(owner)._parameters[attribute] = parameter if is_idle else own.get(first_name)
        renewed = {id(buffer) for stage in self._stages.values() for buffer in stage.updates.values()}
        for name in renewed_names:
            owner, _, attribute = name.rpartition(".")
            if id(self.module.get_buffer(name)) not in renewed:
                self.module.get_submodule(owner)._buffers[attribute] = None

    def _run_passes(self, microbatches: Sequence[Any], step_loss: StepLoss, num_items: Tensor | None) -> None:
        self._step_loss = step_loss
        columns = zip(*(list_inputs(microbatch, num_items) for microbatch in microbatches), strict=True)
        tensors = dict(zip(self._input_names, map(torch.cat, columns), strict=True))
        first = (next(iter(tensors.values())),) if self._is_first else ()
        target = next(iter(tensors.values())) if self._is_last else None
        losses: list[Tensor] | None = [] if self._is_last else None
        is_cast = self._is_cast and self._boundary_dtype is None
        with torch.autocast(self.device.type, DTYPES[self.precision], enabled=is_cast):
            self._runtime.step(*first, target=target, losses=losses, return_outputs=False, **tensors)

    def _add_loss(self, outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Add the loss of a microbatch on the last stage."""
        assert self._step_loss is not None
        total, *weights = outputs
        weight = weights[0] if weights else None
        return self._step_loss.add(WeightedLoss(total, weight, is_share=self._loss_kind is LossKind.SHARES))

    def _finish_gradients(self, factor: float) -> None:
        for buckets in self._buckets.values():
            buckets.finish()
        if self._has_shards:
            groups = [self._mesh[axis].get_group() for axis in ("replica", "shard")]
            average_scalars(self._list_scalars(), groups)
        self._sum_parts()
        self._tied.sum_gradients(self._list_parameters())
        gradients = {  # of several copies on this rank the first one's, which the optimizer steps
            name: to_local(parameter.grad)
            for parameters in reversed(self._list_parameters())
            for name, parameter in parameters.items()
            if parameter.grad is not None
        }
        if factor != 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
        if self.max_norm is not None:
            counted = {name: gradient for name, gradient in gradients.items() if self._tied.is_counted(name)}
            factor = min(self.max_norm / (self._measure_norm(counted) + CLIP_EPSILON), 1.0)
            for gradient in gradients.values():
                gradient.mul_(factor)

    def _sum_parts(self) -> None:
        """Sum what ranks with parts of the same operators have of a gradient; whole operators have none such."""

    def _list_scalars(self) -> list[nn.Parameter]:
        """Return the parameters without dims of this rank's stages, in an order that data ranks have in common."""
        return [p for parameters in self._list_parameters() for p in parameters.values() if not p.dim()]

    def _measure_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of all gradients of the module, of which this rank has some, by name."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            copies = self._count_copies(name) * (1 if gradient.dim() else self.layout.shards)
            total += gradient.double().square().sum() / copies
        if self._has_shards:
            dist.all_reduce(total, group=self._mesh["shard"].get_group())
        for axis in ("pipeline", *self._operator_axes):
            dist.all_reduce(total, group=self._mesh[axis].get_group())
        return math.sqrt(float(total))

    def _count_copies(self, name: str) -> int:
        """Return on how many ranks along the axes of operators a parameter is."""
        return 1

    def _list_parameters(self) -> list[dict[str, nn.Parameter]]:
        return [stage.list_parameters() for stage in self._stages.values()]

    def _end_update(self) -> None:
        stage_parameters = self._list_parameters()
        self._tied.copy_updates(stage_parameters)
        for parameters in stage_parameters:
            for parameter in parameters.values():
                parameter.grad = None

    def export(self, folder: str | Path, *, is_plain: bool = False, format: str = SAFETENSORS) -> Path | None:
        """Write the whole weights, gathered from all stages, as `TrainingStep.export` does."""
        if is_distributed(format):
            return self._export_states(Path(folder))
        if self._trained is None:
            raise ValueError("weights of stages are there after at least one step, met none")
        weights = self._gather_weights(keeps=self.rank == 0)
        if self.rank:
            return None
        return write_module(Path(folder), self._whole, weights, self._aliases, is_plain=is_plain)

    def _gather_weights(self, *, keeps: bool) -> dict[str, Tensor]:
        """Return the states of the whole module, in host memory, on ranks that keep them; others have one at a time."""
        own = self.module.state_dict()
        stage_names: list[Any] = [None] * self.layout.pipeline
        dist.all_gather_object(stage_names, list(own), group=self._group)
        owners = {name: place for place, names in reversed([*enumerate(stage_names)]) for name in names}
        found: dict[str, Tensor] = {}
        for name in self._state_names:
            state: list[Any] = [None]
            if owners[name] == dist.get_rank(self._group):
                state = [self._gather_state(name, own[name]).detach().cpu()]
            source = dist.get_global_rank(self._group, owners[name])
            dist.broadcast_object_list(state, source, group=self._group)
            if keeps:
                found[name] = state[0]
        return found

    def _gather_state(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a state of the module."""
        return to_whole(state)

    def evaluate(
        self, function: EvaluateFunction | None = None, batches: Iterable[Any] = (), *, is_marked: bool = False
    ) -> dict[str, float]:
        """Return figures as `TrainingStep.evaluate` does, of the whole module, which every rank builds for it."""
        if self._trained is None:
            raise ValueError("an evaluation comes after at least one step, met none")
        stages, self.module = self.module, self._build_whole()
        try:
            return super().evaluate(function, batches, is_marked=is_marked)
        finally:
            self.module = stages

    def _build_whole(self) -> nn.Module:
        """Return a whole module with the states as they are now."""
        weights = self._gather_weights(keeps=True)
        whole = copy.deepcopy(self._whole)
        for name, parameter in list(whole.named_parameters(remove_duplicate=False)):
            owner, _, attribute = name.rpartition(".")
            filled = nn.Parameter(weights[name].to(self.device), requires_grad=parameter.requires_grad)
            setattr(whole.get_submodule(owner), attribute, filled)
        whole.load_state_dict(weights)
        return whole
