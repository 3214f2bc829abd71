"""One step of training of a user's module that is whole on every rank."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.modules.batch_norms import normalise_globally
from meshwise.executor.modules.batches import count_samples, split_evenly, to_device, to_double
from meshwise.executor.modules.blocks import list_blocks
from meshwise.executor.modules.calls import count_items_of_step, takes_num_items
from meshwise.executor.modules.courses import (
    CallCourse,
    RenewedBuffers,
    broadcast_states,
    list_own_units,
    require_compiled_units,
)
from meshwise.executor.modules.evaluation import EvaluateFunction, EvaluationBatch, evaluate_module, keep_training
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import (
    LossError,
    LossFunction,
    LossKind,
    StepLoss,
    compute_loss,
    find_loss_kind,
    list_batch_norms,
    measure_loss,
    require_mean_over_samples,
)
from meshwise.executor.modules.optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    build_optimizer,
    build_scheduler,
)
from meshwise.executor.modules.probe import probe, probe_fakes
from meshwise.executor.modules.quiet import keep_draws, turn_to_double
from meshwise.executor.modules.sharding import (
    DTYPES,
    accumulate_gradients,
    average_scalars,
    count_ranks,
    find_precision_context,
    find_rank,
    list_scalars,
    shard_module,
    unwrap,
)
from meshwise.executor.modules.states import (
    SAFETENSORS,
    StateForm,
    export_states,
    export_weights,
    find_newest,
    is_distributed,
    load_states,
    read_step,
    require_foreign,
    save_states,
)
from meshwise.executor.modules.unused import UnusedParameters
from meshwise.executor.parallel.module_offload import BlockOffload, HostStates
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.recording.private_torch import compile_in_place
from meshwise.executor.recording.tensors import list_values, to_whole
from meshwise.executor.saving.background import BackgroundWriter
from meshwise.executor.starting.beginning import Beginning
from meshwise.executor.starting.construction import Start, WholeModule
from meshwise.executor.starting.shards import fill_shards, move_present

CLIP_EPSILON = 1e-6
"""torch's, added to a norm that gradients are divided by."""
CAST_TOLERANCE = 2e-2
"""Fraction by which the loss of a batch in bf16 may differ from the mean of its halves."""

SEED_STRIDE = 1_000_003
"""A prime that keeps the seeds of steps and ranks apart."""


