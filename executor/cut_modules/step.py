"""A step of training of a user's module whose operators are cut over ranks, and whose batch is over data ranks.

Forward and backward are those of a compiled program on this rank's parts. The module keeps its structure, in which
parameters are this rank's parts: so optimizers find them by their names and owners. Its own forward is not run then.

The program's loss is that of all data ranks together, whatever it is: also means over tokens, batch statistics and
losses that compare samples are those of one process.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.capture.captured import CaptureError
from meshwise.executor.capture.source_lines import add_nearest
from meshwise.executor.cut_modules.captures import (
    CutError,
    capture_batch,
    check_start,
    copy_structure,
    find_signature,
    find_weight,
    make_example,
    require_same_module,
    require_samples,
)
from meshwise.executor.cut_modules.elementwise import require_elementwise
from meshwise.executor.cut_modules.part_form import PartForm
from meshwise.executor.cut_modules.part_values import PartValues
from meshwise.executor.cut_modules.plan_choice import PlanChoice, agree_on_plan
from meshwise.executor.cut_modules.whole_states import cut_buffers, gather_buffers, make_whole, put_parts
from meshwise.executor.modules.batches import count_samples, list_tensors, split_evenly, to_device, to_double
from meshwise.executor.modules.courses import broadcast_states
from meshwise.executor.modules.evaluation import (
    EvaluateFunction,
    EvaluationBatch,
    evaluate_module,
    keep_training,
)
from meshwise.executor.modules.layout import CUTS, ModuleLayout
from meshwise.executor.modules.losses import (
    LossError,
    LossFunction,
    list_batch_norms,
    measure_loss,
    require_mean_over_samples,
)
from meshwise.executor.modules.optimizers import OptimizerFactory, SchedulerFactory, build_optimizer, build_scheduler
from meshwise.executor.modules.quiet import KeepDouble, turn_to_double
from meshwise.executor.modules.sharding import DTYPES, count_ranks, find_rank
from meshwise.executor.modules.states import (
    SAFETENSORS,
    export_states,
    export_weights,
    find_newest,
    is_distributed,
    load_states,
    read_step,
    require_foreign,
    save_states,
    write_module,
)
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.local_stage import LocalStage
from meshwise.executor.operators.stage_compiler import compile_stage
from meshwise.executor.operators.trainer import build_device_mesh
from meshwise.executor.recording.weight_files import find_aliases
from meshwise.executor.saving.background import BackgroundWriter
from meshwise.executor.starting.beginning import Beginning
from meshwise.executor.starting.construction import Start, WholeModule, fill_parameters, give_values
from meshwise.executor.starting.shards import move_present

SEED_STRIDE = 1_000_003
"""A prime that keeps the seeds of steps apart."""


class CutStep(Beginning):
    """A step of training: called with this rank's samples, it returns the loss of the global batch.

    It has the methods and parameters of `meshwise.executor.modules.step.TrainingStep`.

    Of a module that is built without its parameters a rank makes its own parts, from one whole parameter at a time.

    Parameters
    ----------
    layout
        Its plan says how operators are cut.
    choose_plan
        Returns the plan for a captured module where the layout has none; rank 0 calls it. The captured program is then
        compared with the module first.
    """

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
        device: torch.device,
        seed: int = 0,
        choose_plan: PlanChoice | None = None,
    ) -> None:
        self.num_ranks, self.rank = count_ranks(), find_rank()
        if layout.num_ranks != self.num_ranks:
            words = ("data", *(name for name in reversed(CUTS) if getattr(layout, name) > 1))
            rule = f"{' * '.join(words)} = {layout.num_ranks} ranks, and there are {self.num_ranks}"
            raise ValueError(f"{rule}; nearest: data=1,tensor={self.num_ranks}")
        if layout.plan is None and choose_plan is None:
            raise ValueError("a module is cut as a plan's shardings say, met none; nearest: meshwise train")
        if precision not in DTYPES:
            raise ValueError(f"precision is one of {', '.join(DTYPES)}, met {precision}; nearest: bf16")
        self.layout, self.plan, self.loss, self.choose_plan = layout, layout.plan, loss, choose_plan
        self.precision, self.max_norm, self.seed = precision, max_norm, seed
        self.device = device
        own_module = self._take_start(WholeModule(module) if isinstance(module, nn.Module) else module)
        self.module = move_present(own_module, self.device)
        if precision == "fp64":
            turn_to_double(self.module)
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.step_number = 0
        self.learning_rate = 0.0
        self._factories = optimizer, scheduler
        self._structure: nn.Module | None = None
        self._stages: dict[str, LocalStage] = {}
        self._trained: tuple[Optimizer, LRScheduler | None] | None = None
        self.writer = BackgroundWriter()
        self._checkpoint: Path | None = None

    def __call__(self, batch: Any) -> float:
        """Return the loss of the global batch, of which ``batch`` are this rank's samples, and step the optimizer."""
        batch = self._place(batch)
        microbatches = split_evenly(batch, self.layout.num_microbatches, "microbatches")
        stage = self._find_stage(batch, microbatches[0])
        optimizer, scheduler = self._trained or self._begin(stage)
        draws = torch.get_rng_state()  # those of the user's data, which are no part of a step
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, microbatch in enumerate(microbatches):
            stage.draws.seed = (self.seed * SEED_STRIDE + self.step_number) * SEED_STRIDE + number
            with self._find_precision_context():
                loss = stage((), self._list_inputs(stage, microbatch)) / len(microbatches)
            loss.backward()
            total += loss.detach()
        torch.set_rng_state(draws)
        stage.sum_gradients()
        self._clip(stage)
        stage.ranks.records.clear()
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        self.module.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        self.step_number += 1
        return float(total)

    def global_batch(self, batch: Any) -> float:
        """Return the loss of a step on a global batch, of which this rank takes its part."""
        return self(split_evenly(batch, self.layout.data, "data ranks")[self.layout.find_data_part(self.rank)])

    def save(self, folder: str | Path, *, in_background: bool = False) -> Path:
        """Write a checkpoint as `TrainingStep.save` does, and return its folder."""
        if self._trained is None:
            raise ValueError("a checkpoint has the states of at least one step, met none")
        gather_buffers(self.module, self._any_stage)
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
            self._load(*self._trained)
        return self.step_number

    def start_from(self, folder: str | Path) -> None:
        """Begin with the states that a script of torch wrote, as `TrainingStep.start_from` does."""
        require_foreign(Path(folder))
        self._checkpoint = Path(folder)
        if self._trained is not None:
            self._load(*self._trained)

    def export(self, folder: str | Path, *, is_plain: bool = False, format: str = SAFETENSORS) -> Path | None:
        """Write the whole weights as `TrainingStep.export` does, and return the file; ``None`` on other ranks."""
        if (self._checkpoint is not None or self._values is not None) and self._trained is None:
            raise ValueError("weights that are not yet made or read are there after at least one step, met none")
        if is_distributed(format):
            if self._trained is None:
                raise ValueError("states of the optimizer are there after at least one step, met none")
            gather_buffers(self.module, self._any_stage)
            return export_states(Path(folder), self.module, *self._trained, self._form)
        if not self._stages:
            return export_weights(Path(folder), self.module, is_plain=is_plain)
        weights = self._gather_weights()
        if self.rank or self._structure is None:
            return None
        return write_module(Path(folder), self._structure, weights, find_aliases(self.module), is_plain=is_plain)

    def _gather_weights(self) -> dict[str, Tensor]:
        """Return the whole states of the module, in host memory, on the first rank; others have one at a time."""
        gather_buffers(self.module, self._any_stage)
        form, found = self._form, dict[str, Tensor]()
        for name, state in self.module.state_dict().items():
            whole = form.gather(name, state)
            if self.rank == 0:
                found[name] = whole.detach().cpu()
        return found

    def evaluate(
        self, function: EvaluateFunction | None = None, batches: Iterable[Any] = (), *, is_marked: bool = False
    ) -> dict[str, float]:
        """Return figures as `TrainingStep.evaluate` does, of the whole module, which every rank has for it."""
        if self._trained is None:
            raise ValueError("an evaluation comes after at least one step, met none")
        marked = batches if is_marked else map(EvaluationBatch, batches)
        own_function = partial(measure_loss, loss=self.loss) if function is None else function
        placed = (EvaluationBatch(self._place(item.batch), item.is_counted) for item in marked)
        with make_whole(self.module, self._any_stage), keep_training(self.module), self._find_precision_context():
            return evaluate_module(self.module, own_function, placed, self.device)

    @property
    def optimizer_states(self) -> list[Any]:
        """The states of the optimizer, of each parameter; none before the first step."""
        return [] if self._trained is None else list(self._trained[0].state.values())

    @property
    def states_by_parameter(self) -> dict[Tensor, Any]:
        """The states of the optimizer by parameter; none before the first step."""
        return {} if self._trained is None else dict(self._trained[0].state)

    def _place(self, batch: Any) -> Any:
        """Return a batch on the device, and in fp64 where that is computed in."""
        batch = to_device(batch, self.device)
        return to_double(batch) if self.precision == "fp64" else batch

    @property
    def _form(self) -> PartForm:
        return PartForm(self._any_stage, find_aliases(self.module))

    @property
    def _any_stage(self) -> LocalStage:
        return next(iter(self._stages.values()))

    def _find_precision_context(self) -> Any:
        is_cast = DTYPES[self.precision].itemsize == 2
        return torch.autocast(self.device.type, DTYPES[self.precision]) if is_cast else nullcontext()

    @staticmethod
    def _list_inputs(stage: LocalStage, microbatch: Any) -> list[Tensor]:
        tensors = list_tensors(microbatch)
        return [tensors[place] for place in stage.input_places]

    def _find_stage(self, batch: Any, microbatch: Any) -> LocalStage:
        """Return the program for microbatches of this shape; it is compiled at the first one."""
        signature = find_signature(microbatch)
        self._require_equal_shapes(batch, signature)
        if signature not in self._stages:
            if self._structure is None:
                self._prepare(batch)
            self._stages[signature] = self._compile(microbatch)
        return self._stages[signature]

    def _prepare(self, batch: Any) -> None:
        """Check module and loss on the first batch, before parameters are cut."""
        broadcast_states(self.module)
        if self.layout.num_microbatches > 1:
            norms = list_batch_norms(self.module)
            if norms:
                name, norm = norms[0]
                raise LossError(
                    f"{name} ({type(norm).__name__}) takes statistics over a batch, which microbatches would divide, "
                    f"met {self.layout.num_microbatches} of them; nearest: 1"
                )
            tolerance = 2e-2 if DTYPES[self.precision].itemsize == 2 else None
            with self._find_precision_context():
                self._try(lambda: require_mean_over_samples(self.module, batch, self.loss, tolerance), bool)
                has_weight = self._try(lambda: find_weight(self.module, batch, self.loss))
            if has_weight:
                met = f"met {self.layout.num_microbatches} microbatches"
                raise LossError(f"a loss (sum, weight) of a cut module is of a whole batch, {met}; nearest: 1")
        self._structure = copy_structure(self.module)

    def _compile(self, microbatch: Any) -> LocalStage:
        assert self._structure is not None
        nearest = f"data={self.num_ranks}"
        example = make_example(microbatch, self.layout.data)
        require_samples(count_samples(example), "all data ranks")
        with KeepDouble() if self.precision == "fp64" else nullcontext():
            captured = capture_batch(self._structure, example, self.loss, nearest=nearest)
        first_stage = next(iter(self._stages.values()), None)
        if self.plan is None:
            check_start(self.module, self._values, example, self.loss, nearest=nearest)
            assert self.choose_plan is not None
            self.plan = agree_on_plan(self.choose_plan, captured)
        require_same_module(self.plan, captured, self.module)
        ranks = RankMesh(build_device_mesh(self.plan, self.device.type)) if first_stage is None else first_stage.ranks
        parameters = {} if first_stage is None else first_stage.parts
        buffers = {} if first_stage is None else {name: part for name, (part, _) in first_stage.buffer_parts.items()}
        module = self.module if first_stage is None else self._structure
        try:
            stage = compile_stage(captured, module, self.plan, ranks, 0, self.device, parameters, buffers)
        except CaptureError as error:
            raise CutError(add_nearest(str(error), nearest)) from error
        if first_stage is None:
            put_parts(self.module, stage.parts)
            self._fill_parts(stage)
        return stage

    def _fill_parts(self, stage: LocalStage) -> None:
        """Give parts their first values, where they have none, one after the other."""
        if self._values is None:
            return
        values = PartValues(self._values, stage.placements, stage.ranks)
        for name, part in stage.parts.items():
            give_values(part, values.read(name).to(self.device, part.dtype))
        others = {name for name, _ in self.module.named_parameters()} - stage.parts.keys()
        fill_parameters(self.module, values, others, self.device)
        self._values = None

    def _begin(self, stage: LocalStage) -> tuple[Optimizer, LRScheduler | None]:
        make_optimizer, make_scheduler = self._factories
        optimizer = build_optimizer(make_optimizer, self.module, self.names)
        require_elementwise(optimizer)
        scheduler = build_scheduler(make_scheduler, optimizer)
        if self._checkpoint is not None:
            self._load(optimizer, scheduler)
        self._trained = optimizer, scheduler
        return self._trained

    def _load(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        assert self._checkpoint is not None
        load_states(self._checkpoint, self.module, optimizer, scheduler, self._form)
        cut_buffers(self.module, self._any_stage)

    def _require_equal_shapes(self, batch: Any, signature: str) -> None:
        """Raise `LossError` where ranks have microbatches of other shapes: their collectives would not meet."""
        figures = float(count_samples(batch)), float(crc32(signature.encode()))
        extremes = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.float64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most_samples, most, least_samples, least = extremes.tolist()
        if most != -least or most_samples != -least_samples:
            raise LossError(
                "all ranks have batches of equal shape where operators are cut, met "
                f"{-least_samples:.0f} to {most_samples:.0f} samples in step {self.step_number}; nearest: padding"
            )

    def _clip(self, stage: LocalStage) -> None:
        """Clip the norm of all gradients, of which ranks have parts and copies."""
        if self.max_norm is None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = []
        for name, part in stage.parts.items():
            if part.grad is not None:
                gradients.append(part.grad)
                total += part.grad.double().square().sum() / stage.placements[name].count_copies(stage.ranks)
        dist.all_reduce(total)
        factor = min(self.max_norm / (float(total) ** 0.5 + 1e-6), 1.0)
        for gradient in gradients:
            gradient.mul_(factor)
