"""Writes results to files and folders, with clear errors where that is impossible."""

import os
import tempfile
from pathlib import Path

from meshwise.simulator.files import whole_file


def write(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees the whole old file or the whole new one.

    Raises
    ------
    ValueError
        Where the file cannot be written; no partial file is left behind.
    """
    try:
        with whole_file(path) as draft, open(draft, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{Path(path)}: the file cannot be written: {reason}") from None


def make_folder(path: str | Path) -> Path:
    """Create the folder ``path`` if needed and return it; ``ValueError`` where files cannot be written to it."""
    target = Path(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        # only a real file tells: permission bits say nothing about root or read-only mounts
        handle, name = tempfile.mkstemp(dir=target)
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{target}: the folder cannot be written: {reason}") from None
    return target


def check_output(path: str | Path | None, endings: tuple[str, ...] = ()) -> None:
    """Raise ``ValueError`` where ``path`` has none of the ``endings`` or could not be written: before any long work."""
    if path is None:
        return
    target = Path(path)
    if endings and target.suffix.lower() not in endings:
        raise ValueError(f"{target}: a name ends in {', '.join(endings)}, met {target.suffix or 'no ending'!r}")
    reason = ""
    if target.is_dir():
        reason = "it is a directory"
    elif not target.parent.is_dir():
        reason = f"there is no folder {target.parent}"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        raise ValueError(f"{target}: the file cannot be written: {reason}")
