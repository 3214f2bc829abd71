"""Classifiers of images: the residual network ResNet with bottlenecks, and the vision transformer ViT.

The stride of ResNet [1]_ is at the 3 x 3 convolution, as in torchvision (version 1.5 of the model). ViT [2]_ takes an
image as a sequence of patches and one class token.

References
----------
.. [1] He et al. 2016, "Deep residual learning for image recognition", table 1.
.. [2] Dosovitskiy et al. 2021, "An image is worth 16x16 words", section 3.1.
"""

from dataclasses import dataclass

from meshwise.simulator.models.attention import ATTENTION, Attention, head_sizes, self_attention
from meshwise.simulator.models.layers import (
    IMAGE,
    INPUT_IMAGE,
    TOKENS,
    classifier,
    convolution,
    dropout,
    feed_forward,
    norm,
    residual,
)
from meshwise.simulator.models.model import BlockBuilder, SymbolicOperator
from meshwise.simulator.operator_graph import Block, OperatorGraph, OperatorKind

EXPANSION = 4
"""Output channels of a bottleneck over its inner channels."""


@dataclass(frozen=True, slots=True)
class ResNet:
    """Sizes of ResNet; a sample is one image of ``image`` by ``image`` pixels.

    Parameters
    ----------
    depths
        Bottlenecks of every stage; every stage but the first halves the image.
    stem
        Channels of the first convolution and within the bottlenecks of the first stage; doubled by every stage.
    """

    depths: tuple[int, ...]
    stem: int = 64
    image: int = 224
    channels: int = 3
    classes: int = 1000
    name: str = "resnet"

    def __post_init__(self) -> None:
        numbers = (*self.depths, self.stem, self.image, self.channels, self.classes)
        if not self.depths or min(numbers) < 1:
            raise ValueError(f"sizes of ResNet are at least 1, met {numbers}")
        smallest = 4 * 2 ** (len(self.depths) - 1)
        if self.image % smallest:
            raise ValueError(f"{len(self.depths)} stages halve the image to 1 / {smallest}, met image({self.image})")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return f"vision, stages of {', '.join(map(str, self.depths))} bottlenecks, image {self.image}"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one image."""
        blocks = [self._stem(precision)]
        channels, size = self.stem, self.image // 4
        for index, depth in enumerate(self.depths):
            width, stride = self.stem * 2**index, 2 if index else 1
            blocks.append(_bottleneck(f"stage_{index + 1}_first", precision, channels, width, size, stride))
            channels, size = EXPANSION * width, size // stride
            if depth > 1:
                blocks.append(_bottleneck(f"stage_{index + 1}", precision, channels, width, size, repeat=depth - 1))
        return OperatorGraph(self.name, (*blocks, self._head(precision, channels, size)), 1)

    def _stem(self, precision: str) -> Block:
        half, quarter = self.image // 2, self.image // 4
        sizes = {"channels_in": self.channels, "channels_out": self.stem, "kernel": 7 * 7}
        sizes |= {"rows": self.image, "columns": self.image, "input_height": half, "input_width": half}
        builder = BlockBuilder(precision, sizes | {"height": quarter, "width": quarter})
        image = builder.tensor("image", "batch channels_in rows columns")
        channels = ("channels_in", "channels_out")
        wide = convolution(builder, "convolution", image, channels, space=INPUT_IMAGE, kernel="kernel")
        active = _relu(builder, "activation", (norm(builder, "norm", wide, bias=True, over="channels_out"),))
        dims = f"batch channels_out {IMAGE}"
        out, places = builder.tensor("x", dims), builder.tensor("maxima", dims, "int64")
        builder.operator(
            SymbolicOperator("pooling", OperatorKind.POOLING, dims, (active,), (out, places), saved=(active, places))
        )
        return builder.block("stem", (image,), (out,))

    def _head(self, precision: str, channels: int, size: int) -> Block:
        sizes = {"channels_in": channels, "height": size, "width": size, "classes": self.classes}
        builder = BlockBuilder(precision, sizes)
        x = builder.tensor("x", f"batch channels_in {IMAGE}")
        pooled = builder.tensor("pooled", "batch channels_in")
        kind, dims = OperatorKind.POOLING, f"batch channels_in {IMAGE}"
        # the mean needs no input, but the rectifier before it does
        builder.operator(SymbolicOperator("pooling", kind, dims, (x,), (pooled,), reduced=IMAGE, saved=(x,)))
        return builder.block("head", (x,), (classifier(builder, pooled, "channels_in"),))


def _bottleneck(
    name: str, precision: str, channels: int, width: int, size: int, stride: int = 0, repeat: int = 1
) -> Block:
    """Return a block of bottlenecks; only the first of a stage has a ``stride`` and projects its shortcut."""
    out = size // (stride or 1)
    sizes = {"channels_in": channels, "bottleneck": width, "bottleneck_out": width, "channels_out": EXPANSION * width}
    sizes |= {"kernel": 3 * 3, "height": out, "width": out, "input_height": size, "input_width": size}
    builder = BlockBuilder(precision, sizes)
    space = INPUT_IMAGE if stride > 1 else IMAGE
    x = builder.tensor("x", f"batch channels_in {space}")
    narrow = _normed(builder, "reduce", x, ("channels_in", "bottleneck"), space)
    narrow = _relu(builder, "reduce_activation", (narrow,))
    inner = _normed(builder, "convolution", narrow, ("bottleneck", "bottleneck_out"), kernel="kernel")
    inner = _relu(builder, "activation", (inner,))
    wide = _normed(builder, "expand", inner, ("bottleneck_out", "channels_out"))
    shortcut = _normed(builder, "shortcut", x, ("channels_in", "channels_out")) if stride else x
    # the next block's convolution reads the sum too and keeps it, so that this block need not
    result = _relu(builder, "residual", (wide, shortcut), kept_by_reader=True)
    return builder.block(name, (x,), (result,), repeat, layer=True)


def _normed(
    builder: BlockBuilder, name: str, source: str, channels: tuple[str, str], space: str = IMAGE, kernel: str = ""
) -> str:
    """Add a convolution and batch norm and return its output."""
    wide = convolution(builder, name, source, channels, space=space, kernel=kernel)
    return norm(builder, f"{name}_norm", wide, bias=True, over=channels[1])


def _relu(builder: BlockBuilder, name: str, inputs: tuple[str, ...], *, kept_by_reader: bool = False) -> str:
    """Add the rectified sum of ``inputs`` and return it; backward reads the output, which the next block may keep."""
    dims = builder.dims(inputs[0])
    out = builder.tensor(f"{name}_out", dims)
    builder.elementwise(name, dims, inputs, (out,), saved=() if kept_by_reader else (out,))
    return out


@dataclass(frozen=True, slots=True)
class VisionTransformer:
    """Sizes of ViT; a sample is one image of ``image`` by ``image`` pixels, whatever sequence is requested."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    image: int = 224
    channels: int = 3
    classes: int = 1000
    attention: str = "flash"
    dropout: bool = False
    name: str = "vit"

    def __post_init__(self) -> None:
        numbers = (self.layers, self.hidden, self.heads, self.ffn, self.patch, self.image, self.channels, self.classes)
        if min(numbers) < 1:
            raise ValueError(f"sizes of ViT are at least 1, met {numbers}")
        if self.hidden % self.heads:
            raise ValueError(f"heads divide hidden({self.hidden}), met {self.heads}")
        if self.image % self.patch:
            raise ValueError(f"patch divides image({self.image}), met {self.patch}")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention is one of {', '.join(ATTENTION)}, met {self.attention}")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return (
            f"vision, {self.layers} layers, hidden {self.hidden}, {self.heads} heads, ffn {self.ffn}, "
            f"image {self.image} in patches of {self.patch}"
        )

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one image: a sequence of its patches and the class token."""
        rows = self.image // self.patch
        tokens = rows * rows + 1
        sizes = {
            "sequence": tokens,
            "key": tokens,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "classes": self.classes,
            "channels": self.channels,
            "kernel": self.patch**2,
            "input_height": self.image,
            "input_width": self.image,
            "height": rows,
            "width": rows,
            "patches": rows * rows,
            **head_sizes(self.heads, self.heads, self.hidden // self.heads),
        }
        parts = (_embedding, _layers, _head)
        return OperatorGraph(self.name, tuple(part(self, BlockBuilder(precision, sizes)) for part in parts), tokens)


def _embedding(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    image = builder.tensor("image", "batch channels input_height input_width")
    channels = ("channels", "hidden")
    tokens = "batch patches hidden"
    patches = convolution(builder, "patches", image, channels, kernel="kernel", bias=True, tokens=tokens)
    first, table = builder.tensor("class_token", "hidden"), builder.tensor("positions", "sequence hidden")
    joined = builder.tensor("tokens", TOKENS)
    builder.elementwise("class_token", TOKENS, (patches,), (joined,))
    tables = (first, table)
    out = dropout(builder, "position", (joined,), "x", "position_mask", on=spec.dropout, parameters=tables)
    return builder.block("embedding", (image,), (out,))


def _layers(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    how = Attention(kernel=spec.attention, causal=False, dropout=spec.dropout, qkv_bias=True, bias=True)
    x = builder.tensor("x", TOKENS)
    attended = self_attention(builder, norm(builder, "input_norm", x, bias=True), how)
    middle = residual(builder, "attention_residual", (attended,), x, drop=spec.dropout)
    normed = norm(builder, "feed_forward_norm", middle, bias=True)
    narrow = feed_forward(builder, normed, gated=False, bias=True)
    out = residual(builder, "feed_forward_residual", (narrow,), middle, drop=spec.dropout)
    return builder.block("layers", (x,), (out,), spec.layers, layer=True)


def _head(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    x = builder.tensor("x", TOKENS)
    normed = norm(builder, "final_norm", x, bias=True)
    first = builder.tensor("first", "batch hidden")
    builder.elementwise("first_token", "batch hidden", (normed,), (first,))
    return builder.block("head", (x,), (classifier(builder, first, "hidden"),))
