"""The steps of a job in one process by a plain loop of torch, by which a run under a plan is judged."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from meshwise.executor.capture.capture import format_error
from meshwise.executor.modules.batches import to_double
from meshwise.executor.modules.losses import compute_own_loss
from meshwise.executor.modules.optimizers import make_adamw
from meshwise.executor.modules.quiet import KeepDouble, drop_nothing, list_dropouts, turn_to_double
from meshwise.executor.modules.sharding import DTYPES
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.tensors import list_values
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.training import load_source, next_batch, open_batches
from meshwise.executor.user_training.user_file import UserFile, UserFileError, find_own_line

NOISE = 1e-11
"""Fraction of the largest gradient below which a gradient in fp64 is rounding."""


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A module after a step.

    Parameters
    ----------
    weights
        Parameters and buffers, by the names of the state dict.
    states
        Tensors of the optimizer's states, by parameter and then by their own name.
    """

    loss: float
    learning_rate: float
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class PlainRun:
    """The steps of a job in one process.

    Parameters
    ----------
    first_weights
        Parameters and buffers before the first step.
    steps
        Those whose states were kept; the last one always is.
    noisy_names
        Parameters whose gradients are nothing but rounding: optimizers that divide by the size of gradients make whole
        steps of them.
    noisy_elements
        Which elements of other parameters have such gradients, as those of the bias of keys have where one parameter
        has the biases of queries, keys and values; parameters that have none are left out.
    """

    losses: list[float]
    first_weights: dict[str, Tensor]
    steps: list[PlainStep]
    noisy_names: frozenset[str]
    noisy_elements: dict[str, Tensor]


class RoundValues(TorchFunctionMode):
    """Rounds what every operator returns, and the parameters that it reads, to a dtype; gradients are rounded alike.

    With torch's autocast it shows what a format does to a module. What has no gradient, such as positions and masks,
    stays as it is, and so do views, whose memory others write.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with rounded parameters, and round its result."""
        name = getattr(function, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__")
        if name in ("__get__", "__set__") or is_in_place:
            return function(*args, **(kwargs or {}))
        rounded_args = tuple(self._round(item) if isinstance(item, nn.Parameter) else item for item in args)
        result = function(*rounded_args, **(kwargs or {}))
        if isinstance(result, tuple) and type(result) is tuple:
            return tuple(self._round(item) for item in result)
        return result if any(result is item for item in rounded_args) else self._round(result)

    def _round(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype is torch.float32
        if not is_float or not value.requires_grad or value._is_view():
            return value
        rounded = value.to(self.dtype).to(value.dtype)
        return torch.where(rounded.isfinite(), rounded, value)


@contextmanager
def _round_to(rounding: str | None, *, is_cast: bool) -> Iterator[None]:
    """Run the body in fp32, or with roundings to a precision, and perhaps torch's casts to it."""
    if rounding is None:
        yield
        return
    with torch.autocast("cpu", DTYPES[rounding], enabled=is_cast), RoundValues(DTYPES[rounding]):
        yield


@contextmanager
def _name_line(user_file: UserFile) -> Iterator[None]:
    """Raise what fails in the body as a `UserFileError` with the user's line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserFileError(f"{find_own_line(error, user_file.path)}: {format_error(error)}") from error


def has_dropout(job: TrainJob) -> bool:
    """Return whether the module of a job has parts that drop values."""
    module = load_source(job).build_model(job.seed)
    return any(getattr(part, name) > 0 for part, name in list_dropouts(module))


def train_plainly(
    job: TrainJob, *, rounding: str | None = None, is_cast: bool = False, keeps_steps: bool = False
) -> PlainRun:
    """Return the steps of a job in this process, whole batch after whole batch, by a loop of torch alone.

    Parameters
    ----------
    job
        It is computed in fp64 where its precision is that, else in fp32.
    rounding
        The precision to whose dtype all values of forward and backward are rounded, if any.
    is_cast
        Whether torch's autocast to that precision is on too.
    keeps_steps
        Whether states are kept after every step.
    """
    user_file = load_source(job)
    with _name_line(user_file):
        return _train_plainly(job, user_file, rounding, is_cast=is_cast, keeps_steps=keeps_steps)


def train_rounded(job: TrainJob) -> PlainRun:
    """Return the steps of a job in this process in fp32 with the roundings of its precision.

    Some modules run without autocast only, as they do under shards, whose blocks are in the precision as a whole.
    """
    try:
        return train_plainly(job, rounding=job.precision, is_cast=True, keeps_steps=True)
    except UserError:
        return train_plainly(job, rounding=job.precision, keeps_steps=True)


def _train_plainly(
    job: TrainJob, user_file: UserFile, rounding: str | None, *, is_cast: bool, keeps_steps: bool
) -> PlainRun:
    module = user_file.build_model(job.seed)
    is_double = job.precision == "fp64"
    if is_double:
        turn_to_double(module)
    drop_nothing(module)
    module.train()
    optimizer = (user_file.optimizer or make_adamw(job.learning_rate))(module)
    scheduler = None if user_file.scheduler is None else user_file.scheduler(optimizer)
    batches, losses, steps = open_batches(job, user_file, 0, 1, 0), [], []
    first_weights = _copy_weights(module)
    largest = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in module.named_parameters()}
    for number in range(job.steps):
        batch = next_batch(batches, user_file, number)
        with KeepDouble() if is_double else _round_to(rounding, is_cast=is_cast):
            value = compute_own_loss(module, to_double(batch) if is_double else batch, user_file.loss).mean
        value.backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and parameter.grad.numel():
                largest[name] = torch.maximum(largest[name], parameter.grad.to_dense().abs())
        if job.max_norm is not None:
            _clip(module, job.max_norm)
        learning_rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
        if keeps_steps or number + 1 == job.steps:
            steps.append(PlainStep(losses[-1], learning_rate, _copy_weights(module), _copy_states(module, optimizer)))
    return PlainRun(losses, first_weights, steps, *_find_noise(largest))


def _clip(module: nn.Module, max_norm: float) -> None:
    """Clip the norm of all gradients as torch does; torch itself refuses sparse ones."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return
    norm = nn.utils.get_total_norm([list_values(gradient) for gradient in gradients])
    for gradient in gradients:
        gradient.mul_(min(max_norm / (float(norm) + 1e-6), 1.0))


def _find_noise(largest: Mapping[str, Tensor]) -> tuple[frozenset[str], dict[str, Tensor]]:
    """Return parameters, and elements of others, of whose gradients the largest sizes are above 0 and only rounding."""
    sizes = {name: float(values.max()) for name, values in largest.items() if values.numel()}
    limit = NOISE * max(sizes.values(), default=0.0)
    names = frozenset(name for name, size in sizes.items() if 0 < size < limit)
    masks = {name: ((values > 0) & (values < limit)).cpu() for name, values in largest.items() if name not in names}
    return names, {name: mask for name, mask in masks.items() if mask.any()}


def _copy_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _copy_states(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the states that have the shape of their parameter, or are numbers: shards of others may mean others."""
    return {
        name: {
            key: value.detach().cpu().clone()
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor) and (value.shape == parameter.shape or not value.dim())
        }
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }
