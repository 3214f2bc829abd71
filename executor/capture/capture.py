"""From a module and its inputs to an operator graph."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from executor.capture.assemble import Assembly
from executor.capture.captured import Captured, CaptureError
from executor.capture.drafts import drafts
from executor.capture.program import export
from executor.capture.reading import read
from executor.capture.segments import divided


def capture(module: nn.Module, inputs: Sequence[Tensor], name: str = "captured") -> Captured:
    """Return a module as an operator graph of one sample.

    Parameters
    ----------
    module
        Its ``forward(*inputs)`` returns a scalar loss; it is captured in training mode.
    inputs
        Tensors whose dim 0 is the batch. A batch of one sample is captured as two equal ones, which tells
        the batch from a dim of size 1.

    Raises
    ------
    CaptureError
        Where the inputs are not as said, or torch cannot export the module.
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
    """Return the samples of inputs; `CaptureError` where they are no tensors with one batch."""
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
