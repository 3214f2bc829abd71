"""Saves a rank's part of a training run as pieces of whole tensors, and loads it from the pieces of any plan.

A piece is identified by its tensor and its box of indices, so nothing in a checkpoint depends on the plan that made it.
Of ranks that have the same piece, one writes it.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.executor.parallel.sharded_states import SplitOptimizer, main_dtype
from meshwise.executor.recording.private_torch import list_chunks
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.training.checkpoint import (
    Box,
    Checkpoint,
    CheckpointError,
    DamagedError,
    StoredPiece,
    begin_checkpoint,
    commit_checkpoint,
    describe_error,
    split_rows,
    write_file,
)
from meshwise.executor.training.continuation import describe_run
from meshwise.executor.training.optimizer import unwrap_optimizers
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
    is_saved: bool = True

    @property
    def dtype(self) -> str:
        """The name of the dtype, as torch spells it."""
        return str(self.values.dtype).removeprefix("torch.")


def list_pieces(trainer: Trainer) -> Iterator[Piece]:
    """Yield this rank's pieces of parameters and of optimizer states.

    Parameters are saved in the precision of their update. So a plan with main weights beside weights of 16 bits, and a
    plan whose shards are the main weights, continue from each other's checkpoints.
    """
    names: dict[nn.Parameter, str] = {}
    for network in trainer.networks.values():
        for name, parameter in network.model_parameters():
            names[parameter] = name
            is_wide = parameter.dtype.itemsize > 2
            yield from _make_pieces(f"parameter {name}", parameter.detach(), is_saved=is_wide)
    for member in unwrap_optimizers(trainer.optimizer):
        if isinstance(member, SplitOptimizer):
            yield from _list_split_pieces(member, names)
            continue
        for parameter, parameter_states in member.state.items():
            for state, value in parameter_states.items():
                if isinstance(value, Tensor):
                    yield from _make_pieces(f"{state} {names[parameter]}", value)


def _list_split_pieces(optimizer: SplitOptimizer, names: Mapping[nn.Parameter, str]) -> Iterator[Piece]:
    """Yield the weights and states of an optimizer that cuts flat parameters, without regard to their shapes."""
    for piece, main, parameter_states in optimizer.list_ranges():
        parameter, name = piece.parameter, names[piece.parameter]
        is_rounded = parameter.dtype.itemsize <= 2
        for state, value in {"parameter": main, **parameter_states}.items():
            if value.dim() == 0:
                yield from _make_pieces(f"{state} {name}", value)
                continue
            outer = find_box(parameter.detach())
            for start, box in split_rows(outer, piece.start, piece.stop):
                part = value[start - piece.start :][: box.volume].view(box.sizes)
                yield Piece(f"{state} {name}", tuple(parameter.shape), box, part, state != "parameter" or is_rounded)


def _make_pieces(name: str, tensor: Tensor, *, is_saved: bool = True) -> Iterator[Piece]:
    if (box := find_box(tensor)).volume:
        yield Piece(name, tuple(tensor.shape), box, to_local(tensor), is_saved)


def find_box(tensor: Tensor) -> Box:
    """Return the box of indices that this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        (chunk,) = list_chunks(tensor)
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def save_checkpoint(trainer: Trainer, step: int, place: Path) -> None:
    """Write a checkpoint of ``trainer`` after ``step`` steps into ``place``, which hosts share; every rank calls it.

    ``CheckpointError`` on every rank, where one of them could not write. Earlier checkpoints are unchanged.
    """
    rank = dist.get_rank()
    # a tied table may come twice
    saved_pieces = {(piece.name, piece.box): piece for piece in list_pieces(trainer) if piece.is_saved}
    partial: Path = _write_together(lambda: begin_checkpoint(place, step) if rank == 0 else None, place / "none")[0]
    writers = _assign_writers({key: piece.values.nbytes for key, piece in saved_pieces.items()})
    rank_pieces = [piece for key, piece in saved_pieces.items() if writers[key] == rank]
    part_file = partial / f"rank-{rank}.bin"
    entries = _write_together(lambda: _write(part_file, rank_pieces) if rank_pieces else None, partial)
    manifest = {
        "step": step,
        "tensors": {name: description for entry in entries if entry for name, description in entry["tensors"].items()},
        "files": {f"rank-{writer}.bin": file["file"] for writer, file in enumerate(entries) if file},
    }
    job = trainer.job
    _write_together(
        lambda: commit_checkpoint(partial, describe_run(job, trainer.text) | manifest, job.keep) if rank == 0 else None,
        partial,
    )


