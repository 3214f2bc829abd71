"""The SHA-256 of every file of a folder, in a file that ``sha256sum -c`` reads too; ranks share the work."""

from collections.abc import Iterable
from hashlib import file_digest
from pathlib import Path

import torch.distributed as dist

DIGESTS = "SHA256SUMS"


def compute_digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return the digests of files by name."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = file_digest(file, "sha256").hexdigest()
    return digests


def format_digests(digests: dict[str, str]) -> bytes:
    """Return the content of the file of digests.

    >>> format_digests({"b": "1", "a": "0"})
    b'0  a\\n1  b\\n'
    """
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def find_damage(folder: Path) -> str:
    """Return what is wrong with the files of a folder, on all ranks, of which each reads its part; empty if nothing."""
    has_peers = dist.is_initialized()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if has_peers else (0, 1)
    damage = _find_own_damage(folder, rank, num_ranks)
    if not has_peers:
        return damage
    answers: list[str] = [""] * num_ranks
    dist.all_gather_object(answers, damage)
    return next(filter(None, answers), "")


def _find_own_damage(folder: Path, rank: int, num_ranks: int) -> str:
    try:
        rows = [line.split("  ", 1) for line in (folder / DIGESTS).read_text("utf-8").splitlines()]
        expected = {row[-1]: row[0] for row in rows}
    except (OSError, UnicodeDecodeError) as error:
        return f"{folder / DIGESTS} cannot be read: {error}"
    strange = [name for name in expected if Path(name).name != name]
    if strange or not expected:
        return f"{folder / DIGESTS} names files beside it, met {strange[0] if strange else 'none'}"
    for name in sorted(expected)[rank::num_ranks]:
        try:
            digest = compute_digests([folder / name])[name]
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if digest != expected[name]:
            return f"{folder / name} has the SHA-256 that {DIGESTS} states, met another"
    return ""
