"""States written beside the steps: a step waits while they are copied to host memory, and not while they are written.

One folder is under way at a time; the next one waits for it. The copies stay, for the next ones to fill their memory.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.executor.recording.tensors import to_local
from meshwise.executor.saving.shared_states import SharedState
from meshwise.executor.saving.writing import Group, write_folder


class HostCopies:
    """Copies of states in host memory, whose tensors are cut over ranks as the states are."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}

    def take(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of states, which are in dicts by name; those of an earlier call are overwritten."""
        with torch.no_grad():
            self._copies = _copy_states(states, self._copies)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return self._copies


def _copy_states(states: Mapping[str, Any], old: Any) -> dict[str, Any]:
    known = old if isinstance(old, dict) else {}
    return {name: _copy(state, known.get(name)) for name, state in states.items()}


def _copy(state: Any, old: Any) -> Any:
    if isinstance(state, Mapping):
        return _copy_states(state, old)
    if not isinstance(state, Tensor):
        return deepcopy(state)
    if isinstance(state, SharedState):
        return state.replace(_copy(state.part, old.part if isinstance(old, SharedState) else None))
    if type(old) is not type(state) or old.shape != state.shape or old.dtype != state.dtype:
        return state.detach().to("cpu", copy=True)
    to_local(old).copy_(to_local(state.detach()), non_blocking=True)
    return old


class BackgroundWriter:
    """Writes states into folders, at once or beside the steps; all ranks call it alike."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._threads: ThreadPoolExecutor | None = None
        self._group: Group = None
        self._writing: Future[None] | None = None

    def write(
        self, target: Path, states: dict[str, Any], files: Mapping[str, bytes], *, in_background: bool = False
    ) -> None:
        """Write states and files into a folder, as `write_folder` does; earlier ones are there before.

        Raises
        ------
        CheckpointError
            Where they cannot be written, or those before could not.
        """
        self.finish()
        if not in_background:
            write_folder(target, states, files, sweeps=True)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "meshwise-saving")
            # messages of a group of its own do not meet those of the steps
            self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        copies = self._copies.take(states)
        self._writing = self._threads.submit(write_folder, target, copies, files, self._group, sweeps=True)

    def look(self) -> None:
        """Raise `CheckpointError` where states could not be written; wait for nothing."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Return when what was begun is written; `CheckpointError` where it could not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
