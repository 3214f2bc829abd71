"""The fields of a scenario's model, and the values that each allows."""

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from meshwise.scenarios.files.fields import Count, OneOf, Table, Text
from meshwise.scenarios.schema.loads import AnySpread
from meshwise.simulator.models.attention import ATTENTION_KERNELS
from meshwise.simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from meshwise.simulator.models.presets import MODELS

MAX_HEADS = 100_000
MAX_EXPERTS = 100_000

Layers = Annotated[int, Count(MAX_LAYERS)]
Width = Annotated[int, Count(MAX_WIDTH)]
Heads = Annotated[int, Count(MAX_HEADS)]
Factor = Annotated[float, Field(ge=1, le=MAX_EXPERTS)]


class ExpertsTable(Table):
    """A mixture of experts in the place of the feed-forward layer."""

    count: Annotated[int, Count(MAX_EXPERTS)] = Field(description="Experts of a layer.")
    top_k: Annotated[int, Count(MAX_EXPERTS)] = Field(description="Experts that a token goes to.")
    ffn: Width = Field(description="Width of one expert.")
    shared: Annotated[int, Count(MAX_EXPERTS, minimum=0)] = Field(
        default=0, description="Experts that every token goes to besides."
    )
    dense_layers: Annotated[int, Count(MAX_LAYERS, minimum=0)] = Field(
        default=0, description="Layers before the first one with experts."
    )
    score_bias: bool = False
    capacity_factor: Factor = Field(default=1.0, description="Slots of an expert over its mean number of tokens.")
    imbalance: AnySpread = Field(
        default=1.0,
        description="Tokens of the most loaded expert over the mean: one value, a distribution, or measured values.",
    )


class LatentAttentionTable(Table):
    """Multi-head latent attention."""

    kv_rank: Width
    nope_dim: Width
    rope_dim: Width
    value_dim: Width
    q_rank: Width | None = Field(default=None, description="Default: queries are not compressed.")


class TransformerTable(Table):
    """A decoder transformer, written out."""

    layers: Layers
    hidden: Annotated[int, Count(1_000_000)]
    heads: Heads
    kv_heads: Heads | None = Field(default=None, description="Default: heads.")
    ffn: Width
    vocab: Width
    ffn_kind: Literal["gelu", "swiglu", "geglu"] = "gelu"
    tied_embeddings: bool = True
    attention: Annotated[str, OneOf(lambda: ATTENTION_KERNELS)] = "flash"
    dropout: bool = False
    positions: Literal["learned", "rotary"] = "learned"
    kv_channels: Width | None = Field(default=None, description="Width of one head. Default: hidden / heads.")
    max_positions: Width | None = Field(default=None, description="Learned positions. Default: the sequence.")
    norm: Literal["layer", "rms"] | None = Field(default=None, description="Default: layer with gelu, rms else.")
    biases: Literal["all", "qkv", "none"] | None = Field(default=None, description="Default: all with gelu, none else.")
    qk_norm: bool = False
    window: Width | None = Field(default=None, description="Tokens that one sees. Default: all before it.")
    parallel_residual: bool = False
    experts: ExpertsTable | None = None
    latent: LatentAttentionTable | None = None


MAX_TABLES = 10_000
MAX_ROWS = 10**12
Rows = Annotated[int, Count(MAX_ROWS)]
Widths = Annotated[tuple[Width, ...], Strict(False), Field(min_length=1, max_length=100)]
Popularity = Annotated[float, Field(ge=0, le=10)]


class DlrmTable(Table):
    """A deep learning recommendation model, written out."""

    rows: Annotated[tuple[Rows, ...], Strict(False), Field(min_length=1, max_length=MAX_TABLES)] = Field(
        description="Rows of every embedding table."
    )
    hots: Annotated[tuple[Width, ...], Strict(False), Field(min_length=1, max_length=MAX_TABLES)] = Field(
        description="Indices that a sample looks up in each."
    )
    embedding: Width = Field(description="Width of a row.")
    dense: Width = Field(description="Dense features of a sample.")
    bottom: Widths = Field(description="Widths of the layers on dense features; the last one is that of a row.")
    top: Widths = Field(description="Widths of the layers behind the interaction; the last one is 1.")
    interaction: Literal["dot", "cross"] = "dot"
    crosses: Annotated[int, Count(MAX_LAYERS, minimum=0)] = Field(default=0, description="Cross layers.")
    rank: Annotated[int, Count(MAX_WIDTH, minimum=0)] = Field(default=0, description="Rank of a cross layer.")


_SOURCES = ("preset", "transformer", "dlrm", "hf_config", "graph")


class ModelTable(Table):
    """The network: one of ``preset``, ``transformer``, ``dlrm``, ``hf_config`` and ``graph``."""

    preset: Annotated[str, OneOf(lambda: MODELS, "models")] | None = None
    transformer: TransformerTable | None = None
    dlrm: DlrmTable | None = None
    hf_config: Text | None = Field(
        default=None, description="Path of a Hugging Face config.json, relative to the scenario."
    )
    graph: Text | None = Field(
        default=None, description="Path of a graph file, as `meshwise capture` writes it, relative to the scenario."
    )
    popularity: Popularity | None = Field(
        default=None,
        description="Zipf exponent of how often rows of a recommender's tables are looked up. Default: 0, all alike.",
    )

    @model_validator(mode="after")
    def _check_sources(self) -> "ModelTable":
        stated_sources = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(stated_sources) != 1:
            met_text = " and ".join(stated_sources) or "none"
            raise ValueError(f"holds one of preset, transformer, dlrm, hf_config and graph, met {met_text}")
        return self
