"""Text of reports: Markdown documents, and text from users made safe to show."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote

from meshwise.simulator.brief import brief_repr

_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&$])")
_LIST = re.compile(r"^(\d*)([-+=.)])")


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report; its parts are shown in the order of the fields.

    Parameters
    ----------
    table
        Rows of cells; the first row is the heading.
    image
        A picture's path relative to the report's folder, or nothing.
    caption
        What the picture shows.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    image: str = ""
    caption: str = ""

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        path = PurePosixPath(self.image)
        if path.is_absolute() or ".." in path.parts or ":" in self.image or "\\" in self.image:
            raise ValueError(f"a report's image lies in its folder, met {self.image!r}; nearest: {path.name!r}")
        widths = {len(row) for row in self.table}
        if len(widths) > 1:
            raise ValueError(f"rows of a report's table have equally many cells, met {sorted(widths)}")


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return a report as Markdown; special characters in its texts are escaped."""
    return "\n\n".join(_markdown_blocks(title, sections)) + "\n"


def _markdown_blocks(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {_escape(title)}"
    for section in sections:
        yield f"## {_escape(section.heading)}"
        yield from (_escape(paragraph) for paragraph in section.paragraphs)
        if section.table:
            head, *rows = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in section.table]
            yield "\n".join([head, "|" + " --- |" * len(section.table[0]), *rows])
        if section.image:
            yield f"![{_escape(section.caption or section.heading)}]({quote(section.image)})"


def _escape(text: str) -> str:
    """Return ``text`` on one line with every character escaped that means something to Markdown or HTML."""
    return _LIST.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\1", " ".join(text.split())))


def clean_text(text: str, length: int = 120) -> str:
    """Return ``text`` on one line, without control characters, cut to ``length`` characters.

    >>> clean_text("a very long name", 8)
    'a very …'
    """
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= length else words[: length - 1] + "…"
