"""Checkpoints of a user's module: sharded files of torch's distributed checkpoint, which any number of ranks reads.

A folder has one folder a checkpoint, named after the steps that were done, and whole once it has that name
(`meshwise.executor.saving.writing`). A run may also begin from a checkpoint of a script of torch, or write one for it.
"""

import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.modules.calls import is_of_transformers
from meshwise.executor.modules.sharding import count_ranks, find_rank, unwrap
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.recording.weight_files import find_aliases, list_weight_files, write_weights
from meshwise.executor.saving.background import BackgroundWriter
from meshwise.executor.saving.digests import DIGESTS, find_damage
from meshwise.executor.saving.groups import list_groups, nest_states
from meshwise.executor.saving.names import STATE, find_scheduler, match_names, strip_compiled
from meshwise.executor.saving.safe_reading import list_shapes, load_keys
from meshwise.executor.saving.shared_states import SharedState
from meshwise.executor.saving.sparse_states import fill_sparse_states
from meshwise.executor.saving.writing import METADATA, write_folder

_NAME = re.compile(r"step-(\d{8})")
SAFETENSORS, DCP = FORMATS = "safetensors", "dcp"
"""Forms in which states are exported: whole weights, or sharded states of torch's distributed checkpoint."""
_FACTS, _SCHEDULER = "facts.json", "scheduler.pt"
VERSION = 3
_MODULE, _OPTIMIZER = "module.", "optimizer."
"""How names of the states of module and optimizer begin in a checkpoint."""
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
"""Options of optimizers stand by parameter: ranks of a pipeline have groups of different parameters."""


class StatesError(UserError):
    """A checkpoint that is not there, or that a module cannot go on from."""


def is_distributed(format: str) -> bool:
    """Return whether an export has the form of torch's distributed checkpoint; `StatesError` for unknown forms."""
    if format not in FORMATS:
        raise StatesError(f"states are exported as {' or '.join(FORMATS)}, met {format}; nearest: {SAFETENSORS}")
    return format == DCP


