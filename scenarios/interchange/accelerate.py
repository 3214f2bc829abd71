"""Accelerate: the configuration file (YAML) of ``accelerate launch``.

Batch sizes have no key in the file, because they belong to the script: comments ``# script:`` state them in the words
of ``transformers.TrainingArguments``, and are read back with the rest.

References
----------
Accelerate 1.15.0: ``accelerate/commands/config/config_args.py`` (``ClusterConfig``), ``.../commands/launch.py`` and
``.../utils/launch.py`` (keys of ``fsdp_config``, ``deepspeed_config`` and ``parallelism_config``),
``accelerate/parallelism_config.py`` (degrees and their order), ``.../utils/dataclasses.py``
(``TorchContextParallelConfig``). transformers 5, ``TrainingArguments``.
"""

import re
from collections.abc import Iterator

import yaml

from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import Document, parse_document
from meshwise.scenarios.interchange.entry import (
    COMMON_ENTRIES,
    HOST_OPTIMIZER_AND_PARAMETERS,
    HOST_STATES,
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
    map_word,
    require_key,
)
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest, format_fact
from meshwise.scenarios.interchange.lines import ConfigValues, nest_values
from meshwise.scenarios.interchange.recipe import CLIPPING
from meshwise.scenarios.interchange.script import (
    CLIPPING_OF_SCRIPT,
    MODEL_OF_SCRIPT,
    RUN_OF_SCRIPT,
    SEQUENCE_OF_SCRIPT,
    build_rates,
    build_run,
)
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NO_OFFLOADING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_SIZE, _STEPS = "script.per_device_train_batch_size", "script.gradient_accumulation_steps"
_TYPE, _PROCESSES, _MACHINES = "distributed_type", "num_processes", "num_machines"
_SHARDED, _ZERO_12, _REPLICAS, _SINGLE = "FSDP", "DEEPSPEED", "MULTI_GPU", "NO"
_PARALLELISM = "parallelism_config.parallelism_config_"
_REPLICATE, _SHARD, _TENSOR, _CONTEXT = (
    f"{_PARALLELISM}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp")
)
_ROTATE = f"{_PARALLELISM}cp_comm_strategy"
_FSDP = "fsdp_config.fsdp_"
_RESHARD, _OFFLOAD, _CHECKPOINT = (
    f"{_FSDP}{name}" for name in ("reshard_after_forward", "offload_params", "activation_checkpointing")
)
_FIXED_VALUES = {
    f"{_FSDP}version": 2,
    f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{_FSDP}state_dict_type": "SHARDED_STATE_DICT",
}
_DEEPSPEED = "deepspeed_config."
_STAGE, _DS_STEPS, _DS_OPTIMIZER = (
    f"{_DEEPSPEED}{name}" for name in ("zero_stage", "gradient_accumulation_steps", "offload_optimizer_device")
)
_DS_CLIPPING, _DS_LAUNCHER = f"{_DEEPSPEED}gradient_clipping", f"{_DEEPSPEED}deepspeed_multinode_launcher"
_ROTATIONS = ((Attention.RING, "alltoall"), (Attention.ALL_GATHER, "allgather"))


def _find_type(facts: Facts) -> str:
    """Return the back end that runs a plan: DeepSpeed for ZeRO 1 and 2, which FSDP does not have."""
    if facts["plan.zero"] in (1, 2):
        return _ZERO_12
    if facts["plan.zero"] == 3 or facts["plan.tensor"] * facts["plan.context"] > 1:
        return _SHARDED
    return _REPLICAS if facts["plan.data"] > 1 else _SINGLE


