"""Text from outside that is safe to print: nothing in it moves a cursor, hides or reverses what stands beside it."""

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline (Unicode, category Cc)
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls (Unicode Standard Annex 9, section 2)
    "\u2028\u2029\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # separators, marks, halves and tags
)


def unsafe_character(text: str) -> str | None:
    """Return the name, as in ``U+001B``, of the first character of ``text`` that is not safe to print.

    >>> unsafe_character("red\\x1b[31m"), unsafe_character("Zürich")
    ('U+001B', None)
    """
    found = None if text.isprintable() else _UNSAFE.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"


def is_plain(text: str) -> bool:
    """Return whether every character of ``text`` is safe to print."""
    return unsafe_character(text) is None


def escaped(text: str) -> str:
    """Return ``text`` with what is not safe to print written out.

    >>> escaped("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    return text if text.isprintable() else _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
