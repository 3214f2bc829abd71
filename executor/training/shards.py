"""Saves what a rank holds of a training run as pieces of whole tensors, and fills it again from pieces of any plan.

A piece is named by its tensor and by the range of indices that the rank has of it, so nothing in a checkpoint depends
on the plan under which it was made. What several ranks hold alike one of them writes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.executor.parallel.sharded_states import SplitOptimizer, main_type
from meshwise.executor.recording.private_torch import chunks
from meshwise.executor.recording.tensors import local
from meshwise.executor.training.checkpoint import (
    Box,
    Checkpoint,
    CheckpointError,
    DamagedError,
    Stored,
    abandon,
    begin,
    boxes,
    commit,
    reason,
    write_file,
)
from meshwise.executor.training.continuation import facts
from meshwise.executor.training.optimizer import inner
from meshwise.executor.training.trainer import Trainer

Key = tuple[str, Box]


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of a tensor: the range ``box`` of its indices, as ``values``.

    ``saved`` says whether a checkpoint has it from here: weights that are a rounded copy, or another one, are not.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    saved: bool = True

    @property
    def dtype(self) -> str:
        """The dtype by torch's name."""
        return str(self.values.dtype).removeprefix("torch.")


def pieces(trainer: Trainer) -> Iterator[Piece]:
    """Yield what this rank holds of parameters and of the states of its optimizer.

    Parameters are in the precision in which they are updated, so plans that keep main weights apart from those in 16
    bits, and plans whose shards are the main weights, go on from each other.
    """
    names: dict[nn.Parameter, str] = {}
    for network in trainer.networks.values():
        for name, parameter in network.model_parameters():
            names[parameter] = name
            wide = parameter.dtype.itemsize > 2
            yield from _piece(f"parameter {name}", parameter.detach(), saved=wide)
    for each in inner(trainer.optimizer):
        if isinstance(each, SplitOptimizer):
            yield from _split(each, names)
            continue
        for parameter, kept in each.state.items():
            for state, value in kept.items():
                if isinstance(value, Tensor):
                    yield from _piece(f"{state} {names[parameter]}", value)


