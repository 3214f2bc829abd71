"""Saves a rank's part of a training run as pieces of whole tensors, and loads it from the pieces of any plan.

A piece is identified by its tensor and its box of indices, so nothing in a checkpoint depends on the plan that made it.
Of ranks that have the same piece, one writes it.
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
    """The part of a tensor that this rank has: ``values`` at the indices ``box``.

    ``is_saved`` says whether a checkpoint is written from it: not from rounded weights, nor from a second copy of
    weights. These are only loaded.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    saved: bool = True

    @property
    def dtype(self) -> str:
        """The name of the dtype, as torch spells it."""
        return str(self.values.dtype).removeprefix("torch.")


def pieces(trainer: Trainer) -> Iterator[Piece]:
    """Yield this rank's pieces of parameters and of optimizer states.

    Parameters are saved in the precision of their update. So a plan with main weights beside weights of 16 bits, and a
    plan whose shards are the main weights, continue from each other's checkpoints.
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
    """Yield the weights and states of an optimizer that cuts flat parameters, without regard to their shapes."""
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
    """Return the box of indices that this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        (chunk,) = chunks(tensor)
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def save(trainer: Trainer, step: int, place: Path) -> None:
    """Write a checkpoint of ``trainer`` after ``step`` steps into ``place``; every rank calls it.

    Parameters
    ----------
    place
        The folder of checkpoints, which all hosts of the run share.

    Raises
    ------
    CheckpointError
        On every rank, where one of them could not write. Earlier checkpoints are unchanged.
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
    """Return what ``write()`` returned, of every rank; where it failed on one, remove the folder and raise on all.

    Every rank takes part in the gather, also one that failed, so none waits for another.
    """
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
    """Return the rank that writes each piece: of the ranks that have it, the one with the least to write so far."""
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
    """Write pieces into a file and return its entry for the manifest."""
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
    """Fill ``trainer``, which has done no steps yet, from a checkpoint of any plan of the same model.

    The trainer first runs one step, whose results are overwritten. It makes the optimizer states, and it makes
    DistributedDataParallel sort its buckets as in the run that is continued, so gradients are summed in the same order.

    Raises
    ------
    DamagedError
        Where the checkpoint is damaged, or is of another model.
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
    if stored.start % dtype.itemsize:  # a view as another dtype needs an aligned start
        raw = raw.clone()
    return raw.view(dtype).view(stored.box.sizes)
