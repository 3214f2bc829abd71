"""The reference of the Python interface as pages of the documentation, from the docstrings of public names.

Run ``python -m scenarios.reference docs/reference`` to write them. Modules are read, not imported, so that the
pages are the same with every version of Python and without torch.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from scenarios.reference_pages import CONTENTS, PAGES, Page

Definition = ast.ClassDef | ast.FunctionDef
WIDTH = 100
"""Characters of a signature up to which it stays on one line."""
_ITEMS = ("Parameters", "Attributes", "Raises", "Returns", "Yields")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a docstring under a title of its own; the first part has none."""

    title: str
    lines: tuple[str, ...]


def write(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def pages() -> dict[str, str]:
    """Return the text of every page by the name of its file."""
    return {CONTENTS: _contents(), **{page.file: _page(page) for page in PAGES}}


def _contents() -> str:
    lines = ["# Python reference", "", "Written by `python -m scenarios.reference docs/reference` from docstrings.", ""]
    lines += [f"- [{page.title}]({page.file}): {page.lead}" for page in PAGES]
    return "\n".join(lines) + "\n"


def _page(page: Page) -> str:
    lines = [f"# {page.title}", "", page.lead, ""]
    for module, names in page.modules:
        tree = _tree(module)
        head = _sections(ast.get_docstring(tree) or "")[0]
        lines += [f"## {module}", "", *_prose(head.lines), ""]
        defined = dict(_definitions(tree))
        for name in names or tuple(defined):
            if name not in defined:
                raise ValueError(f"{module} has no public {name}")
            lines += [*_entry(name, defined[name]), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _tree(module: str) -> ast.Module:
    package, *rest = module.split(".")
    place = Path(str(files(package))).joinpath(*rest)
    source = place.with_suffix(".py") if rest else place
    return ast.parse((source if source.is_file() else place / "__init__.py").read_text("utf-8"))


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition | tuple[str, str]]]:
    """Yield the public classes, functions and documented constants of a module, each with its name."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            said = _text_of(after)
            if isinstance(target, ast.Name) and said and not target.id.startswith("_"):
                yield target.id, (target.id, said)


def _text_of(node: ast.stmt | None) -> str:
    """Return the text of a statement that is a string and nothing else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _entry(name: str, found: Definition | tuple[str, str]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if isinstance(found, tuple):
        yield from _documented(found[1])
        return
    yield from _fenced(_signature(found))
    yield from _documented(ast.get_docstring(found) or "")
    if isinstance(found, ast.ClassDef):
        for member in found.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield f"#### {name}.{member.name}"
                yield ""
                yield from _fenced(_signature(member))
                yield from _documented(ast.get_docstring(member) or "")


def _fenced(text: str) -> tuple[str, ...]:
    return "```text", text, "```", ""


def _signature(node: Definition) -> str:
    """Return how a class or function is called, or what an enumeration has."""
    if isinstance(node, ast.FunctionDef):
        result = f" -> {_type(node.returns)}" if node.returns else ""
        if any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
            return f"{node.name}{result}"
        return _call(node.name, _arguments(node.args), result)
    bases = [ast.unparse(base) for base in node.bases]
    if "StrEnum" in bases:
        values = [ast.unparse(each.value) for each in node.body if isinstance(each, ast.Assign)]
        return _call(node.name, values, "")
    fields = [_field(each) for each in node.body if isinstance(each, ast.AnnAssign) and _is_field(each)]
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    return _call(node.name, fields if made is None else _arguments(made.args), "")


def _is_field(node: ast.AnnAssign) -> bool:
    return not ast.unparse(node.annotation).startswith("ClassVar") and not ast.unparse(node.target).startswith("_")


def _field(node: ast.AnnAssign) -> str:
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    return f"{ast.unparse(node.target)}: {_type(node.annotation)}{value}"


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the parameters of a function one by one, without self and cls."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(each, value) for each, value in zip(plain, defaults, strict=True)]
    words = [word for word, each in zip(words, plain, strict=True) if each.arg not in ("self", "cls")]
    if arguments.vararg is not None:
        words.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        words.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [_argument(each, value) for each, value in named]
    return words + ([f"**{_argument(arguments.kwarg, None)}"] if arguments.kwarg is not None else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = _type(argument.annotation) if argument.annotation else ""
    value = ast.unparse(default) if default is not None else ""
    return argument.arg + (f": {kind}" if kind else "") + (f" = {value}" if value else "")


def _type(annotation: ast.expr) -> str:
    """Return a type as written; one that is quoted for its import's sake without its quotes."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _call(name: str, words: Sequence[str], result: str) -> str:
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def _documented(text: str) -> Iterator[str]:
    """Yield a docstring of NumPy's form as Markdown."""
    for section in _sections(text):
        if section.title:
            yield f"*{section.title}*"
            yield ""
        if section.title in _ITEMS:
            yield from _items(section.lines)
        else:
            yield from _prose(section.lines)
        yield ""


def _sections(text: str) -> list[Section]:
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in text.strip().splitlines():
        if re.fullmatch(r"-{3,}", line.strip()) and found[-1][1]:
            found.append((found[-1][1].pop().strip(), []))
        else:
            found[-1][1].append(line)
    return [Section(title, tuple(lines)) for title, lines in found]


def _items(lines: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a section as a list: names are set to the left, what is said of them is indented."""
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if line and not line.startswith(" "):
            entries.append((line.strip(), []))
        elif line.strip() and entries:
            entries[-1][1].append(line.strip())
    for name, said in entries:
        yield f"- `{name}`" + (f": {_inline(' '.join(said))}" if said else "")


def _prose(lines: Sequence[str]) -> Iterator[str]:
    """Yield running text, with examples as blocks of their own."""
    example: list[str] = []
    for line in (*lines, ""):
        if line.startswith(">>>") or (example and line.strip()):
            example.append(line)
            continue
        if example:
            yield from ("", "```pycon", *example, "```", "")
            example = []
        yield _inline(line)


def _inline(line: str) -> str:
    """Return a line with references to literature as Markdown writes them."""
    line = re.sub(r"^\.\. \[(\w+)\] ", r"- [\1] ", line.strip() if line.startswith("..") else line)
    return re.sub(r"\[(\w+)\]_", r"[\1]", line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scenarios.reference")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
