"""Optimizers with sharded states (ZeRO 1), with states on the host, and with main weights in fp32.

With ZeRO 1 every rank has the optimizer states of its shard of the parameters, and updates that shard [1]_. The
gradients of a unit are one vector, cut into as many equal shards as ranks shard states, without regard to where a
parameter ends [2]_. A reduce-scatter gives each rank the mean of its shard; an all-gather brings the shards that other
ranks have updated. Where several groups of ranks shard states, shards are also summed over the groups' replicas.

For states on the host, parameters are cut into ranges of elements, flat and without regard to their shapes: the update
of an element by AdamW or SGD depends on that element alone. States of the first ranges, a fraction of all that a rank
updates, are on its host and are updated chunk by chunk. Either the host steps: gradients go to it, and updated
parameters come back [3]_. Or the device steps: states come to it, two chunks at a time, are updated and go back [4]_.

Parameters in 16 bits have main weights in fp32 among their states [5]_.

References
----------
.. [1] Rajbhandari et al. 2020, "ZeRO", section 5.1 (optimizer state partitioning) and 7.1 (a reduce-scatter and an
   all-gather move what an all-reduce does).
.. [2] Megatron-Core, ``core/optimizer/distrib_optimizer.py`` (parts of a contiguous buffer of gradients).
.. [3] Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (the host steps; it keeps
   main weights, also where they are as precise as the device's).
.. [4] Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.2 (states come in, are updated and written back in
   chunks).
.. [5] Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1 (a main copy of weights in fp32).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwise.executor.parallel.data_parallel import Finish, Unit
from meshwise.executor.parallel.offload import HostMemory
from meshwise.executor.recording.private_torch import all_gather, reduce_scatter, storage_number
from meshwise.executor.recording.tensors import fill, flatten, to_local
from meshwise.strategies.plan.mesh import REPLICA
from meshwise.strategies.plan.offloading import STEPS, UPDATE_CHUNKS, StepPlace, count_fraction

_NAMES = [step.name for step in STEPS]
GRADIENTS_TO_HOST, ON_HOST, PARAMETERS_FROM_HOST, STATES_FROM_HOST, _, STATES_TO_HOST = _NAMES


class OptimizerKind(NamedTuple):
    """The class of an optimizer and the options that it is made with."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]


class StatePlacement(NamedTuple):
    """Where optimizer states are: the first ``on_host`` of them, a fraction, on the host, and updated at ``place``."""

    host: HostMemory
    on_host: float = 0.0
    place: StepPlace = StepPlace.HOST


class ParameterRange(NamedTuple):
    """Elements ``start`` to ``stop`` of this rank's part of a parameter, counted flat."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def values(self) -> Tensor:
        """A view of the elements."""
        return to_local(self.parameter.detach()).view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """A view of the gradient of the elements."""
        assert self.parameter.grad is not None
        return to_local(self.parameter.grad).view(-1)[self.start : self.stop]


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the main weights, which the optimizer updates: fp32 for parameters in 16 bits."""
    return torch.promote_types(dtype, torch.float32)


