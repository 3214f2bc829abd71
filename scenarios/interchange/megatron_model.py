"""The model in Megatron-LM's arguments.

References
----------
megatron-core 0.16.1, ``megatron/core/transformer/transformer_config.py`` (``TransformerConfig``,
``MLATransformerConfig``), ``.../transformer/moe/moe_layer.py`` (token dispatchers), ``.../transformer/moe/experts.py``
(``TEGroupedMLP``: the products of experts); Megatron-LM at commit 000c4ac, ``megatron/training/arguments.py``.
"""

import re
from collections.abc import Iterator
from typing import Any

from scenarios.errors import shown
from scenarios.interchange.entry import Count, Entry, Reason, Together, Unsayable, Values, Word
from scenarios.interchange.facts import Facts, plainly
from scenarios.interchange.stated import Stated
from simulator.models.experts import Experts
from simulator.models.latent_attention import LatentAttention

_HEADS, _GROUPED, _GROUPS = "--num-attention-heads", "--group-query-attention", "--num-query-groups"
_BIAS, _QKV = "--disable-bias-linear", "--add-qkv-bias"
_ATTENTION_DROPOUT, _HIDDEN_DROPOUT = "--attention-dropout", "--hidden-dropout"
_DROPOUT = 0.1
"""The probability that Megatron-LM takes where none is stated."""
EXPERTS, GROUPED_PRODUCTS = "--num-experts", "--moe-grouped-gemm"
_DISPATCHER, _PAIRWISE = "--moe-token-dispatcher-type", "alltoall"
"""How tokens reach experts: each to the ranks of its own, as plans are priced; ``allgather`` where none is stated."""
_TOP, _WIDTH, _SHARED, _FREQUENCY, _SCORE = (
    "--moe-router-topk",
    "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--moe-layer-freq",
    "--moe-router-enable-expert-bias",
)
_LATENT, _KV_RANK, _Q_RANK, _NOPE, _ROPE, _VALUE, _CHANNELS = (
    "--multi-latent-attention",
    "--kv-lora-rank",
    "--q-lora-rank",
    "--qk-head-dim",
    "--qk-pos-emb-head-dim",
    "--v-head-dim",
    "--kv-channels",
)


def _flag(key: str, field: str, on: Any = True, off: Any = False) -> Word:
    return Word(key, field, ((on, True), (off, False)), False)


def _say_heads(facts: Facts) -> Values:
    heads, groups = facts["model.heads"], facts["model.kv_heads"]
    return {_HEADS: heads} | ({} if heads == groups else {_GROUPED: True, _GROUPS: groups})


def _read_heads(stated: Stated) -> Facts:
    heads = stated.count(_HEADS)
    grouped = stated.flag(_GROUPED, False)
    if not grouped and _GROUPS in stated:
        raise stated.fault(_GROUPS, f"needs {_GROUPED}, met none")
    return {"model.heads": heads, "model.kv_heads": stated.count(_GROUPS) if grouped else heads}


def _say_biases(facts: Facts) -> Values:
    how = facts["model.biases"]
    return {} if how == "all" else {_BIAS: True} | ({_QKV: True} if how == "qkv" else {})


def _read_biases(stated: Stated) -> Facts:
    without, qkv = stated.flag(_BIAS, False), stated.flag(_QKV, False)
    return {"model.biases": "all" if not without else "qkv" if qkv else "none"}


def _say_dropout(facts: Facts) -> Values:
    return {} if facts["model.dropout"] else {_ATTENTION_DROPOUT: 0.0, _HIDDEN_DROPOUT: 0.0}


def _read_dropout(stated: Stated) -> Facts:
    both = [stated.get(key, _DROPOUT) for key in (_ATTENTION_DROPOUT, _HIDDEN_DROPOUT)]
    if not all(isinstance(value, float | int) and 0 <= value < 1 for value in both) or (both[0] > 0) != (both[1] > 0):
        raise stated.fault(_HIDDEN_DROPOUT, f"both are 0.0 or both more, met {' and '.join(map(shown, both))}")
    return {"model.dropout": both[0] > 0}


def _check_experts(experts: Experts, biases: str) -> Iterator[Reason]:
    """Yield why a mixture has no words."""
    if experts.capacity_factor != 1:
        met = plainly(experts.capacity_factor)
        yield Reason("model.experts", "experts that drop no tokens (capacity_factor 1)", met)
    if biases == "all":
        yield Reason("model.biases", f"none or qkv with experts ({GROUPED_PRODUCTS})", biases)


def _say_experts(facts: Facts) -> Values:
    experts: Experts | None = facts["model.experts"]
    if experts is None:
        return {}
    if reasons := tuple(_check_experts(experts, facts["model.biases"])):
        raise Unsayable(*reasons)
    dense, layers = experts.dense_layers, facts["model.layers"]
    values: Values = {EXPERTS: experts.count, _TOP: experts.top_k, _WIDTH: experts.ffn}
    values |= {_DISPATCHER: _PAIRWISE, GROUPED_PRODUCTS: True}
    values |= {_SHARED: experts.shared * experts.ffn} if experts.shared else {}
    values |= {_FREQUENCY: f"([0]*{dense}+[1]*{layers - dense})"} if dense else {}
    return values | ({_SCORE: True} if experts.score_bias else {})


