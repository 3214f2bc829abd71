"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield a path beside ``path``, with its ending, to write to; the file gets its name when the block ends well.

    A reader of ``path`` sees the old file or the new one, never half of it. Where the block raises, an interrupt too,
    nothing is left behind.

    Raises
    ------
    OSError
        Where ``path`` is a folder, or the file cannot be written or renamed.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(21, "it is a directory")
    # the name is known before there is a file, so that no interrupt falls between
    draft = target.parent / f".{target.stem[:40]}.{token_hex(4)}{target.suffix}"
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
