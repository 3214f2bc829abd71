"""Strict reading of JSON and text that may be hostile, and files that are written whole or not at all.

Strict JSON has finite numbers of a limited length, no duplicate names and a limited depth. Plain text is safe to print:
no character in it moves the cursor, or hides or reverses its neighbours.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn

MAX_DIGITS = 100
MAX_DEPTH = 64


class JsonError(ValueError):
    """A text is not strict JSON; ``line`` and ``column`` count from 1, and are 0 if the place is not known."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    JsonError
        If the text is not JSON of one value, a name occurs twice in an object, a number is not finite or has more
        than `MAX_DIGITS` characters, or values nest deeper than `MAX_DEPTH`. No other error is raised.

    >>> parse_json('{"rate": 1e9}')
    {'rate': 1000000000.0}
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        prefix = content[: error.start] if isinstance(content, bytes) else b""
        line, column = prefix.count(b"\n") + 1, len(prefix) - prefix.rfind(b"\n")
        raise JsonError(f"a file is UTF-8 text, met the byte 0x{error.object[error.start]:02x}", line, column) from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise JsonError(f"this is not JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        raise JsonError(f"values nest at most {MAX_DEPTH} deep, met more") from None
    _check_depth(value)
    return value


def list_strings(value: Any) -> list[str]:
    """Return every name and every text of a JSON value, at any depth."""
    strings: list[str] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, dict):
            strings.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return strings


def _check_depth(value: Any) -> None:
    """Raise `JsonError` if values nest deeper than `MAX_DEPTH`."""
    level, depth = [value], 0
    while level:
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise JsonError(f"values nest at most {MAX_DEPTH} deep, met more")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these members, or raise `JsonError` if a name occurs twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise JsonError(f"{_format_name(duplicate)}: a name occurs once, met it twice")
    return members


def _parse_int(text: str) -> int:
    _check_digits(text)
    return int(text)


def _parse_float(text: str) -> float:
    _check_digits(text)
    number = float(text)
    if isinf(number):
        _reject_constant(text)
    return number


def _check_digits(text: str) -> None:
    # `int` takes quadratic time, and from 4,300 digits on raises an error of its own.
    if len(text) > MAX_DIGITS:
        raise JsonError(f"a number has at most {MAX_DIGITS} characters, met {len(text)}")


def _reject_constant(text: str) -> NoReturn:
    raise JsonError(f"a number is finite, met {text}")


def _format_name(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else f"{name!a:.60}"


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_reject_constant
)


_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline (Unicode, category Cc)
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls (Unicode Standard Annex 9, section 2)
    "\u2028\u2029\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # separators, marks, halves and tags
)


def unsafe_character(text: str) -> str | None:
    """Return the code point, as ``U+001B``, of the first character that is not safe to print; else ``None``.

    >>> unsafe_character("red\\x1b[31m"), unsafe_character("Zürich")
    ('U+001B', None)
    """
    # `isprintable` is fast and true for almost every text, so that the search is rare.
    match = None if text.isprintable() else _UNSAFE.search(text)
    return None if match is None else f"U+{ord(match[0]):04X}"


def is_plain(text: str) -> bool:
    """Return whether every character of ``text`` is safe to print."""
    return unsafe_character(text) is None


def escape_text(text: str) -> str:
    """Return ``text`` with characters that are not safe to print as escape sequences.

    >>> escape_text("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    return text if text.isprintable() else _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


@contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield the path of a draft to write; it is renamed to ``path`` when the block ends without an error.

    The draft lies beside ``path`` and has its suffix. A reader of ``path`` sees the old file or the new one, never
    half of it. If the block raises, or is interrupted, the draft is deleted.

    Raises
    ------
    OSError
        If ``path`` is a folder, or the file cannot be written or renamed.
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
