"""Pages of the documentation: their blocks, what a comment before a block says of it, their headings and links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMMANDS = ("meshwise", "python", "python3", "pip", "pytest", "dask", "sh", "sbatch", "srun", "kubectl", "torchrun")
SHELL = ("sh", "console")
LANGUAGES = (*SHELL, "python", "yaml", "json", "text", "pycon", "math", "diff", "")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: ``mark`` is the comment right before it, ``line`` its first line."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def excluded(self) -> str | None:
        """Why the block is not run; ``None`` where it is."""
        found = re.fullmatch(r"not run:(.*)", self.mark, re.DOTALL)
        return " ".join(found[1].split()) if found else None

    @property
    def exit_code(self) -> int:
        """The exit code that the commands of the block end with."""
        found = re.fullmatch(r"exit code (\d+)", self.mark)
        return int(found[1]) if found else 0

    @property
    def checked(self) -> bool:
        """Whether the block is what the command before it prints."""
        return self.mark == "output"

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block; an indented block is one where it begins with a command."""
        if self.language not in ("", *SHELL):
            return []
        text = self.text if self.language else self.text.partition("\n\n")[0]  # what is printed may follow
        lines = text.replace("\\\n", " ").splitlines()
        lines = [line.removeprefix("$ ") for line in lines if self.language != "console" or line.startswith("$ ")]
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        return lines if self.language or (lines and _is_command(lines[0])) else []


def _is_command(line: str) -> bool:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return False
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    return bool(words) and Path(words[0]).name in COMMANDS


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of code of a page, in order."""
    mark = ""
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            line = token.map[0] + 1 if token.map else 0
            yield Block(page, line, token.info.strip(), token.content, mark)
        comment = re.fullmatch(r"<!--(.*)-->", token.content.strip(), re.DOTALL) if token.type == "html_block" else None
        mark = comment[1].strip() if comment else ""


def marks(page: Path) -> list[str]:
    """Return what every comment of a page says."""
    return [found.strip() for found in re.findall(r"<!--(.*?)-->", page.read_text("utf-8"), re.DOTALL)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    tokens = _tokens(page)
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            number = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in found)
            found.add(f"{slug}-{number}" if number else slug)
    return found


def links(page: Path) -> Iterator[str]:
    """Yield where the links and pictures of a page lead."""
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield str(target)
