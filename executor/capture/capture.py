"""Captures a torch module and its inputs as an operator graph.

A user names a factory of the module and its inputs as ``FILE.py:FACTORY``. Loading it runs the code of the file.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.executor.capture.assemble import Assembly
from meshwise.executor.capture.captured import CapturedModule, CaptureError
from meshwise.executor.capture.program import export_program
from meshwise.executor.capture.reading import read_program
from meshwise.executor.capture.segments import divide_operators, list_drafts


def capture(module: nn.Module, inputs: Sequence[Tensor], name: str = "captured") -> CapturedModule:
    """Return a captured module: its operator graph for one sample, and the program of its forward pass.

    Parameters
    ----------
    module
        Its ``forward(*inputs)`` returns a scalar loss; it is captured in training mode.
    inputs
        Tensors whose dim 0 is the batch. A batch of one sample is captured as two equal samples, so that the batch
        differs from dims of size 1.

    Raises
    ------
    CaptureError
        Where the inputs have no common batch, or torch cannot export the module.
    """
    batch = count_samples(inputs)
    examples = tuple(inputs) if batch > 1 else tuple(torch.cat([tensor, tensor]) for tensor in inputs)
    program = export_program(module, examples)
    reading = read_program(program, max(batch, 2))
    operators = list_drafts(reading)
    if not operators:
        raise CaptureError("the loss depends on no input and no parameter: nothing is computed")
    assembly = Assembly(reading, operators, divide_operators(reading, operators))
    graph = assembly.build_graph(name)
    reading.program.module.recompile()
    warnings = list(dict.fromkeys(reading.warnings))
    if program.skipped_buffers:
        warnings.append(f"buffers that forward updates stay as they are: {', '.join(program.skipped_buffers)}")
    result = vars(program) | vars(assembly.maps)
    return CapturedModule(**result, graph=graph, batch=max(batch, 2), warnings=tuple(warnings))


def count_samples(inputs: Sequence[Tensor]) -> int:
    """Return the number of samples of the inputs; `CaptureError` where they are not tensors with one batch size."""
    if not inputs:
        raise CaptureError("a module is captured with at least one input, met none")
    for place, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise CaptureError(f"inputs are tensors, met {type(tensor).__name__} at place {place}")
        if tensor.dim() == 0:
            raise CaptureError(f"dim 0 of each input is the batch, met a scalar at place {place}")
    sizes = [tensor.shape[0] for tensor in inputs]
    if len(set(sizes)) > 1 or not sizes[0]:
        raise CaptureError(f"dim 0 of each input is the batch, of one size for all, met {', '.join(map(str, sizes))}")
    return sizes[0]


def run_factory(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module and the inputs that the factory ``FILE.py:FACTORY`` creates; its prints go to stderr.

    Raises
    ------
    CaptureError
        Where the file or function does not exist, fails, or returns anything but a module and tensors.
    """
    with redirect_stdout(sys.stderr):
        factory = _load_factory(name)
        try:
            result = factory()
        except Exception as error:
            raise CaptureError(f"{name}: the factory failed: {format_error(error)}") from error
    return _check_result(name, result)


@contextmanager
def name_factory(name: str) -> Iterator[None]:
    """Turn a ``ValueError`` of the body into a `CaptureError` that names the factory; one with a line passes."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, CaptureError) and error.line:
            raise
        raise CaptureError(f"{name}: {error}") from error


def _load_factory(name: str) -> Callable[[], Any]:
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
        raise CaptureError(f"{file}: the file cannot be imported: {format_error(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    attribute = getattr(module, function, None)
    if not callable(attribute):
        matches = get_close_matches(function, [symbol for symbol in vars(module) if not symbol.startswith("_")], n=1)
        raise CaptureError(f"{file} has no function {function}" + (f"; nearest: {matches[0]}" if matches else ""))
    result: Callable[[], Any] = attribute
    return result


def _check_result(name: str, result: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        parts = ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else ""
        description = f"a tuple of {parts or 'nothing'}" if isinstance(result, tuple) else type(result).__name__
        raise CaptureError(f"{name}: the factory returns (module, inputs) with a torch.nn.Module, met {description}")
    module, inputs = result
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list):
        raise CaptureError(f"{name}: inputs are a tuple of tensors, met {type(inputs).__name__}")
    return module, tuple(inputs)


def format_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
