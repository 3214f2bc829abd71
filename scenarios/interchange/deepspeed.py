"""DeepSpeed: the configuration file (JSON) that ``deepspeed.initialize`` reads.

Pipelines and recomputation are part of the model's code in DeepSpeed (``PipelineModule(num_stages=...)``,
``deepspeed.checkpointing.checkpoint``), so the file cannot express them.

References
----------
DeepSpeed 0.19.8: ``deepspeed/runtime/config.py`` and ``constants.py`` (batches, precision, optimizer),
``.../zero/config.py`` and ``.../zero/offload_config.py``, ``.../tensor_parallel/config.py`` (AutoTP),
``deepspeed/module_inject/auto_ep_config.py`` and ``auto_ep_folding.py`` (AutoEP and its groups),
``deepspeed/__init__.py`` (``sequence_parallel_size`` with ``data_parallel_size``), ``.../runtime/engine.py``.
"""

import json
from collections.abc import Iterator

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.interchange.entry import (
    COMMON_ENTRIES,
    ONE_STAGE,
    Entry,
    Reason,
    UnsayableError,
    Values,
    build_reason,
    count_microbatches,
    find_microbatch,
    list_fixed,
    list_fixed_pipeline,
    map_count,
    map_word,
    require_key,
)
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues, nest_values
from meshwise.scenarios.interchange.recipe import (
    BETAS,
    EPSILON,
    ITERATIONS,
    LEARNING_RATE,
    MIN_LEARNING_RATE,
    WARMUP,
    WEIGHT_DECAY,
)
from meshwise.scenarios.interchange.script import MODEL_OF_SCRIPT, RUN_OF_SCRIPT, SEQUENCE_OF_SCRIPT, build_run
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_STAGE, _OVERLAP = f"{_ZERO}.stage", f"{_ZERO}.overlap_comm"
_OPTIMIZER, _RATIO = f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.offload_optimizer.ratio"
_PARAMETERS = f"{_ZERO}.offload_param.device"
_SEQUENCE, _DATA = "sequence_parallel_size", "data_parallel_size"
_TENSOR = "tensor_parallel.autotp_size"
_EXPERTS, _EXPERT = "expert_parallel.enabled", "expert_parallel.autoep_size"
_BF16, _FP16, _GRADIENTS = "bf16.enabled", "fp16.enabled", "data_types.grad_accum_dtype"


def _say_batch(facts: Facts) -> Values:
    return {_BATCH: facts["training.global_batch"], _MICRO: find_microbatch(facts), _STEPS: count_microbatches(facts)}