class _Chunk:
    """Ranges that are updated together, on the device; parameters of fp32 or more are updated in place."""

    def __init__(self, pieces: Sequence[ParameterRange], kind: OptimizerKind, host: HostMemory) -> None:
        self.pieces, self.host = pieces, host
        with torch.no_grad():
            self.mains = [nn.Parameter(self._make_main(piece.values)) for piece in pieces]
        self.optimizer = kind.optimizer_class(self.mains, **kind.options)

    def _make_main(self, values: Tensor) -> Tensor:
        return values.to(main_dtype(values.dtype))

    def _owns_main(self, main: Tensor, piece: ParameterRange) -> bool:
        """Return whether a main weight has memory of its own, beside the parameter's."""
        return storage_number(main) != storage_number(piece.values)

    def step(self) -> None:
        """Update the ranges."""
        for main, piece in zip(self.mains, self.pieces, strict=True):
            main.grad = piece.gradient.to(main.dtype)
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        for main, piece in zip(self.mains, self.pieces, strict=True):
            main.grad = None
            if self._owns_main(main, piece):
                piece.values.copy_(main.detach())

    def _list_states(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the states that have an element for each of a parameter's, as dict and key; scalars are left out."""
        for state in self.optimizer.state.values():
            yield from ((state, name) for name, value in state.items() if isinstance(value, Tensor) and value.dim())


class _HostChunk(_Chunk):
    """Ranges whose states are on the host, which updates them."""

    def _make_main(self, values: Tensor) -> Tensor:
        return self.host.ensure_on_host(values.to(main_dtype(values.dtype)))

    def step(self) -> None:
        with self.host.record_copy(GRADIENTS_TO_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                gradient = piece.gradient
                host_gradient = gradient if self.host.holds(gradient) else self.host.copy_to_host(gradient)
                main.grad = self.host.cast_on_host(host_gradient, main.dtype)
        with self.host.record_copy(ON_HOST):
            self.optimizer.step()
            for state, name in self._list_states():
                state[name] = self.host.ensure_on_host(state[name])
        with self.host.record_copy(PARAMETERS_FROM_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                main.grad = None
                if self._owns_main(main, piece):
                    piece.values.copy_(self.host.cast_on_host(main.detach(), piece.values.dtype))


class _StreamedChunk(_Chunk):
    """Ranges whose states are on the host, and come to the device to be updated."""

    def _make_main(self, values: Tensor) -> Tensor:
        main_values = values.to(main_dtype(values.dtype))
        return main_values if main_values is values else self.host.copy_to_host(main_values)

    def __init__(self, pieces: Sequence[ParameterRange], kind: OptimizerKind, host: HostMemory) -> None:
        super().__init__(pieces, kind, host)
        self.homes = [main.data for main in self.mains]

    def bring_states(self) -> None:
        """Bring the main weights, gradients and states to the device."""
        with self.host.record_copy(STATES_FROM_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                main.data = self.host.bring_to_device(main.data)
                main.grad = self.host.bring_to_device(piece.gradient.to(main.dtype))
            for state, name in self._list_states():
                state[name] = self.host.bring_to_device(state[name])

    def step(self) -> None:
        self._update()

    def return_states(self) -> None:
        """Bring the updated main weights and states back to the host."""
        with self.host.record_copy(STATES_TO_HOST):
            for main, home in zip(self.mains, self.homes, strict=True):
                if main.data_ptr() != home.data_ptr():
                    home.copy_(main.data)
                    main.data = home
            for state, name in self._list_states():
                state[name] = self.host.copy_to_host(state[name])


class SplitOptimizer:
    """Updates ranges of parameters; a fraction of their states may be on the host."""

    def __init__(self, pieces: Sequence[ParameterRange], kind: OptimizerKind, placement: StatePlacement) -> None:
        self.parameters = list(dict.fromkeys(piece.parameter for piece in pieces))
        host, total = placement.host, sum(piece.stop - piece.start for piece in pieces)
        num_on_host = count_fraction(total, placement.on_host)
        size = max(ceil(num_on_host / UPDATE_CHUNKS), 1)
        chunks = [
            list(_cut_ranges(pieces, start, min(start + size, num_on_host))) for start in range(0, num_on_host, size)
        ]
        chunk_class = _HostChunk if placement.place is StepPlace.HOST else _StreamedChunk
        self.host_chunks = [chunk_class(chunk, kind, host) for chunk in chunks]
        # a chunk for each parameter: the temporary tensors of an update are then no larger than one parameter
        self.device_chunks = [_Chunk([piece], kind, host) for piece in _cut_ranges(pieces, num_on_host, total)]
        self.chunks: list[_Chunk] = [*self.device_chunks, *self.host_chunks]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states on the device, by main weight; main weights with memory of their own are among them."""
        states = {}
        for chunk in self.device_chunks:
            for main, piece in zip(chunk.mains, chunk.pieces, strict=True):
                main_state = {"main": main.detach()} if chunk._owns_main(main, piece) else {}
                states[main] = dict(chunk.optimizer.state[main]) | main_state
        return states

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of all ranges."""
        return [group for chunk in self.chunks for group in chunk.optimizer.param_groups]

    def list_ranges(self) -> Iterator[tuple[ParameterRange, Tensor, dict[str, Any]]]:
        """Yield every range with its main weights and its states, on device or host."""
        for chunk in self.chunks:
            for main, piece in zip(chunk.mains, chunk.pieces, strict=True):
                yield piece, main.detach(), chunk.optimizer.state[main]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zeros."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def hand_over(self, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
        """Update copies of the parameters from now on, with the same states."""
        self.parameters = [replacements[parameter] for parameter in self.parameters]
        for chunk in self.chunks:
            chunk.pieces = [piece._replace(parameter=replacements[piece.parameter]) for piece in chunk.pieces]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        for chunk in self.device_chunks:
            chunk.step()
        streamed_chunks = [chunk for chunk in self.host_chunks if isinstance(chunk, _StreamedChunk)]
        for chunk in self.host_chunks:
            if isinstance(chunk, _HostChunk):
                chunk.step()
        # the next chunk comes before the last one leaves: two chunks are on the device at a time
        for chunk in streamed_chunks[:1]:
            chunk.bring_states()
        for chunk, next_chunk in zip_longest(streamed_chunks, streamed_chunks[1:]):
            chunk.step()
            if next_chunk is not None:
                next_chunk.bring_states()
            chunk.return_states()


def list_ranges(parameters: Iterable[nn.Parameter]) -> list[ParameterRange]:
    """Return one range for each parameter: all of this rank's part."""
    return [ParameterRange(parameter, 0, to_local(parameter.detach()).numel()) for parameter in parameters]


def _cut_ranges(pieces: Iterable[ParameterRange], start: int, stop: int) -> Iterator[ParameterRange]:
    """Yield the ranges that make up elements ``start`` to ``stop`` of all ranges put in a row."""
    offset = 0
    for piece in pieces:
        size = piece.stop - piece.start
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            yield ParameterRange(piece.parameter, piece.start + low, piece.start + high)
        offset += size


def shard_size(unit: Unit) -> int:
    """Return the number of elements in a rank's shard of a unit; the shards of the last ranks may have fewer."""
    total = sum(to_local(parameter.detach()).numel() for parameter in unit.parameters)
    return ceil(total / unit.sharing.shards.size())


def list_own_ranges(unit: Unit) -> Iterator[ParameterRange]:
    """Yield the range of every parameter that this rank updates: of most parameters all or nothing."""
    offset, num_elements = 0, shard_size(unit)
    begin = unit.sharing.shards.get_local_rank() * num_elements
    for parameter in unit.parameters:
        size = to_local(parameter.detach()).numel()
        low, high = (min(max(edge - offset, 0), size) for edge in (begin, begin + num_elements))
        yield ParameterRange(parameter, low, high)
        offset += size


def average_shard(unit: Unit) -> Finish:
    """Begin to average the gradients of this rank's shard over all ranks that have the same parameters."""
    sharing = unit.sharing
    group, count, num_elements = sharing.shards.get_group(), sharing.shards.size(), shard_size(unit)
    flat = _pad_flat(unit.gradients, count * num_elements)
    part = flat.new_empty(num_elements)
    work: Any = reduce_scatter(part, flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if sharing.replicas.size() > count:
            dist.all_reduce(part, group=sharing.states[REPLICA].get_group())
        part.div_(sharing.replicas.size())
        start = 0
        for piece in list_own_ranges(unit):
            size = piece.stop - piece.start
            piece.gradient.copy_(part[start : start + size])
            start += size

    return finish


def gather_shards(unit: Unit, tensors: Sequence[Tensor]) -> None:
    """Fill ``tensors``, one for each parameter of a unit, which have this rank's shard, with the shards of others."""
    num_elements, group = shard_size(unit), unit.sharing.shards.get_group()
    parts = zip(tensors, list_own_ranges(unit), strict=True)
    shard = _pad_flat([tensor.flatten()[piece.start : piece.stop] for tensor, piece in parts], num_elements)
    flat = shard.new_empty(num_elements * group.size())
    all_gather(flat, shard, group=group)
    fill(tensors, flat)


def _pad_flat(tensors: Sequence[Tensor], elements: int) -> Tensor:
    """Return the elements of ``tensors`` as one vector of ``elements``, with zeros at its end."""
    return flatten([*tensors, tensors[0].new_zeros(elements - sum(tensor.numel() for tensor in tensors))])


class CombinedOptimizer:
    """Several optimizers of different parameters, used as one."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers = optimizers

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of all parameters that this rank updates."""
        return {parameter: values for member in self.optimizers for parameter, values in member.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, with their learning rates."""
        return [group for member in self.optimizers for group in member.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zeros."""
        for member in self.optimizers:
            member.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Update all parameters."""
        for member in self.optimizers:
            member.step()


class ShardedOptimizer(CombinedOptimizer):
    """Updates this rank's shard of every unit and receives the other shards from their ranks."""

    def __init__(self, units: Sequence[Unit], kind: OptimizerKind, placement: StatePlacement) -> None:
        self.units = units
        pieces = [piece for unit in units for piece in list_own_ranges(unit)]
        super().__init__([SplitOptimizer(pieces, kind, placement)])

    @property
    def gradient_parts(self) -> Iterator[tuple[nn.Parameter, Tensor, str]]:
        """Every parameter with the gradient of this rank's range, and the axis along which ranks have other ranges."""
        return ((piece.parameter, piece.gradient, u.sharing.axis) for u in self.units for piece in list_own_ranges(u))

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and gather the others."""
        super().step()
        for unit in self.units:
            gather_shards(unit, [to_local(parameter.detach()) for parameter in unit.parameters])

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Make every gradient whole again."""
        for unit in self.units:
            gather_shards(unit, unit.gradients)
