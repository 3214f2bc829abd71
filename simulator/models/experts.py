"""A mixture of experts: router, dispatch, the experts' feed-forward layers and combine.

A token goes to ``top_k`` of ``count`` experts. Routed tokens are tensors with dims ``batch experts capacity ...``:
``capacity`` is the mean number of one sample's tokens per expert, and ``imbalance`` the load of the most loaded expert
over the mean. Operators with the dim ``capacity`` are those that expert parallelism cuts along ``experts``.

References
----------
Shazeer et al. 2017, "Outrageously large neural networks"; Lepikhin et al. 2021, "GShard"
(capacity); Gale et al. 2023, "MegaBlocks" (dropless: grouped products).
"""

from dataclasses import dataclass
from math import ceil

from meshwise.simulator.models.layers import TOKEN_DIMS, feed_forward, linear, product
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import OperatorKind


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts, which have no biases.

    Parameters
    ----------
    count, top_k
        Number of experts of a layer, and of experts per token.
    ffn
        Width of one expert.
    shared
        Further experts that every token goes to, as one feed-forward layer of width ``shared * ffn``.
    dense_layers
        Layers before the first one with experts; they have the model's dense feed-forward layer.
    score_bias
        Whether the choice adds a bias that balances load (DeepSeek-V3, section 2.1.2).
    capacity_factor
        Slots of an expert over its mean number of tokens; 1 drops none where load is even.
    imbalance
        Tokens of the most loaded expert over the mean; 1 for even load.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    score_bias: bool = False
    capacity_factor: float = 1.0
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if min(self.count, self.top_k, self.ffn) < 1 or min(self.shared, self.dense_layers) < 0:
            raise ValueError(f"experts: count, top_k and ffn are at least 1, shared and dense_layers 0, met {self}")
        if self.top_k > self.count:
            raise ValueError(f"top_k is at most count({self.count}), met {self.top_k}; nearest: {self.count}")
        if not 1 <= self.capacity_factor <= self.count:
            raise ValueError(f"capacity_factor is 1 to count({self.count}), met {self.capacity_factor}")
        max_imbalance = self.count / self.top_k
        if not 1 <= self.imbalance <= max_imbalance:
            raise ValueError(
                f"imbalance is 1 to count({self.count}) / top_k({self.top_k}) = {max_imbalance:g}, met {self.imbalance}"
            )

    def sizes(self, sequence: int) -> dict[str, int]:
        """Return the sizes of the dims of a layer with experts for one sample."""
        slots = ceil(sequence * self.top_k * self.capacity_factor / self.count)
        sizes = {"experts": self.count, "top_k": self.top_k, "capacity": slots, "expert_ffn": self.ffn}
        return sizes | ({"ffn": self.shared * self.ffn} if self.shared else {})


ROUTED_DIMS = "batch experts capacity"


def mixture_of_experts(builder: BlockBuilder, source: str, experts: Experts, *, gated: bool) -> tuple[str, ...]:
    """Add a layer of experts and return its branches: the routed experts' and, if any, the shared experts'."""
    weights, indices = _route_tokens(builder, source, experts)
    kind, inputs = OperatorKind.PERMUTE, (source, indices)
    routed = builder.add_operator("dispatch", kind, f"{ROUTED_DIMS} hidden", inputs, ("dispatched",), saved=(indices,))
    returned = _expert_feed_forward(builder, routed, experts.imbalance, gated=gated)
    parts = (returned, weights, indices)
    combined = builder.add_operator(
        "combine", kind, f"{TOKEN_DIMS} top_k", parts, ("combined",), reduced="top_k", saved=parts
    )
    if not experts.shared:
        return (combined,)
    return combined, feed_forward(builder, source, gated=gated, bias=False, prefix="shared_")


def _route_tokens(builder: BlockBuilder, source: str, experts: Experts) -> tuple[str, str]:
    """Add the scores of experts and the choice of the best ones, and return its weights and indices."""
    scores = linear(builder, "router", source, ("router_scores",), "experts")
    probabilities = builder.add_tensor("router_probabilities", "batch sequence experts", "fp32")
    weights = builder.add_tensor("router_weights", "batch sequence top_k", "fp32")
    indices = builder.add_tensor("router_indices", "batch sequence top_k", "int64")
    builder.add_operator(
        "top_k",
        OperatorKind.TOP_K,
        "batch sequence experts",
        (scores,),
        (weights, indices),
        parameters={"score_bias": "experts"} if experts.score_bias else {},
        saved=(probabilities, indices),
    )
    return weights, indices


def _expert_feed_forward(builder: BlockBuilder, routed: str, imbalance: float, *, gated: bool) -> str:
    kind, width = OperatorKind.GROUPED_MATMUL, "expert_ffn gate" if gated else "expert_ffn"
    dims, weight = f"{ROUTED_DIMS} {width}", {"expert_up_weight": f"experts hidden {width}"}
    wide = product(
        builder, "expert_up", routed, ("expert_wide",), f"{dims} hidden", "hidden", weight, kind, imbalance=imbalance
    )
    active = builder.add_tensor("expert_active", f"{ROUTED_DIMS} expert_ffn")
    activation = OperatorKind.ELEMENTWISE
    builder.add_operator("expert_activation", activation, dims, (wide,), (active,), saved=(wide,), imbalance=imbalance)
    dims, weight = f"{ROUTED_DIMS} hidden expert_ffn", {"expert_down_weight": "experts expert_ffn hidden"}
    return product(
        builder, "expert_down", active, ("expert_narrow",), dims, "expert_ffn", weight, kind, imbalance=imbalance
    )
