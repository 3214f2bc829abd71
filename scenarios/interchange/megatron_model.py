"""The model in Megatron-LM's arguments, and layers that recompute modules which no argument expresses.

Megatron-LM's own ``--recompute-modules`` applies to every layer, has no activation but that of experts, and recomputes
no norm of a dense layer, because Transformer Engine's specification of one fuses norms into products. For the rest, the
script writes a Python module of layers, which ``--spec`` names. Its flags are ones that Megatron-LM's layers read; the
activation is recomputed as Megatron-LM does for experts, by the code of its ``MLP`` with all fusions.

References
----------
megatron-core 0.16.1, ``megatron/core/transformer/transformer_config.py`` (``TransformerConfig``,
``MLATransformerConfig``), ``.../transformer/moe/moe_layer.py`` (token dispatchers), ``.../transformer/moe/experts.py``
(``TEGroupedMLP``: the products of experts); Megatron-LM at commit 000c4ac, ``megatron/training/arguments.py``.
Megatron-LM at core_v0.16.1: ``gpt_builders.py`` (``--spec``: a name of a module, imported and not called);
``megatron/core/transformer/transformer_block.py`` (``_get_block_submodules``: the specification of one layer is that of
all; ``build_layer``: layers are counted from 1 within a stage), ``.../transformer_layer.py`` (the flags of norms;
what an MLP is built with), ``.../attention.py`` (``checkpoint_core_attention``), ``.../mlp.py``,
``.../moe/experts.py`` (``moe_act``); ``megatron/core/tensor_parallel/random.py`` (``CheckpointWithoutOutput``);
``megatron/core/models/gpt/gpt_layer_specs.py`` (the layer of Transformer Engine, and in the local one the names of
norms in checkpoints); ``.../transformer/transformer_config.py`` (no such recomputation beside fp8's delayed scaling).
"""

import re
from collections.abc import Mapping
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.interchange.entry import (
    Entry,
    Reason,
    UnsayableError,
    Values,
    build_reason,
    map_count,
    map_flag,
    map_word,
)
from meshwise.scenarios.interchange.facts import Facts, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues, Pair, parse_value
from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.experts import Experts
from meshwise.strategies.plan.recomputation import (
    FirstLayers,
    PerStage,
    Recomputation,
    Recompute,
    SomeOperators,
    StageRecompute,
)

