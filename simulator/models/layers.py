"""Layers that families share: linear, norm, dropout, embedding, feed-forward, convolution, output and loss.

The feed-forward layer of a transformer is plain or gated.

Images are tensors with dims ``batch channels height width``. The kernel of a convolution is one dim ``kernel`` of
height times width points; a pointwise convolution has none. Where a stride makes the image smaller, the larger one has
dims ``input_height input_width``.
"""

from meshwise.simulator.models.model import BlockBuilder, SymbolicOperator
from meshwise.simulator.operator_graph import OperatorKind

TOKENS = "batch sequence hidden"


def linear(
    builder: BlockBuilder,
    name: str,
    source: str,
    outputs: tuple[str, ...],
    dims: str,
    *,
    weight: str,
    reduced: str,
    bias: str = "",
) -> None:
    """Add a product with a weight, and with a bias if ``bias`` has dims; backward reads the input."""
    parameters = [builder.tensor(f"{name}_weight", weight)]
    if bias:
        parameters.append(builder.tensor(f"{name}_bias", bias))
    builder.operator(
        SymbolicOperator(
            name,
            OperatorKind.MATMUL,
            dims,
            (source,),
            outputs,
            parameters=tuple(parameters),
            reduced=reduced,
            flops=2.0,
            saved=(source,),
        )
    )


def norm(
    builder: BlockBuilder, name: str, source: str, *, bias: bool, over: str = "hidden", output: str | None = None
) -> str:
    """Add a norm along ``dim`` with a weight (and bias) and return its output; backward reads the input.

    Its statistics are a mean and a mean square with a bias (Ba et al. 2016, "Layer normalization"), only a mean square
    without (Zhang and Sennrich 2019, "Root mean square layer normalization"); backward needs equally many.
    """
    dims = builder.dims(source)
    out = builder.tensor(output or f"{name}_out", dims)
    parameters = [builder.tensor(f"{name}_weight", over)]
    if bias:
        parameters.append(builder.tensor(f"{name}_bias", over))
    builder.operator(
        SymbolicOperator(
            name,
            OperatorKind.NORM,
            dims,
            (source,),
            (out,),
            parameters=tuple(parameters),
            saved=(source,),
            statistics=((over, 2 if bias else 1),),
        )
    )
    return out


def dropout(
    builder: BlockBuilder,
    name: str,
    inputs: tuple[str, ...],
    output: str,
    mask: str,
    *,
    on: bool,
    parameters: tuple[str, ...] = (),
) -> str:
    """Add the fused sum of ``inputs`` and parameters, with dropout if ``is_active``: then backward reads the mask."""
    dims = builder.dims(inputs[0])
    out = builder.tensor(output, dims)
    kind = OperatorKind.DROPOUT if on else OperatorKind.ELEMENTWISE
    saved = (builder.tensor(mask, dims, "mask"),) if on else ()
    builder.operator(SymbolicOperator(name, kind, dims, inputs, (out,), parameters=parameters, saved=saved))
    return out


def residual(
    builder: BlockBuilder, name: str, branches: tuple[str, ...], source: str, *, drop: bool, output: str | None = None
) -> str:
    """Add the sum of branches and their source and return it."""
    return dropout(builder, name, (*branches, source), output or f"{name}_out", f"{name}_mask", on=drop)


def token_embedding(builder: BlockBuilder, tokens: str = "tokens", output: str = "embedded") -> str:
    """Add the look-up of tokens in a table and return the rows."""
    builder.tensor(tokens, "batch sequence", "int64")
    builder.tensor("table", "vocab hidden")
    out = builder.tensor(output, TOKENS)
    builder.operator(
        SymbolicOperator(
            "token",
            OperatorKind.EMBEDDING,
            f"{TOKENS} vocab",
            (tokens,),
            (out,),
            parameters=("table",),
            reduced="vocab",
            saved=(tokens,),
        )
    )
    return out


