"""Finds the line of the user's code that an operator, an error or a module comes from, as ``file.py:12``."""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OWN = tuple(
    Path(__file__).parents[2] / room for room in ("simulator", "strategies", "executor", "reports", "scenarios")
)
_INSTALLED = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
_FOREIGN = tuple(folder.resolve() for folder in (*_OWN, Path(str(torch.__file__)).parent, *_INSTALLED))
"""Folders whose code is not the user's: torch, this program, and installed packages."""


def line_of_node(node: Node) -> str:
    """Return the line of the user's code that runs a node of a program; empty where torch recorded no stack."""
    return _innermost((file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or ""))


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error passed through; empty where there is none."""
    return _innermost((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


def line_of_caller() -> str:
    """Return the line of the user's code that called this; empty where there is none."""
    return _innermost((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())


def line_of_forward(module: nn.Module) -> str:
    """Return the line where a module's forward is defined; empty where it has no source."""
    try:
        code = inspect.unwrap(type(module).forward).__code__
    except (AttributeError, ValueError):
        return ""
    return _innermost([(code.co_filename, code.co_firstlineno)])


def line_of_assignment(module: nn.Module, attribute: str) -> str:
    """Return the line of a module's class that assigns an attribute, else the line of its forward."""
    pattern = re.compile(rf"self\.{re.escape(attribute)}\s*([-+*/]|//|\*\*)?=[^=]")
    for function in (each for kind in type(module).__mro__ for each in vars(kind).values() if inspect.isfunction(each)):
        file = function.__code__.co_filename
        if function.__name__ != "__init__" and not _is_foreign(file):
            try:
                lines, first = inspect.getsourcelines(function)
            except OSError:  # the file has changed, or is gone
                continue
            changes = [first + number for number, line in enumerate(lines) if pattern.search(line)]
            if changes:
                return place(file, changes[0])
    return line_of_forward(module)


def at(line: str, text: str) -> str:
    """Return a message with the line of code in front, where one is known.

    >>> at("net.py:3", "met 2"), at("", "met 2")
    ('net.py:3: met 2', 'met 2')
    """
    return f"{line}: {text}" if line else text


def _innermost(frames: Iterator[tuple[str, int]] | list[tuple[str, int]]) -> str:
    own = [(file, line) for file, line in frames if not _is_foreign(file)]
    return place(*own[-1]) if own else ""


def place(file: str, line: int) -> str:
    """Return ``file:line``, relative to the working directory where the file is inside it."""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _is_foreign(file: str) -> bool:
    return not file or file.startswith("<") or any(map(Path(file).resolve().is_relative_to, _FOREIGN))
