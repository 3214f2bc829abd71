"""Colours that colour-blind readers can tell apart and whose lightness differs, so that they survive grey print."""

from collections.abc import Mapping

from meshwise.simulator.program import Category, TaskKind

IDLE = "#F1F1F1"
KIND_COLOUR = {
    TaskKind.FORWARD: "#F0B429",
    TaskKind.BACKWARD: "#1D5B96",
    TaskKind.WEIGHT_GRADIENT: "#4D84C1",
    TaskKind.RECOMPUTE: "#CC84B4",
    TaskKind.OPTIMIZER: "#26262B",
    TaskKind.TENSOR_COMMUNICATION: "#35B898",
    TaskKind.EXPERT_COMMUNICATION: "#EAA27A",
    TaskKind.CONTEXT_COMMUNICATION: "#2E6E3F",
    TaskKind.PIPELINE_COMMUNICATION: "#CF4A16",
    TaskKind.DATA_COMMUNICATION: "#5A2A82",
    TaskKind.HOST_COPY: "#D9D96B",
    TaskKind.LAUNCH: "#8A8A8A",
}
DARK_COLOUR = KIND_COLOUR | {
    TaskKind.BACKWARD: "#3A7FC4",
    TaskKind.WEIGHT_GRADIENT: "#80AFE3",
    TaskKind.OPTIMIZER: "#F4F4F6",
    TaskKind.CONTEXT_COMMUNICATION: "#3F8F55",
    TaskKind.DATA_COMMUNICATION: "#8D56BE",
}
"""Colours of task kinds on a dark ground; the darkest ones are replaced."""
CHUNKED = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT)
"""Task kinds whose colour is shaded by model chunk."""
CATEGORY_COLOUR = {
    Category.PARAMETERS: "#1D5B96",
    Category.GRADIENTS: "#8BBDE3",
    Category.OPTIMIZER: "#A85A93",
    Category.ACTIVATIONS: "#F0B429",
    Category.BUFFERS: "#7A7A7A",
}
SERIES = ("#1D5B96", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A2A82", "#333333")
"""Colours of lines without an order; line styles distinguish more than eight."""
DASHES = ("solid", "dashed", "dotted", "dashdot")
_MAX_LIGHTENING = 0.62


def shade_kind(kind: TaskKind, chunk: int, chunks: int, colours: Mapping[TaskKind, str] = KIND_COLOUR) -> str:
    """Return the colour of ``kind`` for one of ``chunks`` model chunks: later chunks are lighter.

    >>> shade_kind(TaskKind.FORWARD, 0, 2)
    '#f0b429'
    """
    lightening = _MAX_LIGHTENING * chunk / max(chunks, 2) if chunks > 1 else 0.0
    return blend(colours[kind], "#FFFFFF", lightening)


def blend(colour: str, target: str, weight: float) -> str:
    """Return ``colour`` mixed with ``target``: 0 of ``weight`` is the former, 1 the latter.

    >>> blend("#000000", "#ffffff", 0.5)
    '#808080'
    """
    channels = zip(split_channels(colour), split_channels(target), strict=True)
    return "#" + "".join(f"{int(start + (end - start) * weight + 0.5):02x}" for start, end in channels)


def split_channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of ``#rrggbb``, each from 0 to 255."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def lightness(colour: str) -> float:
    """Return the lightness of ``colour``, from 0 to 100 (CIE L*, from sRGB luminance).

    >>> round(lightness("#FFFFFF"))
    100
    """
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in split_channels(colour))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


def text_colour(colour: str) -> str:
    """Return black or white, whichever reads better on ``colour``."""
    return "#FFFFFF" if lightness(colour) < 58 else "#1A1A1A"