def _say_degrees(facts: Facts) -> Values:
    kind, data, tensor, context = _find_type(facts), facts["plan.data"], facts["plan.tensor"], facts["plan.context"]
    values: Values = {_TYPE: kind, _PROCESSES: data * tensor * context}
    if kind != _SHARDED:
        return values | ({_STAGE: facts["plan.zero"]} if kind == _ZERO_12 else {})
    zero = facts["plan.zero"]
    shard = (facts["plan.zero_shards"] or data) if zero else 1
    if not zero and (data > 1 or context > 1):
        limit = "3 with tensor or context ranks, over which FSDP spans"
        raise UnsayableError(Reason("plan.zero", limit, f"0 with data {data}, tensor {tensor} and context {context}"))
    if zero and shard * context == 1:
        raise UnsayableError(build_reason(facts, "plan.zero", f"0 where no rank shares states ({_SHARD} 1)"))
    values |= _FIXED_VALUES | {_REPLICATE: data // shard, _SHARD: shard, _TENSOR: tensor, _CONTEXT: context}
    values |= {_RESHARD: facts["plan.reshard_after_forward"]}
    if context == 1:
        return values
    word = dict(_ROTATIONS).get(facts["plan.attention"])
    if word is None:
        raise UnsayableError(build_reason(facts, "plan.attention", f"ring or all_gather ({_ROTATE})"))
    return values | {_ROTATE: word}


def _read_degrees(config: ConfigValues) -> Facts:
    kind = config.word(_TYPE, (_SHARDED, _ZERO_12, _REPLICAS, _SINGLE))
    _check_sections(config, kind)
    ranks = config.count(_PROCESSES)
    base_facts: Facts = {"plan.tensor": 1, "plan.context": 1, "plan.attention": None, "plan.zero_shards": 0}
    base_facts |= {"plan.reshard_after_forward": True}
    if kind != _SHARDED:
        zero = int(config.word(_STAGE, (1, 2))) if kind == _ZERO_12 else 0
        if (ranks == 1) != (kind == _SINGLE) and kind != _ZERO_12:
            raise config.build_error(_PROCESSES, f"is 1 with {_SINGLE} alone, met {ranks} with {kind}")
        return base_facts | {"plan.data": ranks, "plan.zero": zero}
    for key, value in _FIXED_VALUES.items():
        config.word(key, (value,))
    return base_facts | _read_sharded(config, ranks)


def _read_sharded(config: ConfigValues, ranks: int) -> Facts:
    replicas, shard, tensor, context = (config.count(key, 1) for key in (_REPLICATE, _SHARD, _TENSOR, _CONTEXT))
    if replicas * shard * tensor * context != ranks:
        product = f"dp_replicate({replicas}) * dp_shard({shard}) * tp({tensor}) * cp({context})"
        raise config.build_error(_PROCESSES, f"is {product}, met {ranks}")
    if replicas > 1 and shard == 1:
        raise config.build_error(_SHARD, "is more than 1 with replicas, met 1")
    attention = config.choice(_ROTATE, _ROTATIONS, "allgather")
    is_sharded = shard * context > 1
    return {
        "plan.data": replicas * shard,
        "plan.tensor": tensor,
        "plan.context": context,
        "plan.attention": attention if context > 1 else None,
        "plan.zero": 3 if is_sharded else 0,
        "plan.zero_shards": shard if is_sharded and replicas > 1 else 0,
        "plan.reshard_after_forward": config.flag(_RESHARD, True) or not is_sharded,
    }


def _check_sections(config: ConfigValues, kind: str) -> None:
    """Raise ``ScenarioError`` where a file has a section of another back end than its own."""
    for prefix, owner in ((_FSDP, _SHARDED), (_PARALLELISM, _SHARDED), (_DEEPSPEED, _ZERO_12)):
        if kind != owner:
            keys = [key for key in config.values if key.startswith(prefix)]
            config.forbid(keys, f"needs {_TYPE} {owner}, met {kind}")


def _say_batch(facts: Facts) -> Values:
    steps = count_microbatches(facts)
    values = {_SIZE: find_microbatch(facts), _STEPS: steps}
    return values | ({_DS_STEPS: steps} if _find_type(facts) == _ZERO_12 else {})


def _read_batch(config: ConfigValues) -> Facts:
    size, steps = config.count(_SIZE), config.count(_STEPS)
    if _DS_STEPS in config and config.count(_DS_STEPS) != steps:
        raise config.build_error(_DS_STEPS, f"is that of the script({steps}), met {config.count(_DS_STEPS)}")
    return {"plan.microbatch": size, "training.global_batch": size * steps * _read_degrees(config)["plan.data"]}


def _say_memory(facts: Facts) -> Values:
    """Return the keys of offload and recomputation, which differ between FSDP and DeepSpeed."""
    kind, offload, recompute = _find_type(facts), facts["plan.offload"], facts["plan.recompute"]
    sayable_offloads = {
        _SHARDED: (NO_OFFLOADING, HOST_OPTIMIZER_AND_PARAMETERS),
        _ZERO_12: (NO_OFFLOADING, HOST_STATES),
    }.get(kind, (NO_OFFLOADING,))
    reasons = []
    if offload not in sayable_offloads:
        limit = f"{' or '.join(map(format_fact, sayable_offloads))} with {kind} and zero {facts['plan.zero']}"
        reasons.append(build_reason(facts, "plan.offload", limit))
    if recompute is not Recompute.NONE and (recompute is not Recompute.FULL or kind != _SHARDED):
        limit = f"none, or full with {_SHARDED} ({_CHECKPOINT})"
        reasons.append(Reason("plan.recompute", limit, f"{format_fact(recompute)} with {kind}"))
    if facts["plan.overlap_gradients"] != (kind != _ZERO_12):
        limit = f"{format_fact(kind != _ZERO_12)} with {kind}, whose choice is not in the file"
        reasons.append(build_reason(facts, "plan.overlap_gradients", limit))
    if reasons:
        raise UnsayableError(*reasons)
    if kind == _SHARDED:
        return {_OFFLOAD: offload != NO_OFFLOADING, _CHECKPOINT: recompute is Recompute.FULL}
    return {_DS_OPTIMIZER: "none" if offload == NO_OFFLOADING else "cpu"} if kind == _ZERO_12 else {}


def _read_memory(config: ConfigValues) -> Facts:
    kind = config.word(_TYPE, (_SHARDED, _ZERO_12, _REPLICAS, _SINGLE))
    is_offloaded = config.flag(_OFFLOAD, False)
    states = config.word(_DS_OPTIMIZER, ("none", "cpu"), "none") == "cpu"
    return {
        "plan.offload": HOST_OPTIMIZER_AND_PARAMETERS if is_offloaded else HOST_STATES if states else NO_OFFLOADING,
        "plan.recompute": Recompute.FULL if config.flag(_CHECKPOINT, False) else Recompute.NONE,
        "plan.overlap_gradients": kind != _ZERO_12,
    }


def _say_deepspeed_clipping(facts: Facts) -> Values:
    """Return DeepSpeed's own key, for its engine clips by that alone."""
    if _find_type(facts) != _ZERO_12:
        return {}
    return {_DS_CLIPPING: CLIPPING if facts["training.gradient_clipping"] else 0.0}


def _read_deepspeed_clipping(config: ConfigValues) -> Facts:
    norm = "script.max_grad_norm"
    if _DS_CLIPPING in config and norm in config and config.get(_DS_CLIPPING) != config.get(norm):
        raise config.build_error(_DS_CLIPPING, f"is that of the script({config.get(norm)})")
    return {}


def _check_combinations(facts: Facts) -> Iterator[Reason]:
    model_ranks = facts["plan.tensor"] * facts["plan.context"]
    if facts["plan.zero"] in (1, 2) and model_ranks > 1:
        yield build_reason(facts, "plan.zero", "0 or 3 with tensor or context ranks: 1 and 2 are DeepSpeed's")
    if facts["plan.zero"] in (1, 2) and facts["plan.zero_shards"]:
        yield build_reason(facts, "plan.zero_shards", "0 with zero 1 and 2")


_MAP: tuple[Entry, ...] = (
    require_key("compute_environment", "LOCAL_MACHINE", is_fixed=True),
    require_key(_MACHINES, 1),
    require_key("machine_rank", 0),
    map_word("mixed_precision", "training.precision", (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "no"))),
    Entry(
        (_TYPE, _PROCESSES, _STAGE, *_FIXED_VALUES, _REPLICATE, _SHARD, _TENSOR, _CONTEXT, _ROTATE, _RESHARD),
        (
            "plan.zero",
            "plan.data",
            "plan.tensor",
            "plan.context",
            "plan.attention",
            "plan.zero_shards",
            "plan.reshard_after_forward",
        ),
        _say_degrees,
        _read_degrees,
    ),
    Entry(
        (_OFFLOAD, _CHECKPOINT, _DS_OPTIMIZER),
        ("plan.offload", "plan.recompute", "plan.overlap_gradients"),
        _say_memory,
        _read_memory,
    ),
    Entry((_SIZE, _STEPS, _DS_STEPS), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    *list_fixed_pipeline("for it has no pipelines of its own"),
    ONE_STAGE,
    *list_fixed("its ParallelismConfig has no expert ranks", expert=1),
    *list_fixed("the model's tensor-parallel plan decides", sequence_parallel=False, overlap_tensor=False),
    Entry((), ("training.optimizer", "training.gradient_precision")),
    SEQUENCE_OF_SCRIPT,
    CLIPPING_OF_SCRIPT,
    Entry((_DS_CLIPPING,), (), _say_deepspeed_clipping, _read_deepspeed_clipping),
    MODEL_OF_SCRIPT,
    RUN_OF_SCRIPT,
    Entry((_DS_LAUNCHER,), ()),
    Entry((f"{_FSDP}transformer_layer_cls_to_wrap", "main_process_ip", "main_process_port"), ()),
    *COMMON_ENTRIES,
)

_SCRIPT_LINE = re.compile(r"# script: ([a-z0-9_]+) = ([^\x00-\x1f]{1,300})")


def _write(values: Values, request: TrainerRequest, target_name: str) -> str:
    hosts, _ = request.hosts
    if hosts > 1 and values[_TYPE] == _ZERO_12:
        values = values | {_DS_LAUNCHER: "standard"}  # the command on each host, as without DeepSpeed
    sections = nest_values(build_rates(request) | build_run(request) | values | {_MACHINES: hosts})
    script = sections.pop("script")
    place = "" if hosts == 1 else "--machine_rank 0 --main_process_ip HOST0 --main_process_port 29500 "
    return (
        f"# accelerate launch --config_file {request.find_file_name('accelerate.yaml')} {place}train.py\n"
        f"# {request.title}\n"
        f"# For {target_name} (`meshwise export --to accelerate`). The file has no key for the model and the\n"
        "# run, which are the script's: here they are in the words of transformers.TrainingArguments and config.json.\n"
        "# The rate, its schedule, steps, folders, data and tokenizer are yours to set. max_grad_norm 0.0 clips\n"
        "# nothing; its default is 1.0. Of rope_theta, norm_epsilon and initializer_range the scenario says nothing:\n"
        "# they are those of `family`.\n"
        + "".join(f"# script: {key} = {_format_word(value)}\n" for key, value in script.items())
        + yaml.safe_dump(sections, sort_keys=False)
    )


def _format_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_word(text: str) -> object:
    """Return a whole number, a fraction, a truth value, or the text itself."""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?(e[+-]?[0-9]{1,2})?", text):
        return float(text)
    return {"true": True, "false": False}.get(text, text)


def _parse(content: bytes, file: str) -> Document:
    yaml_document = parse_document(content, file)
    if not isinstance(yaml_document.data, dict):
        return yaml_document
    if "script" in yaml_document.data:
        raise ScenarioError((yaml_document.fault(("script",), "a comment says what the script does, met a key"),))
    script: dict[str, object] = {}
    places = dict(yaml_document.places)
    for number, line in enumerate(content.decode("utf-8-sig").split("\n"), 1):
        if match := _SCRIPT_LINE.fullmatch(line.rstrip()):
            if match[1] in script:
                raise ScenarioError((Fault(file, number, 1, match[1], "is stated once, met it again"),))
            script[match[1]] = _parse_word(match[2])
            places["script", match[1]] = (number, 1)
    return Document(file, yaml_document.data | ({"script": script} if script else {}), places)


ACCELERATE = Target("accelerate", "1.15.0", _MAP, _write, _parse, _check_combinations)
