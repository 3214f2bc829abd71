"""Models with an encoder: BERT, and the encoder-decoder T5.

BERT [1]_ has its pre-training losses: masked tokens and the next sentence. In T5 [2]_ the encoder's output and the
relative position bias are carried as further tensors through all layers of the decoder; the table of the bias is in
the first layer of each stack.

References
----------
.. [1] Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers", section 3.
.. [2] Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text
   transformer", sections 2.1 and 3.1.1 (the model before version 1.1).
"""

from dataclasses import dataclass

from meshwise.simulator.models.attention import (
    ATTENTION_KERNELS,
    UNFUSED,
    Attention,
    cross_attention,
    head_sizes,
    self_attention,
)
from meshwise.simulator.models.layers import (
    GATED_KINDS,
    TOKEN_DIMS,
    dropout,
    feed_forward,
    linear,
    norm,
    residual,
    token_embedding,
    vocabulary_loss,
)
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph, OperatorKind


@dataclass(frozen=True, slots=True)
class Bert:
    """Sizes of BERT.

    Parameters
    ----------
    max_positions
        Rows of the table of positions: the longest sample.
    types
        Rows of the table of segments.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    max_positions: int = 512
    types: int = 2
    attention: str = "flash"
    dropout: bool = True
    name: str = "bert"

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.ffn, self.vocab, self.max_positions, self.types)
        if min(sizes) < 1:
            raise ValueError(f"sizes of BERT are at least 1, met {sizes}")
        if self.hidden % self.heads:
            raise ValueError(f"heads divide hidden({self.hidden}), met {self.heads}")
        if self.attention not in ATTENTION_KERNELS:
            raise ValueError(f"attention is one of {', '.join(ATTENTION_KERNELS)}, met {self.attention}")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return f"encoder, {self.layers} layers, hidden {self.hidden}, {self.heads} heads, ffn {self.ffn}"

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens."""
        if sequence > self.max_positions:
            raise ValueError(f"{self.name} has {self.max_positions} positions, met a sequence of {sequence} tokens")
        sizes = {
            "sequence": sequence,
            "key": sequence,
            "hidden": self.hidden,
            "ffn": self.ffn,
            "vocab": self.vocab,
            "positions": self.max_positions,
            "types": self.types,
            "pooled": self.hidden,
            "classes": 2,
            **head_sizes(self.heads, self.heads, self.hidden // self.heads),
        }
        parts = (_build_embedding, _build_layers, _build_head)
        blocks = tuple(part(self, BlockBuilder(precision, sizes)) for part in parts)
        return OperatorGraph(self.name, blocks, sequence, ((("embedding", "table"), ("head", "output_weight")),))


def _build_embedding(spec: Bert, builder: BlockBuilder) -> Block:
    embedded = token_embedding(builder)
    tables = (builder.add_tensor("positions", "positions hidden"), builder.add_tensor("types", "types hidden"))
    summed = dropout(builder, "position", (embedded,), "summed", "", is_active=False, parameters=tables)
    normed = norm(builder, "embedding_norm", summed, bias=True)
    out = dropout(builder, "embedding_dropout", (normed,), "x", "embedding_mask", is_active=spec.dropout)
    return builder.build_block("embedding", ("tokens",), (out,))


def _build_layers(spec: Bert, builder: BlockBuilder) -> Block:
    attention = Attention(kernel=spec.attention, causal=False, dropout=spec.dropout, qkv_bias=True, bias=True)
    x = builder.add_tensor("x", TOKEN_DIMS)
    attended = self_attention(builder, x, attention)
    middle = residual(builder, "attention_residual", (attended,), x, with_dropout=spec.dropout)
    middle = norm(builder, "attention_norm", middle, bias=True)
    narrow = feed_forward(builder, middle, gated=False, bias=True)
    out = residual(builder, "feed_forward_residual", (narrow,), middle, with_dropout=spec.dropout)
    out = norm(builder, "feed_forward_norm", out, bias=True)
    return builder.build_block("layers", (x,), (out,), spec.layers, layer=True)


def _build_head(spec: Bert, builder: BlockBuilder) -> Block:
    x = builder.add_tensor("x", TOKEN_DIMS)
    dense = builder.add_tensor("transformed", "batch sequence pooled")
    builder.add_tensor("active", TOKEN_DIMS)
    linear(builder, "transform", x, (dense,), "pooled", bias=True)
    active = builder.add_elementwise("transform_activation", TOKEN_DIMS, (dense,), ("active",), (dense,))
    tokens = vocabulary_loss(builder, norm(builder, "transform_norm", active, bias=True), bias=True)
    sentence = _next_sentence(builder, x)
    loss = builder.add_tensor("total_loss", "batch", "fp32")
    builder.add_elementwise("total_loss", "batch", (tokens, sentence), (loss,))
    return builder.build_block("head", (x,), (loss,))


def _next_sentence(builder: BlockBuilder, x: str) -> str:
    """Add the pooler of the first token and the classification of the next sentence, and return its loss."""
    first_token, pooled = builder.add_tensor("first", "batch hidden"), builder.add_tensor("pooled", "batch pooled")
    builder.add_elementwise("first_token", "batch hidden", (x,), (first_token,))
    linear(builder, "pooler", first_token, (pooled,), "pooled", over="batch", bias=True)
    active = builder.add_elementwise(
        "pooler_activation", "batch pooled", (pooled,), ("pooled_active",), ("pooled_active",)
    )
    logits = builder.add_tensor("sentence_logits", "batch classes", "fp32")
    loss = builder.add_tensor("sentence_loss", "batch")
    linear(builder, "sentence", active, (logits,), "classes", "pooled", over="batch", bias=True)
    return builder.add_elementwise("sentence_loss", "batch classes", (logits,), (loss,), (logits,))


@dataclass(frozen=True, slots=True)
class T5:
    """Sizes of T5.

    Parameters
    ----------
    layers, decoder_layers
        Layers of the encoder and of the decoder; None for equally many.
    head_dim
        Width of one head; heads times it may differ from ``hidden``.
    buckets
        Number of distances that the relative position bias distinguishes.
    target_sequence
        Tokens of the decoder's sample; None for as many as the encoder's.
    """

    layers: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    decoder_layers: int | None = None
    buckets: int = 32
    ffn_kind: str = "relu"
    tied_embeddings: bool = True
    dropout: bool = True
    target_sequence: int | None = None
    name: str = "t5"

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.head_dim, self.ffn, self.vocab, self.buckets)
        optional = (self.decoder_layers, self.target_sequence)
        if min(*sizes, *(size for size in optional if size is not None), 1) < 1:
            raise ValueError(f"sizes of T5 are at least 1, met {(*sizes, *optional)}")
        if self.ffn_kind not in _FFN_KINDS:
            raise ValueError(f"ffn_kind is one of {', '.join(_FFN_KINDS)}, met {self.ffn_kind}")

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        decoder = self.decoder_layers or self.layers
        return (
            f"encoder-decoder, {self.layers} + {decoder} layers, hidden {self.hidden}, {self.heads} heads of "
            f"{self.head_dim}, ffn {self.ffn} {self.ffn_kind}, vocab {self.vocab}"
        )

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens in and ``target_sequence`` out."""
        parts = _T5Blocks(self, sequence, precision)
        table = ("embedding", "table")
        tied = [(table, (parts.first_decoder, "table"))]
        if self.tied_embeddings:
            tied.append((table, ("head", "output_weight")))
        blocks = (parts.build_embedding(), *parts.build_encoder(), *parts.build_decoder(), parts.build_head())
        return OperatorGraph(self.name, blocks, sequence, tuple(tied))


_FFN_KINDS = ("relu", *GATED_KINDS)


class _T5Blocks:
    """The blocks of one T5 for one sample."""

    first_decoder = "first_decoder_layer"

    def __init__(self, spec: T5, sequence: int, precision: str) -> None:
        self.spec, self.sequence, self.precision = spec, sequence, precision
        self.target_tokens = spec.target_sequence or sequence
        self.attention = Attention(kernel=UNFUSED, causal=False, dropout=spec.dropout, position_bias="position_bias")

    def _make_builder(self, tokens: int) -> BlockBuilder:
        sizes = {
            "sequence": tokens,
            "key": tokens,
            "source": self.sequence,
            "hidden": self.spec.hidden,
            "ffn": self.spec.ffn,
            "gate": 2,
            "vocab": self.spec.vocab,
            "buckets": self.spec.buckets,
            **head_sizes(self.spec.heads, self.spec.heads, self.spec.head_dim),
        }
        return BlockBuilder(self.precision, sizes)

    def _add_residual(self, builder: BlockBuilder, name: str, branch_output: str, source: str) -> str:
        return residual(builder, name, (branch_output,), source, with_dropout=self.spec.dropout)

    def _embed_tokens(self, builder: BlockBuilder, tokens: str, output: str) -> str:
        embedded = token_embedding(builder, tokens, f"{output}_embedded")
        return dropout(builder, "embedding_dropout", (embedded,), output, f"{output}_mask", is_active=self.spec.dropout)

    def build_embedding(self) -> Block:
        builder = self._make_builder(self.sequence)
        return builder.build_block("embedding", ("tokens",), (self._embed_tokens(builder, "tokens", "x"),))

    def build_encoder(self) -> tuple[Block, ...]:
        """Return the first layer of the encoder, with the table of the position bias, and the others."""
        builder = self._make_builder(self.sequence)
        x = builder.add_tensor("x", TOKEN_DIMS)
        bias = _look_up_position_bias(builder)
        out = self._add_feed_forward(builder, self._add_attention(builder, x))
        first_layer = builder.build_block("first_encoder_layer", (x,), (out, bias), layer=True)
        if self.spec.layers == 1:
            return (first_layer,)
        builder = self._make_builder(self.sequence)
        x, bias = builder.add_tensor("x", TOKEN_DIMS), _add_position_bias_tensor(builder)
        out = self._add_feed_forward(builder, self._add_attention(builder, x))
        return first_layer, builder.build_block(
            "encoder_layers", (x, bias), (out, bias), self.spec.layers - 1, layer=True
        )

    def build_decoder(self) -> tuple[Block, ...]:
        """Return the first layer of the decoder, which embeds its tokens, and the others."""
        builder = self._make_builder(self.target_tokens)
        memory = builder.add_tensor("encoder_x", "batch source hidden")
        unused = builder.add_tensor("encoder_position_bias", "heads source source")
        normed = norm(builder, "encoder_norm", memory, bias=False)
        encoded = dropout(builder, "encoder_dropout", (normed,), "encoded", "encoded_mask", is_active=self.spec.dropout)
        x = self._embed_tokens(builder, "target_tokens", "x")
        bias = _look_up_position_bias(builder)
        out = self._add_decoder_layer(builder, x, encoded)
        first_layer = builder.build_block(self.first_decoder, (memory, unused), (out, bias, encoded), layer=True)
        layers = (self.spec.decoder_layers or self.spec.layers) - 1
        if not layers:
            return (first_layer,)
        builder = self._make_builder(self.target_tokens)
        x, bias, encoded = self._add_carried(builder)
        out = self._add_decoder_layer(builder, x, encoded)
        return first_layer, builder.build_block(
            "decoder_layers", (x, bias, encoded), (out, bias, encoded), layers, layer=True
        )

    def _add_carried(self, builder: BlockBuilder) -> tuple[str, str, str]:
        encoded = builder.add_tensor("encoded", "batch source hidden")
        return builder.add_tensor("x", TOKEN_DIMS), _add_position_bias_tensor(builder), encoded

    def _add_decoder_layer(self, builder: BlockBuilder, x: str, encoded: str) -> str:
        middle = self._add_attention(builder, x)
        normed = norm(builder, "cross_norm", middle, bias=False)
        attention = Attention(kernel=UNFUSED, causal=False, dropout=self.spec.dropout, prefix="cross_")
        crossed = cross_attention(builder, normed, encoded, attention, "hidden")
        return self._add_feed_forward(builder, self._add_residual(builder, "cross_residual", crossed, middle))

    def _add_attention(self, builder: BlockBuilder, x: str) -> str:
        attended = self_attention(builder, norm(builder, "input_norm", x, bias=False), self.attention)
        return self._add_residual(builder, "attention_residual", attended, x)

    def _add_feed_forward(self, builder: BlockBuilder, x: str) -> str:
        normed = norm(builder, "feed_forward_norm", x, bias=False)
        narrow = feed_forward(builder, normed, gated=self.spec.ffn_kind in GATED_KINDS, bias=False)
        return self._add_residual(builder, "feed_forward_residual", narrow, x)

    def build_head(self) -> Block:
        builder = self._make_builder(self.target_tokens)
        x, bias, encoded = self._add_carried(builder)
        normed = norm(builder, "final_norm", x, bias=False)
        with_dropout, mask = self.spec.dropout, "final_mask"
        loss = vocabulary_loss(
            builder, dropout(builder, "final_dropout", (normed,), "final", mask, is_active=with_dropout)
        )
        return builder.build_block("head", (x, bias, encoded), (loss,))


def _add_position_bias_tensor(builder: BlockBuilder) -> str:
    return builder.add_tensor("position_bias", "heads sequence key")


def _look_up_position_bias(builder: BlockBuilder) -> str:
    """Add the look-up of the bias of every pair of positions and return it."""
    table = builder.add_tensor("relative_attention_bias", "buckets heads")
    bias, dims = _add_position_bias_tensor(builder), "sequence key heads buckets"
    kind = OperatorKind.EMBEDDING
    return builder.add_operator("relative_position", kind, dims, (), (bias,), parameters=(table,), reduced="buckets")
