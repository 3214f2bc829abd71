"""How a notebook shows a result: a table of figures with a picture below it."""

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from meshwise.reports.document import plain


def to_html(title: str, rows: Iterable[tuple[str, str]], picture: bytes = b"") -> str:
    """Return an HTML fragment with figures as a table, and a PNG picture where one is passed.

    Parameters
    ----------
    rows
        Name and formatted value of each figure.
    """
    cells = "".join(
        f"<tr><td>{escape(plain(name))}</td><td style='text-align:right'>{escape(plain(value))}</td></tr>"
        for name, value in rows
    )
    shown = f"<img style='max-width:100%' src='data:image/png;base64,{b64encode(picture).decode()}'>" if picture else ""
    return f"<div><strong>{escape(plain(title))}</strong><table>{cells}</table>{shown}</div>"
