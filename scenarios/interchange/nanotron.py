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

from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.interchange.entry import (
    COMMON_ENTRIES,
    Entry,
    Reason,
    UnsayableError,
    Values,
    build_reason,
    count_microbatches,
    find_microbatch,
    fix_field,
    list_fixed,
    map_count,
    map_flag,
    map_word,
    require_key,
)
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues, nest_values
from meshwise.scenarios.interchange.recipe import (
    BETAS,
    CHECKPOINT_EVERY,
    CHECKPOINTS,
    DATA,
    EPSILON,
    ITERATIONS,
    LEARNING_RATE,
    MIN_LEARNING_RATE,
    SCHEDULE,
    TOKENIZER,
    WARMUP,
    WEIGHT_DECAY,
    find_family,
)
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_PARALLELISM, _TOKENS, _OPTIMIZER, _MODEL = "parallelism", "tokens", "optimizer", "model.model_config"
_DATA, _PIPELINE, _TENSOR = f"{_PARALLELISM}.dp", f"{_PARALLELISM}.pp", f"{_PARALLELISM}.tp"
_CONTEXT, _ATTENTION = f"{_PARALLELISM}.context_parallel_size", f"{_MODEL}._attn_implementation"
_SIZE, _STEPS = f"{_TOKENS}.micro_batch_size", f"{_TOKENS}.batch_accumulation_per_replica"
_LAYERS, _HIDDEN, _FFN, _VOCAB = (
    f"{_MODEL}.{name}" for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
)
_FLASH, _RING = "flash_attention_2", "ring"
_IN_FP32 = f"{_OPTIMIZER}.accumulate_grad_in_fp32"
_DTYPE, _DEVIATION = "model.dtype", "model.init_method.std"
_BASE, _NORM_EPSILON = f"{_MODEL}.rope_theta", f"{_MODEL}.rms_norm_eps"
_DTYPES = (("bf16", "bfloat16"), ("fp32", "float32"))


def divide_layers(layers: int, hidden: int, ffn: int, vocab: int, pipeline: int) -> tuple[int, ...] | None:
    """Return the number of layers of every stage as nanotron divides them; ``None`` where a rank has no blocks.

    A rank takes blocks until the cost so far exceeds its share of the total; a layer costs
    ``4 * hidden^2 + 3 * ffn * hidden``, the head ``vocab * hidden``.

    >>> divide_layers(layers=8, hidden=64, ffn=256, vocab=256, pipeline=2)
    (5, 3)
    """
    layer_cost, head_cost = 4 * hidden * hidden + 3 * ffn * hidden, vocab * hidden
    total_cost = layers * layer_cost + head_cost
    counts = [0] * pipeline
    rank = 0
    for layer in range(1, layers + 1):
        counts[rank] += 1
        if layer * layer_cost > total_cost * ((rank + 1) / pipeline):
            rank += 1
    return tuple(counts) if rank == pipeline - 1 else None


def _say_stages(facts: Facts) -> Values:
    sizes = {name: facts[f"model.{name}"] for name in ("layers", "hidden", "ffn", "vocab")}
    nanotron_stages = divide_layers(**sizes, pipeline=facts["plan.pipeline"])
    if nanotron_stages != facts["plan.stages"]:
        limit = f"{format_fact(nanotron_stages)}, as it divides the layers itself"
        limit = limit if nanotron_stages else "fewer, for a rank is left without layers"
        raise UnsayableError(build_reason(facts, "plan.stages", limit))
    return {}


def _read_stages(config: ConfigValues) -> Facts:
    layers, hidden, ffn, vocab = (config.count(key) for key in (_LAYERS, _HIDDEN, _FFN, _VOCAB))
    if layers > 10_000:  # the division walks over layers: a hostile number must not make it endless
        raise config.build_error(_LAYERS, f"is at most 10000, met {layers}")
    pipeline = config.count(_PIPELINE)
    stages = divide_layers(layers, hidden, ffn, vocab, pipeline) if pipeline <= layers else None
    if stages is None:
        raise config.build_error(_PIPELINE, f"leaves no rank without layers, met {pipeline} of {layers} layers")
    return {"plan.stages": stages, "plan.chunks": 1}


def _say_batch(facts: Facts) -> Values:
    return {_SIZE: find_microbatch(facts), _STEPS: count_microbatches(facts)}


def _read_batch(config: ConfigValues) -> Facts:
    size, steps, data = config.count(_SIZE), config.count(_STEPS), config.count(_DATA)
    return {"plan.microbatch": size, "training.global_batch": size * steps * data}