class TrainingStep(Beginning):
    """A step of training: called with this rank's samples, it returns the loss of the global batch.

    Parameters
    ----------
    module
        The user's module; its parameters are sharded in place where the layout says so. It may be compiled. Of one that
        is built without its parameters a rank makes no more of them than it keeps, one after the other.
    layout
        How it is trained.
    optimizer, scheduler
        What `meshwise.executor.modules.optimizers.build_optimizer` takes, and a function of the optimizer.
    loss
        A function of ``(outputs, batch)``; without one the outputs are the loss, or have it as ``loss``.
    precision
        ``fp32``, ``bf16`` or ``fp64``, in which forward and backward compute.
    max_norm
        The norm to which all gradients together are clipped; ``None`` for no clipping.
    seed
        The seed of random draws in forward, such as dropout: each rank and step has draws of its own.

    ``step_number`` counts the steps that are done, and ``learning_rate`` is that of the last one, in its first group.
    ``whole_reason`` says why a rank that keeps parts of a module has had the whole in memory; empty where it had not.
    """

    cuts_operators = False
    """Whether ranks may have parts of operators."""

    def __init__(
        self,
        module: nn.Module | Start,
        layout: ModuleLayout,
        *,
        optimizer: OptimizerFactory | Optimizer,
        scheduler: SchedulerFactory | LRScheduler | None = None,
        loss: LossFunction | None = None,
        precision: str = "fp32",
        max_norm: float | None = None,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        self.num_ranks, self.rank = count_ranks(), find_rank()
        if layout.operator_ranks > 1 and not self.cuts_operators:
            raise ValueError(f"tensor: this step has the module whole on every rank, met {layout.tensor}; nearest: 1")
        if layout.num_ranks != self.num_ranks:
            rule = f"a plan is for all ranks that were started, {self.num_ranks}"
            raise ValueError(f"{rule}, met {layout.describe()}; nearest: data={self.num_ranks // layout.pipeline or 1}")
        if precision not in DTYPES:
            raise ValueError(f"precision is one of {', '.join(DTYPES)}, met {precision}; nearest: bf16")
        self.layout, self.loss, self.precision, self.max_norm, self.seed = layout, loss, precision, max_norm, seed
        self.device = find_device() if device is None else device
        module = compile_in_place(self._take_start(WholeModule(module) if isinstance(module, nn.Module) else module))
        self.module = module.to(self.device) if self._values is None else move_present(module, self.device)
        if precision == "fp64":
            turn_to_double(self.module)
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.data_rank = layout.find_data_part(self.rank)
        self.step_number = 0
        self.learning_rate = 0.0
        self._factories = optimizer, scheduler
        self._trained: tuple[Optimizer, LRScheduler | None] | None = None
        self.writer = BackgroundWriter()
        self._checkpoint: Path | None = None
        self._form: StateForm | None = None
        self._unused: UnusedParameters | None = None
        self._course: CallCourse | None = None
        self._loss_kind = LossKind.SAMPLES
        self._activations: BlockOffload | None = None
        self._host_states: HostStates | None = None

    def __call__(self, batch: Any) -> float:
        """Return the loss of the global batch, of which ``batch`` are this rank's samples, and step the optimizer."""
        batch = self._place(batch)
        microbatches = split_evenly(batch, self.layout.num_microbatches, "microbatches")
        is_first = self._trained is None
        optimizer, scheduler = self._trained or self._begin(batch)
        num_items = self._count_items(batch) if self._loss_kind is LossKind.SHARES else None
        parts = self.layout.num_microbatches, self.layout.data
        step_loss = StepLoss(*parts, self.device, has_shares=num_items is not None, is_counted=self._is_counted)
        renewed = self._watch_buffers() if is_first else None
        with keep_draws():  # those of the user's data are no part of a step
            torch.manual_seed(((self.seed * SEED_STRIDE + self.step_number) * SEED_STRIDE + self._draw_rank) % 2**63)
            self._run_passes(microbatches, step_loss, num_items)
        if renewed is not None:
            renewed.require_equal(self.layout.num_microbatches)
        mean_loss, factor = step_loss.reduce()
        self._require_same_course(count_samples(batch), is_mean=step_loss.is_mean)
        self._finish_gradients(factor)
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        self._end_update()
        if scheduler is not None:
            scheduler.step()
        self.step_number += 1
        return mean_loss

    def global_batch(self, batch: Any) -> float:
        """Return the loss of a step on a global batch, of which this rank takes its part."""
        return self(split_evenly(batch, self.layout.data, "data ranks")[self.data_rank])

    @property
    def optimizer_states(self) -> list[dict[str, Any]]:
        """The optimizer's states of every parameter; none before the first step."""
        return [] if self._trained is None else list(self._trained[0].state.values())

    def holds_on_host(self, state: Tensor) -> bool:
        """Return whether a state of the optimizer takes no memory of the device."""
        return self._host_states is not None and self._host_states.holds(state)

    @property
    def states_by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's states, of every parameter that has some."""
        return {} if self._trained is None else dict(self._trained[0].state)

    def save(self, folder: str | Path, *, in_background: bool = False) -> Path:
        """Write module, optimizer and scheduler into a folder from all ranks; return the folder of this step.

        Parameters
        ----------
        in_background
            Whether steps go on once states are copied to host memory; `finish_saving` waits until they are written.
        """
        if self._trained is None:
            raise ValueError("a checkpoint has the states of at least one step, met none")
        return save_states(
            Path(folder),
            self.module,
            *self._trained,
            self.step_number,
            self._form,
            writer=self.writer,
            in_background=in_background,
        )

    def finish_saving(self) -> None:
        """Return when checkpoints are written; `CheckpointError` where one could not be."""
        self.writer.finish()

    def load(self, folder: str | Path) -> int:
        """Go on from the newest checkpoint in a folder, of any layout; return the steps that it has done."""
        self.writer.finish()
        self._checkpoint = find_newest(Path(folder))
        self.step_number = read_step(self._checkpoint)
        if self._trained is not None:
            load_states(self._checkpoint, self.module, *self._trained, self._form)
        return self.step_number

    def start_from(self, folder: str | Path) -> None:
        """Begin with the states in a folder that a script of torch wrote by ``torch.distributed.checkpoint.save``.

        They have the names of ``get_state_dict``; without states of the optimizer it begins, and so does a schedule.
        """
        require_foreign(Path(folder))
        self._checkpoint = Path(folder)
        if self._trained is not None:
            load_states(self._checkpoint, self.module, *self._trained, self._form)

    def export(self, folder: str | Path, *, is_plain: bool = False, format: str = SAFETENSORS) -> Path | None:
        """Write the whole weights into a folder as safetensors, from rank 0; return the file, or ``None`` elsewhere.

        Parameters
        ----------
        is_plain
            Whether those of a model of transformers have the names of its parameters, as those of other modules do.
        format
            ``safetensors``, or ``dcp`` for a folder of torch's distributed checkpoint, which all ranks write, with the
            states of the optimizer: ``{"model": ..., "optimizer": ...}`` of ``get_state_dict``.
        """
        if (self._checkpoint is not None or self._values is not None) and self._trained is None:
            raise ValueError("weights that are not yet made or read are there after at least one step, met none")
        if is_distributed(format):
            return self._export_states(Path(folder))
        return export_weights(Path(folder), self.module, is_plain=is_plain)

    def _export_states(self, folder: Path) -> Path:
        """Write the states of module and optimizer into a folder of torch's distributed checkpoint."""
        if self._trained is None:
            raise ValueError("states of the optimizer are there after at least one step, met none")
        return export_states(folder, self.module, *self._trained, self._form)

    def _run_passes(self, microbatches: Sequence[Any], step_loss: StepLoss, num_items: Tensor | None) -> None:
        """Run forward and backward of all microbatches, and add up their losses."""
        for number, microbatch in enumerate(microbatches, 1):
            if self._activations is not None:
                self._activations.begin_pass(0, number - 1)
            with accumulate_gradients(self.module, self.layout, is_last=number == len(microbatches)):
                with find_precision_context(self.module, self.device, self.precision):
                    loss = compute_loss(self.module, microbatch, self.loss, self._loss_kind, num_items)
                step_loss.add(loss).backward()  # type: ignore[no-untyped-call]

    def _watch_buffers(self) -> RenewedBuffers | None:
        """Return what looks at the buffers of the first step; ``None`` for a batch that is not divided."""
        return RenewedBuffers(unwrap(self.module)) if self._divides_batch else None

    def _end_update(self) -> None:
        """Drop the gradients of a step that is done."""
        self.module.zero_grad(set_to_none=True)

    def _count_items(self, batch: Any) -> Tensor:
        """Return the labels of the step that count."""
        count = count_items_of_step(self.module, batch, self.num_ranks)
        return count * self.layout.data // self.num_ranks  # ranks of other stages and parts have them too

    def evaluate(
        self, function: EvaluateFunction | None = None, batches: Iterable[Any] = (), *, is_marked: bool = False
    ) -> dict[str, float]:
        """Return figures of the module over the batches of all ranks, by name, in the mode of evaluation.

        Parameters
        ----------
        function
            It returns a number of ``(module, batch)``, which is a mean over samples, a pair (sum, weight), or a dict of
            these; by default the loss.
        batches
            Those of this rank; ranks may have different numbers of them.
        is_marked
            Whether they are instances of `EvaluationBatch`, of which some do not count.
        """
        if self._trained is None:
            raise ValueError("an evaluation comes after at least one step, met none")
        marked = batches if is_marked else map(EvaluationBatch, batches)
        own_function = partial(measure_loss, loss=self.loss) if function is None else function
        placed = (EvaluationBatch(self._place(item.batch), item.is_counted) for item in marked)
        with keep_training(self.module), find_precision_context(self.module, self.device, self.precision):
            figures = evaluate_module(unwrap(self.module), own_function, placed, self.device)
        self._forget_calls()
        return figures

    def _place(self, batch: Any) -> Any:
        """Return a batch on the device, and in fp64 where that is computed in."""
        batch = to_device(batch, self.device)
        if self.precision != "fp64":
            return batch
        return to_double(batch)

    def _take_start(self, start: Start) -> nn.Module:
        """Return a module without its parameters where all ranks keep and can make parts of them, else with them."""
        return super()._take_start(start) if self._keeps_parts else start.build()

    @property
    def _keeps_parts(self) -> bool:
        """Whether a rank keeps parts of parameters only."""
        return self.layout.zero > 0 and self.layout.data > 1

    def _begin(self, batch: Any) -> tuple[Optimizer, LRScheduler | None]:
        """Check module and loss on the first batch, shard the module, and return its optimizer and scheduler.

        Parameters that are not yet there get their values as shards; where the course of the module depends on values,
        all of them come first.
        """
        self.module.zero_grad(set_to_none=True)  # of what the user ran before
        units, has_unused, idle_names = tuple(list_blocks(self.module)), False, frozenset[str]()
        findings = None if self._values is None else self._probe(probe_fakes, units, batch)
        if findings is None:
            self._fill()
            self._find_loss_kind(batch)
        self._require_whole_statistics()
        if findings is None:
            self._check_loss(batch)
        if self.num_ranks > 1:
            units, has_unused, idle_names = findings or self._probe(probe, units, batch)
            units = list_own_units(units, self.module)
            broadcast_states(self.module)
            if self.layout.zero:
                self._require_one_dtype()
                require_compiled_units(units, self.module)
                self._course = CallCourse(units)
        if has_unused and self.layout.zero:
            self._unused = UnusedParameters((*units, self.module), idle_names)
        self._activations = self._make_block_offload(0)
        self.module = shard_module(
            self.module,
            self.layout,
            self.device,
            self.precision,
            units,
            has_unused=has_unused,
            activations=self._activations,
        )
        if self._values is not None:
            fill_shards(self.module, self._values, self.device)
            self._values = None
            self._find_loss_kind(batch)
            self._check_loss(batch)
            self._forget_calls()
        return self._build_optimizer()

    def _make_block_offload(self, position: int) -> BlockOffload | None:
        """Return what keeps on the host what blocks save for backward; ``None`` where that stays."""
        if not self.layout.offload.activations:
            return None
        return BlockOffload(self.layout.actions, position, find_accelerator(self.device.type))

    def _probe(self, run: Callable[..., Any], units: Sequence[nn.Module], batch: Any) -> Any:
        """Return what a function finds of the module on the first batch."""
        is_share = self.loss is None and takes_num_items(self.module)
        kind = LossKind.SHARES if is_share else self._loss_kind
        with find_precision_context(self.module, self.device, self.precision):
            return run(self.module, units, batch, self.loss, self.device, kind)

    @property
    def _divides_batch(self) -> bool:
        """Whether the loss of a step is one of several parts of a batch."""
        return self.num_ranks > 1 or self.layout.num_microbatches > 1

    def _find_loss_kind(self, batch: Any) -> None:
        """Find how losses of ranks and microbatches add up."""
        if self._divides_batch or takes_num_items(self.module):
            with find_precision_context(self.module, self.device, self.precision):
                self._loss_kind = find_loss_kind(self.module, batch, self.loss)

    def _check_loss(self, batch: Any) -> bool:
        """Raise `LossError` where ranks and microbatches do not make the loss of the batch; else say if it is known."""
        if not self._divides_batch:
            return True
        tolerance = CAST_TOLERANCE if self._is_cast else None
        with find_precision_context(self.module, self.device, self.precision):
            return require_mean_over_samples(self.module, batch, self.loss, tolerance, self._loss_kind)

    def _forget_calls(self) -> None:
        """Forget what units have run outside of steps."""
        if self._course is not None:
            self._course.take_digest()
        if self._unused is not None:
            self._unused.forget_calls()

    def _build_optimizer(self) -> tuple[Optimizer, LRScheduler | None]:
        """Return optimizer and scheduler of the module as it is sharded, with the states of a checkpoint if any."""
        make_optimizer, make_scheduler = self._factories
        optimizer = build_optimizer(make_optimizer, unwrap(self.module), self.names)
        if self.layout.offload.optimizer and not (self.layout.zero and self.layout.data > 1):
            self._host_states = HostStates(optimizer, find_accelerator(self.device.type))
        scheduler = build_scheduler(make_scheduler, optimizer)
        if self._checkpoint is not None:
            load_states(self._checkpoint, self.module, optimizer, scheduler, self._form)
            if self._host_states is not None:
                self._host_states.move_states()
        self._trained = optimizer, scheduler
        return self._trained

    @property
    def _draw_rank(self) -> int:
        """The number of this rank's random draws: ranks with parts of the same operators draw the same."""
        return self.rank // self.layout.operator_ranks

    @property
    def _is_counted(self) -> bool:
        """Whether this rank's losses count: of those with parts of the same operators one's do."""
        return self.rank % self.layout.operator_ranks == 0

    @property
    def _is_cast(self) -> bool:
        return DTYPES[self.precision].itemsize == 2

    def _require_whole_statistics(self) -> None:
        """Have batch statistics taken over all ranks; `LossError` where microbatches would divide them."""
        norms = list_batch_norms(self.module) if self._divides_batch else []
        if norms and self.layout.num_microbatches > 1:
            name, norm = norms[0]
            raise LossError(
                f"{name} ({type(norm).__name__}) takes statistics over a batch, which microbatches would divide, met "
                f"{self.layout.num_microbatches} of them; nearest: 1"
            )
        if norms and self.num_ranks > 1:
            normalise_globally(self.module)

    def _require_same_course(self, num_samples: int, *, is_mean: bool) -> None:
        """Raise `LossError` where ranks have run other blocks, or have other numbers of samples for a mean."""
        if self.num_ranks == 1:
            return
        figures = (float(num_samples) if is_mean else 0.0, 0.0 if self._course is None else self._course.take_digest())
        extremes = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.float64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most_samples, most_digest, least_samples, least_digest = extremes.tolist()
        if most_samples != -least_samples:
            raise LossError(
                f"all ranks have equally many samples for a mean over samples, met {-least_samples:.0f} to "
                f"{most_samples:.0f}; nearest: return (sum, weight)"
            )
        if most_digest != -least_digest:
            raise LossError(
                f"all ranks run the same blocks in the same order under ZeRO, met others in step {self.step_number}; "
                "nearest: zero=0"
            )

    def _require_one_dtype(self) -> None:
        dtypes = {str(parameter.dtype) for parameter in self.module.parameters() if parameter.requires_grad}
        if len(dtypes) > 1:
            raise LossError(f"parameters are of one dtype under ZeRO, met {', '.join(sorted(dtypes))}; nearest: zero=0")

    def _finish_gradients(self, factor: float) -> None:
        """Scale gradients to those of the step's loss, and clip them."""
        if self._unused is not None:
            self._unused.drop_gradients(self.device)
        if self.layout.zero and self.layout.data > 1:
            average_scalars(list_scalars((self.module,)), (None,))
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        if self.max_norm is not None:
            self._clip(gradients, self.max_norm)

    def _clip(self, gradients: Sequence[Tensor], max_norm: float) -> None:
        """Clip the norm of all gradients together."""
        clip_gradients(gradients, max_norm)


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Clip the norm of all gradients together; some may be shards, and others whole on every rank."""
    shards = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    norms = [
        to_whole(nn.utils.get_total_norm([list_values(item) for item in part])) for part in (shards, whole) if part
    ]
    if norms:
        norm = float(torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms])))
        for gradient in gradients:
            gradient.mul_(min(max_norm / (norm + CLIP_EPSILON), 1.0))


def find_device() -> torch.device:
    """Return the device of this rank: the GPU of its number on the host where there is one, else a core."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
