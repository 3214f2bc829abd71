"""The page as one HTML file that contains its style, its scripts and its data; it loads nothing."""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isfinite
from string import Template
from typing import Any

from meshwise.reports.document import plain
from meshwise.reports.page.columns import Columns
from meshwise.reports.page.payload import payload
from meshwise.reports.page.report import Report

_SCRIPTS = (
    "text", "data", "state", "lanes", "paint", "path", "axis", "memory", "hover", "inspector", "charts", "tables",
    "page",
)  # fmt: skip
"""Scripts of the page, in the order in which they are concatenated: later ones use names of earlier ones."""


def html(report: Report) -> str:
    """Return ``report`` as one HTML file; the same report gives the same text.

    A Content-Security-Policy allows the page's own style and program, by their hashes, and nothing else: no network,
    and no script that a name could smuggle in.
    """
    columns = Columns()
    document = _json(payload(report, columns))
    style, script = _read("page.css"), _script()
    return Template(_read("page.html")).substitute(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {_hash(script)}; "
        f"style-src {_hash(style)}",
        title=escape(plain(report.title)),
        style=style,
        script=script,
        document=document,
        columns=columns.text(),
    )


def _script() -> str:
    parts = "\n".join(_read(f"js/{name}.js") for name in _SCRIPTS)
    return f'\n(() => {{\n"use strict";\n{parts}\n}})();\n'


@cache
def _read(name: str) -> str:
    return files("meshwise.reports.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}'"


def _json(document: Any) -> str:
    """Return ASCII JSON that cannot end a script element; numbers that are not finite become null."""
    # JSON knows no infinity, and `<` could begin `</script>`
    text = json.dumps(_finite(document), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
