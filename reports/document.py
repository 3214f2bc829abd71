"""A report as a folder: report.md and report.html, with pictures beside them and nothing from outside."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePosixPath
from urllib.parse import quote

_STYLE = """
body { font: 17px/1.55 Georgia, "Times New Roman", serif; color: #1a1a1a; }
body { max-width: 60rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1, h2, th, figcaption { font-family: "Helvetica Neue", Arial, sans-serif; line-height: 1.25; }
h1 { font-size: 1.9rem; } h2 { font-size: 1.3rem; margin-top: 2.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.95rem; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid #d9d9d9; text-align: left; vertical-align: top; }
figure { margin: 1.2rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #5c5c5c; font-size: 0.9rem; }
""".strip()
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#|~&$])")
_LIST = re.compile(r"^(\d*)([-+=.)])")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report, in this order.

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

    def __post_init__(self) -> None:
        path = PurePosixPath(self.image)
        if path.is_absolute() or ".." in path.parts or ":" in self.image or "\\" in self.image:
            raise ValueError(f"a report's image lies in its folder, met {self.image!r}; nearest: {path.name!r}")
        widths = {len(row) for row in self.table}
        if len(widths) > 1:
            raise ValueError(f"rows of a report's table have equally many cells, met {sorted(widths)}")


def write_report(folder: Path | str, *, title: str, sections: Sequence[Section]) -> tuple[Path, Path]:
    """Write report.md and report.html into ``folder``, which is made where it is missing, and return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    markdown, page = folder / "report.md", folder / "report.html"
    markdown.write_text(to_markdown(title, sections), encoding="utf-8")
    page.write_text("\n".join(_html(title, sections)) + "\n", encoding="utf-8")
    return markdown, page


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return a report as Markdown; everything that it would read in texts is escaped."""
    return "\n\n".join(_markdown(title, sections)) + "\n"


def _markdown(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {_md(title)}"
    for section in sections:
        yield f"## {_md(section.heading)}"
        yield from (_md(paragraph) for paragraph in section.paragraphs)
        if section.table:
            head, *rows = [f"| {' | '.join(_md(cell) for cell in row)} |" for row in section.table]
            yield "\n".join([head, "|" + " --- |" * len(section.table[0]), *rows])
        if section.image:
            yield f"![{_md(section.caption or section.heading)}]({quote(section.image)})"


def _md(text: str) -> str:
    """Return ``text`` on one line with everything escaped that Markdown or HTML would read."""
    return _LIST.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\1", " ".join(text.split())))


def _html(title: str, sections: Sequence[Section]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>"
    for section in sections:
        yield f"<section>\n<h2>{escape(section.heading)}</h2>"
        yield from (f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs)
        if section.table:
            yield from _html_table(section.table)
        if section.image:
            caption = escape(section.caption or section.heading)
            picture = f'<img src="{escape(quote(section.image))}" alt="{caption}">'
            yield f"<figure>\n{picture}\n<figcaption>{caption}</figcaption>\n</figure>"
        yield "</section>"
    yield "</body>\n</html>"


def _html_table(table: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *rows = table
    yield "<table>\n<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    yield from ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    yield "</table>"
