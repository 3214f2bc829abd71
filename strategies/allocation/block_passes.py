"""One block's passes as allocations: which tensors it takes and gives back, operator by operator.

The moments of `meshwise.strategies.lowering.costs.liveness` say which tensors live while each operator runs. From one
moment to the next, tensors that are gone are released, and then new ones are allocated. What a stage's end or a
schedule makes of a block's memory (`meshwise.strategies.lowering.costs.memory.BlockMemory`) is imposed on the moments:
temporary tensors are cut where a moment exceeds the bytes of the pass, and one is added where none reaches them. So the
most bytes that the allocations of a pass request are exactly those of its `BlockMemory`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from meshwise.strategies.lowering.costs.liveness import KeptTensor, Liveness, Moment
from meshwise.strategies.lowering.costs.memory import BlockMemory
from meshwise.strategies.lowering.costs.recompute import count_elements, find_pass_tensors, find_recomputed_operators
from meshwise.strategies.plan.recomputation import LayerRecompute
from meshwise.strategies.schedules.schedule import ActionKind

Name = TypeVar("Name", str, int)


class BlockTensors(NamedTuple):
    """The tensors of one microbatch of a block on one rank, moment by moment.

    Parameters
    ----------
    kept
        What forward keeps, bytes by tensor.
    forward, remade, backward
        What is live while operators run: forward, what backward runs again, and backward, each in its own order. In
        backward it has what operators make of gradients of weights that count elsewhere only where it exceeds these.
    gradients
        The bytes of gradients of weights that count elsewhere and that each moment of ``backward`` makes.
    num_loss_moments
        The moments of ``backward`` that are a loss's.
    """

    kept: Moment
    forward: list[Moment]
    remade: list[Moment]
    backward: list[Moment]
    gradients: list[int]
    num_loss_moments: int


def find_block_tensors(
    liveness: Liveness, factor: int, recompute_choice: LayerRecompute, separate_bytes: int
) -> BlockTensors:
    """Return the tensors of a block with ``factor`` times the sequences of its live tensors.

    ``separate_bytes`` are those of an element of gradients that count elsewhere, as in
    `meshwise.strategies.lowering.costs.recompute.compute_moments`.
    """
    operators = liveness.operators
    kept_tensors, remade_tensors, remade_range = find_pass_tensors(liveness, recompute_choice)
    recomputed = set(find_recomputed_operators(liveness.block, recompute_choice))
    kept = {name: factor * tensor.size for name, tensor in kept_tensors.items()}
    inner_tensors: dict[str, KeptTensor] = {**remade_tensors, **kept_tensors}
    remade = [
        kept | _scale(moment, factor)
        for operator, moment in zip(operators, liveness.list_forward_moments(inner_tensors), strict=True)
        if operator in recomputed
    ]
    levels = liveness.list_backward_moments(kept_tensors, remade_tensors, remade_range)
    backward, gradients = [], []
    for operator, moment in zip(operators, levels, strict=True):
        gradient_bytes = liveness.weight_gradient_bytes(operator)
        separate = count_elements(liveness, operator) * separate_bytes
        gradients.append(separate)
        backward.append(
            _scale(moment, factor) | {f"{operator.name} gradient of weights": max(gradient_bytes - separate, 0)}
        )
    return BlockTensors(
        kept,
        [_scale(moment, factor) for moment in liveness.list_forward_moments(kept_tensors)],
        remade,
        backward[::-1],
        gradients[::-1],
        0 if recomputed else len(liveness.block.loss),
    )


def _scale(moment: Moment, factor: int) -> Moment:
    return {name: factor * size for name, size in moment.items()}


class PassEvents(NamedTuple):
    """The allocations and releases of one pass of a block, each of a local slot and its bytes, 0 for a release.

    The first ``num_kept`` slots are what the block keeps from forward to backward; ``gradients`` are slots, with their
    bytes, that stay when the pass has ended; all others are temporary.
    ``split`` is the number of events before the part that reads parameters: those of a loss's backward.
    """

    slots: tuple[int, ...]
    sizes: tuple[int, ...]
    num_kept: int
    gradients: tuple[tuple[int, int], ...]
    num_slots: int
    split: int = 0


def fit_kept(kept: Moment, size: int) -> Moment:
    """Return kept tensors that have ``size`` bytes together: without one that lies in a buffer, or with one more.

    >>> fit_kept({"input": 10, "norm": 6}, 6), fit_kept({"norm": 6}, 16)
    ({'norm': 6}, {'norm': 6, 'sent': 10})
    """
    result, excess = dict(kept), sum(kept.values()) - size
    whole = next((name for name, bytes_ in kept.items() if bytes_ == excess), None)
    if whole is not None:
        del result[whole]
    elif excess > 0:
        _shrink(result, excess, list(result))
    elif excess < 0:
        result["sent"] = -excess
    return {name: bytes_ for name, bytes_ in result.items() if bytes_}


def _shrink(moment: dict[Name, int], excess: int, names: Iterable[Name]) -> None:
    """Take bytes from tensors of a moment, the largest first."""
    for name in sorted(names, key=lambda name: -moment[name]):
        cut = min(excess, moment[name])
        moment[name] -= cut
        excess -= cut


def fit_moments(moments: Sequence[Moment], kept: Moment, size: int) -> list[Moment]:
    """Return moments of which the fullest has ``size`` bytes, and whose kept tensors are those of ``kept``.

    >>> fit_moments([{"x": 4}, {"x": 4, "y": 9}], {"x": 4}, 10)
    [{'x': 4}, {'x': 4, 'y': 6}]
    >>> fit_moments([{"x": 4}], {"x": 4}, 10)
    [{'x': 4, 'more': 6}]
    """
    result = []
    for moment in moments:
        fitted = {name: kept.get(name, bytes_) for name, bytes_ in moment.items()}
        _shrink(fitted, max(sum(fitted.values()) - size, 0), [name for name in fitted if name not in kept])
        result.append({name: bytes_ for name, bytes_ in fitted.items() if bytes_})
    fullest = max(result, key=lambda moment: sum(moment.values()), default=None)
    if fullest is None:
        result.append({})
        fullest = result[-1]
    missing = size - sum(fullest.values())
    if missing > 0:
        fullest["more"] = missing
    return result


class _Recorder:
    """Records the events of a pass."""

    def __init__(self, kept: Moment, num_gradients: int, live: Moment) -> None:
        self.kept = kept
        self.places = {name: place for place, name in enumerate(kept)}
        self.live: dict[str, tuple[int, int]] = {name: (self.places[name], size) for name, size in live.items()}
        self.slots: list[int] = []
        self.sizes: list[int] = []
        self.gradients: list[tuple[int, int]] = []
        self.num_slots = len(kept) + num_gradients

    def release_others(self, moment: Moment) -> None:
        """Release what is not in a moment."""
        for name, (slot, size) in list(self.live.items()):
            if moment.get(name) != size:
                self._record(slot, 0)
                del self.live[name]

    def move_to(self, moment: Moment) -> None:
        """Release what is not in a moment, and allocate what is new in it."""
        self.release_others(moment)
        for name, size in moment.items():
            if size and name not in self.live:
                self._allocate(name, size)

    def _allocate(self, name: str, size: int) -> None:
        slot = self.places[name] if self.kept.get(name) == size else self.num_slots
        self.num_slots += slot == self.num_slots
        self.live[name] = slot, size
        self._record(slot, size)

    def make_gradient(self, number: int, size: int) -> None:
        """Allocate a gradient that stays."""
        if size:
            self.gradients.append((len(self.kept) + number, size))
            self._record(*self.gradients[-1])

    def _record(self, slot: int, size: int) -> None:
        self.slots.append(slot)
        self.sizes.append(size)

    def finish(self, split: int = 0) -> PassEvents:
        """Return the events."""
        return PassEvents(
            tuple(self.slots), tuple(self.sizes), len(self.kept), tuple(self.gradients), self.num_slots, split
        )


def record_forward(tensors: BlockTensors, kept: Moment, memory: BlockMemory) -> PassEvents:
    """Return the events of a forward that leaves ``kept`` tensors."""
    recorder = _Recorder(kept, 0, {})
    # a tensor is released between its last reader and backward only where nothing keeps it
    for moment in fit_moments(tensors.forward, kept, memory.kept_bytes + memory.forward):
        recorder.move_to(moment)
    recorder.move_to(kept)
    return recorder.finish()


def record_backward(tensors: BlockTensors, kept: Moment, memory: BlockMemory, gradient_bytes: int) -> PassEvents:
    """Return the events of a backward that finds ``kept`` tensors and makes ``gradient_bytes`` that stay."""
    size = memory.kept_bytes + memory.recomputed_bytes + memory.backward
    gradients = _fit_gradients(tensors.gradients, gradient_bytes)
    recorder = _Recorder(kept, len(gradients), kept)
    for moment in tensors.remade:
        recorder.move_to(fit_moments([kept | moment], kept, min(sum((kept | moment).values()), size))[0])
    num_loss = tensors.num_loss_moments
    made_bytes, split = 0, 0
    rows: list[tuple[Moment, int]] = []
    for moment, made in zip(tensors.backward, gradients, strict=True):
        made_bytes += made
        # what other moments make of gradients that stay is not there yet
        rows.append((moment, size + gradient_bytes - made_bytes))
    parts = (rows[:num_loss], size), (rows[num_loss:], size - memory.loss)
    number = 0
    for part, limit in parts:
        if not part:
            continue
        totals = [_count_fitted(moment, kept) - (limit_ - size) for moment, limit_ in part]
        fullest = totals.index(max(totals))
        for place, (moment, row_size) in enumerate(part):
            room = row_size - (size - limit)
            fitted = fit_moments([moment], kept, room if place == fullest else min(room, _count_fitted(moment, kept)))[
                0
            ]
            if number == num_loss:  # what comes next reads parameters
                recorder.release_others(fitted)
                split = len(recorder.slots)
            recorder.move_to(fitted)
            recorder.make_gradient(number, gradients[number])
            number += 1
    recorder.move_to({})
    return recorder.finish(split)


def _count_fitted(moment: Moment, kept: Moment) -> int:
    """Return the bytes of a moment with the kept tensors as they are."""
    return sum(kept.get(name, size) for name, size in moment.items())


def _fit_gradients(gradients: Sequence[int], size: int) -> list[int]:
    """Return the bytes of gradients that each moment makes, ``size`` together."""
    result = dict(enumerate(gradients))
    excess = sum(gradients) - size
    if excess > 0:
        _shrink(result, excess, list(result))
    elif result:
        result[0] -= excess
    return list(result.values())


def record_part(kept: Moment, memory: BlockMemory, kind: ActionKind, left: Moment) -> PassEvents:
    """Return the events of one part of a split backward, which finds ``kept`` tensors and leaves ``left`` of them."""
    acquired, _ = memory.changes(kind)
    working = max(acquired, 0) + memory.working_bytes(kind)
    recorder = _Recorder(kept, 0, kept)
    recorder.move_to(kept | {"working": working})
    remaining = {name: size for name, size in kept.items() if name in left}
    recorder.move_to(remaining)
    return recorder.finish()
