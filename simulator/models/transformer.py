"""The decoder transformer (GPT, Llama) as an operator graph.

Operators are those a training framework launches: fused bias, dropout and residual add
count as one. The tensors that backward reads follow [1]_, so that one GPT layer keeps
``sequence * batch * hidden * (34 + 5 * heads * sequence / hidden)`` bytes in 16 bit.

References
----------
.. [1] Korthikanti et al., "Reducing activation recomputation in large transformer
   models", MLSys 2023, section 4.1 and equation 1.
"""

from dataclasses import dataclass
from functools import lru_cache

from simulator.operator_graph import BATCH, Block, Operator, OperatorGraph, OperatorKind, Tensor


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a decoder transformer.

    Parameters
    ----------
    kv_heads
        Heads of keys and values; a divisor of ``heads`` (grouped-query attention).
    ffn
        Width of the feed-forward layer; ``swiglu`` has two matrices into it, ``gelu`` one.
    attention
        ``flash`` is one kernel that keeps no scores; ``unfused`` keeps them.
    dropout
        Whether attention, projection and feed-forward outputs are dropped out.
    positions
        ``learned`` embeddings or ``rotary``.
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
    name: str = "transformer"

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        if min(sizes) < 1:
            raise ValueError(f"transformer sizes are at least 1, met {sizes}")
        if self.hidden % self.heads:
            raise ValueError(f"heads divide hidden({self.hidden}), met {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads divide heads({self.heads}), met {self.kv_heads}")
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is one of {', '.join(allowed)}, met {getattr(self, field)}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


_ATTENTION_SPACE = "batch heads group sequence key head_dim"
_CHOICES = {
    "ffn_kind": ("gelu", "swiglu"),
    "attention": ("flash", "unfused"),
    "positions": ("learned", "rotary"),
}


@lru_cache(maxsize=64)
def build(spec: Transformer, sequence: int, precision: str) -> OperatorGraph:
    """Return the operator graph of one sample of ``sequence`` tokens.

    >>> gpt = Transformer(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200)
    >>> round(build(gpt, 2048, "bf16").num_parameters / 1e9, 1)
    174.6
    """
    builder = _Builder(spec, sequence, precision)
    layer = builder.layer()
    tied = ((("embedding", "table"), ("head", "output_weight")),) if spec.tied_embeddings else ()
    return OperatorGraph(spec.name, (builder.embedding(), layer, builder.head()), sequence, tied)


