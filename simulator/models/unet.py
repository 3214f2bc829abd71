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
    IMAGE_DIMS,
    INPUT_IMAGE_DIMS,
    TOKEN_DIMS,
    convolution,
    feed_forward,
    linear,
    norm,
    residual,
)
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph

TIME_EXPANSION = 4
"""Width of the embedding of the time step over the width of the first level."""
FEED_FORWARD_EXPANSION = 4
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
        bad_width = next((width for width in self.widths if width % self.heads), None)
        if bad_width is not None:
            raise ValueError(f"heads divide widths({bad_width}), met {self.heads}")
        divisor = 2 ** (len(self.widths) - 1)
        if self.image % divisor:
            raise ValueError(f"{len(self.widths)} levels halve the image to 1 / {divisor}, met image({self.image})")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return f"diffusion, levels of {', '.join(map(str, self.widths))} channels, image {self.image}"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one image."""
        return OperatorGraph(self.name, _BlockWriter(self, precision).write_blocks(), 1)


@dataclass(frozen=True, slots=True)
class _Image:
    """Channels of an image, and its height and width."""

    channels: int
    size: int


class _BlockWriter:
    """Writes the blocks in order: ``image_shape`` is the current image, ``skips`` are kept for the way up."""

    def __init__(self, spec: UNet, precision: str) -> None:
        self.spec, self.precision = spec, precision
        self.image_shape = _Image(spec.channels, spec.image)
        self.skips: list[_Image] = []

    def write_blocks(self) -> tuple[Block, ...]:
        """Return all blocks: down, through the middle, and up."""
        levels = list(zip(self.spec.widths, self.spec.attends, strict=True))
        result = [self._write_input()]
        for index, (width, attends) in enumerate(levels):
            if index:
                result.append(self._write_halving(f"down_{index}_halve"))
            result += [
                self._write_residual(f"down_{index + 1}_{i + 1}", width, attends) for i in range(self.spec.depth)
            ]
        result += [self._write_residual("middle_1", width, attends=True, keep_skip=False)]
        result += [self._write_residual("middle_2", width, attends=False, keep_skip=False)]
        for index, (width, attends) in reversed(list(enumerate(levels))):
            result += [
                self._write_residual(f"up_{index + 1}_{i + 1}", width, attends, going_up=True)
                for i in range(self.spec.depth + 1)
            ]
            if index:
                result.append(self._write_doubling(f"up_{index + 1}_double"))
        return (*result, self._write_output())

    def _make_builder(self, out: _Image, skip_channels: int = 0) -> BlockBuilder:
        """Return a builder of a block from the current image, with ``skip_channels`` more channels, to ``out``."""
        input_shape, width = self.image_shape, self.spec.widths[0]
        sizes = {
            "channels_in": input_shape.channels + skip_channels,
            "channels_before": input_shape.channels,
            "channels_joined": skip_channels,
            "channels_out": out.channels,
            "channels": out.channels,
            "latent": self.spec.channels,
            "kernel": 3 * 3,
            "height": out.size,
            "width": out.size,
            "input_height": input_shape.size,
            "input_width": input_shape.size,
            "frequencies": width,
            "time": TIME_EXPANSION * width,
            "time_in": TIME_EXPANSION * width,
            "sequence": out.size**2,
            "key": out.size**2,
            "source": self.spec.text,
            "text": self.spec.text_width,
            "hidden": out.channels,
            "ffn": FEED_FORWARD_EXPANSION * out.channels,
            "gate": 2,
            **head_sizes(self.spec.heads, self.spec.heads, max(out.channels // self.spec.heads, 1)),
        }
        for index, skip in enumerate(self.skips):
            sizes |= {f"skip_channels_{index}": skip.channels, f"skip_size_{index}": skip.size}
        return BlockBuilder(self.precision, sizes)

    def _add_carried(self, builder: BlockBuilder) -> tuple[str, ...]:
        """Add the embedding of time and the skips to a block and return them."""
        time = builder.add_tensor("time", "batch time")
        dims = "batch skip_channels_{0} skip_size_{0} skip_size_{0}"
        return time, *(builder.add_tensor(f"skip_{i}", dims.format(i)) for i in range(len(self.skips)))

    def _write_input(self) -> Block:
        out = _Image(self.spec.widths[0], self.spec.image)
        builder = self._make_builder(out)
        image = builder.add_tensor("image", f"batch channels_in {IMAGE_DIMS}")
        waves = builder.add_tensor("waves", "batch frequencies")
        wide = linear(builder, "time_1", waves, ("first_time",), "time_in", "frequencies", over="batch", bias=True)
        active = _add_silu(builder, "time_activation", wide)
        time = linear(builder, "time_2", active, ("time",), "time", "time_in", over="batch", bias=True)
        x = convolution(builder, "convolution", image, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.image_shape, self.skips = out, [out]
        return builder.build_block("input", (image, waves), (x, time, x))

    def _write_halving(self, name: str) -> Block:
        out = _Image(self.image_shape.channels, self.image_shape.size // 2)
        builder = self._make_builder(out)
        carried = self._add_carried(builder)
        x = builder.add_tensor("x", f"batch channels_in {INPUT_IMAGE_DIMS}")
        y = convolution(builder, "convolution", x, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.image_shape = out
        self.skips.append(out)
        return builder.build_block(name, (x, *carried), (y, *carried, y), layer=True)

    def _write_doubling(self, name: str) -> Block:
        out = _Image(self.image_shape.channels, self.image_shape.size * 2)
        builder = self._make_builder(out)
        carried = self._add_carried(builder)
        x = builder.add_tensor("x", f"batch channels_in {INPUT_IMAGE_DIMS}")
        large = builder.add_elementwise("nearest", f"batch channels_in {IMAGE_DIMS}", (x,), ("large",))
        y = convolution(builder, "convolution", large, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        self.image_shape = out
        return builder.build_block(name, (x, *carried), (y, *carried), layer=True)

    def _write_residual(
        self, name: str, width: int, attends: bool, *, keep_skip: bool = True, going_up: bool = False
    ) -> Block:
        """Return a residual block, with attention if the level ``attends``; on the way up it concatenates a skip."""
        skip = self.skips[-1] if going_up else None
        out = _Image(width, self.image_shape.size)
        builder = self._make_builder(out, skip.channels if skip else 0)
        carried = self._add_carried(builder)
        x = builder.add_tensor("x", f"batch channels_before {IMAGE_DIMS}")
        source, dims = x, f"batch channels_in {IMAGE_DIMS}"
        if skip:
            source = builder.add_elementwise("join", dims, (x, carried[-1]), ("joined",))
        else:
            builder.add_tensor(x, dims)
        y = _residual_convolutions(builder, source, carried[0])
        if attends:
            y = _transformer_layer(builder, y)
        self.image_shape, next_carried = out, carried
        if going_up:
            self.skips.pop()
            next_carried = carried[:-1]
        elif keep_skip:
            self.skips.append(out)
            next_carried = (*carried, y)
        return builder.build_block(name, (x, *carried), (y, *next_carried), layer=True)

    def _write_output(self) -> Block:
        builder = self._make_builder(_Image(self.spec.channels, self.image_shape.size))
        carried = self._add_carried(builder)
        x = builder.add_tensor("x", f"batch channels_in {IMAGE_DIMS}")
        active = _add_silu(builder, "activation", norm(builder, "norm", x, bias=True, dim="channels_in"))
        noise = convolution(builder, "convolution", active, ("channels_in", "channels_out"), kernel="kernel", bias=True)
        loss = builder.add_tensor("loss", "batch", "fp32")
        dims = f"batch channels_out {IMAGE_DIMS}"
        builder.add_elementwise("loss", dims, (noise,), (loss,), saved=(noise,))
        return builder.build_block("output", (x, *carried), (loss,))


def _add_silu(builder: BlockBuilder, name: str, source: str) -> str:
    """Add a SiLU activation and return its output; backward reads the input."""
    return builder.add_elementwise(name, builder.tensor_dims(source), (source,), (f"{name}_out",), saved=(source,))


def _residual_convolutions(builder: BlockBuilder, x: str, time: str) -> str:
    """Add two normalised convolutions, with the time added between them, and return the sum with their source."""
    active = _add_silu(builder, "activation_1", norm(builder, "norm_1", x, bias=True, dim="channels_in"))
    channel_change = ("channels_in", "channels_out")
    wide = convolution(builder, "convolution_1", active, channel_change, kernel="kernel", bias=True)
    shift = builder.add_tensor("shift", "batch channels_out")
    active_time = _add_silu(builder, "time_activation", time)
    linear(builder, "time", active_time, (shift,), "channels_out", "time", over="batch", bias=True)
    dims = f"batch channels_out {IMAGE_DIMS}"
    shifted = builder.add_elementwise("shift", dims, (wide, shift), ("shifted",))
    active = _add_silu(builder, "activation_2", norm(builder, "norm_2", shifted, bias=True, dim="channels_out"))
    channel_pair = ("channels_out", "channels")
    branch = convolution(builder, "convolution_2", active, channel_pair, kernel="kernel", bias=True)
    if builder.dim_sizes["channels_in"] != builder.dim_sizes["channels_out"]:
        x = convolution(builder, "shortcut", x, channel_change, bias=True)
    return residual(builder, "sum", (branch,), x)


def _transformer_layer(builder: BlockBuilder, image: str) -> str:
    """Add a transformer layer over the points of an image, with attention to the text, and return the sum with it."""
    normed = norm(builder, "image_norm", image, bias=True, dim="channels")
    x = convolution(builder, "tokens", normed, ("channels", "hidden"), bias=True, tokens=TOKEN_DIMS)
    self_attention_spec = Attention(causal=False, bias=True)
    attended = self_attention(builder, norm(builder, "self_norm", x, bias=True), self_attention_spec)
    x = residual(builder, "attention_residual", (attended,), x)
    text, normed = builder.add_tensor("text", "batch source text"), norm(builder, "cross_norm", x, bias=True)
    crossed = cross_attention(builder, normed, text, Attention(causal=False, bias=True, prefix="cross_"), "text")
    x = residual(builder, "cross_residual", (crossed,), x)
    narrow = feed_forward(builder, norm(builder, "feed_forward_norm", x, bias=True), gated=True, bias=True)
    x = residual(builder, "feed_forward_residual", (narrow,), x)
    points = convolution(builder, "image", x, ("hidden", "channels"), bias=True)
    return residual(builder, "image_residual", (points,), image)
