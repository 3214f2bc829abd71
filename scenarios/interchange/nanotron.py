"""nanotron: the configuration file (YAML) of ``run_train.py``.

References
----------
huggingface/nanotron, main (version 0.4 in its pyproject): ``src/nanotron/config/parallelism_config.py``,
``.../config/config.py`` (``TokensArgs``, ``OptimizerArgs``, ``ModelArgs``), ``.../config/models_config.py``
(``Qwen2Config``), ``.../config/utils_config.py`` (words of pipeline engines and dtypes), ``.../nn/attention.py``,
``.../parallel/context.py`` (rank order), ``.../models/base.py``, ``build_model``, and ``.../models/qwen.py``,
``get_block_compute_costs`` (how layers are divided).
"""

from collections.abc import Iterator

import yaml

from meshwise.scenarios.files.reader import parse
from meshwise.scenarios.interchange.entry import (
    PLAIN,
    Always,
    Count,
    Entry,
    Needed,
    Reason,
    Together,
    Unsayable,
    Values,
    Word,
    accumulation,
    always,
    one_size,
)
from meshwise.scenarios.interchange.facts import Facts, Request, plainly
from meshwise.scenarios.interchange.lines import Stated, nested
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NOTHING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_BY, _TOKENS, _OPTIMIZER, _MODEL = "parallelism", "tokens", "optimizer", "model.model_config"
_DATA, _PIPELINE, _TENSOR = f"{_BY}.dp", f"{_BY}.pp", f"{_BY}.tp"
_CONTEXT, _ATTENTION = f"{_BY}.context_parallel_size", f"{_MODEL}._attn_implementation"
_SIZE, _STEPS = f"{_TOKENS}.micro_batch_size", f"{_TOKENS}.batch_accumulation_per_replica"
_LAYERS, _HIDDEN, _FFN, _VOCAB = (
    f"{_MODEL}.{name}" for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
)
_FLASH, _RING = "flash_attention_2", "ring"
_IN_FP32 = f"{_OPTIMIZER}.accumulate_grad_in_fp32"
_DTYPE = "model.dtype"
_DTYPES = (("bf16", "bfloat16"), ("fp32", "float32"))


def division(layers: int, hidden: int, ffn: int, vocab: int, pipeline: int) -> tuple[int, ...] | None:
    """Return the number of layers of every stage as nanotron divides them; ``None`` where a rank has no blocks.

    A rank takes blocks until the cost so far exceeds its share of the total; a layer costs
    ``4 * hidden^2 + 3 * ffn * hidden``, the head ``vocab * hidden``.

    >>> division(layers=8, hidden=64, ffn=256, vocab=256, pipeline=2)
    (5, 3)
    """
    each, head = 4 * hidden * hidden + 3 * ffn * hidden, vocab * hidden
    whole = layers * each + head
    counts = [0] * pipeline
    rank = 0
    for layer in range(1, layers + 1):
        counts[rank] += 1
        if layer * each > whole * ((rank + 1) / pipeline):
            rank += 1
    return tuple(counts) if rank == pipeline - 1 else None


def _say_stages(facts: Facts) -> Values:
    sizes = {name: facts[f"model.{name}"] for name in ("layers", "hidden", "ffn", "vocab")}
    own = division(**sizes, pipeline=facts["plan.pipeline"])
    if own != facts["plan.stages"]:
        can = f"{plainly(own)}, as it divides the layers itself" if own else "fewer, for a rank is left without layers"
        raise Unsayable(Reason("plan.stages", can, plainly(facts["plan.stages"])))
    return {}


