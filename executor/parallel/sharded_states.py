"""ZeRO 1: every rank keeps the optimizer's states of its own part of the parameters, and updates that part.

The gradients of a unit are one vector, cut into as many equal parts as ranks share states, without regard to where a
parameter ends. A reduce-scatter gives each rank the mean of its part; an all-gather brings the parts that others have
updated. Where groups of ranks share states, parts are summed over the groups' replicas.

An optimizer whose states, or the weights that it updates, are not where parameters are.

Parameters are cut into pieces, flat and without regard to their shapes: what AdamW and SGD do to an element depends on
nothing but that element. States of the first pieces, a fraction of all that a rank updates, are on its host; they are
updated chunk after chunk. Either the host steps: gradients go to it, and updated parameters come back. Or the device
steps: states come to it, two chunks at a time, are updated and go back. Parameters in 16 bits have main weights in fp32
among their states.

References
----------
Rajbhandari et al. 2020, "ZeRO", section 5.1 (optimizer state partitioning) and 7.1 (a reduce-scatter and an
all-gather move what an all-reduce does).
Megatron-Core, ``core/optimizer/distrib_optimizer.py`` (parts of a contiguous buffer of gradients).
Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (the host steps; it keeps main
weights, also where they are as precise as the device's).
Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.2 (states come in, are updated and written back in chunks).
Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.1 (a main copy of weights in fp32).
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
    """An optimizer: its class, and what it is made with."""

    make: type[torch.optim.Optimizer]
    options: dict[str, Any]


class States(NamedTuple):
    """Where optimizer states are: a fraction of them on the host, the first ones, updated there or on the device."""

    host: HostMemory
    on_host: float = 0.0
    place: StepPlace = StepPlace.HOST


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the part of a parameter that this rank has."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def values(self) -> Tensor:
        """A view of the elements."""
        return local(self.parameter.detach()).view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """A view of their gradient."""
        assert self.parameter.grad is not None
        return local(self.parameter.grad).view(-1)[self.start : self.stop]


def main_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the weights that an optimizer updates: fp32 for those in 16 bits."""
    return torch.promote_types(dtype, torch.float32)


class _Chunk:
    """Pieces that are updated together; here, and in fp32 or more, the optimizer updates them in place."""

    def __init__(self, pieces: Sequence[Piece], kind: Kind, host: HostMemory) -> None:
        self.pieces, self.host = pieces, host
        with torch.no_grad():
            self.mains = [nn.Parameter(self._main(piece.values)) for piece in pieces]
        self.optimizer = kind.make(self.mains, **kind.options)

    def _main(self, values: Tensor) -> Tensor:
        return values.to(main_type(values.dtype))

    def _own(self, main: Tensor, piece: Piece) -> bool:
        """Return whether a main weight is a copy of the parameter."""
        return storage(main) != storage(piece.values)

    def step(self) -> None:
        """Update the pieces."""
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
        """Yield where the states are that have the size of a parameter."""
        for state in self.optimizer.state.values():
            yield from ((state, name) for name, value in state.items() if isinstance(value, Tensor) and value.dim())


class _HostChunk(_Chunk):
    """Pieces that the host updates."""

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
    """Pieces whose states come to the device to be updated."""

    def _main(self, values: Tensor) -> Tensor:
        wide = values.to(main_type(values.dtype))
        return wide if wide is values else self.host.copy(wide)

    def __init__(self, pieces: Sequence[Piece], kind: Kind, host: HostMemory) -> None:
        super().__init__(pieces, kind, host)
        self.homes = [main.data for main in self.mains]

    def bring(self) -> None:
        """Bring to the device what the update reads."""
        with self.host.moving(STATES_FROM_HOST):
            for main, piece in zip(self.mains, self.pieces, strict=True):
                main.data = self.host.bring(main.data)
                main.grad = self.host.bring(piece.gradient.to(main.dtype))
            for state, name in self._states():
                state[name] = self.host.bring(state[name])

    def step(self) -> None:
        self._update()

    def leave(self) -> None:
        """Bring back to the host what the update wrote."""
        with self.host.moving(STATES_TO_HOST):
            for main, home in zip(self.mains, self.homes, strict=True):
                if main.data_ptr() != home.data_ptr():
                    home.copy_(main.data)
                    main.data = home
            for state, name in self._states():
                state[name] = self.host.copy(state[name])


