"""The deep learning recommendation model DLRM: embedding bags, an interaction and dense layers.

References
----------
Naumov et al. 2019, "Deep learning recommendation model for personalization and
recommendation systems" (dot products); Wang et al. 2021, "DCN V2" (low-rank crosses).
"""

from dataclasses import dataclass

from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph, OperatorKind

INTERACTIONS = ("dot", "cross")


@dataclass(frozen=True, slots=True)
class Dlrm:
    """Sizes of DLRM; a sample is one row of dense features and one bag of indices per table.

    Parameters
    ----------
    rows, hots
        Rows of every table, and indices that a sample looks up in it.
    embedding
        Width of a row.
    dense
        Dense features of a sample.
    bottom
        Widths of the layers on dense features; the last one is ``embedding``.
    top
        Widths of the layers behind the interaction; the last one is 1.
    interaction
        ``dot`` products of all pairs, or ``crosses`` low-rank ``cross`` layers of rank ``rank``.
    popularity
        Zipf exponent of how often the rows of a table are looked up; 0 where all are looked up as often.
    """

    rows: tuple[int, ...]
    hots: tuple[int, ...]
    embedding: int
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: str = "dot"
    crosses: int = 0
    rank: int = 0
    name: str = "dlrm"
    popularity: float = 0.0

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.hots) or not self.rows:
            raise ValueError(f"hots are one number a table({len(self.rows)}), met {len(self.hots)}")
        if min(*self.rows, *self.hots, self.embedding, self.dense, *self.bottom, *self.top) < 1:
            raise ValueError(f"sizes of DLRM are at least 1, met {self}")
        if self.bottom[-1:] != (self.embedding,):
            raise ValueError(f"bottom ends with embedding({self.embedding}), met {self.bottom}")
        if self.top[-1:] != (1,):
            raise ValueError(f"top ends with 1, met {self.top}")
        if self.interaction not in INTERACTIONS:
            raise ValueError(f"interaction is one of {', '.join(INTERACTIONS)}, met {self.interaction}")
        if self.interaction == "cross" and min(self.crosses, self.rank) < 1:
            raise ValueError(f"crosses and rank are at least 1, met {self.crosses} and {self.rank}")
        if not self.popularity >= 0:
            raise ValueError(f"popularity is at least 0, met {self.popularity}")

    @property
    def features(self) -> int:
        """Number of vectors that interact: one per table, and the dense one."""
        return len(self.rows) + 1

    @property
    def interacted(self) -> int:
        """Number of inputs of the layers behind the interaction."""
        if self.interaction == "cross":
            return self.features * self.embedding
        return self.embedding + self.features * (self.features - 1) // 2

    @property
    def summary(self) -> str:
        """The sizes in one line."""
        return (
            f"recommender, {len(self.rows)} tables of {sum(self.rows)} rows in all, embedding {self.embedding}, "
            f"{self.interaction} interaction"
        )

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample."""
        sizes = {
            "embedding": self.embedding,
            "features": self.features,
            "others": self.features,
            "flat_out": self.features * self.embedding,
            "flat": self.features * self.embedding,
            "interacted": self.interacted,
            "rank": max(self.rank, 1),
        }
        sizes |= {f"rows_{i}": count for i, count in enumerate(self.rows)}
        sizes |= {f"hots_{i}": count for i, count in enumerate(self.hots)}
        sizes |= {f"bottom_{i}": width for i, width in enumerate((self.dense, *self.bottom))}
        sizes |= {f"top_{i}": width for i, width in enumerate((self.interacted, *self.top))}
        parts = (_build_embedding, _build_crosses if self.interaction == "cross" else _build_dots, _build_head)
        return OperatorGraph(self.name, tuple(part(self, BlockBuilder(precision, sizes)) for part in parts), 1)


def _build_embedding(spec: Dlrm, builder: BlockBuilder) -> Block:
    """Return the block of embedding bags and layers on dense features, whose output is all vectors in one tensor."""
    pooled = tuple(_embedding_bag(builder, table, spec.popularity) for table in range(len(spec.rows)))
    dense = _dense_layers(builder, builder.add_tensor("dense", "batch bottom_0"), "bottom", len(spec.bottom))
    out = builder.add_elementwise("concatenate", "batch features embedding", (dense, *pooled), ("features",))
    indices = tuple(f"indices_{table}" for table in range(len(spec.rows)))
    carried = (out, out) if spec.interaction == "cross" else (out,)
    return builder.build_block("embedding", ("dense", *indices), carried)


def _embedding_bag(builder: BlockBuilder, table: int, popularity: float) -> str:
    """Add the sum of the rows that a sample looks up in a table and return it."""
    rows, hots = f"rows_{table}", f"hots_{table}"
    indices = (builder.add_tensor(f"indices_{table}", f"batch {hots}", "int64"),)
    weight = (builder.add_tensor(f"table_{table}", f"{rows} embedding"),)
    dims, outputs, reduced = f"batch {hots} embedding {rows}", (f"pooled_{table}",), f"{hots} {rows}"
    return builder.add_operator(
        f"bag_{table}",
        OperatorKind.EMBEDDING,
        dims,
        indices,
        outputs,
        parameters=weight,
        reduced=reduced,
        saved=indices,
        popularity=popularity,
    )


def _dense_layers(builder: BlockBuilder, source: str, prefix: str, count: int, *, last_active: bool = True) -> str:
    """Add linear layers with rectifiers, whose backward reads their output, and return the output."""
    for index in range(1, count + 1):
        rows, columns = f"{prefix}_{index - 1}", f"{prefix}_{index}"
        outputs = (f"{prefix}_out_{index}",)
        source = linear(builder, f"{prefix}_{index}", source, outputs, columns, rows, over="batch", bias=True)
        if last_active or index < count:
            active = (f"{prefix}_active_{index}",)
            source = builder.add_elementwise(
                f"{prefix}_activation_{index}", f"batch {columns}", (source,), active, active
            )
    return source


def _build_dots(spec: Dlrm, builder: BlockBuilder) -> Block:
    """Return the block of dot products of all pairs of vectors, concatenated with the dense vector."""
    features = builder.add_tensor("features", "batch features embedding")
    out = builder.add_tensor("interacted", "batch interacted")
    kind, dims = OperatorKind.INTERACTION, "batch features others embedding"
    builder.add_operator(
        "dots", kind, dims, (features,), (out,), reduced="embedding", flops_per_point=2.0, saved=(features,)
    )
    return builder.build_block("interaction", (features,), (out,), layer=True)


def _build_crosses(spec: Dlrm, builder: BlockBuilder) -> Block:
    """Return the block of cross layers ``x + initial * (W V x + b)``; ``initial`` is carried through all of them."""
    initial, x = builder.add_tensor("first", "batch flat"), builder.add_tensor("x", "batch flat")
    builder.add_tensor("low", "batch rank")
    crossed = builder.add_tensor("crossed", "batch flat_out")
    low = linear(builder, "down", x, ("low",), "rank", "flat", over="batch")
    linear(builder, "up", low, (crossed,), "flat_out", "rank", over="batch", bias=True)
    out = builder.add_elementwise("cross", "batch flat", (crossed, initial, x), ("crossed_x",), (crossed, initial))
    return builder.build_block("crosses", (initial, x), (initial, out), spec.crosses, layer=True)


def _build_head(spec: Dlrm, builder: BlockBuilder) -> Block:
    x = builder.add_tensor("x", "batch top_0")
    carried = (builder.add_tensor("first", "batch flat"),) if spec.interaction == "cross" else ()
    logit = _dense_layers(builder, x, "top", len(spec.top), last_active=False)
    loss = builder.add_tensor("loss", "batch", "fp32")
    builder.add_elementwise("loss", "batch", (logit,), (loss,), saved=(logit,))
    return builder.build_block("head", (*carried, x), (loss,))
