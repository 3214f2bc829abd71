"""Megatron-LM: a bash script that passes arguments to ``pretrain_gpt.py``, written and read back line by line.

References
----------
megatron-core 0.16.1: ``megatron/core/model_parallel_config.py``, ``.../transformer/transformer_config.py``,
``.../transformer/pipeline_parallel_layer_layout.py`` (the layout's text form), ``.../optimizer/optimizer_config.py``,
``.../distributed/distributed_data_parallel_config.py``; Megatron-LM at commit 000c4ac,
``megatron/training/arguments.py`` (the names of arguments, and `validate_args`: what goes together);
``megatron/core/parallel_state.py`` (rank order ``tp-cp-ep-dp-pp``, instances of the distributed optimizer);
layers of the script's own (``--spec``): `meshwise.scenarios.interchange.megatron_model`;
torch's FSDP2: Megatron-LM at core_v0.16.1, ``megatron/training/arguments.py``, ``megatron/training/training.py``
(``get_model``), ``megatron/core/distributed/torch_fully_sharded_data_parallel.py``.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwise.executor.supported import UNFUSED_CORE
from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.files.reader import Document
from meshwise.scenarios.interchange.entry import (
    COMMON_ENTRIES,
    ONE_FORWARD_ONE_BACKWARD,
    Entry,
    Reason,
    UnsayableError,
    Values,
    build_reason,
    build_schedule_reason,
    count_microbatches,
    find_microbatch,
    fix_field,
    map_count,
    map_flag,
    map_word,
)
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues, Pair, parse_argument, parse_lines
from meshwise.scenarios.interchange.megatron_model import (
    CORE,
    EXPERTS,
    GROUPED_PRODUCTS,
    LAYER_SPEC,
    MODEL_MAP,
    QUANTISED,
    RECOMPUTED,
    SPEC,
    collect_modules,
    list_layer_modules,
    parse_literal,
    read_layers,
    say_layers,
    split_into_modules,
    strip_layers,
    write_layers,
)
from meshwise.scenarios.interchange.megatron_run import (
    RUN_ENTRIES,
    list_run_lines,
    list_variable_lines,
    parse_run_line,
)
from meshwise.scenarios.interchange.target import Target
from meshwise.simulator.models.attention import UNFUSED
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators
from meshwise.strategies.schedules.rule import find_round_size

NODES, RANKS_PER_NODE = "NNODES", "NPROC_PER_NODE"
"""Variables of the script: the number of hosts, and of ranks on each."""

_ORDERED_AXES = ("tensor-model", "context")
"""Axes whose collectives have to be launched in order before Blackwell (``CUDA_DEVICE_MAX_CONNECTIONS=1``)."""

_SHARD_PARAMETERS = {"--use-megatron-fsdp", "--use-torch-fsdp2"}
"""Arguments that shard parameters: gathers overlap with products, which needs more than one queue of kernels."""

_HEAD = """# {command}
# {title}
# For Megatron-LM ({called}; `meshwise export --to megatron`).
# The first line starts the run in Megatron-LM's folder{on_hosts}.
# More arguments of pretrain_gpt.py may follow the name of the file.
{variables}
{remarks}{nodes}={hosts}
{each}={ranks}
{environment}{layers}ARGUMENTS=(
"""
_FOOT = """)
torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --node-rank "${NODE_RANK:-0}" \\
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
    pretrain_gpt.py "${ARGUMENTS[@]}" "$@"
