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
from typing import Any

from meshwise.executor.supported import UNFUSED_CORE
from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.files.reader import Document
from meshwise.scenarios.interchange.entry import (
    ONE_FORWARD_ONE_BACKWARD,
    PLAIN,
    Always,
    Count,
    Entry,
    Reason,
    Together,
    Unsayable,
    Values,
    Word,
    one_size,
)
from meshwise.scenarios.interchange.facts import Facts, Request, plainly
from meshwise.scenarios.interchange.lines import Pair, Stated, argument, document
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
from meshwise.scenarios.interchange.target import Target
from meshwise.simulator.models.attention import UNFUSED
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.offloading import NOTHING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute, SomeOperators

NODES, EACH = "NNODES", "NPROC_PER_NODE"
"""Variables of the script: the number of hosts, and of ranks on each."""

_ORDERED = ("tensor-model", "context")
"""Axes whose collectives have to be launched in order before Blackwell (``CUDA_DEVICE_MAX_CONNECTIONS=1``)."""

_SHARD_PARAMETERS = {"--use-megatron-fsdp", "--use-torch-fsdp2"}
"""Arguments that shard parameters: gathers overlap with products, which needs more than one queue of kernels."""

_HEAD = """#!/bin/bash
# {title}
# For Megatron-LM ({called}; `meshwise export --to megatron`). On each host, in its folder:
#   NODE_RANK=0 MASTER_ADDR=host0 bash FILE --data-path ...
{remarks}{nodes}={hosts}
{each}={ranks}
{environment}{layers}ARGUMENTS=(
"""
_FOOT = """)
torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --node-rank "${NODE_RANK:-0}" \\
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \\
    pretrain_gpt.py "${ARGUMENTS[@]}" "$@"
"""
_UNCLIPPED = """# --clip-grad 0.0 clips nothing: the scenario has gradient_clipping false, or says nothing of it.
#   Megatron-LM's own default is 1.0.
"""
_ROUTING = """# Routing is priced with {load}. What balances it is yours to state:
#   --moe-aux-loss-coeff, 0.0 where nothing is stated.
"""
_ONE_CONNECTION = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"


def write(values: Values, request: Request, called: str) -> str:
    """Return the script, with one queue of kernels a device where `validate_args` of Megatron-LM requires it.

    Where layers recompute something that no argument expresses, a Python module of layers precedes the arguments.
    """
    hosts, ranks = request.hosts
    ordered = any(f"--{axis}-parallel-size" in values for axis in _ORDERED)
    one = ordered and not values.keys() & _SHARD_PARAMETERS
    environment = _ONE_CONNECTION if one else ""
    head = _HEAD.format(
        title=request.title,
        called=called,
        remarks="".join(_remarks(values, request)),
        nodes=NODES,
        each=EACH,
        hosts=hosts,
        ranks=ranks,
        environment=environment,
        layers=write_layers(values[RECOMPUTED]) if RECOMPUTED in values else "",
    )
    arguments = (_argument(key, value) for key, value in values.items() if key != RECOMPUTED)
    return head + "".join(f"    {argument}\n" for argument in arguments) + _FOOT


def _remarks(values: Values, request: Request) -> Iterator[str]:
    """Yield comments about gradient clipping and the load of experts, where defaults of Megatron-LM may surprise."""
    if values.get("--clip-grad") == 0:
        yield _UNCLIPPED
    if isinstance(request.spec, Transformer) and (experts := request.spec.experts):
        balanced = experts.imbalance == 1
        load = "balanced experts" if balanced else f"an expert of {experts.imbalance:g} times the mean load"
        yield _ROUTING.format(load=load)