def _write_together(write: Callable[[], Any], partial: Path) -> list[Any]:
    """Return what ``write()`` returned, of every rank; where it failed on one, remove the folder and raise on all.

    Every rank takes part in the gather, also one that failed, so none waits for another.
    """
    try:
        outcome, failure = write(), None
    except (OSError, CheckpointError) as error:
        outcome, failure = None, describe_error(error) if isinstance(error, OSError) else str(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (outcome, failure))
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            shutil.rmtree(partial, ignore_errors=True)
            consequence = "the checkpoints before are as they were"
            raise CheckpointError(
                f"rank {rank} cannot write a checkpoint into {partial.parent}: {message}; {consequence}"
            )
    return [outcome for outcome, _ in outcomes]


def _assign_writers(sizes: dict[Key, int]) -> dict[Key, int]:
    """Return the rank that writes each piece: of the ranks that have it, the one with the least to write so far."""
    rank_rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rank_rows, list(sizes.items()))
    holders: dict[Key, list[int]] = {}
    key_sizes: dict[Key, int] = {}
    for rank, rows in enumerate(rank_rows):
        for key, size in rows:
            holders.setdefault(key, []).append(rank)
            key_sizes[key] = size
    load = [0] * len(rank_rows)
    result = {}
    for key, ranks in holders.items():
        result[key] = min(ranks, key=lambda rank: load[rank])
        load[result[key]] += key_sizes[key]
    return result


def _write(path: Path, rank_pieces: list[Piece]) -> dict[str, Any]:
    """Write pieces into a file and return its entry for the manifest."""
    rows, start = [], 0
    for piece in rank_pieces:
        rows.append([piece.name, piece.box.offsets, piece.box.sizes, start])
        start += piece.values.nbytes
    size, digest = write_file(path, (_view_bytes(piece.values) for piece in rank_pieces))
    return {
        "file": {"bytes": size, "sha256": digest, "pieces": rows},
        "tensors": {piece.name: (piece.dtype, piece.shape) for piece in rank_pieces},
    }


def _view_bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def load_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Fill ``trainer``, which has done no steps yet, from a checkpoint of any plan of the same model.

    The trainer first runs one step, whose results are overwritten. It makes the optimizer states, and it makes
    DistributedDataParallel sort its buckets as in the run that is continued, so gradients are summed in the same order.
    ``DamagedError`` where the checkpoint is damaged, or is of another model.
    """
    checkpoint = Checkpoint.open(folder)
    trainer.step(checkpoint.step)
    files: dict[str, Tensor] = {}
    for piece in list_pieces(trainer):
        dtype = str(main_dtype(piece.values.dtype) if piece.name.startswith("parameter ") else piece.values.dtype)[6:]
        if (checkpoint.shapes.get(piece.name), checkpoint.dtypes.get(piece.name)) != (piece.shape, dtype):
            raise DamagedError(f"{folder} has {piece.name} as {dtype} {list(piece.shape)}, met another or none")
        overlaps = ((stored, stored.box.overlap(piece.box)) for stored in checkpoint.pieces[piece.name])
        matches = [(stored, overlap) for stored, overlap in overlaps if overlap is not None]
        if sum(overlap.volume for _, overlap in matches) != piece.box.volume:
            raise DamagedError(f"{folder}: pieces make up every tensor once, met others of {piece.name}")
        for stored, overlap in matches:
            if stored.file not in files:
                files[stored.file] = torch.frombuffer(checkpoint.map_file(stored.file), dtype=torch.uint8)
            source = _view_stored(files[stored.file], stored, getattr(torch, dtype))
            piece.values[overlap.find_slices(piece.box)].copy_(source[overlap.find_slices(stored.box)])
    trainer.optimizer.zero_grad(set_to_none=True)


def _view_stored(file: Tensor, stored: StoredPiece, dtype: torch.dtype) -> Tensor:
    raw = file[stored.start : stored.start + stored.box.volume * dtype.itemsize]
    if stored.start % dtype.itemsize:  # a view as another dtype needs an aligned start
        raw = raw.clone()
    return raw.view(dtype).view(stored.box.sizes)
