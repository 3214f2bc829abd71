"""The decoder transformer (GPT, Llama, Mixtral, DeepSeek) as an operator graph.

Operators are those that a training framework launches: a fused bias, dropout and residual add is one operator. The
tensors that backward reads follow [1]_, so that one GPT layer keeps
``sequence * batch * hidden * (34 + 5 * heads * sequence / hidden)`` bytes in 16 bits.

References
----------
.. [1] Korthikanti et al., "Reducing activation recomputation in large transformer
   models", MLSys 2023, section 4.1 and equation 1.
"""

from dataclasses import dataclass

from meshwise.simulator.models.attention import (
    ATTENTION_KERNELS,
    Attention,
    LatentAttention,
    head_sizes,
    latent_attention,
    self_attention,
)
from meshwise.simulator.models.experts import Experts, mixture_of_experts
from meshwise.simulator.models.layers import (
    GATED_KINDS,
    TOKEN_DIMS,
    dropout,
    feed_forward,
    norm,
    residual,
    token_embedding,
    vocabulary_loss,
)
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder transformer.

    Parameters
    ----------
    kv_heads
        Heads of keys and values; a divisor of ``heads`` (grouped-query attention).
    ffn
        Width of the feed-forward layer; ``swiglu`` and ``geglu`` have two matrices into it, ``gelu`` one.
    attention
        One of `ATTENTION_KERNELS`: ``flash`` is one kernel that keeps no scores; ``unfused`` keeps them.
    dropout
        Whether attention, projection and feed-forward outputs are dropped out.
    positions
        ``learned`` embeddings or ``rotary``.
    kv_channels
        Width of one head; None for ``hidden / heads``.
    max_positions
        Rows of the table of learned positions; None for as many as the sample has tokens.
    norm
        ``layer`` has a bias, ``rms`` none; None for ``layer`` with ``gelu`` and ``rms`` else.
    biases
        Linear layers with a bias: ``all``, ``qkv`` or ``none``; None for ``all`` with ``gelu`` and ``none`` else.
    qk_norm
        Whether queries and keys are normalised head by head.
    window
        Number of tokens that a token sees, itself included (sliding window); None for all before it.
    parallel_residual
        Whether attention and feed-forward layer read the same input (GPT-NeoX).
    experts
        The mixture of experts that replaces the feed-forward layer, or None.
    latent
        Sizes of multi-head latent attention, or None.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    ffn_kind: str = "gelu"
    tied_embeddings: bool = True
    attention: str = "flash"
    dropout: bool = False
    positions: str = "learned"
    kv_channels: int | None = None
    max_positions: int | None = None
    norm: str | None = None
    biases: str | None = None
    qk_norm: bool = False
    window: int | None = None
    parallel_residual: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    name: str = "transformer"

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        optional = (self.kv_channels, self.max_positions, self.window)
        if min(*sizes, *(size for size in optional if size is not None)) < 1:
            raise ValueError(f"transformer sizes are at least 1, met {(*sizes, *optional)}")
        if self.kv_channels is None and self.latent is None and self.hidden % self.heads:
            raise ValueError(f"heads divide hidden({self.hidden}), met {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads divide heads({self.heads}), met {self.kv_heads}")
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed and (value is not None or field not in _OPTIONAL_CHOICES):
                raise ValueError(f"{field} is one of {', '.join(allowed)}, met {value}")
        self._check_layers()

    def _check_layers(self) -> None:
        if self.experts is not None and self.experts.dense_layers >= self.layers:
            num_dense = self.experts.dense_layers
            raise ValueError(f"experts: dense_layers are fewer than layers({self.layers}), met {num_dense}")
        if self.latent is not None and (self.kv_heads != self.heads or self.positions != "rotary" or self.qk_norm):
            raise ValueError("latent: attention has kv_heads equal to heads, rotary positions and no qk_norm")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden // self.heads

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        experts = self.experts
        experts_text = f", {experts.count} experts of {experts.ffn}, top {experts.top_k}" if experts else ""
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, "
            f"ffn {self.ffn} {self.ffn_kind}{experts_text}, vocab {self.vocab}"
        )

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens.

        >>> gpt = Transformer(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200)
        >>> round(gpt.graph(2048, "bf16").num_parameters / 1e9, 1)
        174.6
        """
        if self.positions == "learned" and sequence > (self.max_positions or sequence):
            raise ValueError(f"{self.name} has {self.max_positions} positions, met a sequence of {sequence} tokens")
        parts = _TransformerBlocks(self, sequence, precision)
        blocks = (parts.build_embedding(), *parts.build_layers(), parts.build_head())
        tied = ((("embedding", "table"), ("head", "output_weight")),) if self.tied_embeddings else ()
        return OperatorGraph(self.name, blocks, sequence, tied)


_CHOICES = {
    "ffn_kind": ("gelu", *GATED_KINDS),
    "attention": ATTENTION_KERNELS,
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "biases": ("all", "qkv", "none"),
}
_OPTIONAL_CHOICES = ("norm", "biases")


class _TransformerBlocks:
    """The blocks of one transformer for one sample."""

    def __init__(self, spec: Transformer, sequence: int, precision: str) -> None:
        self.spec, self.sequence, self.precision = spec, sequence, precision
        is_gelu = spec.ffn_kind == "gelu"
        self.norm_bias = (spec.norm or ("layer" if is_gelu else "rms")) == "layer"
        biases = spec.biases or ("all" if is_gelu else "none")
        self.bias = biases == "all"
        latent = spec.latent
        self.attention = Attention(
            kernel=spec.attention,
            dropout=spec.dropout,
            window=spec.window,
            qkv_bias=biases != "none",
            bias=self.bias,
            rotary=spec.positions == "rotary",
            qk_norm=spec.qk_norm,
            query_dim="query_dim" if latent else "head_dim",
            value_dim="value_dim" if latent else "head_dim",
        )
        self.sizes = {
            "sequence": sequence,
            "key": sequence,
            "hidden": spec.hidden,
            "ffn": spec.ffn,
            "gate": 2,
            "vocab": spec.vocab,
            "positions": spec.max_positions or sequence,
            **head_sizes(spec.heads, spec.kv_heads, spec.head_dim),
            **(latent.sizes if latent else {}),
        }

    def _make_builder(self, sizes: dict[str, int] | None = None) -> BlockBuilder:
        return BlockBuilder(self.precision, self.sizes | (sizes or {}))

    def build_embedding(self) -> Block:
        builder = self._make_builder()
        embedded = token_embedding(builder)
        positions: tuple[str, ...] = ()
        if self.spec.positions == "learned":
            table_dim = "positions" if self.spec.max_positions else "sequence"
            positions = (builder.add_tensor("positions", f"{table_dim} hidden"),)
        with_dropout = self.spec.dropout
        out = dropout(
            builder, "position", (embedded,), "x", "position_mask", is_active=with_dropout, parameters=positions
        )
        return builder.build_block("embedding", ("tokens",), (out,))

    def build_layers(self) -> tuple[Block, ...]:
        """Return the layers, those with a dense feed-forward layer before those with experts."""
        experts = self.spec.experts
        if experts is None:
            return (self._build_layer("layers", self.spec.layers, None),)
        num_dense = experts.dense_layers
        expert_layers = self._build_layer("layers", self.spec.layers - num_dense, experts)
        return (self._build_layer("dense_layers", num_dense, None), expert_layers) if num_dense else (expert_layers,)

    def _build_layer(self, name: str, repeat: int, experts: Experts | None) -> Block:
        builder = self._make_builder(experts.sizes(self.sequence) if experts else None)
        with_dropout = self.spec.dropout
        x = builder.add_tensor("x", TOKEN_DIMS)
        normalized = norm(builder, "input_norm", x, bias=self.norm_bias)
        if self.spec.latent is None:
            attention_output = self_attention(builder, normalized, self.attention)
        else:
            attention_output = latent_attention(builder, normalized, self.spec.latent, self.attention)
        residual_stream = x
        if not self.spec.parallel_residual:
            residual_stream = residual(builder, "attention_residual", (attention_output,), x, with_dropout=with_dropout)
        normalized = norm(builder, "feed_forward_norm", residual_stream, bias=self.norm_bias)
        gated = self.spec.ffn_kind in GATED_KINDS
        if experts is None:
            branches: tuple[str, ...] = (feed_forward(builder, normalized, gated=gated, bias=self.bias),)
        else:
            branches = mixture_of_experts(builder, normalized, experts, gated=gated)
        if self.spec.parallel_residual:
            branches = (attention_output, *branches)
        out = residual(builder, "feed_forward_residual", branches, residual_stream, with_dropout=with_dropout)
        return builder.build_block(name, (x,), (out,), repeat, layer=True)

    def build_head(self) -> Block:
        builder = self._make_builder()
        x = builder.add_tensor("x", TOKEN_DIMS)
        loss = vocabulary_loss(builder, norm(builder, "final_norm", x, bias=self.norm_bias))
        return builder.build_block("head", (x,), (loss,))