def vocabulary_loss(builder: BlockBuilder, source: str, *, bias: bool = False) -> str:
    """Add the product with the output weight and the cross-entropy of tokens, and return the loss."""
    weight = (builder.tensor("output_weight", "hidden vocab"),)
    logits = builder.tensor("logits", "batch sequence vocab", "fp32")
    builder.operator(
        SymbolicOperator(
            "logits",
            OperatorKind.MATMUL,
            "batch sequence vocab hidden",
            (source,),
            (logits,),
            parameters=(*weight, builder.tensor("output_bias", "vocab")) if bias else weight,
            reduced="hidden",
            flops=2.0,
            saved=(source,),
        )
    )
    return cross_entropy(builder, logits, "batch sequence", "vocab", summed="sequence")


def cross_entropy(builder: BlockBuilder, logits: str, dims: str, classes: str, summed: str = "") -> str:
    """Add the cross-entropy over ``classes`` and return the loss, summed along ``summed``."""
    # with the vocabulary cut, each of the three is summed over ranks (Shoeybi et al. 2019, section 3)
    names = ("largest_logit", "sum_of_exponentials", "target_logit")
    parts = tuple(builder.tensor(name, dims, "fp32") for name in names)
    kind = OperatorKind.CROSS_ENTROPY
    builder.operator(
        SymbolicOperator("cross_entropy", kind, f"{dims} {classes}", (logits,), parts, reduced=classes, saved=(logits,))
    )
    loss = builder.tensor("loss", "batch", "fp32")
    builder.operator(SymbolicOperator("loss", OperatorKind.ELEMENTWISE, dims, parts, (loss,), reduced=summed))
    return loss


def classifier(builder: BlockBuilder, source: str, features: str) -> str:
    """Add a linear layer from ``features`` to classes, and return the loss."""
    logits = builder.tensor("logits", "batch classes", "fp32")
    dims, weight = f"batch classes {features}", f"{features} classes"
    linear(builder, "classifier", source, (logits,), dims, weight=weight, reduced=features, bias="classes")
    return cross_entropy(builder, logits, "batch", "classes")


GATED = ("swiglu", "geglu")
"""Kinds of feed-forward layers with two matrices into the wide layer, one gating the other (Shazeer 2020)."""


def feed_forward(builder: BlockBuilder, source: str, *, gated: bool, bias: bool, prefix: str = "") -> str:
    """Add a feed-forward layer of width ``ffn`` and return its output; backward of the activation reads its input."""
    width = "ffn gate" if gated else "ffn"
    dims = f"batch sequence {width}"
    wide = builder.tensor(f"{prefix}wide", dims)
    linear(
        builder,
        f"{prefix}up",
        source,
        (wide,),
        f"{dims} hidden",
        weight=f"hidden {width}",
        reduced="hidden",
        bias=width if bias else "",
    )
    active = builder.tensor(f"{prefix}active", "batch sequence ffn")
    builder.elementwise(f"{prefix}activation", dims, (wide,), (active,), saved=(wide,))
    narrow = builder.tensor(f"{prefix}narrow", TOKENS)
    linear(
        builder,
        f"{prefix}down",
        active,
        (narrow,),
        f"{TOKENS} ffn",
        weight="ffn hidden",
        reduced="ffn",
        bias="hidden" if bias else "",
    )
    return narrow


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
    tokens: str = "",
) -> str:
    """Add a convolution from one dim of channels to another and return its output; backward reads the input.

    Parameters
    ----------
    space
        Dims of the output image.
    kernel
        Dim of the kernel's points, empty for a pointwise convolution.
    tokens
        Dims of the output if it is a sequence of points, not an image.
    """
    read, written = channels
    out = builder.tensor(f"{name}_out", tokens or f"batch {written} {space}")
    reduced = f"{read} {kernel}".strip()
    parameters = [builder.tensor(f"{name}_weight", f"{written} {reduced}")]
    if bias:
        parameters.append(builder.tensor(f"{name}_bias", written))
    builder.operator(
        SymbolicOperator(
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
    )
    return out
