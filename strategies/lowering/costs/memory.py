"""Memory of one microbatch on one rank: what passes of blocks and stages keep and work in."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwise.strategies.schedules.schedule import ActionKind


class BlockMemory(NamedTuple):
    """Bytes of one microbatch of one block on one rank.

    Parameters
    ----------
    kept_bytes
        Held from forward to backward.
    recomputed_bytes
        Made again at the start of backward and held until its end; below 0 where gradients count from the start on
        that are made only after activations are freed.
    forward, backward
        Held beyond those at the fullest moment of each pass.
    deferred_bytes
        Needed for the gradients of weights once those of inputs are made.
    gradients
        The part of ``deferred_bytes`` that exists only then: gradients of outputs of operators with weights.
    inputs, weights
        Where backward is split, held beyond those at the fullest moment of each part; ``weights`` may be below 0 as
        ``recomputed_bytes`` may.
    loss, loss_inputs
        The parts of ``backward`` and of ``inputs`` that exist only during the backward of a loss, which comes first.
    lost_bytes
        The part of ``deferred_bytes`` that a stage frees when the gradients of its inputs are made.
    """

    kept_bytes: int
    recomputed_bytes: int
    forward: int
    backward: int
    deferred_bytes: int = 0
    gradients: int = 0
    inputs: int = 0
    weights: int = 0
    loss: int = 0
    loss_inputs: int = 0
    lost_bytes: int = 0

    def changes(self, kind: ActionKind) -> tuple[int, int]:
        """Return the bytes that a pass takes at its start and gives back at its end, besides `working_bytes`."""
        if kind is ActionKind.FORWARD:
            return self.kept_bytes, 0
        if kind is ActionKind.WEIGHT:
            early_bytes = min(self.weights, 0)
            return early_bytes, early_bytes + self.deferred_bytes
        if kind is ActionKind.BACKWARD:
            return self.recomputed_bytes, self.recomputed_bytes + self.kept_bytes
        acquired_bytes = max(self.recomputed_bytes, 0) + self.gradients
        return acquired_bytes, acquired_bytes + self.kept_bytes - self.deferred_bytes

    def with_late_gradients(self) -> "BlockMemory":
        """Return the memory where a split backward makes all gradients with those of weights."""
        weights = self.recomputed_bytes + self.backward
        return self._replace(
            deferred_bytes=self.kept_bytes,
            gradients=-max(self.recomputed_bytes, 0),
            inputs=0,
            weights=weights,
            loss_inputs=0,
            lost_bytes=0,
        )

    def with_kept_graph(self, received_bytes: int, sent_bytes: int) -> "BlockMemory":
        """Return the memory as `with_buffers` does, where a split backward gives nothing back before its end."""
        memory, gradients = self.with_buffers(received_bytes, sent_bytes), max(self.gradients - sent_bytes, 0)
        return memory._replace(
            gradients=gradients,
            deferred_bytes=self.deferred_bytes
            - min(received_bytes, self.kept_bytes)
            + gradients
            - self.gradients
            + sent_bytes,
        )

    def with_buffers(self, received_bytes: int, sent_bytes: int) -> "BlockMemory":
        """Return the memory where received bytes lie in a buffer, and sent bytes stay until backward."""
        backward, inputs = max(self.backward - sent_bytes, 0), max(self.inputs - sent_bytes, 0)
        return self._replace(
            kept_bytes=max(self.kept_bytes - received_bytes, 0) + sent_bytes,
            forward=max(self.forward - sent_bytes, 0),
            backward=backward,
            inputs=inputs,
            loss=min(self.loss, backward),
            loss_inputs=min(self.loss_inputs, inputs),
        )

    def working_bytes(self, kind: ActionKind) -> int:
        """Return the bytes that a pass holds at its fullest moment beyond those it takes."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward
        return self.inputs if kind is ActionKind.INPUT else max(self.weights, 0)

    def loss_bytes(self, kind: ActionKind) -> int:
        """Return the part of `working_bytes` that a pass frees before it reads parameters."""
        if kind is ActionKind.BACKWARD:
            return self.loss
        return self.loss_inputs if kind is ActionKind.INPUT else 0


