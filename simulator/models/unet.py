"""The denoising U-Net of latent diffusion, conditioned on a text.

Outputs on the way down are kept for the way up: these skip tensors, and the embedding of the time step, are carried
through all blocks in between. A block with attention reads the text's embedding, which is input data.

References
----------
Rombach et al. 2022, "High-resolution image synthesis with latent diffusion models",
section 3.3; diffusers, ``UNet2DConditionModel``.
"""

from dataclasses import dataclass

from meshwise.simulator.models.attention import Attention, cross_attention, head_sizes, self_attention
from meshwise.simulator.models.layers import (
    IMAGE,
    INPUT_IMAGE,
    TOKENS,
    convolution,
    feed_forward,
    linear,
    norm,
    residual,
)
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph

TIME = 4
"""Width of the embedding of the time step over the width of the first level."""
FEED_FORWARD = 4
"""Width of the feed-forward layer over that of its level."""


@dataclass(frozen=True, slots=True)
class UNet:
    """Sizes of the U-Net; a sample is one latent image.

    Parameters
    ----------
    widths
        Channels of every level; each level but the last halves the image.
    attends
        Whether each residual block of a level is followed by attention to the text.
    depth
        Residual blocks of a level on the way down; the way up has one more.
    heads
        Heads of attention, on all levels.
    image
        Height and width of the latent image.
    text, text_width
        Tokens of the text and width of its embedding.
    """

    widths: tuple[int, ...]
    attends: tuple[bool, ...]
    depth: int
    heads: int
    image: int
    text: int
    text_width: int
    channels: int = 4
    name: str = "unet"

    def __post_init__(self) -> None:
        numbers = (*self.widths, self.depth, self.heads, self.image, self.text, self.text_width, self.channels)
        if not self.widths or min(numbers) < 1:
            raise ValueError(f"sizes of the U-Net are at least 1, met {numbers}")
        if len(self.attends) != len(self.widths):
            raise ValueError(f"attends is one word a level({len(self.widths)}), met {len(self.attends)}")
        wrong = next((width for width in self.widths if width % self.heads), None)
        if wrong is not None:
            raise ValueError(f"heads divide widths({wrong}), met {self.heads}")
        smallest = 2 ** (len(self.widths) - 1)
        if self.image % smallest:
            raise ValueError(f"{len(self.widths)} levels halve the image to 1 / {smallest}, met image({self.image})")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return f"diffusion, levels of {', '.join(map(str, self.widths))} channels, image {self.image}"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one image."""
        return OperatorGraph(self.name, _Walk(self, precision).blocks(), 1)


@dataclass(frozen=True, slots=True)
class _Image:
    """Channels of an image, and its height and width."""

    channels: int
    size: int


class _Walk:
    """Writes the blocks in order: ``image_shape`` is the current image, ``skips`` are kept for the way up."""

    def __init__(self, spec: UNet, precision: str) -> None:
        self.spec, self.precision = spec, precision
        self.now = _Image(spec.channels, spec.image)
        self.skips: list[_Image] = []

    def blocks(self) -> tuple[Block, ...]:
        """Return all blocks: down, through the middle, and up."""
        levels = list(zip(self.spec.widths, self.spec.attends, strict=True))
        result = [self._enter()]
        for index, (width, attends) in enumerate(levels):
            if index:
                result.append(self._halve(f"down_{index}_halve"))
            result += [self._residual(f"down_{index + 1}_{i + 1}", width, attends) for i in range(self.spec.depth)]
        result += [self._residual("middle_1", width, attends=True, keep=False)]
        result += [self._residual("middle_2", width, attends=False, keep=False)]
        for index, (width, attends) in reversed(list(enumerate(levels))):
            result += [
                self._residual(f"up_{index + 1}_{i + 1}", width, attends, up=True) for i in range(self.spec.depth + 1)
            ]
            if index:
                result.append(self._double(f"up_{index + 1}_double"))
        return (*result, self._leave())

    def _builder(self, out: _Image, joined: int = 0) -> BlockBuilder:
        """Return a builder of a block from the current image, with ``skip_channels`` more channels, to ``out``."""
        now, width = self.now, self.spec.widths[0]
        sizes = {
            "channels_in": now.channels + joined,
            "channels_before": now.channels,
            "channels_joined": joined,
            "channels_out": out.channels,
            "channels": out.channels,
            "latent": self.spec.channels,
            "kernel": 3 * 3,
            "height": out.size,
            "width": out.size,
            "input_height": now.size,
            "input_width": now.size,
            "frequencies": width,
            "time": TIME * width,
            "time_in": TIME * width,
            "sequence": out.size**2,
            "key": out.size**2,
            "source": self.spec.text,
            "text": self.spec.text_width,
            "hidden": out.channels,
            "ffn": FEED_FORWARD * out.channels,
            "gate": 2,
            **head_sizes(self.spec.heads, self.spec.heads, max(out.channels // self.spec.heads, 1)),
        }
        for index, skip in enumerate(self.skips):
            sizes |= {f"skip_channels_{index}": skip.channels, f"skip_size_{index}": skip.size}
        return BlockBuilder(self.precision, sizes)

    def _carried(self, builder: BlockBuilder) -> tuple[str, ...]:
        """Add the embedding of time and the skips to a block and return them."""
        time = builder.tensor("time", "batch time")
        dims = "batch skip_channels_{0} skip_size_{0} skip_size_{0}"
        return time, *(builder.tensor(f"skip_{i}", dims.format(i)) for i in range(len(self.skips)))

    def _enter(self) -> Block:
        out = _Image(self.spec.widths[0], self.spec.image)
        builder = self._builder(out)
        image = builder.tensor("image", f"batch channels_in {IMAGE}")
        waves = builder.tensor("waves", "batch frequencies")
        first = builder.tensor("first_time", "batch time_in")
        dims, weight = "batch time_in frequencies", "frequencies time_in"
        linear(builder, "time_1", waves, (first,), dims, weight=weight, reduced="frequencies", bias="time_in")
        active = _silu(builder, "time_activation", first)
        time = builder.tensor("time", "batch time")
        dims, weight = "batch time time_in", "time_in time"
        linear(builder, "time_2", active, (time,), dims, weight=weight, reduced="time_in", bias="time")
        x = convolution(builder, "convolution", image, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.now, self.skips = out, [out]
        return builder.block("input", (image, waves), (x, time, x))

    def _halve(self, name: str) -> Block:
        out = _Image(self.now.channels, self.now.size // 2)
        builder = self._builder(out)
        carried = self._carried(builder)
        x = builder.tensor("x", f"batch channels_in {INPUT_IMAGE}")
        y = convolution(builder, "convolution", x, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.now = out
        self.skips.append(out)
        return builder.block(name, (x, *carried), (y, *carried, y), layer=True)

    def _double(self, name: str) -> Block:
        out = _Image(self.now.channels, self.now.size * 2)
        builder = self._builder(out)
        carried = self._carried(builder)
        x = builder.tensor("x", f"batch channels_in {INPUT_IMAGE}")
        large = builder.tensor("large", f"batch channels_in {IMAGE}")
        builder.elementwise("nearest", f"batch channels_in {IMAGE}", (x,), (large,))
        y = convolution(builder, "convolution", large, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.now = out
        return builder.block(name, (x, *carried), (y, *carried), layer=True)

    def _residual(self, name: str, width: int, attends: bool, *, keep: bool = True, up: bool = False) -> Block:
        """Return a residual block, with attention if the level ``attends``; on the way up it concatenates a skip."""
        skip = self.skips[-1] if up else None
        out = _Image(width, self.now.size)
        builder = self._builder(out, skip.channels if skip else 0)
        carried = self._carried(builder)
        x = builder.tensor("x", f"batch channels_before {IMAGE}")
        source = _join(builder, x, carried[-1]) if skip else builder.tensor("x", f"batch channels_in {IMAGE}")
        y = _convolutions(builder, source, carried[0])
        if attends:
            y = _transformer(builder, y)
        self.now, kept = out, carried
        if up:
            self.skips.pop()
            kept = carried[:-1]
        elif keep:
            self.skips.append(out)
            kept = (*carried, y)
        return builder.block(name, (x, *carried), (y, *kept), layer=True)

    def _leave(self) -> Block:
        builder = self._builder(_Image(self.spec.channels, self.now.size))
        carried = self._carried(builder)
        x = builder.tensor("x", f"batch channels_in {IMAGE}")
        active = _silu(builder, "activation", norm(builder, "norm", x, bias=True, over="channels_in"))
        noise = convolution(builder, "convolution", active, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        loss = builder.tensor("loss", "batch", "fp32")
        dims = f"batch channels_out {IMAGE}"
        builder.elementwise("loss", dims, (noise,), (loss,), saved=(noise,))
        return builder.block("output", (x, *carried), (loss,))


def _join(builder: BlockBuilder, x: str, skip: str) -> str:
    out = builder.tensor("joined", f"batch channels_in {IMAGE}")
    builder.elementwise("join", f"batch channels_in {IMAGE}", (x, skip), (out,))
    return out


def _silu(builder: BlockBuilder, name: str, source: str) -> str:
    """Add a SiLU activation and return its output; backward reads the input."""
    out = builder.tensor(f"{name}_out", builder.dims(source))
    builder.elementwise(name, builder.dims(source), (source,), (out,), saved=(source,))
    return out


def _convolutions(builder: BlockBuilder, x: str, time: str) -> str:
    """Add two normalised convolutions, with the time added between them, and return the sum with their source."""
    active = _silu(builder, "activation_1", norm(builder, "norm_1", x, bias=True, over="channels_in"))
    change = ("channels_in", "channels_out")
    wide = convolution(builder, "convolution_1", active, change, kernel="kernel", bias=True)
    shift = builder.tensor("shift", "batch channels_out")
    moment = _silu(builder, "time_activation", time)
    dims, weight = "batch channels_out time", "time channels_out"
    linear(builder, "time", moment, (shift,), dims, weight=weight, reduced="time", bias="channels_out")
    dims = f"batch channels_out {IMAGE}"
    shifted = builder.tensor("shifted", dims)
    builder.elementwise("shift", dims, (wide, shift), (shifted,))
    active = _silu(builder, "activation_2", norm(builder, "norm_2", shifted, bias=True, over="channels_out"))
    keep = ("channels_out", "channels")
    branch = convolution(builder, "convolution_2", active, keep, kernel="kernel", bias=True)
    if builder.size["channels_in"] != builder.size["channels_out"]:
        x = convolution(builder, "shortcut", x, change, bias=True)
    return residual(builder, "sum", (branch,), x, drop=False)


def _transformer(builder: BlockBuilder, image: str) -> str:
    """Add a transformer layer over the points of an image, with attention to the text, and return the sum with it."""
    normed = norm(builder, "image_norm", image, bias=True, over="channels")
    x = convolution(builder, "tokens", normed, ("channels", "hidden"), bias=True, tokens=TOKENS)
    itself = Attention(causal=False, bias=True)
    attended = self_attention(builder, norm(builder, "self_norm", x, bias=True), itself)
    x = residual(builder, "attention_residual", (attended,), x, drop=False)
    text, normed = builder.tensor("text", "batch source text"), norm(builder, "cross_norm", x, bias=True)
    crossed = cross_attention(builder, normed, text, Attention(causal=False, bias=True, prefix="cross_"), "text")
    x = residual(builder, "cross_residual", (crossed,), x, drop=False)
    narrow = feed_forward(builder, norm(builder, "feed_forward_norm", x, bias=True), gated=True, bias=True)
    x = residual(builder, "feed_forward_residual", (narrow,), x, drop=False)
    points = convolution(builder, "image", x, ("hidden", "channels"), bias=True)
    return residual(builder, "image_residual", (points,), image, drop=False)