def _read_batch(config: ConfigValues) -> Facts:
    global_batch, size, steps = (config.count(key) for key in (_BATCH, _MICRO, _STEPS))
    if global_batch % (size * steps):
        raise config.build_error(_BATCH, f"is a multiple of {_MICRO}({size}) * {_STEPS}({steps}), met {global_batch}")
    return {"training.global_batch": global_batch, "plan.microbatch": size, "plan.data": global_batch // (size * steps)}


def _say_zero(facts: Facts) -> Values:
    zero, overlap = facts["plan.zero"], facts["plan.overlap_gradients"]
    is_alone = facts["plan.data"] * facts["plan.context"] == 1
    if not zero and overlap != is_alone:
        limit = "false with zero 0, whose gradients are summed after"
        limit = "true where no rank shares gradients" if is_alone else limit
        raise UnsayableError(build_reason(facts, "plan.overlap_gradients", limit))
    return {_STAGE: zero} | ({_OVERLAP: overlap} if zero else {})


def _read_zero(config: ConfigValues) -> Facts:
    zero = config.count(_STAGE, 0, 0)
    if zero > 3:
        raise config.build_error(_STAGE, f"is 0, 1, 2 or 3, met {zero}")
    is_alone = _read_batch(config)["plan.data"] * config.count(_SEQUENCE, 1) == 1
    return {"plan.zero": zero, "plan.overlap_gradients": config.flag(_OVERLAP, zero == 3) if zero else is_alone}


def _say_offload(facts: Facts) -> Values:
    offload: Offloading = facts["plan.offload"]
    if offload == NO_OFFLOADING:
        return {}
    zero, states = facts["plan.zero"], offload.optimizer
    is_whole = offload.parameters in ((), (1.0,)) and offload == Offloading(states, offload.parameters)
    if not is_whole or len(states) > 1:
        limit = "one fraction of the optimizer's states, stepped on the host, and all parameters (offload_optimizer)"
        raise UnsayableError(build_reason(facts, "plan.offload", limit))
    if zero < 1 or (zero < 3 and (offload.parameters or states != (1.0,))):
        limit = "nothing with zero 0, the optimizer's states as a whole with zero 1 and 2"
        raise UnsayableError(Reason("plan.offload", limit, f"{format_fact(offload)} with zero {zero}"))
    values: Values = {_OPTIMIZER: "cpu"} if states else {}
    values |= {_RATIO: states[0]} if states and states != (1.0,) else {}
    return values | ({_PARAMETERS: "cpu"} if offload.parameters else {})


def _read_offload(config: ConfigValues) -> Facts:
    places = ("none", "cpu")
    states, parameters = (config.word(key, places, "none") == "cpu" for key in (_OPTIMIZER, _PARAMETERS))
    ratio = config.get(_RATIO, 1.0)
    if type(ratio) not in (int, float) or not 0 < ratio <= 1 or (_RATIO in config and not states):
        message = f"is more than 0 and at most 1, of states on the cpu, met {format_value(ratio)}"
        raise config.build_error(_RATIO, message)
    return {"plan.offload": Offloading((float(ratio),) if states else (), (1.0,) if parameters else ())}


def _say_context(facts: Facts) -> Values:
    if facts["plan.context"] == 1:
        return {}
    if facts["plan.attention"] is not Attention.ULYSSES:
        raise UnsayableError(build_reason(facts, "plan.attention", f"ulysses ({_SEQUENCE})"))
    return {_SEQUENCE: facts["plan.context"], _DATA: facts["plan.data"]}


def _read_context(config: ConfigValues) -> Facts:
    context = config.count(_SEQUENCE, 1)
    if context > 1 or _DATA in config:
        data = _read_batch(config)["plan.data"]
        if config.count(_DATA) != data:
            raise config.build_error(_DATA, f"is the {data} of {_BATCH}, met {config.count(_DATA)}")
    return {"plan.context": context, "plan.attention": Attention.ULYSSES if context > 1 else None}


def _say_precision(facts: Facts) -> Values:
    words: dict[str, Values] = {"fp32": {}, "bf16": {_BF16: True}, "fp16": {_FP16: True}}
    if facts["training.precision"] not in words:
        raise UnsayableError(build_reason(facts, "training.precision", "fp32, bf16 or fp16"))
    return words[facts["training.precision"]]


def _read_precision(config: ConfigValues) -> Facts:
    bf16, fp16 = config.flag(_BF16, False), config.flag(_FP16, False)
    if bf16 and fp16:
        raise config.build_error(_FP16, "one of bf16 and fp16, met both")
    return {"training.precision": "bf16" if bf16 else "fp16" if fp16 else "fp32"}


def _say_gradients(facts: Facts) -> Values:
    """Return the precision in which gradients are summed; without ZeRO it is that of parameters.

    ``DeepSpeedEngine._do_optimizer_sanity_check`` refuses every other mix.
    """
    is_half, gradients = facts["training.precision"] != "fp32", facts["training.gradient_precision"]
    if is_half and gradients == "fp32" and not facts["plan.zero"]:
        limit = f"same with zero 0, which sums gradients as parameters are ({_GRADIENTS})"
        raise UnsayableError(build_reason(facts, "training.gradient_precision", limit))
    return {_GRADIENTS: "fp32" if facts["training.gradient_precision"] == "fp32" else facts["training.precision"]}


def _read_gradients(config: ConfigValues) -> Facts:
    precision = _read_precision(config)["training.precision"]
    word = config.word(_GRADIENTS, tuple(dict.fromkeys(("fp32", precision))))
    if word != precision and not config.count(_STAGE, 0, 0):
        raise config.build_error(_GRADIENTS, f"is {precision} with {_STAGE} 0, met {word}")
    return {"training.gradient_precision": "fp32" if word == "fp32" else "same"}


def _check_combinations(facts: Facts) -> Iterator[Reason]:
    used_axes = [axis for axis in ("tensor", "context", "expert") if facts[f"plan.{axis}"] > 1]
    if len(used_axes) > 1:
        axes_text = " and ".join(f"{axis} {facts[f'plan.{axis}']}" for axis in used_axes)
        yield Reason(f"plan.{used_axes[-1]}", "one of tensor, context and expert ranks in a file", axes_text)


_OPTIMIZER_PARAMETERS = {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
_SCHEDULE = {
    "scheduler.type": "WarmupCosineLR",
    "scheduler.params.total_num_steps": ITERATIONS,
    "scheduler.params.warmup_num_steps": WARMUP,
    "scheduler.params.warmup_type": "linear",
    "scheduler.params.cos_min_ratio": MIN_LEARNING_RATE / LEARNING_RATE,
}
_RATES = (*(f"optimizer.params.{name}" for name in _OPTIMIZER_PARAMETERS), *_SCHEDULE)
_UNTESTED = "zero_allow_untested_optimizer"
"""Needed for SGD, which is not among ``ZERO_SUPPORTED_OPTIMIZERS`` (``deepspeed/runtime/zero/utils.py``)."""

_UNKNOWN_PARAMETERS = {"sgd": ("betas", "eps"), "lion": ("eps",)}


def _say_rates(facts: Facts) -> Values:
    """Return how weights learn: the parameters that the optimizer has, and the schedule."""
    unknown = _UNKNOWN_PARAMETERS.get(facts["training.optimizer"], ())
    parameters = {name: value for name, value in _OPTIMIZER_PARAMETERS.items() if name not in unknown}
    values = {f"optimizer.params.{name}": value for name, value in parameters.items()} | _SCHEDULE
    return values | ({_UNTESTED: True} if facts["training.optimizer"] == "sgd" and facts["plan.zero"] else {})


_MAP: tuple[Entry, ...] = (
    Entry((_MICRO, _BATCH, _STEPS), ("plan.microbatch", "plan.data", "training.global_batch"), _say_batch, _read_batch),
    map_count(_TENSOR, "plan.tensor", 1),
    Entry((_SEQUENCE, _DATA), ("plan.context", "plan.attention"), _say_context, _read_context),
    Entry(
        (_EXPERT, _EXPERTS),
        ("plan.expert",),
        lambda facts: {} if facts["plan.expert"] == 1 else {_EXPERTS: True, _EXPERT: facts["plan.expert"]},
        lambda config: {"plan.expert": config.count(_EXPERT, 1) if config.flag(_EXPERTS, False) else 1},
    ),
    Entry((_STAGE, _OVERLAP), ("plan.zero", "plan.overlap_gradients"), _say_zero, _read_zero),
    Entry((_OPTIMIZER, _RATIO, _PARAMETERS), ("plan.offload",), _say_offload, _read_offload),
    Entry((_BF16, _FP16), ("training.precision",), _say_precision, _read_precision),
    Entry((_GRADIENTS,), ("training.gradient_precision",), _say_gradients, _read_gradients),
    map_word("optimizer.type", "training.optimizer", (("adamw", "AdamW"), ("sgd", "SGD"), ("lion", "Lion"))),
    Entry((*_RATES, _UNTESTED), (), _say_rates),
    map_word("gradient_clipping", "training.gradient_clipping", ((True, 1.0), (False, 0.0))),
    *(require_key(key, "") for key in ("command", "meshwise")),
    *list_fixed_pipeline("of which the model's code decides (PipelineModule)"),
    ONE_STAGE,
    *list_fixed("the model's code decides (deepspeed.checkpointing)", recompute=Recompute.NONE),
    *list_fixed("AutoTP sums whole activations", sequence_parallel=False, overlap_tensor=False),
    *list_fixed("MiCS was removed in 0.19", zero_shards=0),
    *list_fixed("parameters are given up after forward", reshard_after_forward=True),
    SEQUENCE_OF_SCRIPT,
    MODEL_OF_SCRIPT,
    RUN_OF_SCRIPT,
    *COMMON_ENTRIES,
)


_FIRST_SECTIONS = ("optimizer", "scheduler", "gradient_clipping", "script")
"""What is for users to set comes first."""


def _write(values: Values, request: TrainerRequest, target_name: str) -> str:
    """Return the text, whose first line has the command: JSON has no comments."""
    hosts, ranks = request.hosts
    place = f"--num_gpus {ranks}" if hosts == 1 else f"--hostfile HOSTS --num_nodes {hosts} --num_gpus {ranks}"
    file = request.find_file_name("ds_config.json")
    own = {
        "command": f"deepspeed {place} train.py --deepspeed --deepspeed_config {file}",
        "meshwise": f"{request.title} (for {target_name}, whose own gradient_clipping is 0.0; script is for train.py)",
    }
    sections = nest_values(own | values | build_run(request) | own)
    first = {name: sections.pop(name) for name in ("command", "meshwise", *_FIRST_SECTIONS)}
    text = json.dumps(first | sections, indent=2) + "\n"
    return text.replace("{\n  ", "{", 1)


DEEPSPEED = Target("deepspeed", "0.19.8", _MAP, _write, parse_document, _check_combinations)
