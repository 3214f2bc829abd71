"""Offload of a user's module: what its blocks keep for backward, and the states of any optimizer, in host memory.

Blocks move what they keep as the layers of built-in models do (`meshwise.executor.parallel.offload`). An optimizer on
the host steps copies of its parameters there [1]_: gradients go to the host, and stepped parameters come back. Where
``fully_shard`` has the parameters, its own policy keeps shards, gradients and so states on the host [2]_.

References
----------
.. [1] Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021.
.. [2] torch, ``torch.distributed.fsdp.CPUOffloadPolicy``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim import Optimizer

from meshwise.executor.parallel.offload import ActivationOffload, HostMemory
from meshwise.executor.recording.accelerator import Accelerator
from meshwise.strategies.schedules.schedule import Schedule


class _PassPlace:
    """Which pass runs, in the place of a recorder: nothing is recorded."""

    current_pass: tuple[int, int] = 0, 0

    def record_host_copy(self, name: str, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Return a context that records nothing."""
        return nullcontext()


class BlockOffload:
    """Keeps what the blocks of this rank save for backward on the host; all its stages share two buffers.

    Parameters
    ----------
    schedule
        The passes of all pipeline ranks.
    position
        The number of this one.
    """

    def __init__(self, schedule: Schedule, position: int, accelerator: Accelerator) -> None:
        place: Any = _PassPlace()
        self._place, self.host = place, HostMemory(place, accelerator)
        self._activations = ActivationOffload(schedule, position, self.host)

    def begin_pass(self, stage: int, microbatch: int) -> None:
        """Say which forward runs next."""
        self._place.current_pass = stage, microbatch
        self._activations.last_layer = None  # that of the step before, whose pass has the same place

    def wrap(self, blocks: Sequence[nn.Module], owner: nn.Module | None = None) -> None:
        """Have the blocks of a stage, in the order of forward, keep on the host what they save.

        Parameters
        ----------
        owner
            Has the parameters that blocks read, which stay; by default those of each block do.
        """
        for place, block in enumerate(blocks):
            plain: Any = block
            plain.forward = partial(self._run, plain.forward, owner or block, place, len(blocks) - 1 - place)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def _run(
        self, forward: Any, owner: nn.Module, place: int, num_behind: int, *arguments: Any, **named_arguments: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named_arguments)
        with self._activations.offload_layer(owner, f"blocks.{place}", num_behind):
            return forward(*arguments, **named_arguments)


def choose_offload_policy(accelerator: Accelerator, *, is_on_host: bool) -> OffloadPolicy:
    """Return where ``fully_shard`` keeps shards: those on the host are page-locked on a host of GPUs."""
    return CPUOffloadPolicy(pin_memory=accelerator.pins) if is_on_host else OffloadPolicy()


class HostStates:
    """Has an optimizer step copies of its parameters on the host, where their states are too.

    The parameters in its groups stay those of the device, so that schedules and checkpoints see nothing of it.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        place: Any = _PassPlace()
        self.optimizer, self.host = optimizer, HostMemory(place, accelerator)
        self._copies: dict[Tensor, tuple[nn.Parameter, int]] = {}  # with the version of the parameter that they have
        self._step = optimizer.step
        plain: Any = optimizer
        plain.step = MethodType(lambda _, closure=None: self.step(closure), optimizer)

    def step(self, closure: Any = None) -> Any:
        """Step the copies, and bring them back."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        own_rows = [group["params"] for group in groups]
        pairs = {
            parameter: self._copy(parameter) for row in own_rows for parameter in row if parameter.grad is not None
        }
        for parameter, copy in pairs.items():
            if parameter in state:
                state[copy] = state.pop(parameter)
                self._move(state[copy])
        for group, row in zip(groups, own_rows, strict=True):
            group["params"] = [pairs[parameter] for parameter in row if parameter in pairs]
        try:
            return self._step(closure)
        finally:
            for group, row in zip(groups, own_rows, strict=True):
                group["params"] = row
            for parameter, copy in pairs.items():
                if copy in state:
                    state[parameter] = state.pop(copy)
                    self._move(state[parameter])
                copy.grad = None
                with torch.no_grad():
                    parameter.copy_(copy)
                self._copies[parameter] = copy, parameter._version

    def _copy(self, parameter: Tensor) -> nn.Parameter:
        """Return the copy of a parameter with its gradient, made anew where something else has changed it.

        Torch counts no changes of ``parameter.data``: the copy does not have these.
        """
        copy, version = self._copies.get(parameter, (None, -1))
        if copy is None or version != parameter._version:
            copy = nn.Parameter(self.host.copy_to_host(parameter.detach().contiguous()))
        assert parameter.grad is not None
        copy.grad = self.host.copy_to_host(parameter.grad.contiguous())
        return copy

    def move_states(self) -> None:
        """Move all states to the host: a checkpoint is read to where parameters are."""
        for states in self.optimizer.state.values():
            self._move(states)

    def _move(self, states: dict[str, Any]) -> None:
        """Move states with elements to the host, where they are not there yet."""
        for name, value in states.items():
            if isinstance(value, Tensor) and value.dim():
                states[name] = self.host.ensure_on_host(value.contiguous())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a state is on the host."""
        return bool(tensor.dim()) and self.host.holds(tensor)
