"""Layers that families share: linear, norm, dropout, embedding, feed-forward, convolution, output and loss.

The feed-forward layer of a transformer is plain or gated.

Images are tensors with dims ``batch channels height width``. The kernel of a convolution is one dim ``kernel`` of
height times width points; a pointwise convolution has none. Where a stride makes the image smaller, the larger one has
dims ``input_height input_width``.
"""

from collections.abc import Mapping

from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorKind

TOKEN_DIMS = "batch sequence hidden"


def linear(
    builder: BlockBuilder,
    name: str,
    source: str,
    outputs: tuple[str, ...],
    columns: str,
    rows: str = "hidden",
    *,
    over: str = "batch sequence",
    bias: bool = False,
) -> str:
    """Add a product with a weight of dims ``rows columns`` and return its first output; backward reads the input.

    ``over`` are the dims of the input beside ``rows``.
    """
    parameters = {f"{name}_weight": f"{rows} {columns}"} | ({f"{name}_bias": columns} if bias else {})
    return product(builder, name, source, outputs, f"{over} {columns} {rows}", rows, parameters)


def product(
    builder: BlockBuilder,
    name: str,
    source: str,
    outputs: tuple[str, ...],
    dims: str,
    reduced: str,
    parameters: Mapping[str, str],
    kind: OperatorKind = OperatorKind.MATMUL,
    **details: float,
) -> str:
    """Add a product with parameters and return its first output; backward reads the input."""
    return builder.add_operator(
        name,
        kind,
        dims,
        (source,),
        outputs,
        reduced=reduced,
        parameters=parameters,
        flops_per_point=2.0,
        saved=(source,),
        **details,
    )


def norm(builder: BlockBuilder, name: str, source: str, *, bias: bool, dim: str = "hidden") -> str:
    """Add a norm along ``dim`` with a weight (and bias) and return its output; backward reads the input.

    Its statistics are a mean and a mean square with a bias (Ba et al. 2016, "Layer normalization"), only a mean square
    without (Zhang and Sennrich 2019, "Root mean square layer normalization"); backward needs equally many.
    """
    return builder.add_operator(
        name,
        OperatorKind.NORM,
        builder.tensor_dims(source),
        (source,),
        (f"{name}_out",),
        parameters={f"{name}_weight": dim} | ({f"{name}_bias": dim} if bias else {}),
        saved=(source,),
        statistics=((dim, 2 if bias else 1),),
    )


def dropout(
    builder: BlockBuilder,
    name: str,
    inputs: tuple[str, ...],
    output: str,
    mask: str,
    *,
    is_active: bool,
    parameters: tuple[str, ...] = (),
) -> str:
    """Add the fused sum of ``inputs`` and parameters, with dropout if ``is_active``: then backward reads the mask."""
    dims = builder.tensor_dims(inputs[0])
    builder.add_tensor(output, dims)
    kind = OperatorKind.DROPOUT if is_active else OperatorKind.ELEMENTWISE
    saved = (builder.add_tensor(mask, dims, "mask"),) if is_active else ()
    return builder.add_operator(name, kind, dims, inputs, (output,), parameters=parameters, saved=saved)


def residual(
    builder: BlockBuilder, name: str, branches: tuple[str, ...], source: str, *, with_dropout: bool = False
) -> str:
    """Add the sum of branches and their source and return it."""
    return dropout(builder, name, (*branches, source), f"{name}_out", f"{name}_mask", is_active=with_dropout)


def token_embedding(builder: BlockBuilder, tokens: str = "tokens", output: str = "embedded") -> str:
    """Add the look-up of tokens in a table and return the rows."""
    builder.add_tensor(tokens, "batch sequence", "int64")
    table, kind, dims = builder.add_tensor("table", "vocab hidden"), OperatorKind.EMBEDDING, f"{TOKEN_DIMS} vocab"
    return builder.add_operator(
        "token", kind, dims, (tokens,), (output,), parameters=(table,), reduced="vocab", saved=(tokens,)
    )


def vocabulary_loss(builder: BlockBuilder, source: str, *, bias: bool = False) -> str:
    """Add the product with the output weight and the cross-entropy of tokens, and return the loss."""
    weight = {builder.add_tensor("output_weight", "hidden vocab"): "hidden vocab"}
    logits = builder.add_tensor("logits", "batch sequence vocab", "fp32")
    parameters = weight | ({"output_bias": "vocab"} if bias else {})
    product(builder, "logits", source, (logits,), "batch sequence vocab hidden", "hidden", parameters)
    return cross_entropy(builder, logits, "batch sequence", "vocab", summed="sequence")


def cross_entropy(builder: BlockBuilder, logits: str, dims: str, classes: str, summed: str = "") -> str:
    """Add the cross-entropy over ``classes`` and return the loss, summed along ``summed``."""
    # with the vocabulary cut, each of the three is summed over ranks (Shoeybi et al. 2019, section 3)
    names = ("largest_logit", "sum_of_exponentials", "target_logit")
    terms = tuple(builder.add_tensor(name, dims, "fp32") for name in names)
    kind = OperatorKind.CROSS_ENTROPY
    builder.add_operator("cross_entropy", kind, f"{dims} {classes}", (logits,), terms, reduced=classes, saved=(logits,))
    loss = builder.add_tensor("loss", "batch", "fp32")
    return builder.add_operator("loss", OperatorKind.ELEMENTWISE, dims, terms, (loss,), reduced=summed)


def classifier(builder: BlockBuilder, source: str, features: str) -> str:
    """Add a linear layer from ``features`` to classes, and return the loss."""
    logits = builder.add_tensor("logits", "batch classes", "fp32")
    linear(builder, "classifier", source, (logits,), "classes", features, over="batch", bias=True)
    return cross_entropy(builder, logits, "batch", "classes")


GATED_KINDS = ("swiglu", "geglu")
"""Kinds of feed-forward layers with two matrices into the wide layer, one gating the other (Shazeer 2020)."""


def feed_forward(builder: BlockBuilder, source: str, *, gated: bool, bias: bool, prefix: str = "") -> str:
    """Add a feed-forward layer of width ``ffn`` and return its output; backward of the activation reads its input."""
    width = "ffn gate" if gated else "ffn"
    wide = linear(builder, f"{prefix}up", source, (f"{prefix}wide",), width, bias=bias)
    active = builder.add_tensor(f"{prefix}active", "batch sequence ffn")
    builder.add_elementwise(f"{prefix}activation", f"batch sequence {width}", (wide,), (active,), saved=(wide,))
    return linear(builder, f"{prefix}down", active, (f"{prefix}narrow",), "hidden", "ffn", bias=bias)


IMAGE_DIMS = "height width"
INPUT_IMAGE_DIMS = "input_height input_width"


def convolution(
    builder: BlockBuilder,
    name: str,
    source: str,
    channels: tuple[str, str],
    *,
    space: str = IMAGE_DIMS,
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
    input_channels, output_channels = channels
    out = builder.add_tensor(f"{name}_out", tokens or f"batch {output_channels} {space}")
    summed_dims = f"{input_channels} {kernel}".strip()
    dims = f"batch {output_channels} {space} {summed_dims}"
    parameters = {f"{name}_weight": f"{output_channels} {summed_dims}"}
    parameters |= {f"{name}_bias": output_channels} if bias else {}
    return product(builder, name, source, (out,), dims, summed_dims, parameters, OperatorKind.CONVOLUTION)
