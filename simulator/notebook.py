"""How a notebook shows a result: a table of figures with a picture below it."""

from base64 import b64encode
from collections.abc import Iterable
from html import escape


def to_html(title: str, rows: Iterable[tuple[str, str]], picture: bytes = b"") -> str:
    """Return an HTML fragment with figures as a table, and a PNG picture where one is passed.

    Parameters
    ----------
    rows
        Name and formatted value of each figure.
    """
    cells = "".join(
        f"<tr><td>{_escape_line(name)}</td><td style='text-align:right'>{_escape_line(value)}</td></tr>"
        for name, value in rows
    )
    shown = f"<img style='max-width:100%' src='data:image/png;base64,{b64encode(picture).decode()}'>" if picture else ""
    return f"<div><strong>{_escape_line(title)}</strong><table>{cells}</table>{shown}</div>"


def _escape_line(text: str) -> str:
    """Return text on one line without control characters, safe inside HTML."""
    return escape(" ".join("".join(c if c.isprintable() else " " for c in text).split()))
