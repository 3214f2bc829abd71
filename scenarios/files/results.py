"""Where results are written, and what is said where that cannot be."""

import os
import tempfile
from pathlib import Path

from meshwise.simulator.files import whole_file


def write(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never half of it.

    Raises
    ------
    ValueError
        Where the place cannot be written; nothing is left behind.
    """
    try:
        with whole_file(path) as draft, open(draft, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{Path(path)}: the file cannot be written: {reason}") from None


def folder(path: str | Path) -> Path:
    """Return ``path`` as a folder that exists and can be written; ``ValueError`` where it cannot."""
    target = Path(path)
    try:
        target.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target)
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{target}: the folder cannot be written: {reason}") from None
    return target


def check_output(path: str | Path | None, endings: tuple[str, ...] = ()) -> None:
    """Raise ``ValueError`` where ``path`` has none of the ``endings`` or could not be written later."""
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
