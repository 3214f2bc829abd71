"""A folder of states that all ranks write together, and that has its name only when all of it is on the disk.

Files are written into ``NAME.partial``: every rank's part, by torch's distributed checkpoint, and small files of the
first rank. Then each rank reads its part again for its SHA-256; the first one writes these and renames the folder.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from meshwise.executor.saving.digests import DIGESTS, compute_digests, format_digests
from meshwise.executor.training.checkpoint import CheckpointError, describe_error, sync_folder, write_file

PARTIAL, OLD = ".partial", ".old"
METADATA = ".metadata"
"""The file of torch's distributed checkpoint that tells what is where."""
Group = dist.ProcessGroup | None


def write_folder(
    target: Path, states: dict[str, Any], files: Mapping[str, bytes], group: Group = None, *, sweeps: bool = False
) -> None:
    """Write states of all ranks into a folder, which takes the place of one of its name once it is whole.

    Parameters
    ----------
    files
        Further files, of the first rank.
    group
        The ranks that write; by default all.
    sweeps
        Whether checkpoints that killed runs left half-written beside the folder are removed.

    Raises
    ------
    CheckpointError
        On every rank, where one of them cannot write; what was there before is as it was.
    """
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    partial = target.with_name(target.name + PARTIAL)

    def begin() -> None:
        for stale_folder in target.parent.glob(f"step-*{PARTIAL}") if sweeps else (partial,):
            former = stale_folder.with_name(stale_folder.name.removesuffix(f"{OLD}{PARTIAL}"))
            if former != stale_folder and not former.exists():  # killed between two renames
                stale_folder.rename(former)
            shutil.rmtree(stale_folder, ignore_errors=True)
        partial.mkdir(parents=True)

    def write_states() -> dict[str, str]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(states, storage_writer=FileSystemWriter(partial), process_group=group, no_dist=num_ranks == 1)
        return compute_digests(sorted(partial.glob(f"__{rank}_*")))

    def commit(digests: list[dict[str, str]]) -> None:
        for name, content in files.items():
            write_file(partial / name, [memoryview(content)])
        own = compute_digests([partial / name for name in (METADATA, *files)])
        everything = {name: digest for part in (*digests, own) for name, digest in part.items()}
        write_file(partial / DIGESTS, [memoryview(format_digests(everything))])
        sync_folder(partial)  # before the rename: after a power failure a complete name must mean complete content
        old = target.with_name(f"{target.name}{OLD}{PARTIAL}")
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        try:
            partial.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)

    _act_together(begin if rank == 0 else None, target, num_ranks, group)
    digests = _act_together(write_states, target, num_ranks, group)
    _act_together((lambda: commit(digests)) if rank == 0 else None, target, num_ranks, group)


def _act_together(action: Callable[[], Any] | None, target: Path, num_ranks: int, group: Group) -> list[Any]:
    """Return what an action returns on every rank; where one fails, all raise `CheckpointError`."""
    outcome, failure = None, None
    try:
        outcome = None if action is None else action()
    except CheckpointException as error:  # of all ranks, which know of it
        failure = _tell(next(iter(error.failures.values()))[0])
    except (OSError, RuntimeError) as error:
        failure = _tell(error)
    outcomes: list[Any] = [(outcome, failure)]
    if num_ranks > 1:
        outcomes = [None] * num_ranks
        dist.all_gather_object(outcomes, (outcome, failure), group=group)
    failures = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if failures:
        rank, text = failures[0]
        consequence = "what was there before is as it was"
        raise CheckpointError(f"rank {rank} cannot write {target}: {text}; {consequence}")
    return [value for value, _ in outcomes]


def _tell(error: BaseException) -> str:
    return describe_error(error) if isinstance(error, OSError) else " ".join(str(error).split())[:300]
