"""Checkpoints of a user's module: sharded files of torch's distributed checkpoint, which any number of ranks reads.

A folder has one folder a checkpoint, named after the steps that were done. It is written under another name and renamed
once every rank has written its part, so that a folder of that name is whole.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.modules.calls import is_of_transformers
from meshwise.executor.modules.sharding import count_ranks, find_rank, unwrap
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.weight_files import find_aliases, list_weight_files, write_weights

_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial"
_FACTS, _SCHEDULER = "facts.json", "scheduler.pt"
VERSION = 2
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""Options of optimizers stand by parameter: ranks of a pipeline have groups of different parameters."""


class StatesError(UserError):
    """A checkpoint that is not there, or that a module cannot go on from."""


class StateForm(Protocol):
    """How a rank's states are whole ones in a checkpoint, so that it is the same under any plan."""

    def gather(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a parameter, or of a state of its shape; of other states what they are."""

    def make_room(self, name: str, state: Tensor) -> Tensor:
        """Return a tensor of the shape of the whole."""

    def cut(self, name: str, whole: Tensor, state: Tensor) -> Tensor:
        """Return this rank's part of a whole, as ``state`` has it."""


def _map_states(function: Callable[..., Tensor], states: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Return states after a function of the name of the parameter, and of every state of it in each dict."""
    result = dict(states)
    for key, state in states.items():
        if isinstance(state, Tensor):
            name = key.removeprefix(_STATE).rpartition(".")[0] if key.startswith(_STATE) else key
            result[key] = function(name, state, *(other[key] for other in others))
    return result


_STATE = "state."
"""How names of states of the optimizer begin, before those of their parameters."""


def save_states(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    step: int,
    form: StateForm | None = None,
) -> Path:
    """Write a checkpoint into a folder from all ranks, and return its own folder."""
    target = folder / f"step-{step:08d}"
    partial = target.with_name(target.name + _PARTIAL)
    model_states, optimizer_states = get_state_dict(module, optimizer, options=_OPTIONS)
    if form is not None:
        model_states = _map_states(form.gather, model_states)
        optimizer_states = _map_states(form.gather, optimizer_states)
    if find_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait()
    states = {"module": model_states, "optimizer": optimizer_states}
    save(states, checkpoint_id=partial, no_dist=count_ranks() == 1)
    if find_rank() == 0:
        (partial / _FACTS).write_text(json.dumps({"version": VERSION, "step": step}))
        if scheduler is not None:
            torch.save(scheduler.state_dict(), partial / _SCHEDULER)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    _wait()
    return target


def list_checkpoints(folder: Path) -> list[str]:
    """Return the names of the whole checkpoints in a folder, the oldest first."""
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def find_newest(folder: Path) -> Path:
    """Return the newest whole checkpoint in a folder; `StatesError` where there is none."""
    names = list_checkpoints(folder)
    if not names:
        raise StatesError(f"{folder}: a folder of checkpoints has step-..., met none")
    return folder / names[-1]


def read_step(checkpoint: Path) -> int:
    """Return the steps that a checkpoint has done; `StatesError` where it says none."""
    try:
        facts = json.loads((checkpoint / _FACTS).read_text("utf-8"))
        if facts["version"] != VERSION:
            raise StatesError(f"{checkpoint}: a checkpoint of this program has version {VERSION}")
        return int(facts["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StatesError(f"{checkpoint}: the checkpoint cannot be read: {error}") from error


def load_states(
    checkpoint: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    form: StateForm | None = None,
) -> None:
    """Read a checkpoint into module, optimizer and scheduler; `StatesError` where it is another module's."""
    model_states, optimizer_states = get_state_dict(module, optimizer, options=_OPTIONS)
    own_states: dict[str, Any] = {"module": model_states, "optimizer": optimizer_states}
    states = own_states
    if form is not None:
        states = {key: _map_states(form.make_room, part) for key, part in own_states.items()}
    try:
        planner = DefaultLoadPlanner(allow_partial_load=True)  # parameters without a gradient so far have no states
        load(states, checkpoint_id=checkpoint, planner=planner, no_dist=count_ranks() == 1)
        known_names = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    except (RuntimeError, ValueError, OSError, KeyError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise StatesError(f"{checkpoint}: a checkpoint is of this module and optimizer, met {reason[:300]}") from error
    if form is not None:
        states = {key: _map_states(form.cut, part, own_states[key]) for key, part in states.items()}
    new_states = {"model_state_dict": states["module"], "optim_state_dict": states["optimizer"]}
    set_state_dict(module, optimizer, **new_states, options=_OPTIONS)
    for name, parameter in module.named_parameters():
        plain_name = name.removeprefix("module.") if isinstance(module, DistributedDataParallel) else name
        if not any(known_name.startswith(f"optimizer.state.{plain_name}.") for known_name in known_names):
            optimizer.state.pop(parameter, None)
    scheduler_file = checkpoint / _SCHEDULER
    if scheduler is not None:
        if not scheduler_file.exists():
            raise StatesError(f"{checkpoint}: a run with a schedule goes on from a run with one, met none")
        scheduler.load_state_dict(torch.load(scheduler_file, weights_only=True))


def export_weights(folder: Path, module: nn.Module, *, is_plain: bool = False) -> Path | None:
    """Write the whole weights as safetensors from rank 0, and return their file; ``None`` on other ranks.

    A model of transformers writes itself, so that ``from_pretrained`` loads the folder.

    Parameters
    ----------
    is_plain
        Whether the weights of such a model have the names of its parameters, as those of other modules do.
    """
    weights: Any = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if find_rank() != 0:
        return None
    return write_module(folder, unwrap(module), weights, find_aliases(unwrap(module)), is_plain=is_plain)


def write_module(
    folder: Path, own_module: Any, weights: dict[str, Any], aliases: dict[str, str], *, is_plain: bool
) -> Path:
    """Write whole weights of a user's module as `export_weights` does, and return their file.

    Parameters
    ----------
    aliases
        Further names of tied parameters, each with the first one.
    """
    if is_plain or not is_of_transformers(own_module):
        return write_weights(folder, weights, aliases)
    for stale_file in list_weight_files(folder):
        stale_file.unlink()
    own_module.save_pretrained(folder, state_dict=weights)
    return list_weight_files(folder)[-1]


def _wait() -> None:
    """Return when all ranks have come here."""
    if dist.is_initialized():
        dist.barrier()
