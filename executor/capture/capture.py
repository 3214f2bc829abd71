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
from meshwise.executor.capture.captured import Captured, CaptureError
from meshwise.executor.capture.program import export
from meshwise.executor.capture.reading import read
from meshwise.executor.capture.segments import divided, drafts


def capture(module: nn.Module, inputs: Sequence[Tensor], name: str = "captured") -> Captured:
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
    batch = num_samples(inputs)
    examples = tuple(inputs) if batch > 1 else tuple(torch.cat([each, each]) for each in inputs)
    program = export(module, examples)
    reading = read(program, max(batch, 2))
    operators = drafts(reading)
    if not operators:
        raise CaptureError("the loss depends on no input and no parameter: nothing is computed")
    assembly = Assembly(reading, operators, divided(reading, operators))
    graph = assembly.graph(name)
    reading.program.module.recompile()
    warnings = list(dict.fromkeys(reading.warnings))
    if program.left:
        warnings.append(f"buffers that forward updates stay as they are: {', '.join(program.left)}")
    maps = assembly.maps
    return Captured(
        graph,
        program.module,
        program.parameters,
        program.buffers,
        program.constants,
        program.inputs,
        maps.dims,
        maps.operators,
        maps.occurrence,
        maps.tensors,
        maps.parameter_names,
        max(batch, 2),
        program.updates,
        program.left,
        program.renewal_lines,
        tuple(warnings),
    )


def num_samples(inputs: Sequence[Tensor]) -> int:
    """Return the number of samples of the inputs; `CaptureError` where they are not tensors with one batch size."""
    if not inputs:
        raise CaptureError("a module is captured with at least one input, met none")
    for place, each in enumerate(inputs):
        if not isinstance(each, Tensor):
            raise CaptureError(f"inputs are tensors, met {type(each).__name__} at place {place}")
        if each.dim() == 0:
            raise CaptureError(f"dim 0 of each input is the batch, met a scalar at place {place}")
    sizes = [each.shape[0] for each in inputs]
    if len(set(sizes)) > 1 or not sizes[0]:
        raise CaptureError(f"dim 0 of each input is the batch, of one size for all, met {', '.join(map(str, sizes))}")
    return sizes[0]


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module and the inputs that the factory ``FILE.py:FACTORY`` creates; its prints go to stderr.

    Raises
    ------
    CaptureError
        Where the file or function does not exist, fails, or returns anything but a module and tensors.
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
    """Turn a ``ValueError`` of the body into a `CaptureError` that names the factory; one with a line passes."""
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