def _argument(key: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join((key, *value))
    return key if value is True else f"{key} '{value}'" if re.search(r"[|()*\[]", str(value)) else f"{key} {value}"


_IGNORED = re.compile(r"#.*|ARGUMENTS=\(|\)||export CUDA_DEVICE_MAX_CONNECTIONS=1")


def parse(content: bytes, file: str) -> Document:
    """Return the document of a script, argument by argument; ``ScenarioError`` where a line is nothing it may have."""
    foot = _FOOT.removeprefix(")\n").encode()
    stripped = strip_layers(content, file)
    return document(stripped.removesuffix(foot), file, _pair if stripped == content else _parse_line_beside_layers)


def _parse_line_beside_layers(line: str) -> Pair | None:
    return parse_literal(line) or _pair(line)


def _pair(line: str) -> Pair | None:
    if _IGNORED.fullmatch(line):
        return None
    if found := re.fullmatch(rf"({NODES}|{EACH})=([0-9]{{1,9}})", line):
        return found[1], int(found[2])
    return argument(line)


_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_VIRTUAL, _LAYOUT = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
_LAYERS_OF_ONE = "--num-layers-per-virtual-pipeline-stage"
_CONTEXT, _HOW = "--context-parallel-size", "--cp-comm-type"
_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"
_DISTRIBUTED, _INSTANCES = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
_FSDP, _STRATEGY, _FORMAT = "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--ckpt-format"
_OVERLAP, _OVERLAP_GATHER = "--overlap-grad-reduce", "--overlap-param-gather"
_TORCH, _KEPT = "--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"
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
_OFFLOAD, _FRACTION, _AWARE = (
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--use-precision-aware-optimizer",
)
_BF16, _FP16, _FP8 = "--bf16", "--fp16", "--fp8-format"
_IN_FP32, _IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
_STRATEGIES = ((2, "optim_grads"), (3, "optim_grads_params"))
_ATTENTIONS = ((Attention.RING, "p2p"), (Attention.ALL_GATHER, "allgather"), (Attention.ULYSSES, "a2a"))


def _read_batch(stated: Stated) -> Facts:
    """Return batch sizes and data ranks, which have no key: they are all ranks divided by the other degrees."""
    ranks = stated.count(NODES) * stated.count(EACH)
    others = stated.count(_TENSOR, 1) * stated.count(_PIPELINE, 1) * stated.count(_CONTEXT, 1)
    if ranks % others:
        raise stated.fault(EACH, f"{NODES} * {EACH} is a multiple of the other degrees({others}), met {ranks}")
    size, whole = stated.count(_MICRO), stated.count(_GLOBAL)
    return {"plan.data": ranks // others, "plan.microbatch": size, "training.global_batch": whole}


def _say_batch(facts: Facts) -> Values:
    return {_MICRO: one_size(facts), _GLOBAL: facts["training.global_batch"]}


def _say_pipeline(facts: Facts) -> Values:
    pipeline, chunks, stages = facts["plan.pipeline"], facts["plan.chunks"], facts["plan.stages"]
    own = "interleaved" if chunks > 1 else ONE_FORWARD_ONE_BACKWARD
    if facts["plan.schedule"] != own:
        can = "1f1b, or interleaved with chunks"
        raise Unsayable(Reason("plan.schedule", can, plainly(facts["plan.schedule"]).split("\n")[0][:60]))
    values: Values = {} if pipeline == 1 else {_PIPELINE: pipeline}
    if len(set(stages)) > 1:
        return values | {_LAYOUT: _layout(stages)}
    return values | ({_VIRTUAL: chunks} if chunks > 1 else {})


def _layout(stages: tuple[int, ...]) -> str:
    """Return the layers of every stage in Megatron-LM's text form.

    >>> _layout((1, 2, 1))
    'Et|tt|tL'
    """
    return "E" + "|".join("t" * count for count in stages) + "L"


def _read_pipeline(stated: Stated) -> Facts:
    pipeline, layers = stated.count(_PIPELINE, 1), stated.count("--num-layers")
    if sum(key in stated for key in (_LAYOUT, _VIRTUAL, _LAYERS_OF_ONE)) > 1:
        raise stated.fault(_LAYOUT, f"one of {_LAYOUT}, {_VIRTUAL} and {_LAYERS_OF_ONE}, met several")
    stages = _read_layout(stated, pipeline) if _LAYOUT in stated else _read_even(stated, pipeline, layers)
    if sum(stages) != layers:
        raise stated.fault(_LAYOUT, f"has the layers of --num-layers {layers}, met {sum(stages)}")
    chunks = len(stages) // pipeline
    schedule = "interleaved" if chunks > 1 else ONE_FORWARD_ONE_BACKWARD
    return {"plan.pipeline": pipeline, "plan.chunks": chunks, "plan.schedule": schedule, "plan.stages": stages}


def _read_layout(stated: Stated, pipeline: int) -> tuple[int, ...]:
    text = str(stated.get(_LAYOUT))
    if not re.fullmatch(r"E[t|]*L", text) or (text.count("|") + 1) % pipeline:
        raise stated.fault(
            _LAYOUT, f"is E, layers t of stages of {pipeline} ranks and L, as in Ett|tL, met {shown(text)}"
        )
    return tuple(map(len, text[1:-1].split("|")))


def _read_even(stated: Stated, pipeline: int, layers: int) -> tuple[int, ...]:
    chunks = stated.count(_VIRTUAL, 1)
    if _LAYERS_OF_ONE in stated:
        chunks = max(1, layers // (stated.count(_LAYERS_OF_ONE) * pipeline))
    if chunks * pipeline > layers or layers % (chunks * pipeline):
        raise stated.fault(_PIPELINE, f"stages({chunks * pipeline}) divide --num-layers {layers}")
    return (layers // (chunks * pipeline),) * (chunks * pipeline)


def _say_context(facts: Facts) -> Values:
    context = facts["plan.context"]
    if context == 1:
        return {}
    if facts["training.sequence"] % (2 * context):
        can = "a divisor of half the sequence, for each rank has two parts"
        raise Unsayable(Reason("plan.context", can, f"{context} of {facts['training.sequence']} tokens"))
    return {_CONTEXT: context, _HOW: dict(_ATTENTIONS)[facts["plan.attention"]]}


def _read_context(stated: Stated) -> Facts:
    context = stated.count(_CONTEXT, 1)
    word = stated.word(_HOW, tuple(word for _, word in _ATTENTIONS), "p2p")
    how = next(own for own, one in _ATTENTIONS if one == word)
    return {"plan.context": context, "plan.attention": how if context > 1 else None}


def _say_zero(facts: Facts) -> Values:
    zero, shards, overlap = facts["plan.zero"], facts["plan.zero_shards"], facts["plan.overlap_gradients"]
    if not facts["plan.reshard_after_forward"]:
        return {_TORCH: True, _KEPT: True, _NO_FUSION: True, _FORMAT: "torch_dist"}
    values: Values = {_OVERLAP: True} if overlap else {}
    if zero:
        values |= {_DISTRIBUTED: True} | ({_INSTANCES: facts["plan.data"] // shards} if shards else {})
    if zero > 1:
        values |= {_FSDP: True, _STRATEGY: dict(_STRATEGIES)[zero], _FORMAT: "fsdp_dtensor"}
    return values | ({_OVERLAP_GATHER: True} if zero == 3 and overlap else {})


def _read_zero(stated: Stated) -> Facts:
    if stated.flag(_TORCH, False):
        return _read_torch(stated)
    if alone := next((key for key in (_KEPT, _NO_FUSION) if key in stated), None):
        raise stated.fault(alone, f"needs {_TORCH}, met none")
    zero = int(stated.flag(_DISTRIBUTED, False))
    if stated.flag(_FSDP, False):
        word = stated.word(_STRATEGY, tuple(word for _, word in _STRATEGIES))
        zero = next(own for own, one in _STRATEGIES if one == word)
        stated.word(_FORMAT, ("fsdp_dtensor",))
    elif _STRATEGY in stated or _FORMAT in stated:
        raise stated.fault(_STRATEGY if _STRATEGY in stated else _FORMAT, f"needs {_FSDP}, met none")
    overlap, gather = stated.flag(_OVERLAP, False), stated.flag(_OVERLAP_GATHER, False)
    if gather != (overlap and zero == 3):
        raise stated.fault(_OVERLAP_GATHER, f"goes with {_OVERLAP} and optim_grads_params, and they with it")
    return {
        "plan.zero": zero,
        "plan.overlap_gradients": overlap,
        "plan.zero_shards": _shards(stated, zero),
        "plan.reshard_after_forward": True,
    }


def _read_torch(stated: Stated) -> Facts:
    """Return the facts of torch's FSDP2: it shards over all data ranks and always overlaps its collectives."""
    others = (_DISTRIBUTED, _INSTANCES, _FSDP, _STRATEGY, _OVERLAP, _OVERLAP_GATHER, _OFFLOAD, _FP16)
    if wrong := next((key for key in others if key in stated), None):
        raise stated.fault(wrong, f"goes without {_TORCH}, met both")
    if wrong := next((key for key in (_PIPELINE, _EXPERT) if stated.count(key, 1) > 1), None):
        raise stated.fault(wrong, f"1 with {_TORCH}, met {stated.get(wrong)}")
    for needed in (_NO_FUSION, _UNTIED):
        stated.word(needed, (True,))
    if stated.word(_FORMAT, ("torch_dist", "torch_dcp"), "torch_dist") == "torch_dcp" and stated.count(_TENSOR, 1) > 1:
        raise stated.fault(_FORMAT, "torch_dist with tensor ranks, met torch_dcp")
    kept = stated.flag(_KEPT, False)
    facts = {"plan.zero": 3, "plan.overlap_gradients": True, "plan.zero_shards": 0}
    return facts | {"plan.reshard_after_forward": not kept}


def _beside_torch(facts: Facts) -> Iterator[Reason]:
    """Yield what does not go with torch's FSDP2, the only way of Megatron-LM to keep parameters after forward.

    Gradients have the precision of parameters: `get_model` passes no other to torch's wrapper.
    """
    for axis in ("pipeline", "expert"):
        if (ranks := facts[f"plan.{axis}"]) > 1:
            yield Reason(f"plan.{axis}", f"1 where parameters are kept after forward ({_TORCH})", str(ranks))
    limits: tuple[tuple[str, Any, str], ...] = (
        ("plan.zero_shards", 0, "shards over all data ranks"),
        ("plan.overlap_gradients", True, "always sums gradients beside backward"),
        ("plan.offload", NOTHING, "goes without the distributed optimizer"),
        ("model.tied_embeddings", False, f"needs {_UNTIED}"),
    )
    for field, value, why in limits:
        if facts[field] != value:
            yield Reason(field, f"{plainly(value)} with {_TORCH}, which {why}", plainly(facts[field]))
    if (precision := facts["training.precision"]) == "fp16":
        yield Reason("training.precision", f"bf16, fp8 or fp32 with {_TORCH}", precision)
    elif precision != "fp32" and facts["training.gradient_precision"] != "same":
        can = f"same with {_TORCH}, which sums gradients as parameters are"
        yield Reason("training.gradient_precision", can, plainly(facts["training.gradient_precision"]))


def _shards(stated: Stated, zero: int) -> int:
    instances = stated.count(_INSTANCES, 1)
    if instances == 1:
        return 0
    data = _read_batch(stated)["plan.data"]
    if not zero or data % instances:
        raise stated.fault(_INSTANCES, f"divides the data ranks({data}) of {_DISTRIBUTED}, met {instances}")
    return int(data // instances)


def _list_core_operators(attention: str) -> tuple[str, ...]:
    """Return the operators of the attention core: several for unfused attention, else one."""
    return UNFUSED_CORE if attention == UNFUSED else ("attention",)


def _say_recompute(facts: Facts) -> Values:
    how, core = facts["plan.recompute"], _list_core_operators(facts["model.attention"])
    if how is Recompute.NONE:
        return {}
    if how is Recompute.SELECTIVE:
        return {_GRANULARITY: "selective"}
    if how is Recompute.FULL:
        return {_GRANULARITY: "full", _METHOD: "uniform", _LAYERS: 1}
    if isinstance(how, FirstLayers) and how.layer is Recompute.FULL:
        return {_GRANULARITY: "full", _METHOD: "block", _LAYERS: how.layers}
    if isinstance(how, SomeOperators) and (words := split_into_modules(how.names, {CORE: core} | _OPERATORS)):
        if reasons := tuple(_check_modules(facts, words)):
            raise Unsayable(*reasons)
        return {_GRANULARITY: "selective", _MODULES: words}
    values = say_layers(how, list_layer_modules(core))
    if not values:
        can = f"{SAYABLE_BY_ARGUMENTS}, or by stage none, selective, or norms, attention and activation ({SPEC})"
        raise Unsayable(Reason("plan.recompute", can, plainly(how)))
    if reasons := tuple(_check_layers(facts, values[RECOMPUTED])):
        raise Unsayable(*reasons)
    return values


SAYABLE_BY_ARGUMENTS = (
    f"none, selective, full, full of the first layers of all stages, or operators of modules ({_GRANULARITY})"
)


def _check_modules(facts: Facts, words: list[str]) -> Iterator[Reason]:
    """Yield why arguments cannot recompute modules in the precision of the facts (``transformer_config.py``)."""
    if "moe_act" in words and facts["training.precision"] == "fp8":
        can = f"no activation of experts with fp8, whose scaling is delayed ({_MODULES} moe_act)"
        yield Reason("plan.recompute", can, plainly(facts["plan.recompute"]))


def _check_layers(facts: Facts, pairs: Any) -> Iterator[Reason]:
    """Yield why layers that the script defines do not suit the model or its precision."""
    quantised = facts["training.precision"] == "fp8" and collect_modules(pairs) & set(QUANTISED)
    limits = (
        (facts["model.experts"] is not None, "with experts, which layers of the script's own do not have"),
        (facts["model.latent"] is not None, "with latent attention, which layers of the script's own do not have"),
        (quantised, "with fp8, whose delayed scaling goes with no norm or activation that is computed again"),
    )
    met = plainly(facts["plan.recompute"])
    yield from (
        Reason("plan.recompute", f"{SAYABLE_BY_ARGUMENTS} {why} ({SPEC})", met) for wrong, why in limits if wrong
    )


def _read_recompute(stated: Stated) -> Facts:
    if RECOMPUTED in stated or SPEC in stated:
        return {"plan.recompute": _read_layers(stated)}
    what = stated.word(_GRANULARITY, ("none", "selective", "full"), "none")
    if what != "selective" and _MODULES in stated:
        raise stated.fault(_MODULES, f"needs {_GRANULARITY} selective, met {what}")
    if what != "full":
        if _METHOD in stated or _LAYERS in stated:
            raise stated.fault(_METHOD if _METHOD in stated else _LAYERS, f"needs {_GRANULARITY} full, met {what}")
        return {"plan.recompute": _read_modules(stated) if what == "selective" else Recompute.NONE}
    method, layers = stated.word(_METHOD, ("uniform", "block")), stated.count(_LAYERS)
    if method == "uniform" and layers != 1:
        raise stated.fault(_LAYERS, f"1 with uniform, for each layer is kept at its start, met {layers}")
    return {"plan.recompute": Recompute.FULL if method == "uniform" else FirstLayers(Recompute.FULL, layers)}


def _read_layers(stated: Stated) -> Recomputation:
    """Return what the layers that the script defines recompute."""
    if RECOMPUTED not in stated or stated.get(SPEC) != LAYER_SPEC:
        met = shown(stated.get(SPEC)) if RECOMPUTED in stated else "none"
        raise stated.fault(SPEC, f"is {' '.join(LAYER_SPEC)}, a module that the script writes, met {met}")
    others = (_GRANULARITY, _METHOD, _LAYERS, _MODULES, GROUPED_PRODUCTS, EXPERTS, _LATENT)
    if wrong := next((key for key in others if key in stated), None):
        raise stated.fault(wrong, f"goes without {SPEC}, met both")
    value = stated.get(RECOMPUTED, ())
    try:
        how = read_layers(
            value, list_layer_modules(_list_core_operators(str(stated.get("--attention-backend", "flash"))))
        )
    except ValueError as error:
        raise stated.fault(RECOMPUTED, str(error)) from None
    if _FP8 in stated and collect_modules(value) & set(QUANTISED):
        raise stated.fault(_FP8, f"goes without {', '.join(QUANTISED)} in {RECOMPUTED}, met both")
    return how


def _read_modules(stated: Stated) -> Recompute | SomeOperators:
    met = stated.get(_MODULES, CORE)
    words = met if isinstance(met, list) else [met]
    modules = {CORE: _list_core_operators(str(stated.get("--attention-backend", "flash")))} | _OPERATORS
    if len(set(map(str, words))) < len(words) or not all(word in modules for word in map(str, words)):
        raise stated.fault(_MODULES, f"is some of {', '.join(modules)}, each once, met {shown(met)}")
    if "moe_act" in words and EXPERTS not in stated:
        raise stated.fault(_MODULES, f"moe_act needs {EXPERTS}")
    if "moe_act" in words and _FP8 in stated:
        raise stated.fault(_FP8, "goes without moe_act, met both")
    if "mla_up_proj" in words and not stated.flag(_LATENT, False):
        raise stated.fault(_MODULES, f"mla_up_proj needs {_LATENT}")
    names = tuple(name for word in words for name in modules[word])
    return Recompute.SELECTIVE if words == [CORE] else SomeOperators(names)


def _say_offload(facts: Facts) -> Values:
    how: Offloading = facts["plan.offload"]
    if how == NOTHING:
        return {}
    if how != Offloading(optimizer=how.optimizer) or len(how.optimizer) > 1:
        can = f"one fraction of the optimizer's states, stepped on the host ({_FRACTION})"
        raise Unsayable(Reason("plan.offload", can, plainly(how)))
    if not facts["plan.zero"]:
        raise Unsayable(Reason("plan.offload", f"nothing without {_DISTRIBUTED}", "zero 0"))
    return {_OFFLOAD: True, _FRACTION: how.optimizer[0], _AWARE: True}


def _read_offload(stated: Stated) -> Facts:
    if not stated.flag(_OFFLOAD, False):
        if _FRACTION in stated or _AWARE in stated:
            raise stated.fault(_FRACTION if _FRACTION in stated else _AWARE, f"needs {_OFFLOAD}, met none")
        return {"plan.offload": NOTHING}
    stated.word(_AWARE, (True,))
    fraction = stated.get(_FRACTION, 1.0)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise stated.fault(_FRACTION, f"is more than 0 and at most 1, met {shown(fraction)}")
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
        raise Unsayable(Reason("training.precision", "fp32, bf16, fp16 or fp8", precision))
    half = precision in ("bf16", "fp8")
    if half and gradients == "same":
        return words[precision] | {_IN_BF16: True}
    return words[precision] | ({_IN_FP32: True} if precision == "fp16" and gradients == "fp32" else {})


def _read_precision(stated: Stated) -> Facts:
    bf16, fp16 = stated.flag(_BF16, False), stated.flag(_FP16, False)
    fp8 = stated.word(_FP8, (False, "hybrid"), False) == "hybrid"
    if (bf16 and fp16) or (fp8 and not bf16):
        raise stated.fault(_FP8 if fp8 else _FP16, f"{_BF16} or {_FP16}, and {_FP8} with {_BF16}")
    precision = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    wide = stated.flag(_IN_FP32, False), stated.flag(_IN_BF16, False)
    # Megatron-LM sums gradients of bf16 in fp32 unless told otherwise (never by FSDP2), those of fp16 only if told so
    same = wide[1] or _TORCH in stated if bf16 else fp16 and not wide[0]
    return {"training.precision": precision, "training.gradient_precision": "same" if same else "fp32"}


def _combinations(facts: Facts) -> Iterator[Reason]:
    expert, context = facts["plan.expert"], facts["plan.context"]
    if expert > 1 and context > 1:
        yield Reason("plan.expert", "1 with context ranks, which it makes expert ranks first", f"context {context}")
    if facts["model.experts"] is not None and facts["plan.tensor"] > 1 and not facts["plan.sequence_parallel"]:
        # `MoELayer.forward` of ``megatron/core/transformer/moe/moe_layer.py`` raises in training
        yield Reason("plan.sequence_parallel", "true with experts and tensor ranks", "false")
    if expert > 1 and facts["training.precision"] == "fp16":
        yield Reason("training.precision", "not fp16 with expert parallelism", "fp16")
    if facts["plan.zero"] > 1 and facts["plan.chunks"] > 1:
        yield Reason("plan.zero", "0 or 1 with chunks, of which the map knows no run with Megatron-FSDP", "interleaved")
    if not facts["plan.reshard_after_forward"]:
        yield from _beside_torch(facts)


def _flag(key: str, field: str, on: Any = True, off: Any = False) -> Word:
    return Word(key, field, ((on, True), (off, False)), False)


_MAP: tuple[Entry, ...] = (
    Together(
        (_MICRO, _GLOBAL, NODES, EACH),
        ("plan.microbatch", "plan.data", "training.global_batch"),
        _say_batch,
        _read_batch,
    ),
    Count(_TENSOR, "plan.tensor", 1),
    _flag("--sequence-parallel", "plan.sequence_parallel"),
    _flag("--tp-comm-overlap", "plan.overlap_tensor"),
    Together(
        (_LAYOUT, _PIPELINE, _VIRTUAL, _LAYERS_OF_ONE),
        ("plan.stages", "plan.pipeline", "plan.chunks", "plan.schedule"),
        _say_pipeline,
        _read_pipeline,
    ),
    _flag("--no-scatter-gather-tensors-in-pipeline", "plan.scatter_gather", False, True),
    Together((_CONTEXT, _HOW), ("plan.context", "plan.attention"), _say_context, _read_context),
    Count(_EXPERT, "plan.expert", 1),
    Together(
        (_DISTRIBUTED, _INSTANCES, _FSDP, _STRATEGY, _FORMAT, _OVERLAP, _OVERLAP_GATHER, _TORCH, _KEPT, _NO_FUSION),
        ("plan.zero", "plan.zero_shards", "plan.overlap_gradients", "plan.reshard_after_forward"),
        _say_zero,
        _read_zero,
    ),
    Together(
        (_GRANULARITY, _METHOD, _LAYERS, _MODULES, RECOMPUTED, SPEC),
        ("plan.recompute",),
        _say_recompute,
        _read_recompute,
    ),
    Together((_OFFLOAD, _FRACTION, _AWARE), ("plan.offload",), _say_offload, _read_offload),
    Count("--seq-length", "training.sequence"),
    Together(
        (_BF16, _FP16, _FP8, _IN_FP32, _IN_BF16),
        ("training.precision", "training.gradient_precision"),
        _say_precision,
        _read_precision,
    ),
    Word("--optimizer", "training.optimizer", (("adamw", "adam"), ("sgd", "sgd")), "adam"),
    Word("--clip-grad", "training.gradient_clipping", ((True, 1.0), (False, 0.0)), 1.0),
    *MODEL_MAP,
    Always("model.window", None, "sliding windows are not in the field map"),
    Always("model.parallel_residual", False, "which it does not have"),
    *PLAIN,
)

MEGATRON = Target("megatron", "core 0.16.1", _MAP, write, parse, _combinations)
to_megatron, from_megatron = MEGATRON.to, MEGATRON.read