"""
_CLIPPED = "# --clip-grad 1.0 clips gradients, as the scenario says and as Megatron-LM does by default.\n"
_UNCLIPPED = """# --clip-grad 0.0 clips nothing: the scenario has gradient_clipping false, or says nothing of it.
#   Megatron-LM's own default is 1.0.
"""
_ROUTING = """# Routing is priced with {load}. What balances it is yours to state:
#   --moe-aux-loss-coeff, 0.0 where nothing is stated.
"""
_ONE_CONNECTION = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"


def write(values: Values, request: TrainerRequest, target_name: str) -> str:
    """Return the script, with one queue of kernels a device where `validate_args` of Megatron-LM requires it.

    Where layers recompute something that no argument expresses, a Python module of layers precedes the arguments.
    """
    hosts, ranks = request.hosts
    is_ordered = any(f"--{axis}-parallel-size" in values for axis in _ORDERED_AXES)
    has_one_connection = is_ordered and not values.keys() & _SHARD_PARAMETERS
    environment = _ONE_CONNECTION if has_one_connection else ""
    command = f"bash {request.find_file_name('plan.sh')}"
    head = _HEAD.format(
        command=command if hosts == 1 else f"NODE_RANK=0 MASTER_ADDR=HOST0 {command}",
        on_hosts="" if hosts == 1 else f", on each of {hosts} hosts with a NODE_RANK of its own",
        variables="\n".join(list_variable_lines()),
        title=request.title,
        called=target_name,
        remarks="".join(_list_remarks(values, request)),
        nodes=NODES,
        each=RANKS_PER_NODE,
        hosts=hosts,
        ranks=ranks,
        environment=environment,
        layers=write_layers(values[RECOMPUTED]) if RECOMPUTED in values else "",
    )
    arguments = [_format_argument(key, value) for key, value in values.items() if key != RECOMPUTED]
    arguments += list_run_lines(values, request)
    return head + "".join(f"    {argument}\n" for argument in arguments) + _FOOT


def _list_remarks(values: Values, request: TrainerRequest) -> Iterator[str]:
    """Yield comments about gradient clipping and the load of experts, where defaults of Megatron-LM may surprise."""
    yield _UNCLIPPED if values.get("--clip-grad") == 0 else _CLIPPED
    if isinstance(request.spec, Transformer) and (experts := request.spec.experts):
        balanced = experts.imbalance == 1
        load = "balanced experts" if balanced else f"an expert of {experts.imbalance:g} times the mean load"
        yield _ROUTING.format(load=load)


def _format_argument(key: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join((key, *value))
    return key if value is True else f"{key} '{value}'" if re.search(r"[|()*\[]", str(value)) else f"{key} {value}"


_IGNORED_LINES = re.compile(r"#.*|ARGUMENTS=\(|\)||export CUDA_DEVICE_MAX_CONNECTIONS=1")


def parse(content: bytes, file: str) -> Document:
    """Return the document of a script, argument by argument; ``ScenarioError`` where a line is nothing it may have."""
    foot = _FOOT.removeprefix(")\n").encode()
    stripped = strip_layers(content, file)
    return parse_lines(
        stripped.removesuffix(foot), file, _parse_line if stripped == content else _parse_line_beside_layers
    )


def _parse_line_beside_layers(line: str) -> Pair | None:
    return parse_literal(line) or _parse_line(line)


def _parse_line(line: str) -> Pair | None:
    if _IGNORED_LINES.fullmatch(line):
        return None
    if match := re.fullmatch(rf"({NODES}|{RANKS_PER_NODE})=([0-9]{{1,9}})", line):
        return match[1], int(match[2])
    return parse_run_line(line) or parse_argument(line)


_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_VIRTUAL, _LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
_CHUNK_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_ROUND = "--microbatch-group-size-per-virtual-pipeline-stage"
_CONTEXT, _COMM_TYPE = "--context-parallel-size", "--cp-comm-type"
_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"
_DISTRIBUTED, _INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
_FSDP, _STRATEGY, _FORMAT = "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--ckpt-format"
_OVERLAP, _OVERLAP_GATHER = "--overlap-grad-reduce", "--overlap-param-gather"
_TORCH, _NO_RESHARD = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
_NO_FUSION = "--no-gradient-accumulation-fusion"
_EXPERT, _UNTIED = "--expert-model-parallel-size", "--untie-embeddings-and-output-weights"
_GRANULARITY, _METHOD, _LAYERS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
_MODULES, _LATENT = "--recompute-modules", "--multi-latent-attention"
_OPERATORS = {
    "mlp": ("up", "activation", "down"),
    "moe_act": ("expert_activation",),
    "shared_experts": ("shared_up", "shared_activation", "shared_down"),
    "mla_up_proj": ("query", "kv_up", "rotary"),
}
"""Operators by module that arguments recompute. ``layernorm`` is missing: in a layer without experts Transformer Engine
fuses norms into products and recomputes none of them, so layers that the script defines do it. ``moe`` is missing: it
contains more than operators of the model here. ``mla_up_proj`` is ``qkv_up_proj_and_rope_apply`` of
``transformer/multi_latent_attention.py``."""
_OFFLOAD, _FRACTION, _PRECISION_AWARE = (
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--use-precision-aware-optimizer",
)
_BF16, _FP16, _FP8 = "--bf16", "--fp16", "--fp8-format"
_IN_FP32, _IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
_STRATEGIES = ((2, "optim_grads"), (3, "optim_grads_params"))
_ATTENTIONS = ((Attention.RING, "p2p"), (Attention.ALL_GATHER, "allgather"), (Attention.ULYSSES, "a2a"))


def _read_batch(config: ConfigValues) -> Facts:
    """Return batch sizes and data ranks, which have no key: they are all ranks divided by the other degrees."""
    ranks = config.count(NODES) * config.count(RANKS_PER_NODE)
    other_degrees = config.count(_TENSOR, 1) * config.count(_PIPELINE, 1) * config.count(_CONTEXT, 1)
    if ranks % other_degrees:
        raise config.build_error(
            RANKS_PER_NODE,
            f"{NODES} * {RANKS_PER_NODE} is a multiple of the other degrees({other_degrees}), met {ranks}",
        )
    size, global_batch = config.count(_MICRO), config.count(_GLOBAL)
    return {"plan.data": ranks // other_degrees, "plan.microbatch": size, "training.global_batch": global_batch}


def _say_batch(facts: Facts) -> Values:
    return {_MICRO: find_microbatch(facts), _GLOBAL: facts["training.global_batch"]}


def _say_pipeline(facts: Facts) -> Values:
    pipeline, chunks, stages = facts["plan.pipeline"], facts["plan.chunks"], facts["plan.stages"]
    default_schedule = "interleaved" if chunks > 1 else ONE_FORWARD_ONE_BACKWARD
    if facts["plan.schedule"] != default_schedule:
        raise UnsayableError(build_schedule_reason(facts, "1f1b, or interleaved with chunks"))
    values: Values = {} if pipeline == 1 else {_PIPELINE: pipeline}
    if chunks > 1 and (round_size := find_round_size(pipeline, count_microbatches(facts))) != pipeline:
        values[_ROUND] = round_size
    if len(set(stages)) > 1:
        return values | {_LAYOUT: _format_layout(stages)}
    return values | ({_VIRTUAL: chunks} if chunks > 1 else {})


def _format_layout(stages: tuple[int, ...]) -> str:
    """Return the layers of every stage in Megatron-LM's text form.

    >>> _format_layout((1, 2, 1))
    'Et|tt|tL'
    """
    return "E" + "|".join("t" * count for count in stages) + "L"


def _read_pipeline(config: ConfigValues) -> Facts:
    pipeline, layers = config.count(_PIPELINE, 1), config.count("--num-layers")
    if sum(key in config for key in (_LAYOUT, _VIRTUAL, _CHUNK_LAYERS)) > 1:
        raise config.build_error(_LAYOUT, f"one of {_LAYOUT}, {_VIRTUAL} and {_CHUNK_LAYERS}, met several")
    stages = _read_layout(config, pipeline) if _LAYOUT in config else _read_even(config, pipeline, layers)
    if sum(stages) != layers:
        raise config.build_error(_LAYOUT, f"has the layers of --num-layers {layers}, met {sum(stages)}")
    chunks = len(stages) // pipeline
    if chunks > 1:
        _check_round(config, pipeline)
    schedule = "interleaved" if chunks > 1 else ONE_FORWARD_ONE_BACKWARD
    return {"plan.pipeline": pipeline, "plan.chunks": chunks, "plan.schedule": schedule, "plan.stages": stages}


def _check_round(config: ConfigValues, pipeline: int) -> None:
    """Raise `UserError` where rounds of microbatches are not those of the schedule here, which is torch's."""
    batch = _read_batch(config)
    num_microbatches = batch["training.global_batch"] // (batch["plan.data"] * batch["plan.microbatch"])
    if num_microbatches >= pipeline:
        round_size, own_size = find_round_size(pipeline, num_microbatches), config.count(_ROUND, pipeline)
        if own_size != round_size:
            raise config.build_error(_ROUND, f"is {round_size} with {num_microbatches} microbatches, met {own_size}")