def _say_context(facts: Facts) -> Values:
    context = facts["plan.context"]
    if facts["model.attention"] != "flash":
        raise UnsayableError(build_reason(facts, "model.attention", f"flash ({_ATTENTION})"))
    if context > 1 and facts["plan.attention"] is not Attention.RING:
        raise UnsayableError(build_reason(facts, "plan.attention", f"ring ({_ATTENTION})"))
    return {_CONTEXT: context, _ATTENTION: _RING if context > 1 else _FLASH}


def _read_context(config: ConfigValues) -> Facts:
    context = config.count(_CONTEXT, 1)
    config.word(_ATTENTION, (_RING if context > 1 else _FLASH,), _FLASH)
    facts = {"plan.context": context, "plan.attention": Attention.RING if context > 1 else None}
    return facts | {"model.attention": "flash"}


def _check_combinations(facts: Facts) -> Iterator[Reason]:
    head_width = facts["model.hidden"] // facts["model.heads"]
    if facts["model.kv_channels"] != head_width:
        yield build_reason(facts, "model.kv_channels", f"hidden / heads = {head_width}")


def _read_channels(config: ConfigValues) -> Facts:
    hidden, heads = config.count(_HIDDEN), config.count(f"{_MODEL}.num_attention_heads")
    if hidden % heads:
        raise config.build_error(_HIDDEN, f"is a multiple of num_attention_heads({heads}), met {hidden}")
    return {"model.kv_channels": hidden // heads}


_MODES = ((True, "REDUCE_SCATTER"), (False, "ALL_REDUCE"))
_PLAN_MAP: tuple[Entry, ...] = (
    map_count(_DATA, "plan.data"),
    map_count(_PIPELINE, "plan.pipeline"),
    map_count(_TENSOR, "plan.tensor"),
    Entry((_CONTEXT, _ATTENTION), ("plan.context", "plan.attention", "model.attention"), _say_context, _read_context),
    map_word(f"{_PARALLELISM}.pp_engine", "plan.schedule", (("1f1b", "1f1b"), ("gpipe", "afab")), "afab"),
    Entry((), ("plan.stages", "plan.chunks"), _say_stages, _read_stages),
    map_word(f"{_PARALLELISM}.tp_mode", "plan.sequence_parallel", _MODES, "ALL_REDUCE"),
    map_flag(f"{_PARALLELISM}.tp_linear_async_communication", "plan.overlap_tensor"),
    map_word(
        f"{_PARALLELISM}.recompute_layer", "plan.recompute", ((Recompute.NONE, False), (Recompute.FULL, True)), False
    ),
    map_word(f"{_OPTIMIZER}.zero_stage", "plan.zero", ((0, 0), (1, 1))),
    Entry((_SIZE, _STEPS), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    *list_fixed("ZeRO shares over all data ranks", zero_shards=0),
    *list_fixed("experts are not in the field map", expert=1),
    *list_fixed("its stages send what they have", scatter_gather=False),
    *list_fixed("it has no offload", offload=NO_OFFLOADING),
    *list_fixed("of ZeRO 3, which it does not have", reshard_after_forward=True),
    *list_fixed("its buckets overlap", overlap_gradients=True),
)
_TRAINING_MAP: tuple[Entry, ...] = (
    map_count(f"{_TOKENS}.sequence_length", "training.sequence"),
    map_word(_DTYPE, "training.precision", _DTYPES),
    map_word(_IN_FP32, "training.gradient_precision", (("fp32", True), ("same", False))),
    map_word(f"{_OPTIMIZER}.clip_grad", "training.gradient_clipping", ((True, 1.0), (False, None))),
    map_word(f"{_OPTIMIZER}.optimizer_factory.name", "training.optimizer", (("adamw", "adamW"), ("sgd", "sgd"))),
)
_MODEL_MAP: tuple[Entry, ...] = (
    require_key(f"{_MODEL}.is_qwen2_config", True, is_fixed=True),
    map_count(_LAYERS, "model.layers"),
    map_count(_HIDDEN, "model.hidden"),
    map_count(f"{_MODEL}.num_attention_heads", "model.heads"),
    map_count(f"{_MODEL}.num_key_value_heads", "model.kv_heads"),
    map_count(_FFN, "model.ffn"),
    map_count(_VOCAB, "model.vocab"),
    map_count(f"{_MODEL}.max_position_embeddings", "model.max_positions"),
    map_word(f"{_MODEL}.tie_word_embeddings", "model.tied_embeddings", ((True, True), (False, False))),
    map_word(f"{_MODEL}.attention_bias", "model.biases", (("none", False), ("qkv", True)), False),
    map_word(f"{_MODEL}.hidden_act", "model.ffn_kind", (("swiglu", "silu"),)),
    fix_field("model.norm", "rms", "the norm of its Qwen2"),
    fix_field("model.positions", "rotary", "the positions of its Qwen2"),
    fix_field("model.qk_norm", False, "its Qwen2 has no such norm"),
    fix_field("model.dropout", False, "its Qwen2 drops nothing out"),
    fix_field("model.parallel_residual", False, "its Qwen2 has none"),
    fix_field("model.window", None, "sliding windows are not in the field map"),
    fix_field("model.experts", None, "experts are not in the field map"),
    fix_field("model.latent", None, "its Qwen2 has no latent attention"),
    Entry((), ("model.kv_channels",), read=_read_channels),
)
_SCHEDULER = f"{_OPTIMIZER}.learning_rate_scheduler"
_NEEDED_VALUES: Values = {
    "general.project": "meshwise",
    "general.run": "meshwise",
    f"{_SCHEDULER}.learning_rate": LEARNING_RATE,
    f"{_SCHEDULER}.lr_warmup_steps": WARMUP,
    f"{_SCHEDULER}.lr_warmup_style": "linear",
    f"{_SCHEDULER}.lr_decay_style": SCHEDULE,
    f"{_SCHEDULER}.lr_decay_steps": ITERATIONS - WARMUP,
    f"{_SCHEDULER}.min_decay_lr": MIN_LEARNING_RATE,
    f"{_OPTIMIZER}.weight_decay": WEIGHT_DECAY,
    f"{_OPTIMIZER}.optimizer_factory.adam_eps": EPSILON,
    f"{_OPTIMIZER}.optimizer_factory.adam_beta1": BETAS[0],
    f"{_OPTIMIZER}.optimizer_factory.adam_beta2": BETAS[1],
    f"{_OPTIMIZER}.optimizer_factory.torch_adam_is_fused": True,
    f"{_TOKENS}.train_steps": ITERATIONS,
    "checkpoints.checkpoints_path": CHECKPOINTS,
    "checkpoints.checkpoint_interval": CHECKPOINT_EVERY,
    "tokenizer.tokenizer_name_or_path": TOKENIZER,
    "data_stages": [
        {
            "name": "training",
            "start_training_step": 1,
            "data": {
                "seed": 42,
                "dataset": {"hf_dataset_or_datasets": DATA, "hf_dataset_splits": "train", "text_column_name": "text"},
            },
        }
    ],
}
_NEEDED_MAP: tuple[Entry, ...] = (
    *(require_key(key, value) for key, value in _NEEDED_VALUES.items()),
    Entry((_BASE, _NORM_EPSILON, _DEVIATION), ()),
)
"""What no field of a scenario states; a file may have any values of it."""

_FIRST_SECTIONS = ("general", "optimizer", "tokens", "checkpoints", "tokenizer", "data_stages")


def _write(values: Values, request: TrainerRequest, target_name: str) -> str:
    if values[f"{_OPTIMIZER}.optimizer_factory.name"] == "sgd":
        values = {key: value for key, value in values.items() if "adam" not in key}
    family, (hosts, ranks) = find_family(request.spec), request.hosts
    defaults = (float(family.rotary_base), family.norm_epsilon, family.deviation)
    values = values | dict(zip((_BASE, _NORM_EPSILON, _DEVIATION), defaults, strict=True))
    sections = nest_values(values)
    first = {name: sections.pop(name) for name in _FIRST_SECTIONS}
    meeting = "" if hosts == 1 else f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST0:29500 "
    file = request.find_file_name("nanotron.yaml")
    return (
        f"# torchrun {meeting}--nproc-per-node {ranks} run_train.py --config-file {file}\n"
        f"# {request.title}\n"
        f"# For {target_name} (`meshwise export --to nanotron`). The first line starts the run in nanotron's folder.\n"
        "# Yours to set: the rate and its schedule, train_steps, checkpoints, tokenizer and data. clip_grad is as the\n"
        "# scenario says, null for no clipping; nanotron has no default of it, its examples have 1.0.\n"
        + yaml.safe_dump(first, sort_keys=False)
        + f"# Not stated by the scenario: rope_theta, rms_norm_eps and std are of {family.source}.\n"
        + yaml.safe_dump(sections, sort_keys=False)
    )


_MAP: tuple[Entry, ...] = (*_PLAN_MAP, *_TRAINING_MAP, *_MODEL_MAP, *_NEEDED_MAP, *COMMON_ENTRIES)
NANOTRON = Target("nanotron", "0.4 (main)", _MAP, _write, parse_document, _check_combinations)
