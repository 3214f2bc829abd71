"""Finds the line of the user's code that an operator, an error or a module comes from, as ``file.py:12``."""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PROGRAM_FOLDERS = tuple(
    Path(__file__).parents[2] / room for room in ("simulator", "strategies", "executor", "reports", "scenarios")
)
_PACKAGES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
_OWN = tuple(folder.resolve() for folder in (*_PROGRAM_FOLDERS, Path(str(torch.__file__)).parent))
_FOREIGN = (*_OWN, Path(sysconfig.get_path("stdlib")).resolve(), *_PACKAGES)
"""Folders whose code is not the user's: torch, this program, and installed packages."""


def add_nearest(text: str, nearest: str) -> str:
    """Return a message with one more value that is allowed.

    >>> add_nearest("met 2", "1"), add_nearest("met 2; nearest: 3", "1")
    ('met 2; nearest: 1', 'met 2; nearest: 3, or 1')
    """
    return f"{text}, or {nearest}" if "; nearest: " in text else f"{text}; nearest: {nearest}"


def find_node_line(node: Node) -> str:
    """Return the line of the user's code that runs a node of a program; empty where torch recorded no stack."""
    return _find_innermost((file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or ""))


def find_error_line(error: BaseException, *, in_packages: bool = True) -> str:
    """Return the innermost line of the user's code that an error passed through, else that of a package; or nothing.

    A line of a package, such as ``transformers``, is told relative to the folder of packages.
    """
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _find_innermost(frames) or (_find_package_line(frames) if in_packages else "")


def find_caller_line() -> str:
    """Return the line of the user's code that called this; empty where there is none."""
    return _find_innermost((frame.filename, frame.lineno or 0) for frame in traceback.extract_stack())


def find_forward_line(module: nn.Module) -> str:
    """Return the line where a module's forward is defined; empty where it has no source."""
    try:
        code = inspect.unwrap(type(module).forward).__code__
    except (AttributeError, ValueError):
        return ""
    return _find_innermost([(code.co_filename, code.co_firstlineno)])


def find_assignment_line(module: nn.Module, attribute: str) -> str:
    """Return the line of a module's class that assigns an attribute, else the line of its forward."""
    pattern = re.compile(rf"self\.{re.escape(attribute)}\s*([-+*/]|//|\*\*)?=[^=]")
    for function in (
        attribute_value
        for base in type(module).__mro__
        for attribute_value in vars(base).values()
        if inspect.isfunction(attribute_value)
    ):
        file = function.__code__.co_filename
        if function.__name__ != "__init__" and not _is_foreign(file):
            try:
                lines, first_line = inspect.getsourcelines(function)
            except OSError:  # the file has changed, or is gone
                continue
            changes = [first_line + number for number, line in enumerate(lines) if pattern.search(line)]
            if changes:
                return format_place(file, changes[0])
    return find_forward_line(module)


def prefix_line(line: str, text: str) -> str:
    """Return a message with the line of code in front, where one is known.

    >>> prefix_line("net.py:3", "met 2"), prefix_line("", "met 2")
    ('net.py:3: met 2', 'met 2')
    """
    return f"{line}: {text}" if line else text


def _find_innermost(frames: Iterable[tuple[str, int]]) -> str:
    user_frames = [(file, line) for file, line in frames if not _is_foreign(file)]
    return format_place(*user_frames[-1]) if user_frames else ""


def _find_package_line(frames: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of an installed package other than torch and this program, or nothing."""
    result = ""
    for file, line in frames:
        path = Path(file).resolve()
        folder = next((folder for folder in _PACKAGES if path.is_relative_to(folder)), None)
        if folder is not None and not any(map(path.is_relative_to, _OWN)):
            result = f"{path.relative_to(folder)}:{line}"
    return result


def format_place(file: str, line: int) -> str:
    """Return ``file:line``, relative to the working directory where the file is inside it."""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def _is_foreign(file: str) -> bool:
    return not file or file.startswith("<") or any(map(Path(file).resolve().is_relative_to, _FOREIGN))