class StateForm(Protocol):
    """How a rank's states are parts of whole ones in a checkpoint, so that it is the same under any plan."""

    def gather(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a parameter, or of a state of its shape; of other states what they are."""

    def share(self, name: str, state: Tensor) -> Tensor:
        """Return a state, in the same memory, as what is written and read of the whole."""


def _share(form: StateForm | None, states: dict[str, Any]) -> dict[str, Any]:
    """Return states by the names of their parameters as a form shares them."""
    result = dict(states)
    for key, state in states.items() if form is not None else ():
        if isinstance(state, Tensor):
            assert form is not None
            name = key.removeprefix(STATE).rpartition(".")[0] if key.startswith(STATE) else key
            result[key] = form.share(name, state)
    return result


def _read_states(
    module: nn.Module, optimizer: Optimizer, form: StateForm | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of module and optimizer by name, as a form shares them."""
    model_states, optimizer_states = get_state_dict(module, optimizer, options=_OPTIONS)
    return _share(form, model_states), _share(form, optimizer_states)


def save_states(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    step: int,
    form: StateForm | None = None,
    *,
    writer: BackgroundWriter,
    in_background: bool = False,
) -> Path:
    """Write a checkpoint into a folder from all ranks, and return its own folder.

    Parameters
    ----------
    in_background
        Whether it is written beside the next steps, and whole once ``writer`` has finished.
    """
    target = folder / f"step-{step:08d}"
    model_states, optimizer_states = _read_states(module, optimizer, form)
    files = {_FACTS: json.dumps({"version": VERSION, "step": step}).encode()}
    if scheduler is not None:
        content = io.BytesIO()
        torch.save(scheduler.state_dict(), content)
        files[_SCHEDULER] = content.getvalue()
    states = {"module": model_states, "optimizer": optimizer_states}
    writer.write(target, states, files, in_background=in_background)
    return target


def export_states(
    folder: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    form: StateForm | None = None,
) -> Path:
    """Write states as a script of torch has them, which saves ``{"model": ..., "optimizer": ...}`` of `get_state_dict`.

    A schedule is ``scheduler`` beside them. Returns the folder.
    """
    _require_replaceable(folder)
    model_states, optimizer_states = _read_states(module, optimizer, form)
    names = {parameter: _find_name(module, name) for name, parameter in module.named_parameters()}
    states = {"model": model_states, "optimizer": nest_states(optimizer_states, list_groups(optimizer, names))}
    if scheduler is not None:
        states["scheduler"] = scheduler.state_dict()
    write_folder(folder, states, {})
    return folder


def _require_replaceable(folder: Path) -> None:
    """Raise `StatesError` where a folder has anything else than an export, in whose place another would come."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    strange = [name for name in names if name not in (METADATA, DIGESTS) and not name.startswith("__")]
    if strange or folder.is_file():
        met = f"met {strange[0]} in it" if strange else "met a file"
        raise StatesError(f"{folder}: states are exported into a folder of their own, {met}; nearest: {folder / DCP}")


def _find_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter without what wraps the module, or parts of it."""
    return strip_compiled(name.removeprefix("module.") if isinstance(module, DistributedDataParallel) else name)


def list_checkpoints(folder: Path) -> list[str]:
    """Return the names of the whole checkpoints in a folder, the oldest first."""
    return sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def find_newest(folder: Path) -> Path:
    """Return the newest whole checkpoint in a folder; `StatesError` where there is none."""
    names = list_checkpoints(folder)
    if not names:
        raise StatesError(f"{folder}: a folder of checkpoints has step-..., met none")
    return folder / names[-1]


def require_steps(folder: Path, steps: int, first_step: int) -> None:
    """Raise `StatesError` where a run that goes on from a folder of checkpoints has done all of its steps."""
    if first_step >= steps:
        rule = f"--steps({steps}) are more than a run that goes on has done"
        raise StatesError(f"{folder}: {rule}, met {first_step} done; nearest: {first_step + 1}")


def read_step(checkpoint: Path) -> int:
    """Return the steps that a checkpoint has done; `StatesError` where it says none."""
    try:
        facts = json.loads((checkpoint / _FACTS).read_text("utf-8"))
        if facts["version"] != VERSION:
            raise StatesError(f"{checkpoint}: a checkpoint of this program has version {VERSION}")
        return int(facts["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StatesError(f"{checkpoint}: the checkpoint cannot be read: {error}") from error


def require_foreign(checkpoint: Path) -> None:
    """Raise `StatesError` unless a folder has a checkpoint as scripts of torch write them."""
    if not (checkpoint / METADATA).is_file():
        rule = "a folder that torch.distributed.checkpoint.save wrote has .metadata"
        raise StatesError(f"{checkpoint}: {rule}, met none{_suggest(checkpoint)}")


def _suggest(folder: Path) -> str:
    found = sorted(path.parent for path in folder.glob(f"*/{METADATA}"))
    return f"; nearest: {found[-1]}" if found else ""


def _require_whole(checkpoint: Path) -> None:
    """Raise `StatesError` on all ranks where a file is not as it was written."""
    damage = find_damage(checkpoint)
    if damage:
        others = [name for name in list_checkpoints(checkpoint.parent) if name < checkpoint.name]
        nearest = f"; nearest: {others[-1]}, once {checkpoint.name} is removed" if others else ""
        raise StatesError(f"{damage}{nearest}")


def load_states(
    checkpoint: Path,
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    form: StateForm | None = None,
) -> None:
    """Read a checkpoint into module, optimizer and scheduler; `StatesError` where it is another module's.

    Of a script of torch, options of the optimizer's groups are not read, except for the learning rate of a schedule.
    """
    is_own = (checkpoint / _FACTS).exists()
    if is_own:
        _require_whole(checkpoint)
    fill_sparse_states(optimizer)
    model_states, optimizer_states = get_state_dict(module, optimizer, options=_OPTIONS)
    own_states: dict[str, Any] = {"module": model_states, "optimizer": optimizer_states}
    states = {key: _share(form, part) for key, part in own_states.items()}
    with _tell_reason(checkpoint):
        shapes = list_shapes(checkpoint)
    known_names = set(shapes)
    keys = (
        {part: {name: f"{part}.{name}" for name in states[part]} for part in states}
        if is_own
        else match_names(checkpoint, states["module"], states["optimizer"], known_names)
    )
    if is_own:
        _require_no_others(checkpoint, module, states["optimizer"], known_names)
    _require_shapes(checkpoint, states["module"], keys["module"], shapes)
    # parameters without a gradient so far have no states
    wanted = {key: states[part][name] for part in keys for name, key in keys[part].items() if key in known_names}
    with _tell_reason(checkpoint):
        load_keys(checkpoint, wanted, is_alone=count_ranks() == 1)
    for part in keys:  # tensors are filled where they lie
        own_states[part] |= {
            name: wanted[key]
            for name, key in keys[part].items()
            if key in wanted and not isinstance(wanted[key], SharedState)
        }
    new_states = {"model_state_dict": own_states["module"], "optim_state_dict": own_states["optimizer"]}
    set_state_dict(module, optimizer, **new_states, options=_OPTIONS)
    stepped_names = {
        name.removeprefix(STATE).rpartition(".")[0]
        for name, key in keys["optimizer"].items()
        if name.startswith(STATE) and key in known_names
    }
    for name, parameter in module.named_parameters():
        if _find_name(module, name) not in stepped_names:
            optimizer.state.pop(parameter, None)
    if scheduler is None:
        return
    if not is_own:
        _load_foreign_scheduler(checkpoint, scheduler, optimizer, known_names)
        return
    scheduler_file = checkpoint / _SCHEDULER
    if not scheduler_file.exists():
        raise StatesError(f"{checkpoint}: a run with a schedule goes on from a run with one, met none")
    scheduler.load_state_dict(torch.load(scheduler_file, weights_only=True))


def require_own_names(checkpoint: Path, module: nn.Module) -> None:
    """Raise `StatesError` where a checkpoint of a run is another module's, by the names of its states."""
    with _tell_reason(checkpoint):
        known = {key.removeprefix(_MODULE) for key in list_shapes(checkpoint) if key.startswith(_MODULE)}
    own = {strip_compiled(name) for name in module.state_dict()}
    if others := sorted(known - own):
        raise StatesError(f"{checkpoint}: it is of another module, met {others[0]}, which this one has not")
    if missing := sorted(own - known):
        raise StatesError(f"{checkpoint}: it is of another module, met no {missing[0]}, which this one has")


def _require_no_others(
    checkpoint: Path, module: nn.Module, optimizer_states: dict[str, Any], known_names: set[str]
) -> None:
    """Raise `StatesError` on all ranks where a checkpoint has parts of a larger module, or of another optimizer."""
    own = set(map(strip_compiled, unwrap(module).state_dict())), _list_kinds(optimizer_states)
    parts: list[Any] = [own]
    if count_ranks() > 1:  # of stages each rank has its own
        parts = [None] * count_ranks()
        dist.all_gather_object(parts, own)
    names, kinds = (set().union(*column) for column in zip(*parts, strict=True))
    others = sorted(key for key in known_names if key.startswith(_MODULE) and key.removeprefix(_MODULE) not in names)
    if others:
        met = f"met {others[0].removeprefix(_MODULE)}, which the module has not"
        raise StatesError(f"{checkpoint}: a checkpoint is of this module and optimizer, {met}")
    known_kinds = _list_kinds(key.removeprefix(_OPTIMIZER) for key in known_names if key.startswith(_OPTIMIZER))
    if kinds.isdisjoint(known_kinds) and kinds != known_kinds:
        own_words, met = (" and ".join(sorted(words)) or "nothing" for words in (kinds, known_kinds))
        raise StatesError(f"{checkpoint}: the optimizer keeps {own_words}, met {met} of another one")


def _list_kinds(names: Iterable[str]) -> set[str]:
    """Return what an optimizer keeps of parameters, besides the number of steps, from the names of its states."""
    return {name.rpartition(".")[2] for name in names if name.startswith(STATE)} - {"step"}


def _require_shapes(
    checkpoint: Path, states: dict[str, Any], keys: dict[str, str], shapes: dict[str, tuple[int, ...] | None]
) -> None:
    """Raise `StatesError` where a checkpoint has not a state of the module, or has it in another shape."""
    rule = f"{checkpoint}: a checkpoint is of this module and optimizer"
    for name, key in keys.items():
        if key not in shapes:
            raise StatesError(f"{rule}, met none of {name}")
        state, shape = states[name], shapes[key]
        if isinstance(state, Tensor) and shape is not None and tuple(state.shape) != shape:
            raise StatesError(f"{rule}, met {name} of shape {list(shape)}; nearest: {list(state.shape)}")


def _load_foreign_scheduler(
    checkpoint: Path, scheduler: LRScheduler, optimizer: Optimizer, known_names: set[str]
) -> None:
    """Have a schedule go on from that of a script of torch, if it saved one; else it begins."""
    own_state = scheduler.state_dict()
    keys = find_scheduler(checkpoint, own_state, known_names)
    if not keys:
        return
    wanted = {key: own_state[name] for name, key in keys.items()}
    with _tell_reason(checkpoint):
        load_keys(checkpoint, wanted, is_alone=count_ranks() == 1)
    scheduler.load_state_dict({name: wanted[key] for name, key in keys.items()})
    for group, rate, first_rate in zip(
        optimizer.param_groups, scheduler.get_last_lr(), scheduler.base_lrs, strict=True
    ):
        group["lr"], group["initial_lr"] = rate, first_rate


@contextmanager
def _tell_reason(checkpoint: Path) -> Iterator[None]:
    """Raise what torch raises as a `StatesError`."""
    try:
        yield
    except (RuntimeError, ValueError, OSError, KeyError, EOFError, UnpicklingError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise StatesError(f"{checkpoint}: a checkpoint is of this module and optimizer, met {reason[:300]}") from error


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