class StageMemory(NamedTuple):
    """Bytes of one microbatch of one stage on one rank.

    Parameters
    ----------
    kept_bytes
        Held from forward to backward.
    forward, backward
        Held beyond ``kept_bytes`` at the fullest moment of each pass.
    deferred_bytes
        Where backward is split, held from the gradients of inputs to those of weights.
    inputs, weights
        Held beyond ``kept_bytes`` and beyond ``deferred_bytes`` at the fullest moment of those passes.
    """

    kept_bytes: int
    forward: int
    backward: int
    deferred_bytes: int = 0
    inputs: int = 0
    weights: int = 0

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action takes, negative where it gives back."""
        return self.kept_bytes, -self.kept_bytes, self.deferred_bytes - self.kept_bytes, -self.deferred_bytes

    @property
    def working_bytes(self) -> tuple[int, int, int, int]:
        """Bytes that each kind of action holds at its fullest moment beyond those held after it."""
        inputs = self.kept_bytes - self.deferred_bytes + self.inputs
        return self.forward, self.kept_bytes + self.backward, inputs, self.deferred_bytes + self.weights


def stage_memory(runs: Iterable[tuple[BlockMemory, int]]) -> StageMemory:
    """Return the memory of a stage whose blocks come in runs of equal ones.

    Forward keeps block after block and backward gives back the last one first, so that each run is fullest at its last
    block.

    >>> layer = BlockMemory(kept_bytes=10, recomputed_bytes=5, forward=20, backward=20)
    >>> stage_memory([(layer, 3), (BlockMemory(2, 0, 1, 1), 1)])[:3]
    (32, 18, 23)
    """
    kept_bytes = forward = backward = 0
    run_list = list(runs)
    for memory, count in run_list:
        kept_bytes += count * memory.kept_bytes
        forward = max(forward, kept_bytes + memory.forward)
        backward = max(backward, kept_bytes + memory.recomputed_bytes + memory.backward)
    deferred_bytes = sum(memory.deferred_bytes * count for memory, count in run_list)
    inputs, weights = _find_input_peak(run_list) - kept_bytes, _find_weight_peak(run_list)
    return StageMemory(
        kept_bytes, max(forward - kept_bytes, 0), max(backward - kept_bytes, 0), deferred_bytes, inputs, weights
    )


def _find_input_peak(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held while a stage makes the gradients of its inputs, the last block first.

    Each block then gives back what it kept, and leaves what the gradients of its weights need.
    """
    level = sum(memory.kept_bytes * count for memory, count in runs)
    peak = level
    for memory, count in reversed(runs):
        change = memory.deferred_bytes - memory.kept_bytes
        working_bytes = memory.recomputed_bytes + memory.gradients + memory.inputs
        peak = max(peak, level + working_bytes, level + change * (count - 1) + working_bytes)
        level += change * count
    return peak


def _find_weight_peak(runs: Sequence[tuple[BlockMemory, int]]) -> int:
    """Return the most bytes held beyond those at the start while a stage makes the gradients of its weights."""
    level = peak = 0
    for memory, count in reversed(runs):
        peak = max(peak, level + memory.weights)
        level -= memory.deferred_bytes * count
    return peak


class Boundary(NamedTuple):
    """Bytes of one microbatch that a stage receives from the previous one, and bytes that it sends to the next.

    ``keeps_graph`` says that a split backward gives nothing back before its end.
    """

    received_bytes: int
    sent_bytes: int
    keeps_graph: bool = False

    def apply_buffers(self, runs: Sequence[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of a stage's blocks, in runs of equal ones, where data at its ends lie in buffers."""
        rows = [row for row in runs if row[1]]
        if self.keeps_graph and not self.received_bytes:
            return [(memory.with_late_gradients(), count) for memory, count in self._buffer_ends(rows)]
        return self._keep_lost_bytes(self._buffer_ends(rows)) if self.keeps_graph else self._buffer_ends(rows)

    def _buffer_ends(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks of which the first and the last use buffers."""
        if not (self.received_bytes or self.sent_bytes) or not rows:
            return rows
        (first_memory, count), *other_rows = rows
        rows = [
            (self._buffer_block(first_memory, self.received_bytes, 0), 1),
            *([(first_memory, count - 1)] if count > 1 else []),
            *other_rows,
        ]
        last_memory, count = rows.pop()
        return [
            *rows,
            *([(last_memory, count - 1)] if count > 1 else []),
            (self._buffer_block(last_memory, 0, self.sent_bytes), 1),
        ]

    def _buffer_block(self, memory: BlockMemory, received_bytes: int, sent_bytes: int) -> BlockMemory:
        """Return the memory of a block whose input, output or both lie in buffers."""
        return (
            memory.with_kept_graph(received_bytes, sent_bytes)
            if self.keeps_graph
            else memory.with_buffers(received_bytes, sent_bytes)
        )

    def _keep_lost_bytes(self, rows: list[tuple[BlockMemory, int]]) -> list[tuple[BlockMemory, int]]:
        """Return the memory of blocks where the first one gives back what any of them loses."""
        lost_bytes = sum(memory.lost_bytes * count for memory, count in rows)
        if not lost_bytes:
            return rows
        (first_memory, count), *other_rows = rows
        # Backward reaches the first block last, and a loss frees its tensors only when the gradients of all inputs are
        # made.
        leading_memory = first_memory._replace(deferred_bytes=first_memory.deferred_bytes - lost_bytes)
        return [(leading_memory, 1), *([(first_memory, count - 1)] if count > 1 else []), *other_rows]