def _read_stages(stated: Stated) -> Facts:
    layers, hidden, ffn, vocab = (stated.count(key) for key in (_LAYERS, _HIDDEN, _FFN, _VOCAB))
    if layers > 10_000:  # the division walks over layers: a hostile number must not make it endless
        raise stated.fault(_LAYERS, f"is at most 10000, met {layers}")
    pipeline = stated.count(_PIPELINE)
    own = division(layers, hidden, ffn, vocab, pipeline) if pipeline <= layers else None
    if own is None:
        raise stated.fault(_PIPELINE, f"leaves no rank without layers, met {pipeline} of {layers} layers")
    return {"plan.stages": own, "plan.chunks": 1}


def _say_batch(facts: Facts) -> Values:
    return {_SIZE: one_size(facts), _STEPS: accumulation(facts)}


def _read_batch(stated: Stated) -> Facts:
    size, steps, data = stated.count(_SIZE), stated.count(_STEPS), stated.count(_DATA)
    return {"plan.microbatch": size, "training.global_batch": size * steps * data}


def _say_context(facts: Facts) -> Values:
    context, how = facts["plan.context"], facts["plan.attention"]
    if facts["model.attention"] != "flash":
        raise Unsayable(Reason("model.attention", f"flash ({_ATTENTION})", plainly(facts["model.attention"])))
    if context > 1 and how is not Attention.RING:
        raise Unsayable(Reason("plan.attention", f"ring ({_ATTENTION})", plainly(how)))
    return {_CONTEXT: context, _ATTENTION: _RING if context > 1 else _FLASH}


def _read_context(stated: Stated) -> Facts:
    context = stated.count(_CONTEXT, 1)
    needed = _RING if context > 1 else _FLASH
    stated.word(_ATTENTION, (needed,), _FLASH)
    return {
        "plan.context": context,
        "plan.attention": Attention.RING if context > 1 else None,
        "model.attention": "flash",
    }


def _combinations(facts: Facts) -> Iterator[Reason]:
    own = facts["model.hidden"] // facts["model.heads"]
    if facts["model.kv_channels"] != own:
        yield Reason("model.kv_channels", f"hidden / heads = {own}", plainly(facts["model.kv_channels"]))