class _Builder:
    """Collects the tensors of a block while its operators are written down."""

    def __init__(self, spec: Transformer, sequence: int, precision: str) -> None:
        self.spec, self.precision = spec, precision
        self.size = {
            BATCH: 1,
            "sequence": sequence,
            "key": sequence,
            "hidden": spec.hidden,
            "heads": spec.kv_heads,
            "group": spec.heads // spec.kv_heads,
            "head_dim": spec.head_dim,
            "qkv": (spec.heads // spec.kv_heads + 2) * spec.head_dim,
            "ffn": spec.ffn,
            "gate": 2 if spec.ffn_kind == "swiglu" else 1,
            "vocab": spec.vocab,
        }
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []

    def tensor(self, name: str, dims: str, dtype: str | None = None) -> str:
        """Note a tensor with space-separated dims and return its name."""
        names = tuple(dims.split())
        shape = tuple(self.size[dim] for dim in names)
        self.tensors[name] = Tensor(name, names, shape, dtype or self.precision)
        return name

    def operator(
        self,
        name: str,
        kind: OperatorKind,
        dims: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        parameters: tuple[str, ...] = (),
        reduced: str = "",
        flops: float = 0.0,
        saved: tuple[str, ...] = (),
        selective: bool = False,
        executed: float = 1.0,
    ) -> None:
        space = tuple((dim, self.size[dim]) for dim in dims.split())
        self.operators.append(
            Operator(
                name,
                kind,
                space,
                inputs,
                outputs,
                parameters,
                tuple(reduced.split()),
                flops,
                saved,
                selective,
                executed,
            )
        )

    def block(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], repeat: int = 1) -> Block:
        block = Block(name, tuple(self.operators), tuple(self.tensors.values()), inputs, outputs, repeat)
        self.tensors, self.operators = {}, []
        return block

    def embedding(self) -> Block:
        self.tensor("tokens", "batch sequence", "int64")
        self.tensor("table", "vocab hidden")
        x = self.tensor("embedded", "batch sequence hidden")
        self.operator(
            "token",
            OperatorKind.EMBEDDING,
            "batch sequence hidden vocab",
            ("tokens",),
            (x,),
            parameters=("table",),
            reduced="vocab",
            saved=("tokens",),
        )
        positions: tuple[str, ...] = ()
        if self.spec.positions == "learned":
            positions = (self.tensor("positions", "sequence hidden"),)
        out = self.tensor("x", "batch sequence hidden")
        kind, saved = self._dropout("position_mask", "batch sequence hidden")
        self.operator("position", kind, "batch sequence hidden", (x,), (out,), parameters=positions, saved=saved)
        return self.block("embedding", ("tokens",), (out,))

    def _dropout(self, mask: str, dims: str) -> tuple[OperatorKind, tuple[str, ...]]:
        if not self.spec.dropout:
            return OperatorKind.ELEMENTWISE, ()
        return OperatorKind.DROPOUT, (self.tensor(mask, dims, "mask"),)

    def norm(self, name: str, source: str) -> str:
        out = self.tensor(f"{name}_out", "batch sequence hidden")
        weights = (self.tensor(f"{name}_weight", "hidden"), self.tensor(f"{name}_bias", "hidden"))
        self.operator(
            name,
            OperatorKind.NORM,
            "batch sequence hidden",
            (source,),
            (out,),
            parameters=weights if self.spec.ffn_kind == "gelu" else weights[:1],
            saved=(source,),
        )
        return out

    def matmul(
        self, name: str, source: str, outputs: tuple[str, ...], dims: str, weight: str, bias: str, reduced: str
    ) -> None:
        parameters = [self.tensor(f"{name}_weight", weight)]
        if self.spec.ffn_kind == "gelu":
            parameters.append(self.tensor(f"{name}_bias", bias))
        self.operator(
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

    def layer(self) -> Block:
        x = self.tensor("x", "batch sequence hidden")
        normed = self.norm("input_norm", x)
        qkv = (
            self.tensor("query", "batch sequence heads group head_dim"),
            self.tensor("keys", "batch key heads head_dim"),
            self.tensor("values", "batch key heads head_dim"),
        )
        self.matmul("qkv", normed, qkv, "batch sequence heads qkv hidden", "hidden heads qkv", "heads qkv", "hidden")
        context = self.attention(qkv)
        projected = self.tensor("projected", "batch sequence hidden")
        self.matmul(
            "projection",
            context,
            (projected,),
            "batch sequence hidden heads group head_dim",
            "heads group head_dim hidden",
            "hidden",
            "heads group head_dim",
        )
        middle = self.residual("attention_residual", projected, x)
        out = self.feed_forward(middle)
        return self.block("layers", (x,), (out,), self.spec.layers)

    def attention(self, qkv: tuple[str, str, str]) -> str:
        query, keys, values = qkv
        if self.spec.positions == "rotary":
            rotated = (
                self.tensor("rotated_query", "batch sequence heads group head_dim"),
                self.tensor("rotated_keys", "batch key heads head_dim"),
            )
            dims = "batch sequence heads group head_dim"
            self.operator("rotary", OperatorKind.ELEMENTWISE, dims, (query, keys), rotated)
            query, keys = rotated
        fuse = self.flash_attention if self.spec.attention == "flash" else self.unfused_attention
        return fuse(query, keys, values)

    def flash_attention(self, query: str, keys: str, values: str) -> str:
        context = self.tensor("context", "batch sequence heads group head_dim")
        lse = self.tensor("logsumexp", "batch heads group sequence", "fp32")
        self.operator(
            "attention",
            OperatorKind.ATTENTION,
            _ATTENTION_SPACE,
            (query, keys, values),
            (context, lse),
            flops=4.0,
            saved=(query, keys, values, context, lse),
            selective=True,
            executed=0.5,
        )
        return context

    def unfused_attention(self, query: str, keys: str, values: str) -> str:
        square = "batch heads group sequence key"
        scores, probabilities = self.tensor("scores", square), self.tensor("probabilities", square)
        product, softmax = OperatorKind.BATCH_MATMUL, OperatorKind.SOFTMAX
        self.operator(
            "scores",
            product,
            _ATTENTION_SPACE,
            (query, keys),
            (scores,),
            reduced="head_dim",
            flops=2.0,
            saved=(query, keys),
            selective=True,
        )
        saved = (probabilities,)
        self.operator("softmax", softmax, square, (scores,), (probabilities,), saved=saved, selective=True)
        if self.spec.dropout:
            source, probabilities = probabilities, self.tensor("dropped", square)
            masks = (self.tensor("probabilities_mask", square, "mask"),)
            kind = OperatorKind.DROPOUT
            self.operator("attention_dropout", kind, square, (source,), (probabilities,), saved=masks, selective=True)
        context = self.tensor("context", "batch sequence heads group head_dim")
        self.operator(
            "context",
            product,
            _ATTENTION_SPACE,
            (probabilities, values),
            (context,),
            reduced="key",
            flops=2.0,
            saved=(probabilities, values),
            selective=True,
        )
        return context

    def residual(self, name: str, branch: str, source: str) -> str:
        out = self.tensor(f"{name}_out", "batch sequence hidden")
        kind, saved = self._dropout(f"{name}_mask", "batch sequence hidden")
        self.operator(name, kind, "batch sequence hidden", (branch, source), (out,), saved=saved)
        return out

    def feed_forward(self, source: str) -> str:
        normed = self.norm("feed_forward_norm", source)
        gated = self.spec.ffn_kind == "swiglu"
        wide = self.tensor("wide", "batch sequence ffn gate" if gated else "batch sequence ffn")
        space = "batch sequence ffn gate hidden" if gated else "batch sequence ffn hidden"
        self.matmul("up", normed, (wide,), space, "hidden ffn gate" if gated else "hidden ffn", "ffn", "hidden")
        active = self.tensor("active", "batch sequence ffn")
        dims = "batch sequence ffn gate" if gated else "batch sequence ffn"
        self.operator("activation", OperatorKind.ELEMENTWISE, dims, (wide,), (active,), saved=(wide,))
        narrow = self.tensor("narrow", "batch sequence hidden")
        self.matmul("down", active, (narrow,), "batch sequence hidden ffn", "ffn hidden", "hidden", "ffn")
        return self.residual("feed_forward_residual", narrow, source)

    def head(self) -> Block:
        x = self.tensor("x", "batch sequence hidden")
        normed = self.norm("final_norm", x)
        weight = self.tensor("output_weight", "hidden vocab")
        logits = self.tensor("logits", "batch sequence vocab", "fp32")
        self.operator(
            "logits",
            OperatorKind.MATMUL,
            "batch sequence vocab hidden",
            (normed,),
            (logits,),
            parameters=(weight,),
            reduced="hidden",
            flops=2.0,
            saved=(normed,),
        )
        # with the vocabulary cut, each of the three is summed over ranks (Shoeybi et al. 2019, section 3)
        names = ("largest_logit", "sum_of_exponentials", "target_logit")
        parts = tuple(self.tensor(name, "batch sequence", "fp32") for name in names)
        self.operator(
            "cross_entropy",
            OperatorKind.CROSS_ENTROPY,
            "batch sequence vocab",
            (logits,),
            parts,
            reduced="vocab",
            saved=(logits,),
        )
        loss = self.tensor("loss", "batch", "fp32")
        self.operator("loss", OperatorKind.ELEMENTWISE, "batch sequence", parts, (loss,), reduced="sequence")
        return self.block("head", (x,), (loss,))