def _read_experts(stated: Stated) -> Facts:
    if EXPERTS not in stated:
        return {"model.experts": None}
    _check_kernels(stated)
    width, shared = stated.count(_WIDTH), stated.count(_SHARED, 0, 0)
    if shared % width:
        raise stated.fault(_SHARED, f"is a multiple of {_WIDTH} {width}, met {shared}")
    pattern = stated.get(_FREQUENCY, "([0]*0+[1]*1)")
    found = re.fullmatch(r"\(\[0\]\*([0-9]{1,9})\+\[1\]\*([0-9]{1,9})\)", str(pattern))
    if found is None or (_FREQUENCY in stated and int(found[1]) + int(found[2]) != stated.count("--num-layers")):
        raise stated.fault(_FREQUENCY, f"is dense layers, then the others, as in ([0]*1+[1]*26), met {shown(pattern)}")
    count, top, score = stated.count(EXPERTS), stated.count(_TOP, 2), stated.flag(_SCORE, False)
    try:
        experts = Experts(count, top, width, shared // width, int(found[1]), score)
    except ValueError as error:
        raise stated.fault(EXPERTS, str(error)) from None
    return {"model.experts": experts}


def _check_kernels(stated: Stated) -> None:
    """Raise ``ScenarioError`` where experts run otherwise than plans are priced: all-to-all, and grouped products."""
    met = stated.get(_DISPATCHER, "")
    if met != _PAIRWISE:
        value = shown(met) if met else "none: Megatron-LM then gathers all tokens (allgather)"
        raise stated.fault(_DISPATCHER, f"is {_PAIRWISE} with {EXPERTS}, as plans are priced, met {value}")
    if not stated.flag(GROUPED_PRODUCTS, False):
        why = "as plans are priced, met none: Megatron-LM then multiplies expert by expert"
        raise stated.fault(GROUPED_PRODUCTS, f"is needed with {EXPERTS}, {why}")
    if not stated.flag(_BIAS, False):
        raise stated.fault(_BIAS, f"is needed with {EXPERTS}, whose products have no biases, met none")


def _say_latent(facts: Facts) -> Values:
    latent: LatentAttention | None = facts["model.latent"]
    if latent is None:
        return {_CHANNELS: facts["model.kv_channels"]}
    values = {_LATENT: True, _KV_RANK: latent.kv_rank, _NOPE: latent.nope_dim, _ROPE: latent.rope_dim}
    return values | {_VALUE: latent.value_dim} | ({_Q_RANK: latent.q_rank} if latent.q_rank else {})


def _read_latent(stated: Stated) -> Facts:
    if not stated.flag(_LATENT, False):
        default = max(1, stated.count("--hidden-size") // stated.count(_HEADS))
        return {"model.latent": None, "model.kv_channels": stated.count(_CHANNELS, default)}
    latent = LatentAttention(
        kv_rank=stated.count(_KV_RANK, 32),
        nope_dim=stated.count(_NOPE, 128),
        rope_dim=stated.count(_ROPE, 64),
        value_dim=stated.count(_VALUE, 128),
        q_rank=stated.count(_Q_RANK) if _Q_RANK in stated else None,
    )
    return {"model.latent": latent, "model.kv_channels": None}


MODEL_MAP: tuple[Entry, ...] = (
    Count("--num-layers", "model.layers"),
    Count("--hidden-size", "model.hidden"),
    Together((_HEADS, _GROUPED, _GROUPS), ("model.heads", "model.kv_heads"), _say_heads, _read_heads),
    Count("--ffn-hidden-size", "model.ffn"),
    Count("--vocab-size", "model.vocab"),
    Count("--max-position-embeddings", "model.max_positions"),
    _flag("--swiglu", "model.ffn_kind", "swiglu", "gelu"),
    _flag("--untie-embeddings-and-output-weights", "model.tied_embeddings", False, True),
    Word("--attention-backend", "model.attention", (("flash", "flash"), ("flash_2", "flash"), ("unfused", "unfused"))),
    Word(
        "--position-embedding-type",
        "model.positions",
        (("learned", "learned_absolute"), ("rotary", "rope")),
        "learned_absolute",
    ),
    Word("--normalization", "model.norm", (("layer", "LayerNorm"), ("rms", "RMSNorm")), "LayerNorm"),
    _flag("--qk-layernorm", "model.qk_norm"),
    Together((_BIAS, _QKV), ("model.biases",), _say_biases, _read_biases),
    Together((_ATTENTION_DROPOUT, _HIDDEN_DROPOUT), ("model.dropout",), _say_dropout, _read_dropout),
    Together(
        (EXPERTS, _TOP, _WIDTH, _DISPATCHER, GROUPED_PRODUCTS, _SHARED, _FREQUENCY, _SCORE),
        ("model.experts",),
        _say_experts,
        _read_experts,
    ),
    Together(
        (_CHANNELS, _LATENT, _KV_RANK, _Q_RANK, _NOPE, _ROPE, _VALUE),
        ("model.latent", "model.kv_channels"),
        _say_latent,
        _read_latent,
    ),
)
"""The model, argument by argument; sliding windows and parallel residuals are not in it. ``--attention-backend flash``
sets ``NVTE_FLASH_ATTN`` (``megatron/core/models/common/language_module/language_module.py``): the version of
FlashAttention is that which is installed, the second or the best of the device. ``TEGroupedMLP`` refuses biases beside
the fusion of bias and dropout, which is on where nothing is stated; grouped products need Ampere or later
(`validate_args`)."""
