"""The user's factory of a module and its inputs: ``FILE.py:FACTORY``. This is code, and runs."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from executor.capture.captured import CaptureError


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module and the inputs that ``FILE.py:FACTORY`` makes; what it prints goes to stderr.

    Raises
    ------
    CaptureError
        Where there is no such file or function, it fails, or it returns something else.
    """
    with redirect_stdout(sys.stderr):
        factory = _found(name)
        try:
            result = factory()
        except Exception as error:
            raise CaptureError(f"{name}: the factory failed: {_line(error)}") from error
    return _checked(name, result)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Raise what the body raises of a module as a `CaptureError` that names its factory, or a line as it is."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, CaptureError) and error.line:
            raise
        raise CaptureError(f"{name}: {error}") from error


def _found(name: str) -> Callable[[], Any]:
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise CaptureError(f"a factory is named FILE.py:FACTORY, met {name!r}")
    path = Path(file)
    if not path.is_file():
        raise CaptureError(f"{file}: the file cannot be read: there is no such file")
    spec = importlib.util.spec_from_file_location(f"captured_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where data classes and pickle look for the classes of a file
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CaptureError(f"{file}: the file cannot be imported: {_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    found = getattr(module, function, None)
    if not callable(found):
        from difflib import get_close_matches

        near = get_close_matches(function, [each for each in vars(module) if not each.startswith("_")], n=1)
        raise CaptureError(f"{file} has no function {function}" + (f"; nearest: {near[0]}" if near else ""))
    result: Callable[[], Any] = found
    return result


def _checked(name: str, result: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        parts = ", ".join(type(each).__name__ for each in result) if isinstance(result, tuple) else ""
        met = f"a tuple of {parts or 'nothing'}" if isinstance(result, tuple) else type(result).__name__
        raise CaptureError(f"{name}: the factory returns (module, inputs) with a torch.nn.Module, met {met}")
    module, inputs = result
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list):
        raise CaptureError(f"{name}: inputs are a tuple of tensors, met {type(inputs).__name__}")
    return module, tuple(inputs)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