class SplitOptimizer:
    """Steps pieces of parameters, of whose states a fraction may be on the host."""

    def __init__(self, pieces: Sequence[Piece], kind: Kind, states: States) -> None:
        self.parameters = list(dict.fromkeys(piece.parameter for piece in pieces))
        host, total = states.host, sum(piece.stop - piece.start for piece in pieces)
        away = fraction_of(total, states.on_host)
        size = max(ceil(away / CHUNKS), 1)
        chunks = [list(_between(pieces, start, min(start + size, away))) for start in range(0, away, size)]
        make = _HostChunk if states.place is StepPlace.HOST else _StreamedChunk
        self.away = [make(chunk, kind, host) for chunk in chunks]
        # one a parameter: temporaries of its update are small
        self.here = [_Chunk([piece], kind, host) for piece in _between(pieces, away, total)]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states on the device, the main weights among them."""
        found = {}
        for chunk in self.here:
            for main, piece in zip(chunk.mains, chunk.pieces, strict=True):
                own = {"main": main.detach()} if chunk._own(main, piece) else {}
                found[main] = dict(chunk.optimizer.state[main]) | own
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of all pieces."""
        return [group for chunk in (*self.here, *self.away) for group in chunk.optimizer.param_groups]

    def held(self) -> "Iterator[tuple[Piece, Tensor, dict[str, Any]]]":
        """Yield every piece with the weights that its update writes and its states, wherever they are."""
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
        """Go on with copies of the parameters."""
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
        for chunk in streamed[:1]:
            chunk.bring()
        for chunk, after in zip_longest(streamed, streamed[1:]):
            chunk.step()
            if after is not None:
                after.bring()
            chunk.leave()


def whole(parameters: Iterable[nn.Parameter]) -> list[Piece]:
    """Return what this rank has of some parameters."""
    return [Piece(parameter, 0, local(parameter.detach()).numel()) for parameter in parameters]


def _between(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """Yield the parts of pieces that lie between two elements of all, one behind the other."""
    first = 0
    for piece in pieces:
        size = piece.stop - piece.start
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            yield Piece(piece.parameter, piece.start + low, piece.start + high)
        first += size


def share(unit: Unit) -> int:
    """Return the elements of a rank's part; those of the last ranks may be fewer."""
    total = sum(local(parameter.detach()).numel() for parameter in unit.parameters)
    return ceil(total / unit.sharing.shards.size())


def own_pieces(unit: Unit) -> Iterator[Piece]:
    """Yield what this rank updates of every parameter; of most it is all or nothing."""
    first, each = 0, share(unit)
    begin = unit.sharing.shards.get_local_rank() * each
    for parameter in unit.parameters:
        size = local(parameter.detach()).numel()
        low, high = (min(max(edge - first, 0), size) for edge in (begin, begin + each))
        yield Piece(parameter, low, high)
        first += size


def average_own(unit: Unit) -> Finish:
    """Begin to make the gradients of this rank's part the mean over all ranks that have the same parameters."""
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
    """Fill ``tensors``, one a parameter of a unit, of which this rank has its own part, with the parts of others."""
    each, group = share(unit), unit.sharing.shards.get_group()
    parts = zip(tensors, own_pieces(unit), strict=True)
    own = _padded([tensor.flatten()[piece.start : piece.stop] for tensor, piece in parts], each)
    whole = own.new_empty(each * group.size())
    all_gather(whole, own, group=group)
    fill(tensors, whole)


def _padded(tensors: Sequence[Tensor], elements: int) -> Tensor:
    """Return all elements of ``tensors``, and zeros behind them, as one vector."""
    return flatten([*tensors, tensors[0].new_zeros(elements - sum(tensor.numel() for tensor in tensors))])


class ShardedOptimizer:
    """Steps this rank's part of every unit and receives the others from their ranks."""

    def __init__(self, units: Sequence[Unit], kind: Kind, states: States) -> None:
        self.units = units
        pieces = [piece for unit in units for piece in own_pieces(unit)]
        self.optim = SplitOptimizer(pieces, kind, states)

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Optimizer states of this rank's part."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options of this rank's part."""
        return self.optim.param_groups

    @property
    def own(self) -> Iterator[tuple[nn.Parameter, Tensor, str]]:
        """Every parameter with the gradient of this rank's part, and the axis along which ranks have other parts."""
        return ((piece.parameter, piece.gradient, u.sharing.axis) for u in self.units for piece in own_pieces(u))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient."""
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's part and gather the others."""
        self.optim.step()
        for unit in self.units:
            gather(unit, [local(parameter.detach()) for parameter in unit.parameters])

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Make every gradient whole again."""
        for unit in self.units:
            gather(unit, unit.gradients)