def _read_channels(stated: Stated) -> Facts:
    hidden, heads = stated.count(_HIDDEN), stated.count(f"{_MODEL}.num_attention_heads")
    if hidden % heads:
        raise stated.fault(_HIDDEN, f"is a multiple of num_attention_heads({heads}), met {hidden}")
    return {"model.kv_channels": hidden // heads}


_PLAN_MAP: tuple[Entry, ...] = (
    Count(_DATA, "plan.data"),
    Count(_PIPELINE, "plan.pipeline"),
    Count(_TENSOR, "plan.tensor"),
    Together(
        (_CONTEXT, _ATTENTION), ("plan.context", "plan.attention", "model.attention"), _say_context, _read_context
    ),
    Word(f"{_BY}.pp_engine", "plan.schedule", (("1f1b", "1f1b"), ("gpipe", "afab")), "afab"),
    Together((), ("plan.stages", "plan.chunks"), _say_stages, _read_stages),
    Word(f"{_BY}.tp_mode", "plan.sequence_parallel", ((True, "REDUCE_SCATTER"), (False, "ALL_REDUCE")), "ALL_REDUCE"),
    Word(f"{_BY}.tp_linear_async_communication", "plan.overlap_tensor", ((True, True), (False, False)), False),
    Word(f"{_BY}.recompute_layer", "plan.recompute", ((Recompute.NONE, False), (Recompute.FULL, True)), False),
    Word(f"{_OPTIMIZER}.zero_stage", "plan.zero", ((0, 0), (1, 1))),
    Together((_SIZE, _STEPS), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    *always("ZeRO shares over all data ranks", zero_shards=0),
    *always("experts are not in the field map", expert=1),
    *always("its stages send what they have", scatter_gather=False),
    *always("it has no offload", offload=NOTHING),
    *always("of ZeRO 3, which it does not have", reshard_after_forward=True),
    *always("its buckets overlap", overlap_gradients=True),
)
_TRAINING_MAP: tuple[Entry, ...] = (
    Count(f"{_TOKENS}.sequence_length", "training.sequence"),
    Word(_DTYPE, "training.precision", _DTYPES),
    Word(_IN_FP32, "training.gradient_precision", (("fp32", True), ("same", False))),
    Word(f"{_OPTIMIZER}.clip_grad", "training.gradient_clipping", ((True, 1.0), (False, None))),
    Word(f"{_OPTIMIZER}.optimizer_factory.name", "training.optimizer", (("adamw", "adamW"), ("sgd", "sgd"))),
)
_MODEL_MAP: tuple[Entry, ...] = (
    Needed(f"{_MODEL}.is_qwen2_config", True, fixed=True),
    Count(_LAYERS, "model.layers"),
    Count(_HIDDEN, "model.hidden"),
    Count(f"{_MODEL}.num_attention_heads", "model.heads"),
    Count(f"{_MODEL}.num_key_value_heads", "model.kv_heads"),
    Count(_FFN, "model.ffn"),
    Count(_VOCAB, "model.vocab"),
    Count(f"{_MODEL}.max_position_embeddings", "model.max_positions"),
    Word(f"{_MODEL}.tie_word_embeddings", "model.tied_embeddings", ((True, True), (False, False))),
    Word(f"{_MODEL}.attention_bias", "model.biases", (("none", False), ("qkv", True)), False),
    Word(f"{_MODEL}.hidden_act", "model.ffn_kind", (("swiglu", "silu"),)),
    Always("model.norm", "rms", "the norm of its Qwen2"),
    Always("model.positions", "rotary", "the positions of its Qwen2"),
    Always("model.qk_norm", False, "its Qwen2 has no such norm"),
    Always("model.dropout", False, "its Qwen2 drops nothing out"),
    Always("model.parallel_residual", False, "its Qwen2 has none"),
    Always("model.window", None, "sliding windows are not in the field map"),
    Always("model.experts", None, "experts are not in the field map"),
    Always("model.latent", None, "its Qwen2 has no latent attention"),
    Together((), ("model.kv_channels",), lambda facts: {}, _read_channels),
)
_NEEDED_MAP: tuple[Entry, ...] = (
    Needed("general.project", "meshwise"),
    Needed("general.run", "meshwise"),
    Needed("model.init_method.std", 0.02),
    Needed(f"{_TOKENS}.train_steps", 100),
    Needed(f"{_OPTIMIZER}.weight_decay", 0.1),
    Needed(f"{_OPTIMIZER}.optimizer_factory.adam_eps", 1e-8),
    Needed(f"{_OPTIMIZER}.optimizer_factory.adam_beta1", 0.9),
    Needed(f"{_OPTIMIZER}.optimizer_factory.adam_beta2", 0.95),
    Needed(f"{_OPTIMIZER}.optimizer_factory.torch_adam_is_fused", True),
    Needed(f"{_OPTIMIZER}.learning_rate_scheduler.learning_rate", 3e-4),
    Needed(f"{_OPTIMIZER}.learning_rate_scheduler.lr_warmup_style", "linear"),
)


def _write(values: Values, request: Request, called: str) -> str:
    if values[f"{_OPTIMIZER}.optimizer_factory.name"] == "sgd":
        values = {key: value for key, value in values.items() if "adam" not in key}
    launch = f"# For {called} (`meshwise export --to nanotron`): torchrun ... run_train.py --config-file FILE"
    return f"# {request.title}\n{launch}\n" + yaml.safe_dump(nested(values), sort_keys=False)


_MAP: tuple[Entry, ...] = (*_PLAN_MAP, *_TRAINING_MAP, *_MODEL_MAP, *_NEEDED_MAP, *PLAIN)
NANOTRON = Target("nanotron", "0.4 (main)", _MAP, _write, parse, _combinations)
to_nanotron, from_nanotron = NANOTRON.to, NANOTRON.read
