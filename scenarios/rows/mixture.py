"""The mixture of experts and the latent attention of a row."""

import re
from math import ceil

from scenarios.model_schema import MAX_EXPERTS
from scenarios.rows.row import Row
from simulator.models.experts import Experts
from simulator.models.hugging_face import MAX_LAYERS, MAX_WIDTH
from simulator.models.latent_attention import LatentAttention
from simulator.models.transformer import Transformer

_LATENT = re.compile(r"\bmla\b|latent attention|deepseek[-_ ]?v?[23]|deepseek[-_ ]?r1|kimi|moonlight")
_LATENT_SIZES = LatentAttention(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, q_rank=1536)
"""Of DeepSeek-V2, section 3.1.2, and DeepSeek-V3, section 4.2."""


def experts(row: Row, known: Transformer | None, hidden: int, layers: int) -> Experts | None:
    """Return the experts of a row, or None."""
    count = row.count("moe_experts", MAX_EXPERTS)
    base = known.experts if known else None
    if count in (None, 1) and base is None:
        return None
    base = base if base is not None and count in (None, base.count) else None
    if count is None and base is not None:
        row.assume(f"{base.count} experts, {base.top_k} a token (not stated; of the model named)")
    top_k = row.count("moe_topk", MAX_EXPERTS) or (base.top_k if base else 2)
    if not row.states("moe_topk"):
        row.assume(f"moe_topk {top_k} (not stated)")
    ffn = row.count("moe_ffn_hidden", MAX_WIDTH) or (base.ffn if base else None) or row.count("ffn_hidden", MAX_WIDTH)
    if not row.states("moe_ffn_hidden"):
        ffn = ffn or 4 * hidden
        row.assume(f"moe_ffn_hidden {ffn} (not stated)")
    count = count or (base.count if base else 1)
    row.assume("tokens are spread evenly over experts (not stated)")
    dense = min(row.optional("n_dense_layers", MAX_LAYERS) or (base.dense_layers if base else 0), layers - 1)
    bias = base.score_bias if base else False
    return Experts(count, min(top_k, count), ffn or hidden, _shared(row, base, ffn or hidden), dense, bias)


def _shared(row: Row, base: Experts | None, ffn: int) -> int:
    width = row.optional("moe_shared_ffn_hidden", MAX_WIDTH)
    if width is None:
        shared = base.shared if base and "moe_shared_ffn_hidden" not in row.fields else 0
        if shared:
            row.assume(f"{shared} shared experts (not stated; of the model named)")
        return shared
    if width % ffn:
        row.assume(f"moe_shared_ffn_hidden {width} taken as {ceil(width / ffn)} experts of {ffn}")
    return ceil(width / ffn)


def latent(row: Row, words: str, known: Transformer | None, mixed: bool) -> LatentAttention | None:
    """Return the sizes of latent attention, which no row states, or None."""
    named = known.latent if known else None
    if named is None and (not mixed or not _LATENT.search(words)):
        return None
    sizes = named or _LATENT_SIZES
    ranks = f"ranks {sizes.kv_rank} and {sizes.q_rank or 'none for queries'}"
    row.assume(f"latent attention with {ranks} (a row states none; of {'the model named' if named else 'DeepSeek'})")
    return sizes
