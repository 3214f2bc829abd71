"""The encoder BERT in pre-training: masked tokens and the next sentence.

References
----------
Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers", section 3.
"""

from dataclasses import dataclass

from simulator.models.attention import ATTENTION, Attention, head_sizes, self_attention
from simulator.models.builder import BlockBuilder
from simulator.models.feed_forward import feed_forward
from simulator.models.layers import TOKENS, dropout, linear, norm, residual, token_embedding, vocabulary_loss
from simulator.operator_graph import Block, OperatorGraph


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
        if self.attention not in ATTENTION:
            raise ValueError(f"attention is one of {', '.join(ATTENTION)}, met {self.attention}")

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
        parts = (_embedding, _layers, _head)
        blocks = tuple(part(self, BlockBuilder(precision, sizes)) for part in parts)
        return OperatorGraph(self.name, blocks, sequence, ((("embedding", "table"), ("head", "output_weight")),))


def _embedding(spec: Bert, builder: BlockBuilder) -> Block:
    embedded = token_embedding(builder)
    tables = (builder.tensor("positions", "positions hidden"), builder.tensor("types", "types hidden"))
    summed = dropout(builder, "position", (embedded,), "summed", "", on=False, parameters=tables)
    normed = norm(builder, "embedding_norm", summed, bias=True)
    out = dropout(builder, "embedding_dropout", (normed,), "x", "embedding_mask", on=spec.dropout)
    return builder.block("embedding", ("tokens",), (out,))


def _layers(spec: Bert, builder: BlockBuilder) -> Block:
    how = Attention(kernel=spec.attention, causal=False, dropout=spec.dropout, qkv_bias=True, bias=True)
    x = builder.tensor("x", TOKENS)
    attended = self_attention(builder, x, how)
    middle = residual(builder, "attention_residual", (attended,), x, drop=spec.dropout)
    middle = norm(builder, "attention_norm", middle, bias=True)
    narrow = feed_forward(builder, middle, gated=False, bias=True)
    out = residual(builder, "feed_forward_residual", (narrow,), middle, drop=spec.dropout)
    out = norm(builder, "feed_forward_norm", out, bias=True)
    return builder.block("layers", (x,), (out,), spec.layers, layer=True)


def _head(spec: Bert, builder: BlockBuilder) -> Block:
    x = builder.tensor("x", TOKENS)
    dense, active = builder.tensor("transformed", "batch sequence pooled"), builder.tensor("active", TOKENS)
    dims = "batch sequence pooled hidden"
    linear(builder, "transform", x, (dense,), dims, weight="hidden pooled", reduced="hidden", bias="pooled")
    builder.elementwise("transform_activation", TOKENS, (dense,), (active,), saved=(dense,))
    tokens = vocabulary_loss(builder, norm(builder, "transform_norm", active, bias=True), bias=True)
    sentence = _next_sentence(builder, x)
    loss = builder.tensor("total_loss", "batch", "fp32")
    builder.elementwise("total_loss", "batch", (tokens, sentence), (loss,))
    return builder.block("head", (x,), (loss,))


def _next_sentence(builder: BlockBuilder, x: str) -> str:
    """Note the pooler of the first token, the two classes and their loss, which is returned."""
    first, pooled = builder.tensor("first", "batch hidden"), builder.tensor("pooled", "batch pooled")
    builder.elementwise("first_token", "batch hidden", (x,), (first,))
    dims = "batch pooled hidden"
    linear(builder, "pooler", first, (pooled,), dims, weight="hidden pooled", reduced="hidden", bias="pooled")
    active = builder.tensor("pooled_active", "batch pooled")
    builder.elementwise("pooler_activation", "batch pooled", (pooled,), (active,), saved=(active,))
    logits, loss = builder.tensor("sentence_logits", "batch classes", "fp32"), builder.tensor("sentence_loss", "batch")
    dims = "batch classes pooled"
    linear(builder, "sentence", active, (logits,), dims, weight="pooled classes", reduced="pooled", bias="classes")
    builder.elementwise("sentence_loss", "batch classes", (logits,), (loss,), saved=(logits,))
    return loss
