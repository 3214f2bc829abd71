"""The vision transformer ViT: an image as a sequence of patches and one class token.

References
----------
Dosovitskiy et al. 2021, "An image is worth 16x16 words", section 3.1.
"""

from dataclasses import dataclass

from simulator.models.attention import ATTENTION, Attention, head_sizes, self_attention
from simulator.models.builder import BlockBuilder
from simulator.models.convolution import convolution
from simulator.models.feed_forward import feed_forward
from simulator.models.layers import TOKENS, classifier, dropout, norm, residual
from simulator.operator_graph import Block, OperatorGraph


@dataclass(frozen=True, slots=True)
class VisionTransformer:
    """Sizes of ViT; the sample is one image of ``image`` by ``image`` pixels, whatever the sequence asked for."""

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