def _read_layout(config: ConfigValues, pipeline: int) -> tuple[int, ...]:
    text = str(config.get(_LAYOUT))
    if not re.fullmatch(r"E[t|]*L", text) or (text.count("|") + 1) % pipeline:
        raise config.build_error(
            _LAYOUT, f"is E, layers t of stages of {pipeline} ranks and L, as in Ett|tL, met {format_value(text)}"
        )
    return tuple(map(len, text[1:-1].split("|")))


def _read_even(config: ConfigValues, pipeline: int, layers: int) -> tuple[int, ...]:
    chunks = config.count(_VIRTUAL, 1)
    if _CHUNK_LAYERS in config:
        chunks = max(1, layers // (config.count(_CHUNK_LAYERS) * pipeline))
    if chunks * pipeline > layers or layers % (chunks * pipeline):
        raise config.build_error(_PIPELINE, f"stages({chunks * pipeline}) divide --num-layers {layers}")
    return (layers // (chunks * pipeline),) * (chunks * pipeline)


def _say_context(facts: Facts) -> Values:
    context = facts["plan.context"]
    if context == 1:
        return {}
    if facts["training.sequence"] % (2 * context):
        limit = "a divisor of half the sequence, for each rank has two parts"
        raise UnsayableError(Reason("plan.context", limit, f"{context} of {facts['training.sequence']} tokens"))
    return {_CONTEXT: context, _COMM_TYPE: dict(_ATTENTIONS)[facts["plan.attention"]]}


def _read_context(config: ConfigValues) -> Facts:
    context, attention = config.count(_CONTEXT, 1), config.choice(_COMM_TYPE, _ATTENTIONS, "p2p")
    return {"plan.context": context, "plan.attention": attention if context > 1 else None}


def _say_zero(facts: Facts) -> Values:
    zero, shards, overlap = facts["plan.zero"], facts["plan.zero_shards"], facts["plan.overlap_gradients"]
    if not facts["plan.reshard_after_forward"]:
        return {_TORCH: True, _NO_RESHARD: True, _NO_FUSION: True, _FORMAT: "torch_dist"}
    values: Values = {_OVERLAP: True} if overlap else {}
    if zero:
        values |= {_DISTRIBUTED: True} | ({_INSTANCES: facts["plan.data"] // shards} if shards else {})
    if zero > 1:
        values |= {_FSDP: True, _STRATEGY: dict(_STRATEGIES)[zero], _FORMAT: "fsdp_dtensor"}
    return values | ({_OVERLAP_GATHER: True} if zero == 3 and overlap else {})


def _read_zero(config: ConfigValues) -> Facts:
    if config.flag(_TORCH, False):
        return _read_torch(config)
    config.forbid((_NO_RESHARD, _NO_FUSION), f"needs {_TORCH}, met none")
    zero = int(config.flag(_DISTRIBUTED, False))
    if config.flag(_FSDP, False):
        zero = config.choice(_STRATEGY, _STRATEGIES)
        config.word(_FORMAT, ("fsdp_dtensor",))
    else:
        config.forbid((_STRATEGY, _FORMAT), f"needs {_FSDP}, met none")
    overlap, gathers_beside = config.flag(_OVERLAP, False), config.flag(_OVERLAP_GATHER, False)
    if gathers_beside != (overlap and zero == 3):
        raise config.build_error(_OVERLAP_GATHER, f"goes with {_OVERLAP} and optim_grads_params, and they with it")
    facts = {"plan.zero": zero, "plan.overlap_gradients": overlap, "plan.zero_shards": _read_shards(config, zero)}
    return facts | {"plan.reshard_after_forward": True}


def _read_torch(config: ConfigValues) -> Facts:
    """Return the facts of torch's FSDP2: it shards over all data ranks and always overlaps its collectives."""
    excluded_keys = (_DISTRIBUTED, _INSTANCES, _FSDP, _STRATEGY, _OVERLAP, _OVERLAP_GATHER, _OFFLOAD, _FP16)
    config.forbid(excluded_keys, f"goes without {_TORCH}, met both")
    if wrong_key := next((key for key in (_PIPELINE, _EXPERT) if config.count(key, 1) > 1), None):
        raise config.build_error(wrong_key, f"1 with {_TORCH}, met {config.get(wrong_key)}")
    for needed_key in (_NO_FUSION, _UNTIED):
        config.word(needed_key, (True,))
    if config.word(_FORMAT, ("torch_dist", "torch_dcp"), "torch_dist") == "torch_dcp" and config.count(_TENSOR, 1) > 1:
        raise config.build_error(_FORMAT, "torch_dist with tensor ranks, met torch_dcp")
    facts = {"plan.zero": 3, "plan.overlap_gradients": True, "plan.zero_shards": 0}
    return facts | {"plan.reshard_after_forward": not config.flag(_NO_RESHARD, False)}


def _check_torch(facts: Facts) -> Iterator[Reason]:
    """Yield what does not go with torch's FSDP2, the only way of Megatron-LM to keep parameters after forward.

    Gradients have the precision of parameters: `get_model` passes no other to torch's wrapper.
    """
    for axis in ("pipeline", "expert"):
        if facts[f"plan.{axis}"] > 1:
            yield build_reason(facts, f"plan.{axis}", f"1 where parameters are kept after forward ({_TORCH})")
    limits: tuple[tuple[str, Any, str], ...] = (
        ("plan.zero_shards", 0, "shards over all data ranks"),
        ("plan.overlap_gradients", True, "always sums gradients beside backward"),
        ("plan.offload", NO_OFFLOADING, "goes without the distributed optimizer"),
        ("model.tied_embeddings", False, f"needs {_UNTIED}"),
    )
    for field, value, reason in limits:
        if facts[field] != value:
            yield build_reason(facts, field, f"{format_fact(value)} with {_TORCH}, which {reason}")
    if (precision := facts["training.precision"]) == "fp16":
        yield build_reason(facts, "training.precision", f"bf16, fp8 or fp32 with {_TORCH}")
    elif precision != "fp32" and facts["training.gradient_precision"] != "same":
        limit = f"same with {_TORCH}, which sums gradients as parameters are"
        yield build_reason(facts, "training.gradient_precision", limit)


def _read_shards(config: ConfigValues, zero: int) -> int:
    instances = config.count(_INSTANCES, 1)
    if instances == 1:
        return 0
    data = _read_batch(config)["plan.data"]
    if not zero or data % instances:
        raise config.build_error(_INSTANCES, f"divides the data ranks({data}) of {_DISTRIBUTED}, met {instances}")
    return int(data // instances)


def _list_core_operators(attention: str) -> tuple[str, ...]:
    """Return the operators of the attention core: several for unfused attention, else one."""
    return UNFUSED_CORE if attention == UNFUSED else ("attention",)


def _read_core_operators(config: ConfigValues) -> tuple[str, ...]:
    return _list_core_operators(str(config.get("--attention-backend", "flash")))


def _say_recompute(facts: Facts) -> Values:
    recompute, core_operators = facts["plan.recompute"], _list_core_operators(facts["model.attention"])
    if recompute is Recompute.NONE:
        return {}
    if recompute is Recompute.SELECTIVE:
        return {_GRANULARITY: "selective"}
    if recompute is Recompute.FULL:
        return {_GRANULARITY: "full", _METHOD: "uniform", _LAYERS: 1}
    if isinstance(recompute, FirstLayers) and recompute.layer is Recompute.FULL:
        return {_GRANULARITY: "full", _METHOD: "block", _LAYERS: recompute.layers}
    if isinstance(recompute, SomeOperators) and (
        words := split_into_modules(recompute.names, {CORE: core_operators} | _OPERATORS)
    ):
        if "moe_act" in words and facts["training.precision"] == "fp8":  # as ``transformer_config.py`` says
            limit = f"no activation of experts with fp8, whose scaling is delayed ({_MODULES} moe_act)"
            raise UnsayableError(build_reason(facts, "plan.recompute", limit))
        return {_GRANULARITY: "selective", _MODULES: words}
    values = say_layers(recompute, list_layer_modules(core_operators))
    if not values:
        limit = f"{SAYABLE_BY_ARGUMENTS}, or by stage none, selective, or norms, attention and activation ({SPEC})"
        raise UnsayableError(build_reason(facts, "plan.recompute", limit))
    if reasons := tuple(_check_layers(facts, values[RECOMPUTED])):
        raise UnsayableError(*reasons)
    return values


SAYABLE_BY_ARGUMENTS = (
    f"none, selective, full, full of the first layers of all stages, or operators of modules ({_GRANULARITY})"
)


def _check_layers(facts: Facts, pairs: Any) -> Iterator[Reason]:
    """Yield why layers that the script defines do not suit the model or its precision."""
    is_quantised = facts["training.precision"] == "fp8" and collect_modules(pairs) & set(QUANTISED)
    limits = (
        (facts["model.experts"] is not None, "with experts, which layers of the script's own do not have"),
        (facts["model.latent"] is not None, "with latent attention, which layers of the script's own do not have"),
        (is_quantised, "with fp8, whose delayed scaling goes with no norm or activation that is computed again"),
    )
    for is_wrong, reason in limits:
        if is_wrong:
            yield build_reason(facts, "plan.recompute", f"{SAYABLE_BY_ARGUMENTS} {reason} ({SPEC})")


def _read_recompute(config: ConfigValues) -> Facts:
    if RECOMPUTED in config or SPEC in config:
        return {"plan.recompute": _read_layers(config)}
    granularity = config.word(_GRANULARITY, ("none", "selective", "full"), "none")
    if granularity != "selective":
        config.forbid((_MODULES,), f"needs {_GRANULARITY} selective, met {granularity}")
    if granularity != "full":
        config.forbid((_METHOD, _LAYERS), f"needs {_GRANULARITY} full, met {granularity}")
        return {"plan.recompute": _read_modules(config) if granularity == "selective" else Recompute.NONE}
    method, layers = config.word(_METHOD, ("uniform", "block")), config.count(_LAYERS)
    if method == "uniform" and layers != 1:
        raise config.build_error(_LAYERS, f"1 with uniform, for each layer is kept at its start, met {layers}")
    return {"plan.recompute": Recompute.FULL if method == "uniform" else FirstLayers(Recompute.FULL, layers)}


def _read_layers(config: ConfigValues) -> Recomputation:
    """Return what the layers that the script defines recompute."""
    if RECOMPUTED not in config or config.get(SPEC) != LAYER_SPEC:
        spec_text = format_value(config.get(SPEC)) if RECOMPUTED in config else "none"
        raise config.build_error(SPEC, f"is {' '.join(LAYER_SPEC)}, a module that the script writes, met {spec_text}")
    excluded_keys = (_GRANULARITY, _METHOD, _LAYERS, _MODULES, GROUPED_PRODUCTS, EXPERTS, _LATENT)
    config.forbid(excluded_keys, f"goes without {SPEC}, met both")
    value = config.get(RECOMPUTED, ())
    try:
        recompute = read_layers(value, list_layer_modules(_read_core_operators(config)))
    except ValueError as error:
        raise config.build_error(RECOMPUTED, str(error)) from None
    if _FP8 in config and collect_modules(value) & set(QUANTISED):
        raise config.build_error(_FP8, f"goes without {', '.join(QUANTISED)} in {RECOMPUTED}, met both")
    return recompute


def _read_modules(config: ConfigValues) -> Recompute | SomeOperators:
    file_words = config.get(_MODULES, CORE)
    words = file_words if isinstance(file_words, list) else [file_words]
    modules = {CORE: _read_core_operators(config)} | _OPERATORS
    if len(set(map(str, words))) < len(words) or not all(word in modules for word in map(str, words)):
        raise config.build_error(
            _MODULES, f"is some of {', '.join(modules)}, each once, met {format_value(file_words)}"
        )
    if "moe_act" in words and EXPERTS not in config:
        raise config.build_error(_MODULES, f"moe_act needs {EXPERTS}")
    if "moe_act" in words and _FP8 in config:
        raise config.build_error(_FP8, "goes without moe_act, met both")
    if "mla_up_proj" in words and not config.flag(_LATENT, False):
        raise config.build_error(_MODULES, f"mla_up_proj needs {_LATENT}")
    names = tuple(name for word in words for name in modules[word])
    return Recompute.SELECTIVE if words == [CORE] else SomeOperators(names)


def _say_offload(facts: Facts) -> Values:
    offload: Offloading = facts["plan.offload"]
    if offload == NO_OFFLOADING:
        return {}
    if offload != Offloading(optimizer=offload.optimizer) or len(offload.optimizer) > 1:
        limit = f"one fraction of the optimizer's states, stepped on the host ({_FRACTION})"
        raise UnsayableError(build_reason(facts, "plan.offload", limit))
    if not facts["plan.zero"]:
        raise UnsayableError(Reason("plan.offload", f"nothing without {_DISTRIBUTED}", "zero 0"))
    return {_OFFLOAD: True, _FRACTION: offload.optimizer[0], _PRECISION_AWARE: True}


def _read_offload(config: ConfigValues) -> Facts:
    if not config.flag(_OFFLOAD, False):
        config.forbid((_FRACTION, _PRECISION_AWARE), f"needs {_OFFLOAD}, met none")
        return {"plan.offload": NO_OFFLOADING}
    config.word(_PRECISION_AWARE, (True,))
    fraction = config.get(_FRACTION, 1.0)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise config.build_error(_FRACTION, f"is more than 0 and at most 1, met {format_value(fraction)}")
    return {"plan.offload": Offloading(optimizer=(float(fraction),))}


def _say_precision(facts: Facts) -> Values:
    precision, gradients = facts["training.precision"], facts["training.gradient_precision"]
    words: dict[str, Values] = {
        "fp32": {},
        "bf16": {_BF16: True},
        "fp16": {_FP16: True},
        "fp8": {_BF16: True, _FP8: "hybrid"},
    }
    if precision not in words:
        raise UnsayableError(build_reason(facts, "training.precision", "fp32, bf16, fp16 or fp8"))
    is_half = precision in ("bf16", "fp8")
    if is_half and gradients == "same":
        return words[precision] | {_IN_BF16: True}
    return words[precision] | ({_IN_FP32: True} if precision == "fp16" and gradients == "fp32" else {})


def _read_precision(config: ConfigValues) -> Facts:
    bf16, fp16 = config.flag(_BF16, False), config.flag(_FP16, False)
    fp8 = config.word(_FP8, (False, "hybrid"), False) == "hybrid"
    if (bf16 and fp16) or (fp8 and not bf16):
        raise config.build_error(_FP8 if fp8 else _FP16, f"{_BF16} or {_FP16}, and {_FP8} with {_BF16}")
    precision = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    wide_flags = config.flag(_IN_FP32, False), config.flag(_IN_BF16, False)
    # Megatron-LM sums gradients of bf16 in fp32 unless told otherwise (never by FSDP2), those of fp16 only if told so
    is_same = wide_flags[1] or _TORCH in config if bf16 else fp16 and not wide_flags[0]
    return {"training.precision": precision, "training.gradient_precision": "same" if is_same else "fp32"}


def _check_combinations(facts: Facts) -> Iterator[Reason]:
    expert, context = facts["plan.expert"], facts["plan.context"]
    if expert > 1 and context > 1:
        yield Reason("plan.expert", "1 with context ranks, which it makes expert ranks first", f"context {context}")
    if facts["model.experts"] is not None and facts["plan.tensor"] > 1 and not facts["plan.sequence_parallel"]:
        # `MoELayer.forward` of ``megatron/core/transformer/moe/moe_layer.py`` raises in training
        yield build_reason(facts, "plan.sequence_parallel", "true with experts and tensor ranks")
    if expert > 1 and facts["training.precision"] == "fp16":
        yield build_reason(facts, "training.precision", "not fp16 with expert parallelism")
    if facts["plan.zero"] > 1 and facts["plan.chunks"] > 1:
        yield Reason("plan.zero", "0 or 1 with chunks, of which the map knows no run with Megatron-FSDP", "interleaved")
    if not facts["plan.reshard_after_forward"]:
        yield from _check_torch(facts)


_CLIPPING = map_word("--clip-grad", "training.gradient_clipping", ((True, 1.0), (False, 0.0)))
_CLIPPING_OR_DEFAULT = replace(
    _CLIPPING, read=map_word("--clip-grad", "training.gradient_clipping", ((True, 1.0), (False, 0.0)), 1.0).read
)
"""Clipping is always written; a script without it has Megatron-LM's own, 1.0."""

_MAP: tuple[Entry, ...] = (
    Entry(
        (_MICRO, _GLOBAL, NODES, RANKS_PER_NODE),
        ("plan.microbatch", "plan.data", "training.global_batch"),
        _say_batch,
        _read_batch,
    ),
    map_count(_TENSOR, "plan.tensor", 1),
    map_flag("--sequence-parallel", "plan.sequence_parallel"),
    map_flag("--tp-comm-overlap", "plan.overlap_tensor"),
    Entry(
        (_LAYOUT, _PIPELINE, _VIRTUAL, _CHUNK_LAYERS, _ROUND),
        ("plan.stages", "plan.pipeline", "plan.chunks", "plan.schedule"),
        _say_pipeline,
        _read_pipeline,
    ),
    map_flag("--no-scatter-gather-tensors-in-pipeline", "plan.scatter_gather", False, True),
    Entry((_CONTEXT, _COMM_TYPE), ("plan.context", "plan.attention"), _say_context, _read_context),
    map_count(_EXPERT, "plan.expert", 1),
    Entry(
        (
            _DISTRIBUTED,
            _INSTANCES,
            _FSDP,
            _STRATEGY,
            _FORMAT,
            _OVERLAP,
            _OVERLAP_GATHER,
            _TORCH,
            _NO_RESHARD,
            _NO_FUSION,
        ),
        ("plan.zero", "plan.zero_shards", "plan.overlap_gradients", "plan.reshard_after_forward"),
        _say_zero,
        _read_zero,
    ),
    Entry(
        (_GRANULARITY, _METHOD, _LAYERS, _MODULES, RECOMPUTED, SPEC),
        ("plan.recompute",),
        _say_recompute,
        _read_recompute,
    ),
    Entry((_OFFLOAD, _FRACTION, _PRECISION_AWARE), ("plan.offload",), _say_offload, _read_offload),
    map_count("--seq-length", "training.sequence"),
    Entry(
        (_BF16, _FP16, _FP8, _IN_FP32, _IN_BF16),
        ("training.precision", "training.gradient_precision"),
        _say_precision,
        _read_precision,
    ),
    map_word("--optimizer", "training.optimizer", (("adamw", "adam"), ("sgd", "sgd")), "adam"),
    _CLIPPING_OR_DEFAULT,
    *MODEL_MAP,
    *RUN_ENTRIES,
    fix_field("model.window", None, "sliding windows are not in the field map"),
    fix_field("model.parallel_residual", False, "which it does not have"),
    *COMMON_ENTRIES,
)

MEGATRON = Target("megatron", "core 0.16.1", _MAP, write, parse, _check_combinations)
