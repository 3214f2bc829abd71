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
from meshwise.executor.recording.private_torch import all_gather, reduce_scatter, storage
from meshwise.executor.recording.tensors import fill, flatten, local
from meshwise.strategies.plan.mesh import REPLICA
from meshwise.strategies.plan.offloading import CHUNKS, STEPS, StepPlace, fraction_of

_NAMES = [step.name for step in STEPS]
GRADIENTS_TO_HOST, ON_HOST, PARAMETERS_FROM_HOST, STATES_FROM_HOST, _, STATES_TO_HOST = _NAMES


class Kind(NamedTuple):
    """The class of an optimizer and the options that it is made with."""

    make: type[torch.optim.Optimizer]
    options: dict[str, Any]


class States(NamedTuple):
    """Where optimizer states are: the first ``on_host`` of them, a fraction, on the host, and updated at ``place``."""

    host: HostMemory
    on_host: float = 0.0
    place: StepPlace = StepPlace.HOST


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of this rank's part of a parameter, counted flat."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def values(self) -> Tensor:
        """A view of the elements."""
        return local(self.parameter.detach()).view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """A view of the gradient of the elements."""
        assert self.parameter.grad is not None
        return local(self.parameter.grad).view(-1)[self.start : self.stop]


def main_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the main weights, which the optimizer updates: fp32 for parameters in 16 bits."""
    return torch.promote_types(dtype, torch.float32)


class _Chunk:
    """Ranges that are updated together, on the device; parameters of fp32 or more are updated in place."""

    def __init__(self, pieces: Sequence[Piece], kind: Kind, host: HostMemory) -> None:
        self.pieces, self.host = pieces, host
        with torch.no_grad():
            self.mains = [nn.Parameter(self._main(piece.values)) for piece in pieces]
        self.optimizer = kind.make(self.mains, **kind.options)

    def _main(self, values: Tensor) -> Tensor:
        return values.to(main_type(values.dtype))

    def _own(self, main: Tensor, piece: Piece) -> bool:
        """Return whether a main weight has memory of its own, beside the parameter's."""
        return storage(main) != storage(piece.values)

    def step(self) -> None:
        """Update the ranges."""
        for main, piece in zip(self.mains, self.pieces, strict=True):
            main.grad = piece.gradient.to(main.dtype)
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        for main, piece in zip(self.mains, self.pieces, strict=True):
            main.grad = None
            if self._own(main, piece):
                piece.values.copy_(main.detach())

    def _states(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the states that have an element for each of a parameter's, as dict and key; scalars are left out."""
        for state in self.optimizer.state.values():
            yield from ((state, name) for name, value in state.items() if isinstance(value, Tensor) and value.dim())


class _HostChunk(_Chunk):
    """Ranges whose states are on the host, which updates them."""

    def _main(self, values: Tensor) -> Tensor:
        return self.host.keep(values.to(main_type(values.dtype)))

    def step(self) -> None:
        with self.host.moving(GRADIENTS_TO_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                gradient = piece.gradient
                there = gradient if self.host.holds(gradient) else self.host.copy(gradient)
                main.grad = self.host.cast(there, main.dtype)
        with self.host.moving(ON_HOST):
            self.optimizer.step()
            for state, name in self._states():
                state[name] = self.host.keep(state[name])
        with self.host.moving(PARAMETERS_FROM_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                main.grad = None
                if self._own(main, piece):
                    piece.values.copy_(self.host.cast(main.detach(), piece.values.dtype))


class _StreamedChunk(_Chunk):
    """Ranges whose states are on the host, and come to the device to be updated."""

    def _main(self, values: Tensor) -> Tensor:
        wide = values.to(main_type(values.dtype))
        return wide if wide is values else self.host.copy(wide)

    def __init__(self, pieces: Sequence[Piece], kind: Kind, host: HostMemory) -> None:
        super().__init__(pieces, kind, host)
        self.homes = [main.data for main in self.mains]

    def bring(self) -> None:
        """Bring the main weights, gradients and states to the device."""
        with self.host.moving(STATES_FROM_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                main.data = self.host.bring(main.data)
                main.grad = self.host.bring(piece.gradient.to(main.dtype))
            for state, name in self._states():
                state[name] = self.host.bring(state[name])

    def step(self) -> None:
        self._update()

    def leave(self) -> None:
        """Bring the updated main weights and states back to the host."""
        with self.host.moving(STATES_TO_HOST):
            for main, home in zip(self.mains, self.homes, strict=True):
                if main.data_ptr() != home.data_ptr():
                    home.copy_(main.data)
                    main.data = home
            for state, name in self._states():
                state[name] = self.host.copy(state[name])


class SplitOptimizer:
    """Updates ranges of parameters; a fraction of their states may be on the host."""

    def __init__(self, pieces: Sequence[Piece], kind: Kind, states: States) -> None:
        self.parameters = list(dict.fromkeys(piece.parameter for piece in pieces))
        host, total = states.host, sum(piece.stop - piece.start for piece in pieces)
        away = fraction_of(total, states.on_host)
        size = max(ceil(away / CHUNKS), 1)
        chunks = [list(_between(pieces, start, min(start + size, away))) for start in range(0, away, size)]
        make = _HostChunk if states.place is StepPlace.HOST else _StreamedChunk
        self.away = [make(chunk, kind, host) for chunk in chunks]
        # a chunk for each parameter: the temporary tensors of an update are then no larger than one parameter
        self.here = [_Chunk([piece], kind, host) for piece in _between(pieces, away, total)]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states on the device, by main weight; main weights with memory of their own are among them."""
        found = {}
        for chunk in self.here:
            for main, piece in zip(chunk.mains, chunk.pieces, strict=True):
                own = {"main": main.detach()} if chunk._own(main, piece) else {}
                found[main] = dict(chunk.optimizer.state[main]) | own
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of all ranges."""
        return [group for chunk in (*self.here, *self.away) for group in chunk.optimizer.param_groups]

    def held(self) -> "Iterator[tuple[Piece, Tensor, dict[str, Any]]]":
        """Yield every range with its main weights and its states, on device or host."""
        for chunk in (*self.here, *self.away):
            for main, piece in zip(chunk.mains, chunk.pieces, strict=True):
                yield piece, main.detach(), chunk.optimizer.state[main]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zeros."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def hand_over(self, renewed: dict[nn.Parameter, nn.Parameter]) -> None:
        """Update copies of the parameters from now on, with the same states."""
        self.parameters = [renewed[parameter] for parameter in self.parameters]
        for chunk in (*self.here, *self.away):
            chunk.pieces = [piece._replace(parameter=renewed[piece.parameter]) for piece in chunk.pieces]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        for chunk in self.here:
            chunk.step()
        streamed = [chunk for chunk in self.away if isinstance(chunk, _StreamedChunk)]
        for chunk in self.away:
            if isinstance(chunk, _HostChunk):
                chunk.step()
        # the next chunk comes before the last one leaves: two chunks are on the device at a time
        for chunk in streamed[:1]:
            chunk.bring()
        for chunk, after in zip_longest(streamed, streamed[1:]):
            chunk.step()
            if after is not None:
                after.bring()
            chunk.leave()


def whole(parameters: Iterable[nn.Parameter]) -> list[Piece]:
    """Return one range for each parameter: all of this rank's part."""
    return [Piece(parameter, 0, local(parameter.detach()).numel()) for parameter in parameters]


def _between(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the ranges that make up elements ``start`` to ``stop`` of all ranges put in a row."""
    first = 0
    for piece in pieces:
        size = piece.stop - piece.start
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            yield Piece(piece.parameter, piece.start + low, piece.start + high)
        first += size


def share(unit: Unit) -> int:
    """Return the number of elements in a rank's shard of a unit; the shards of the last ranks may have fewer."""
    total = sum(local(parameter.detach()).numel() for parameter in unit.parameters)
    return ceil(total / unit.sharing.shards.size())


def own_pieces(unit: Unit) -> Iterator[Piece]:
    """Yield the range of every parameter that this rank updates: of most parameters all or nothing."""
    first, each = 0, share(unit)
    begin = unit.sharing.shards.get_local_rank() * each
    for parameter in unit.parameters:
        size = local(parameter.detach()).numel()
        low, high = (min(max(edge - first, 0), size) for edge in (begin, begin + each))
        yield Piece(parameter, low, high)
        first += size


def average_own(unit: Unit) -> Finish:
    """Begin to average the gradients of this rank's shard over all ranks that have the same parameters."""
    sharing = unit.sharing
    group, count, each = sharing.shards.get_group(), sharing.shards.size(), share(unit)
    flat = _padded(unit.gradients, count * each)
    part = flat.new_empty(each)
    work: Any = reduce_scatter(part, flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if sharing.replicas.size() > count:
            dist.all_reduce(part, group=sharing.states[REPLICA].get_group())
        part.div_(sharing.replicas.size())
        start = 0
        for piece in own_pieces(unit):
            size = piece.stop - piece.start
            piece.gradient.copy_(part[start : start + size])
            start += size

    return finish


def gather(unit: Unit, tensors: Sequence[Tensor]) -> None:
    """Fill ``tensors``, one for each parameter of a unit, which have this rank's shard, with the shards of others."""
    each, group = share(unit), unit.sharing.shards.get_group()
    parts = zip(tensors, own_pieces(unit), strict=True)
    own = _padded([tensor.flatten()[piece.start : piece.stop] for tensor, piece in parts], each)
    whole = own.new_empty(each * group.size())
    all_gather(whole, own, group=group)
    fill(tensors, whole)


def _padded(tensors: Sequence[Tensor], elements: int) -> Tensor:
    """Return the elements of ``tensors`` as one vector of ``elements``, with zeros at its end."""
    return flatten([*tensors, tensors[0].new_zeros(elements - sum(tensor.numel() for tensor in tensors))])


class ShardedOptimizer:
    """Updates this rank's shard of every unit and receives the other shards from their ranks."""

    def __init__(self, units: Sequence[Unit], kind: Kind, states: States) -> None:
        self.units = units
        pieces = [piece for unit in units for piece in own_pieces(unit)]
        self.optim = SplitOptimizer(pieces, kind, states)

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of this rank's shards."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of this rank's shards."""
        return self.optim.param_groups

    @property
    def own(self) -> Iterator[tuple[nn.Parameter, Tensor, str]]:
        """Every parameter with the gradient of this rank's range, and the axis along which ranks have other ranges."""
        return ((piece.parameter, piece.gradient, u.sharing.axis) for u in self.units for piece in own_pieces(u))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and gather the others."""
        self.optim.step()
        for unit in self.units:
            gather(unit, [local(parameter.detach()) for parameter in unit.parameters])

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Make every gradient whole again."""
        for unit in self.units:
            gather(unit, unit.gradients)
