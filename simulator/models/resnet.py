"""The residual network ResNet with bottlenecks.

References
----------
He et al. 2016, "Deep residual learning for image recognition", table 1; the stride is at
the 3 x 3 convolution, as in torchvision (version 1.5 of the model).
"""

from dataclasses import dataclass

from simulator.models.builder import BlockBuilder
from simulator.models.convolution import IMAGE, INPUT_IMAGE, convolution
from simulator.models.layers import classifier, norm
from simulator.operator_graph import Block, OperatorGraph, OperatorKind

EXPANSION = 4
"""Channels out of a bottleneck over those within."""


@dataclass(frozen=True, slots=True)
class ResNet:
    """Sizes of ResNet; the sample is one image of ``image`` by ``image`` pixels.

    Parameters
    ----------
    depths
        Bottlenecks of every stage; a stage halves the image, the first one but the stem does not.
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
        builder.operator("pooling", OperatorKind.POOLING, dims, (active,), (out, places), saved=(active, places))
        return builder.block("stem", (image,), (out,))

    def _head(self, precision: str, channels: int, size: int) -> Block:
        sizes = {"channels_in": channels, "height": size, "width": size, "classes": self.classes}
        builder = BlockBuilder(precision, sizes)
        x = builder.tensor("x", f"batch channels_in {IMAGE}")
        pooled = builder.tensor("pooled", "batch channels_in")
        kind, dims = OperatorKind.POOLING, f"batch channels_in {IMAGE}"
        # the mean needs no input, but the rectifier before it does
        builder.operator("pooling", kind, dims, (x,), (pooled,), reduced=IMAGE, saved=(x,))
        return builder.block("head", (x,), (classifier(builder, pooled, "channels_in"),))


def _bottleneck(
    name: str, precision: str, channels: int, width: int, size: int, stride: int = 0, repeat: int = 1
) -> Block:
    """Return bottlenecks; the first of a stage has a ``stride`` and projects its shortcut, others have none."""
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
    result = _relu(builder, "residual", (wide, shortcut), kept_by_reader=True)
    return builder.block(name, (x,), (result,), repeat, layer=True)


def _normed(
    builder: BlockBuilder, name: str, source: str, channels: tuple[str, str], space: str = IMAGE, kernel: str = ""
) -> str:
    """Note a convolution and batch norm and return its output."""
    wide = convolution(builder, name, source, channels, space=space, kernel=kernel)
    return norm(builder, f"{name}_norm", wide, bias=True, over=channels[1])


def _relu(builder: BlockBuilder, name: str, inputs: tuple[str, ...], *, kept_by_reader: bool = False) -> str:
    """Note the rectified sum of ``inputs`` and return it; backward reads the output, which the next block may keep."""
    dims = builder.dims(inputs[0])
    out = builder.tensor(f"{name}_out", dims)
    builder.elementwise(name, dims, inputs, (out,), saved=() if kept_by_reader else (out,))
    return out
