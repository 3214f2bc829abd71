"""Classifiers of images: the residual network ResNet with bottlenecks, and the vision transformer ViT.

The stride of ResNet [1]_ is at the 3 x 3 convolution, as in torchvision (version 1.5 of the model). ViT [2]_ takes an
image as a sequence of patches and one class token.

References
----------
.. [1] He et al. 2016, "Deep residual learning for image recognition", table 1.
.. [2] Dosovitskiy et al. 2021, "An image is worth 16x16 words", section 3.1.
"""

from dataclasses import dataclass

from meshwise.simulator.models.attention import ATTENTION_KERNELS, Attention, head_sizes, self_attention
from meshwise.simulator.models.layers import (
    IMAGE_DIMS,
    INPUT_IMAGE_DIMS,
    TOKEN_DIMS,
    classifier,
    convolution,
    dropout,
    feed_forward,
    norm,
    residual,
)
from meshwise.simulator.models.model import BlockBuilder
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
        divisor = 4 * 2 ** (len(self.depths) - 1)
        if self.image % divisor:
            raise ValueError(f"{len(self.depths)} stages halve the image to 1 / {divisor}, met image({self.image})")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return f"vision, stages of {', '.join(map(str, self.depths))} bottlenecks, image {self.image}"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one image."""
        blocks = [self._build_stem(precision)]
        channels, size = self.stem, self.image // 4
        for index, depth in enumerate(self.depths):
            width, stride = self.stem * 2**index, 2 if index else 1
            blocks.append(_build_bottlenecks(f"stage_{index + 1}_first", precision, channels, width, size, stride))
            channels, size = EXPANSION * width, size // stride
            if depth > 1:
                blocks.append(
                    _build_bottlenecks(f"stage_{index + 1}", precision, channels, width, size, repeat=depth - 1)
                )
        return OperatorGraph(self.name, (*blocks, self._build_classifier(precision, channels, size)), 1)

    def _build_stem(self, precision: str) -> Block:
        half, quarter = self.image // 2, self.image // 4
        sizes = {"channels_in": self.channels, "channels_out": self.stem, "kernel": 7 * 7}
        sizes |= {"rows": self.image, "columns": self.image, "input_height": half, "input_width": half}
        builder = BlockBuilder(precision, sizes | {"height": quarter, "width": quarter})
        image = builder.add_tensor("image", "batch channels_in rows columns")
        channels = ("channels_in", "channels_out")
        wide = convolution(builder, "convolution", image, channels, space=INPUT_IMAGE_DIMS, kernel="kernel")
        active = _add_relu(builder, "activation", (norm(builder, "norm", wide, bias=True, dim="channels_out"),))
        dims = f"batch channels_out {IMAGE_DIMS}"
        out, maxima = builder.add_tensor("x", dims), builder.add_tensor("maxima", dims, "int64")
        kind, outputs = OperatorKind.POOLING, (out, maxima)
        builder.add_operator("pooling", kind, dims, (active,), outputs, saved=(active, maxima))
        return builder.build_block("stem", (image,), (out,))

    def _build_classifier(self, precision: str, channels: int, size: int) -> Block:
        sizes = {"channels_in": channels, "height": size, "width": size, "classes": self.classes}
        builder = BlockBuilder(precision, sizes)
        x = builder.add_tensor("x", f"batch channels_in {IMAGE_DIMS}")
        kind, dims = OperatorKind.POOLING, f"batch channels_in {IMAGE_DIMS}"
        # the mean needs no input, but the rectifier before it does
        pooled = builder.add_operator("pooling", kind, dims, (x,), ("pooled",), reduced=IMAGE_DIMS, saved=(x,))
        return builder.build_block("head", (x,), (classifier(builder, pooled, "channels_in"),))


def _build_bottlenecks(
    name: str, precision: str, channels: int, width: int, size: int, stride: int = 0, repeat: int = 1
) -> Block:
    """Return a block of bottlenecks; only the first of a stage has a ``stride`` and projects its shortcut."""
    output_size = size // (stride or 1)
    sizes = {"channels_in": channels, "bottleneck": width, "bottleneck_out": width, "channels_out": EXPANSION * width}
    sizes |= {"kernel": 3 * 3, "height": output_size, "width": output_size, "input_height": size, "input_width": size}
    builder = BlockBuilder(precision, sizes)
    space = INPUT_IMAGE_DIMS if stride > 1 else IMAGE_DIMS
    x = builder.add_tensor("x", f"batch channels_in {space}")
    reduced = _normalized_convolution(builder, "reduce", x, ("channels_in", "bottleneck"), space)
    reduced = _add_relu(builder, "reduce_activation", (reduced,))
    convolved = _normalized_convolution(
        builder, "convolution", reduced, ("bottleneck", "bottleneck_out"), kernel="kernel"
    )
    convolved = _add_relu(builder, "activation", (convolved,))
    expanded = _normalized_convolution(builder, "expand", convolved, ("bottleneck_out", "channels_out"))
    shortcut = _normalized_convolution(builder, "shortcut", x, ("channels_in", "channels_out")) if stride else x
    # the next block's convolution reads the sum too and keeps it, so that this block need not
    result = _add_relu(builder, "residual", (expanded, shortcut), kept_by_reader=True)
    return builder.build_block(name, (x,), (result,), repeat, layer=True)


def _normalized_convolution(
    builder: BlockBuilder, name: str, source: str, channels: tuple[str, str], space: str = IMAGE_DIMS, kernel: str = ""
) -> str:
    """Add a convolution and batch norm and return its output."""
    wide = convolution(builder, name, source, channels, space=space, kernel=kernel)
    return norm(builder, f"{name}_norm", wide, bias=True, dim=channels[1])


def _add_relu(builder: BlockBuilder, name: str, inputs: tuple[str, ...], *, kept_by_reader: bool = False) -> str:
    """Add the rectified sum of ``inputs`` and return it; backward reads the output, which the next block may keep."""
    dims = builder.tensor_dims(inputs[0])
    outputs = (f"{name}_out",)
    return builder.add_elementwise(name, dims, inputs, outputs, saved=() if kept_by_reader else outputs)


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
        if self.attention not in ATTENTION_KERNELS:
            raise ValueError(f"attention is one of {', '.join(ATTENTION_KERNELS)}, met {self.attention}")

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
        parts = (_build_embedding, _build_layers, _build_head)
        return OperatorGraph(self.name, tuple(part(self, BlockBuilder(precision, sizes)) for part in parts), tokens)


def _build_embedding(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    image = builder.add_tensor("image", "batch channels input_height input_width")
    channels = ("channels", "hidden")
    tokens = "batch patches hidden"
    patches = convolution(builder, "patches", image, channels, kernel="kernel", bias=True, tokens=tokens)
    tables = (builder.add_tensor("class_token", "hidden"), builder.add_tensor("positions", "sequence hidden"))
    tokens = builder.add_elementwise("class_token", TOKEN_DIMS, (patches,), ("tokens",))
    out = dropout(builder, "position", (tokens,), "x", "position_mask", is_active=spec.dropout, parameters=tables)
    return builder.build_block("embedding", (image,), (out,))


def _build_layers(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    attention = Attention(kernel=spec.attention, causal=False, dropout=spec.dropout, qkv_bias=True, bias=True)
    x = builder.add_tensor("x", TOKEN_DIMS)
    attended = self_attention(builder, norm(builder, "input_norm", x, bias=True), attention)
    middle = residual(builder, "attention_residual", (attended,), x, with_dropout=spec.dropout)
    normed = norm(builder, "feed_forward_norm", middle, bias=True)
    narrow = feed_forward(builder, normed, gated=False, bias=True)
    out = residual(builder, "feed_forward_residual", (narrow,), middle, with_dropout=spec.dropout)
    return builder.build_block("layers", (x,), (out,), spec.layers, layer=True)


def _build_head(spec: VisionTransformer, builder: BlockBuilder) -> Block:
    x = builder.add_tensor("x", TOKEN_DIMS)
    normed = norm(builder, "final_norm", x, bias=True)
    class_output = builder.add_elementwise("first_token", "batch hidden", (normed,), ("first",))
    return builder.build_block("head", (x,), (classifier(builder, class_output, "hidden"),))
