"""Convolutions of images: tensors with dims ``batch channels height width``.

A kernel is one dim ``kernel`` of height times width points; a pointwise convolution has
none. Where a stride makes the image smaller, the larger one has dims ``input_height input_width``.
"""

from simulator.models.builder import BlockBuilder
from simulator.operator_graph import OperatorKind

IMAGE = "height width"
INPUT_IMAGE = "input_height input_width"


def convolution(
    builder: BlockBuilder,
    name: str,
    source: str,
    channels: tuple[str, str],
    *,
    space: str = IMAGE,
    kernel: str = "",
    bias: bool = False,
    output: str | None = None,
    tokens: str = "",
) -> str:
    """Note a convolution from one dim of channels to another and return its output; backward reads the input.

    Parameters
    ----------
    space
        Dims of the output image.
    kernel
        Dim of the kernel's points, or nothing.
    tokens
        Dims of the output where it is not an image: its points as a sequence.
    """
    read, written = channels
    out = builder.tensor(output or f"{name}_out", tokens or f"batch {written} {space}")
    reduced = f"{read} {kernel}".strip()
    parameters = [builder.tensor(f"{name}_weight", f"{written} {reduced}")]
    if bias:
        parameters.append(builder.tensor(f"{name}_bias", written))
    builder.operator(
        name,
        OperatorKind.CONVOLUTION,
        f"batch {written} {space} {reduced}",
        (source,),
        (out,),
        parameters=tuple(parameters),
        reduced=reduced,
        flops=2.0,
        saved=(source,),
    )
    return out