def _split(optimizer: SplitOptimizer, names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    """Yield the weights and states of an optimizer that cuts parameters without regard to their shapes."""
    for piece, main, kept in optimizer.held():
        parameter, name = piece.parameter, names[piece.parameter]
        rounded = parameter.dtype.itemsize <= 2
        for state, value in {"parameter": main, **kept}.items():
            if value.dim() == 0:
                yield from _piece(f"{state} {name}", value)
                continue
            outer = box_of(parameter.detach())
            for start, box in boxes(outer, piece.start, piece.stop):
                part = value[start - piece.start :][: box.volume].view(box.sizes)
                yield Piece(f"{state} {name}", tuple(parameter.shape), box, part, state != "parameter" or rounded)


def _piece(name: str, tensor: Tensor, *, saved: bool = True) -> Iterator[Piece]:
    if (box := box_of(tensor)).volume:
        yield Piece(name, tuple(tensor.shape), box, local(tensor), saved)


def box_of(tensor: Tensor) -> Box:
    """Return the indices of a tensor that this rank has."""
    if isinstance(tensor, DTensor):
        (chunk,) = chunks(tensor)
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def save(trainer: Trainer, step: int, place: Path) -> None:
    """Write a checkpoint of ``trainer`` after ``step`` steps into ``place``; every rank calls it.

    Parameters
    ----------
    place
        A folder that all hosts of the run share.

    Raises
    ------
    CheckpointError
        On every rank, where one could not write. The checkpoints before are as they were.
    """
    rank = dist.get_rank()
    held = list(
        {(piece.name, piece.box): piece for piece in pieces(trainer) if piece.saved}.values()
    )  # a tied table may come twice
    partial: Path = _agreed(lambda: begin(place, step) if rank == 0 else None, place / "none")[0]
    own = _share([(piece.name, piece.box) for piece in held], [piece.values.nbytes for piece in held])
    mine = [piece for piece in held if own[piece.name, piece.box] == rank]
    written = _agreed(lambda: _write(partial / f"rank-{rank}.bin", mine) if mine else None, partial)
    found = {
        "step": step,
        "tensors": {name: described for each in written if each for name, described in each["tensors"].items()},
        "files": {f"rank-{writer}.bin": file["file"] for writer, file in enumerate(written) if file},
    }
    job = trainer.job
    _agreed(lambda: commit(partial, facts(job, trainer.text) | found, job.keep) if rank == 0 else None, partial)


def _agreed(write: Callable[[], Any], partial: Path) -> list[Any]:
    """Return what ``write()`` returned on every rank; where it failed on one, leave nothing and raise on all."""
    try:
        outcome, failed = write(), None
    except (OSError, CheckpointError) as error:
        outcome, failed = None, reason(error) if isinstance(error, OSError) else str(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (outcome, failed))
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            abandon(partial)
            held = "the checkpoints before are as they were"
            raise CheckpointError(f"rank {rank} cannot write a checkpoint into {partial.parent}: {why}; {held}")
    return [outcome for outcome, _ in outcomes]


def _share(keys: list[Key], sizes: list[int]) -> dict[Key, int]:
    """Return which rank writes every piece: of those that hold it, the one that has least to write so far."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(zip(keys, sizes, strict=True)))
    holders: dict[Key, list[int]] = {}
    size_of: dict[Key, int] = {}
    for rank, rows in enumerate(held):
        for key, size in rows:
            holders.setdefault(key, []).append(rank)
            size_of[key] = size
    load = [0] * len(held)
    result = {}
    for key, ranks in holders.items():
        result[key] = min(ranks, key=lambda rank: load[rank])
        load[result[key]] += size_of[key]
    return result


def _write(path: Path, mine: list[Piece]) -> dict[str, Any]:
    """Write pieces into a file and return what the manifest says of it."""
    rows, start = [], 0
    for piece in mine:
        rows.append([piece.name, piece.box.offsets, piece.box.sizes, start])
        start += piece.values.nbytes
    size, digest = write_file(path, (_bytes(piece.values) for piece in mine))
    return {
        "file": {"bytes": size, "sha256": digest, "pieces": rows},
        "tensors": {piece.name: (piece.dtype, piece.shape) for piece in mine},
    }


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def load(trainer: Trainer, folder: Path) -> None:
    """Fill ``trainer`` from a checkpoint of any plan of the same model; it has done no steps yet.

    A step is done first and overwritten: it makes the optimizer's states, and it makes DistributedDataParallel sort
    its buckets as they were in the run that is continued, so that sums of gradients have the same order.

    Raises
    ------
    DamagedError
        Where the checkpoint is not what was written, or not of this model.
    """
    checkpoint = Checkpoint.open(folder)
    trainer.step(checkpoint.step)
    files: dict[str, Tensor] = {}
    for piece in pieces(trainer):
        kind = str(main_type(piece.values.dtype) if piece.name.startswith("parameter ") else piece.values.dtype)[6:]
        if (checkpoint.shapes.get(piece.name), checkpoint.dtypes.get(piece.name)) != (piece.shape, kind):
            raise DamagedError(f"{folder} has {piece.name} as {kind} {list(piece.shape)}, met another or none")
        overlaps = ((stored, stored.box.overlap(piece.box)) for stored in checkpoint.pieces[piece.name])
        found = [(stored, overlap) for stored, overlap in overlaps if overlap is not None]
        if sum(overlap.volume for _, overlap in found) != piece.box.volume:
            raise DamagedError(f"{folder}: pieces make up every tensor once, met others of {piece.name}")
        for stored, overlap in found:
            if stored.file not in files:
                files[stored.file] = torch.frombuffer(checkpoint.mapped(stored.file), dtype=torch.uint8)
            source = _stored(files[stored.file], stored, getattr(torch, kind))
            piece.values[overlap.within(piece.box)].copy_(source[overlap.within(stored.box)])
    trainer.optimizer.zero_grad(set_to_none=True)


def _stored(file: Tensor, stored: Stored, dtype: torch.dtype) -> Tensor:
    raw = file[stored.start : stored.start + stored.box.volume * dtype.itemsize]
    if stored.start % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(stored.box.sizes)
