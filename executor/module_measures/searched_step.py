"""A step of training whose layout is searched for at its first batch: `SearchedStep`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.cut_modules.cut_stages import make_cut_step
from meshwise.executor.cut_modules.step import CutStep
from meshwise.executor.module_measures.figures import ModuleFigures
from meshwise.executor.module_measures.live_module import LiveModule
from meshwise.executor.modules.evaluation import EvaluateFunction
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import LossFunction
from meshwise.executor.modules.optimizers import OptimizerFactory, SchedulerFactory, require_no_states
from meshwise.executor.modules.quiet import keep_draws
from meshwise.executor.modules.sharding import DTYPES, count_ranks, find_rank
from meshwise.executor.modules.states import (
    SAFETENSORS,
    export_weights,
    find_newest,
    is_distributed,
    read_step,
    require_foreign,
)
from meshwise.executor.modules.step import TrainingStep, find_device
from meshwise.executor.recording.private_torch import compile_in_place
from meshwise.executor.stages.parallelize import make_step
from meshwise.strategies.plan.plan import Plan


class Planned(Protocol):
    """A layout that was chosen, and what its step is predicted to take."""

    @property
    def layout(self) -> ModuleLayout:
        """The layout."""

    @property
    def prediction(self) -> Any:
        """Its step time and memory."""


class PlanSearch(Protocol):
    """A search of the first rank."""

    def choose_cuts(self, live: LiveModule) -> Sequence[Plan]:
        """Return how operators may be cut, which is then measured."""

    def choose(self, live: LiveModule, figures: ModuleFigures) -> Planned:
        """Return the plan of a module from what was measured of it."""


class SearchedStep:
    """A step of training: called with this rank's samples, it returns the loss of the global batch.

    It has the methods of `meshwise.executor.modules.step.TrainingStep`. The first call searches: the ranks measure
    copies of the module for some seconds, the first one chooses, and the step of that layout is made. The module and
    random draws are as before until then. Called with a rank's samples, only layouts are chosen that give every rank
    samples of its own; `global_batch` has every layout.

    Parameters
    ----------
    search
        Chooses on the first rank.
    seconds
        For which the module is measured.
    """

    def __init__(
        self,
        module: nn.Module,
        search: PlanSearch,
        seconds: float,
        *,
        optimizer: OptimizerFactory | Optimizer,
        scheduler: SchedulerFactory | LRScheduler | None = None,
        loss: LossFunction | None = None,
        precision: str = "fp32",
        max_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if precision not in DTYPES:
            raise ValueError(f"precision is one of {', '.join(DTYPES)}, met {precision}; nearest: bf16")
        if isinstance(optimizer, Optimizer):
            require_no_states(optimizer)
        self.module, self.device = compile_in_place(module), find_device()
        self.num_ranks, self.rank = count_ranks(), find_rank()
        self.planned: Planned | None = None
        self._search, self._seconds = search, seconds
        self._optimizer, self._loss, self._precision = optimizer, loss, precision
        self._options: dict[str, Any] = {"scheduler": scheduler, "max_norm": max_norm, "seed": seed}
        self._step: TrainingStep | CutStep | None = None
        self._checkpoint: Path | None = None
        self._foreign: Path | None = None

    def __call__(self, batch: Any) -> float:
        """Return the loss of the global batch, of which ``batch`` are this rank's samples, and step the optimizer."""
        return self._find_step(batch, is_global=False)(batch)

    def global_batch(self, batch: Any) -> float:
        """Return the loss of a step on a global batch, of which this rank takes its part."""
        return self._find_step(batch, is_global=True).global_batch(batch)

    @property
    def layout(self) -> ModuleLayout:
        """The layout that was chosen."""
        return self._find_planned().layout

    @property
    def prediction(self) -> Any:
        """The step time and memory that it is predicted to take."""
        return self._find_planned().prediction

    @property
    def step_number(self) -> int:
        """The steps that are done."""
        if self._step is None:
            return 0 if self._checkpoint is None else read_step(self._checkpoint)
        return self._step.step_number

    @property
    def learning_rate(self) -> float:
        """That of the last step, in the first group of the optimizer."""
        return 0.0 if self._step is None else self._step.learning_rate

    @property
    def optimizer_states(self) -> list[Any]:
        """The optimizer's states of every parameter; none before the first step."""
        return [] if self._step is None else list(self._step.optimizer_states)

    @property
    def states_by_parameter(self) -> dict[Tensor, Any]:
        """The optimizer's states by parameter; none before the first step."""
        return {} if self._step is None else dict(self._step.states_by_parameter)

    def save(self, folder: str | Path, *, in_background: bool = False) -> Path:
        """Write a checkpoint as `TrainingStep.save` does, and return its folder."""
        if self._step is None:
            raise ValueError("a checkpoint has the states of at least one step, met none")
        return self._step.save(folder, in_background=in_background)

    def finish_saving(self) -> None:
        """Return when checkpoints are written, as `TrainingStep.finish_saving` does."""
        if self._step is not None:
            self._step.finish_saving()

    def load(self, folder: str | Path) -> int:
        """Go on from the newest checkpoint in a folder, of any layout; return the steps that it has done."""
        if self._step is not None:
            return self._step.load(folder)
        self._foreign = None
        self._checkpoint = find_newest(Path(folder))  # it is read into the parts that the layout makes
        return read_step(self._checkpoint)

    def start_from(self, folder: str | Path) -> None:
        """Begin with the states that a script of torch wrote, as `TrainingStep.start_from` does."""
        require_foreign(Path(folder))
        if self._step is not None:
            self._step.start_from(folder)
        self._foreign, self._checkpoint = Path(folder), None

    def export(self, folder: str | Path, *, is_plain: bool = False, format: str = SAFETENSORS) -> Path | None:
        """Write the whole weights as `TrainingStep.export` does, and return the file; ``None`` on other ranks."""
        if self._step is None:
            if is_distributed(format):
                raise ValueError("states of the optimizer are there after at least one step, met none")
            return export_weights(Path(folder), self.module, is_plain=is_plain)
        return self._step.export(folder, is_plain=is_plain, format=format)

    def evaluate(
        self, function: EvaluateFunction | None = None, batches: Iterable[Any] = (), *, is_marked: bool = False
    ) -> dict[str, float]:
        """Return figures as `TrainingStep.evaluate` does."""
        if self._step is None:
            raise ValueError("an evaluation comes after at least one step, met none")
        return self._step.evaluate(function, batches, is_marked=is_marked)

    def _find_planned(self) -> Planned:
        if self.planned is None:
            raise ValueError("a layout is searched for at the first batch, met none so far; nearest: after one step")
        return self.planned

    def _find_step(self, batch: Any, *, is_global: bool) -> TrainingStep | CutStep:
        if self._step is None:
            self.planned = self._plan(batch, is_global=is_global)
            layout = self.planned.layout
            options = self._options | {"optimizer": self._optimizer, "loss": self._loss, "precision": self._precision}
            make = make_cut_step if layout.operator_ranks > 1 else make_step
            self._step = make(self.module, layout, device=self.device, **options)
            self.module = self._step.module
            if self._checkpoint is not None:
                self._step.load(self._checkpoint.parent)
            elif self._foreign is not None:
                self._step.start_from(self._foreign)
        return self._step

    def _plan(self, batch: Any, *, is_global: bool) -> Planned:
        """Return the plan that the first rank chooses, on all ranks; its error is that of all."""
        with keep_draws():
            live = LiveModule(
                self.module,
                batch,
                is_global=is_global,
                optimizer=self._optimizer,
                loss=self._loss,
                precision=self._precision,
                device=self.device,
            )
            cuts: Sequence[Plan] = self._ask_first_rank(lambda: list(self._search.choose_cuts(live)))
            figures = live.measure(self._seconds, cuts)
            planned: Planned = self._ask_first_rank(lambda: self._search.choose(live, figures))
        return planned

    def _ask_first_rank(self, answer: Callable[[], Any]) -> Any:
        """Return on all ranks what the first one answers, which is no text; its error is that of all."""
        answers: list[Any] = [None]
        if self.rank == 0:
            try:
                answers[0] = answer()
            except Exception as error:  # all ranks wait for an answer
                answers[0] = str(error) or type(error).__name__
        if self.num_ranks > 1:
            dist.broadcast_object_list(answers, 0)
        if isinstance(answers[0], str):
            raise ValueError(f"search: {answers[0]}; nearest: a plan such as data={self.num_ranks}")
        return answers[0]
