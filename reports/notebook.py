"""What a notebook shows of a result: a table of figures, and a picture beneath it."""

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from meshwise.reports.document import plain


def to_html(title: str, rows: Iterable[tuple[str, str]], picture: bytes = b"") -> str:
    """Return a fragment of HTML with figures as a table, and a picture (PNG) where there is one.

    Parameters
    ----------
    rows
        What each figure is called, and its value in words.
    """
    cells = "".join(
        f"<tr><td>{escape(plain(name))}</td><td style='text-align:right'>{escape(plain(value))}</td></tr>"
        for name, value in rows
    )
    shown = f"<img style='max-width:100%' src='data:image/png;base64,{b64encode(picture).decode()}'>" if picture else ""
    return f"<div><strong>{escape(plain(title))}</strong><table>{cells}</table>{shown}</div>"