_HEADS, _GROUPED, _GROUPS = "--num-attention-heads", "--group-query-attention", "--num-query-groups"
_BIAS, _QKV = "--disable-bias-linear", "--add-qkv-bias"
_ATTENTION_DROPOUT, _HIDDEN_DROPOUT = "--attention-dropout", "--hidden-dropout"
_DROPOUT = 0.1
"""The probability that Megatron-LM takes where none is stated."""
EXPERTS, GROUPED_PRODUCTS = "--num-experts", "--moe-grouped-gemm"
_DISPATCHER, _PAIRWISE = "--moe-token-dispatcher-type", "alltoall"
"""How tokens reach experts: all-to-all to the ranks of their experts, as plans are priced; Megatron-LM's default is
``allgather``."""
_TOP_K, _WIDTH, _SHARED, _FREQUENCY, _SCORE = (
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


def _say_heads(facts: Facts) -> Values:
    heads, groups = facts["model.heads"], facts["model.kv_heads"]
    return {_HEADS: heads} | ({} if heads == groups else {_GROUPED: True, _GROUPS: groups})


def _read_heads(config: ConfigValues) -> Facts:
    heads = config.count(_HEADS)
    if config.flag(_GROUPED, False):
        return {"model.heads": heads, "model.kv_heads": config.count(_GROUPS)}
    config.forbid((_GROUPS,), f"needs {_GROUPED}, met none")
    return {"model.heads": heads, "model.kv_heads": heads}


def _say_biases(facts: Facts) -> Values:
    biases = facts["model.biases"]
    return {} if biases == "all" else {_BIAS: True} | ({_QKV: True} if biases == "qkv" else {})


def _read_biases(config: ConfigValues) -> Facts:
    has_no_bias, qkv = config.flag(_BIAS, False), config.flag(_QKV, False)
    return {"model.biases": "all" if not has_no_bias else "qkv" if qkv else "none"}


def _say_dropout(facts: Facts) -> Values:
    return {} if facts["model.dropout"] else {_ATTENTION_DROPOUT: 0.0, _HIDDEN_DROPOUT: 0.0}


def _read_dropout(config: ConfigValues) -> Facts:
    rates = [config.get(key, _DROPOUT) for key in (_ATTENTION_DROPOUT, _HIDDEN_DROPOUT)]
    if not all(isinstance(value, float | int) and 0 <= value < 1 for value in rates) or (rates[0] > 0) != (
        rates[1] > 0
    ):
        raise config.build_error(
            _HIDDEN_DROPOUT, f"both are 0.0 or both more, met {' and '.join(map(format_value, rates))}"
        )
    return {"model.dropout": rates[0] > 0}


def _say_experts(facts: Facts) -> Values:
    experts: Experts | None = facts["model.experts"]
    if experts is None:
        return {}
    reasons = []
    if experts.capacity_factor != 1:
        factor_text = format_fact(experts.capacity_factor)
        reasons.append(Reason("model.experts", "experts that drop no tokens (capacity_factor 1)", factor_text))
    if facts["model.biases"] == "all":
        reasons.append(build_reason(facts, "model.biases", f"none or qkv with experts ({GROUPED_PRODUCTS})"))
    if reasons:
        raise UnsayableError(*reasons)
    dense_layers, layers = experts.dense_layers, facts["model.layers"]
    values: Values = {EXPERTS: experts.count, _TOP_K: experts.top_k, _WIDTH: experts.ffn}
    values |= {_DISPATCHER: _PAIRWISE, GROUPED_PRODUCTS: True}
    values |= {_SHARED: experts.shared * experts.ffn} if experts.shared else {}
    values |= {_FREQUENCY: f"([0]*{dense_layers}+[1]*{layers - dense_layers})"} if dense_layers else {}
    return values | ({_SCORE: True} if experts.score_bias else {})


def _read_experts(config: ConfigValues) -> Facts:
    if EXPERTS not in config:
        return {"model.experts": None}
    _check_kernels(config)
    width, shared = config.count(_WIDTH), config.count(_SHARED, 0, 0)
    if shared % width:
        raise config.build_error(_SHARED, f"is a multiple of {_WIDTH} {width}, met {shared}")
    pattern = config.get(_FREQUENCY, "([0]*0+[1]*1)")
    match = re.fullmatch(r"\(\[0\]\*([0-9]{1,9})\+\[1\]\*([0-9]{1,9})\)", str(pattern))
    if match is None or (_FREQUENCY in config and int(match[1]) + int(match[2]) != config.count("--num-layers")):
        raise config.build_error(
            _FREQUENCY, f"is dense layers, then the others, as in ([0]*1+[1]*26), met {format_value(pattern)}"
        )
    count, top_k, score_bias = config.count(EXPERTS), config.count(_TOP_K, 2), config.flag(_SCORE, False)
    try:
        experts = Experts(count, top_k, width, shared // width, int(match[1]), score_bias)
    except ValueError as error:
        raise config.build_error(EXPERTS, str(error)) from None
    return {"model.experts": experts}


def _check_kernels(config: ConfigValues) -> None:
    """Raise ``ScenarioError`` where experts do not run as plans are priced, with all-to-all and grouped products."""
    dispatcher = config.get(_DISPATCHER, "")
    if dispatcher != _PAIRWISE:
        value = format_value(dispatcher) if dispatcher else "none: Megatron-LM then gathers all tokens (allgather)"
        raise config.build_error(_DISPATCHER, f"is {_PAIRWISE} with {EXPERTS}, as plans are priced, met {value}")
    if not config.flag(GROUPED_PRODUCTS, False):
        reason = "as plans are priced, met none: Megatron-LM then multiplies expert by expert"
        raise config.build_error(GROUPED_PRODUCTS, f"is needed with {EXPERTS}, {reason}")
    if not config.flag(_BIAS, False):
        raise config.build_error(_BIAS, f"is needed with {EXPERTS}, whose products have no biases, met none")


def _say_latent(facts: Facts) -> Values:
    latent: LatentAttention | None = facts["model.latent"]
    if latent is None:
        return {_CHANNELS: facts["model.kv_channels"]}
    values = {_LATENT: True, _KV_RANK: latent.kv_rank, _NOPE: latent.nope_dim, _ROPE: latent.rope_dim}
    return values | {_VALUE: latent.value_dim} | ({_Q_RANK: latent.q_rank} if latent.q_rank else {})


def _read_latent(config: ConfigValues) -> Facts:
    if not config.flag(_LATENT, False):
        default = max(1, config.count("--hidden-size") // config.count(_HEADS))
        return {"model.latent": None, "model.kv_channels": config.count(_CHANNELS, default)}
    latent = LatentAttention(
        kv_rank=config.count(_KV_RANK, 32),
        nope_dim=config.count(_NOPE, 128),
        rope_dim=config.count(_ROPE, 64),
        value_dim=config.count(_VALUE, 128),
        q_rank=config.count(_Q_RANK) if _Q_RANK in config else None,
    )
    return {"model.latent": latent, "model.kv_channels": None}


_ATTENTIONS = (("flash", "flash"), ("flash_2", "flash"), ("unfused", "unfused"))
_POSITIONS = (("learned", "learned_absolute"), ("rotary", "rope"))
MODEL_MAP: tuple[Entry, ...] = (
    map_count("--num-layers", "model.layers"),
    map_count("--hidden-size", "model.hidden"),
    Entry((_HEADS, _GROUPED, _GROUPS), ("model.heads", "model.kv_heads"), _say_heads, _read_heads),
    map_count("--ffn-hidden-size", "model.ffn"),
    map_count("--vocab-size", "model.vocab"),
    map_count("--max-position-embeddings", "model.max_positions"),
    map_flag("--swiglu", "model.ffn_kind", "swiglu", "gelu"),
    map_flag("--untie-embeddings-and-output-weights", "model.tied_embeddings", False, True),
    map_word(
        "--attention-backend", "model.attention", (("flash", "flash"), ("flash_2", "flash"), ("unfused", "unfused"))
    ),
    map_word(
        "--position-embedding-type",
        "model.positions",
        (("learned", "learned_absolute"), ("rotary", "rope")),
        "learned_absolute",
    ),
    map_word("--normalization", "model.norm", (("layer", "LayerNorm"), ("rms", "RMSNorm")), "LayerNorm"),
    map_flag("--qk-layernorm", "model.qk_norm"),
    Entry((_BIAS, _QKV), ("model.biases",), _say_biases, _read_biases),
    Entry((_ATTENTION_DROPOUT, _HIDDEN_DROPOUT), ("model.dropout",), _say_dropout, _read_dropout),
    Entry(
        (EXPERTS, _TOP_K, _WIDTH, _DISPATCHER, GROUPED_PRODUCTS, _SHARED, _FREQUENCY, _SCORE),
        ("model.experts",),
        _say_experts,
        _read_experts,
    ),
    Entry(
        (_CHANNELS, _LATENT, _KV_RANK, _Q_RANK, _NOPE, _ROPE, _VALUE),
        ("model.latent", "model.kv_channels"),
        _say_latent,
        _read_latent,
    ),
)
"""The model, argument by argument, without sliding windows and parallel residuals. ``--attention-backend flash`` sets
``NVTE_FLASH_ATTN`` (``megatron/core/models/common/language_module/language_module.py``): the version of FlashAttention
is the installed one, the second or the best of the device. ``TEGroupedMLP`` refuses biases together with the fusion of
bias and dropout, which is on by default; grouped products need Ampere or later (`validate_args`)."""


RECOMPUTED = "RECOMPUTED"
"""The name of the only literal of the module: which modules layers recompute."""

SPEC, LAYER_SPEC = "--spec", ["recomputed_layers", "layer_spec"]
"""The argument, and its words: the module and a name in it."""

CORE = "core_attn"
"""Megatron-LM's word for the attention core."""

QUANTISED = ("input_layernorm", "pre_mlp_layernorm", "activation")
"""Modules whose output a product reads: with delayed scaling the product keeps that output only in fp8."""

_HEAD = """LAYERS=$(mktemp -d) || exit 1
trap 'rm -rf "$LAYERS"' EXIT
export PYTHONPATH="$LAYERS${PYTHONPATH:+:$PYTHONPATH}"
cat > "$LAYERS/recomputed_layers.py" << 'END'
"""
_IMPORTS = '''"""Layers of Megatron-LM (core 0.16.1) that compute some of their modules again in backward."""

from types import SimpleNamespace

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_rank
from megatron.training import get_args

# How many of a stage's first layers (None: all of them) compute which modules again: one pair for all stages, or a list
# with one a stage. Stages follow one another as their layers do: of virtual stages, the first of every rank come first.
'''
_CODE = '''

class RecomputedMLP(MLP):
    """Keep what the first product returns, and compute the activation again before backward of the second reads it."""

    def forward(self, hidden_states, **kwargs):
        product, bias = self.linear_fc1(hidden_states)
        checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8)
        output, output_bias = self.linear_fc2(checkpoint.checkpoint(self.activate, product, bias))
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias

    def activate(self, product, bias):
        """Return what MLP.forward computes between its products, by that code itself, fused kernels included."""
        between = SimpleNamespace(
            config=self.config,
            activation_func=self.activation_func,
            linear_fc1=lambda pair: pair,
            linear_fc2=lambda activation: (activation, None),
        )
        return MLP.forward(between, (product, bias))[0]


class RecomputedLayer(TransformerLayer):
    """Compute again what RECOMPUTED says of the layer's stage."""

    def __init__(self, config, submodules, layer_number=1, vp_stage=None, **kwargs):
        super().__init__(config, submodules, layer_number=layer_number, vp_stage=vp_stage, **kwargs)
        modules = recomputed_modules(config, vp_stage or 0, get_pg_rank(self.pg_collection.pp), layer_number)
        self.recompute_input_layernorm = "input_layernorm" in modules
        self.self_attention.checkpoint_core_attention = "core_attn" in modules
        self.recompute_pre_mlp_layernorm = "pre_mlp_layernorm" in modules
        if "activation" in modules:
            self.mlp.__class__ = RecomputedMLP  # only now: TransformerLayer gives its groups to no class but MLP


def recomputed_modules(config, vp_stage, pp_rank, layer_number):
    """Return the modules that a layer computes again; it is counted from 1 within its stage."""
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if isinstance(RECOMPUTED, list) and len(RECOMPUTED) != stages:
        raise ValueError(f"RECOMPUTED has a pair for each of {stages} stages, met {len(RECOMPUTED)}")
    stage = config.pipeline_model_parallel_size * vp_stage + pp_rank
    first, modules = RECOMPUTED[stage] if isinstance(RECOMPUTED, list) else RECOMPUTED
    return modules if first is None or layer_number <= first else ()


def make_layer_spec():
    """Return the layer of Transformer Engine, its norms apart from products where any is computed again."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=get_args().qk_layernorm)
    spec.module = RecomputedLayer
    pairs = RECOMPUTED if isinstance(RECOMPUTED, list) else [RECOMPUTED]
    if any(name.endswith("layernorm") for _, modules in pairs for name in modules):
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        parts.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        parts.sharded_state_dict_keys_map = {  # in checkpoints their weights have the names that they have in products
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    return spec


layer_spec = make_layer_spec()
'''
_TAIL = "END\n"
_OPENING, _CLOSING = f"{RECOMPUTED} = [".encode(), b"]"
"""The first and the last line of a list of pairs, which has one pair a line."""
_ASSIGNMENT = re.compile(rf"{RECOMPUTED} = (.+)")


def list_layer_modules(core: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return by module the operators that a layer of the script can recompute; ``core`` are those of attention."""
    return {
        "input_layernorm": ("input_norm",),
        CORE: core,
        "pre_mlp_layernorm": ("feed_forward_norm",),
        "activation": ("activation",),
    }


def split_into_modules(names: tuple[str, ...], modules: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the modules whose operators, one after another, are ``names``; none where there are no such modules.

    Also none for the attention core alone, which Megatron-LM recomputes by default.

    >>> modules = list_layer_modules(("scores", "softmax", "context"))
    >>> split_into_modules(("scores", "softmax", "context", "activation"), modules)
    ['core_attn', 'activation']
    >>> split_into_modules(("activation", "down"), modules)
    []
    """
    words: list[str] = []
    while names:
        word = next((word for word, operators in modules.items() if names[: len(operators)] == operators), None)
        if word is None:
            return []
        words.append(word)
        names = names[len(modules[word]) :]
    return [] if words == [CORE] else words


def say_layers(recompute: Recomputation, modules: Mapping[str, tuple[str, ...]]) -> Values:
    """Return the literal of the module and the argument that names the module; nothing where it cannot express a stage.

    >>> say_layers(PerStage((FirstLayers(Recompute.SELECTIVE, 2), Recompute.NONE)), list_layer_modules(("attention",)))
    {'RECOMPUTED': [(2, ('core_attn',)), (None, ())], '--spec': ['recomputed_layers', 'layer_spec']}
    """
    pairs = [
        _build_pair(stage, modules) for stage in (recompute.stages if isinstance(recompute, PerStage) else (recompute,))
    ]
    if None in pairs:
        return {}
    return {RECOMPUTED: pairs if isinstance(recompute, PerStage) else pairs[0], SPEC: LAYER_SPEC}


def _build_pair(
    stage_recompute: StageRecompute, modules: Mapping[str, tuple[str, ...]]
) -> tuple[int | None, tuple[str, ...]] | None:
    """Return how many first layers of a stage (None: all) recompute which modules; ``None`` if it has no words."""
    layer = stage_recompute.layer
    if isinstance(layer, SomeOperators):
        words = tuple(split_into_modules(layer.names, modules))
        return (stage_recompute.layers, words) if words else None
    known_modules: dict[Recompute, tuple[str, ...]] = {Recompute.NONE: (), Recompute.SELECTIVE: (CORE,)}
    return (stage_recompute.layers, known_modules[layer]) if layer in known_modules else None


def read_layers(value: Any, modules: Mapping[str, tuple[str, ...]]) -> Recomputation:
    """Return the recomputation of a module's literal; ``ValueError`` where the literal is invalid."""
    if isinstance(value, list) and value:
        return PerStage(tuple(_parse_stage(pair, modules) for pair in value))
    return _parse_stage(value, modules)


def _parse_stage(value: Any, modules: Mapping[str, tuple[str, ...]]) -> StageRecompute:
    message = (
        f"a stage is (None, (...)) of {', '.join(modules)}, each once and in tuples, or of its first layers such as "
        f'(4, ("{CORE}",)), met {format_value(value)}'
    )
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple)):
        raise ValueError(message)
    layers, words = value
    if layers is None and not words:
        return Recompute.NONE
    if not all(isinstance(word, str) and word in modules for word in words):
        raise ValueError(message)
    if words == (CORE,) and (layers is None or (type(layers) is int and layers > 0)):
        return Recompute.SELECTIVE if layers is None else FirstLayers(Recompute.SELECTIVE, layers)
    names = tuple(name for word in words for name in modules[word])
    if layers is not None or len(set(names)) < len(names) or not names:
        raise ValueError(message)
    return SomeOperators(names)


def collect_modules(value: Any) -> set[str]:
    """Return the modules that a literal names."""
    pairs = value if isinstance(value, list) else [value]
    return {word for _, words in pairs for word in words}


def write_layers(value: Any) -> str:
    """Return the lines of a script that write the module to a temporary folder of the host, where Python finds it.

    In a folder shared by hosts, ranks could read the module while another host writes it.
    """
    return _HEAD + _IMPORTS + f"{RECOMPUTED} = {_format_pairs(value)}\n" + _CODE + _TAIL


def _format_pairs(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"    {_format_pairs(pair)},\n" for pair in value) + "]"
    return repr(value).replace("'", '"')


def strip_layers(content: bytes, file: str) -> bytes:
    """Return a script with only the literal of its module, on one line; other lines keep their numbers.

    A script without a module is returned unchanged. The module has to be exactly the one that exports write: its code
    is never interpreted.

    Raises
    ------
    ScenarioError
        At the first line of the module that differs.
    """
    lines = content.split(b"\n")
    head, tail = (_HEAD + _IMPORTS).encode().splitlines(), (_CODE + _TAIL).encode().splitlines()
    if head[0] not in lines:
        return content
    start = lines.index(head[0])
    literal_start = literal_end = start + len(head)
    if lines[literal_start : literal_start + 1] == [_OPENING] and _CLOSING in lines[literal_start:]:
        literal_end = lines.index(_CLOSING, literal_start)
    for number, line in (*enumerate(head, start), *enumerate(tail, literal_end + 1)):
        actual_line = lines[number] if number < len(lines) else b"the end"
        if actual_line != line:
            message = (
                f"a module of layers is as it was written, met {format_value(actual_line.decode(errors='replace'))}"
            )
            raise ScenarioError((Fault(file, number + 1, 1, "", message),))
    end = literal_end + 1 + len(tail)
    lines[start:end] = [
        *[b""] * len(head),
        b"".join(lines[literal_start : literal_end + 1]),
        *[b""] * (end - literal_start - 1),
    ]
    return b"\n".join(lines)


def parse_literal(line: str) -> Pair | None:
    """Return the name and value of the literal on a line; ``None`` for any other line."""
    match = _ASSIGNMENT.fullmatch(line)
    return None if match is None else (RECOMPUTED, parse_value(match[1]))
