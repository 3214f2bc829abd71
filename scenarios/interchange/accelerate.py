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
from meshwise.scenarios.files.reader import Document, parse
from meshwise.scenarios.interchange.entry import (
    HOST_OPTIMIZER_AND_PARAMETERS,
    HOST_STATES,
    MODEL_ELSEWHERE,
    ONE_STAGE,
    PLAIN,
    Elsewhere,
    Entry,
    Needed,
    Reason,
    Together,
    Unsayable,
    Values,
    Word,
    accumulation,
    always,
    no_pipeline,
    one_size,
)
from meshwise.scenarios.interchange.facts import Facts, Request, plainly
from meshwise.scenarios.interchange.lines import Stated, nested
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NOTHING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_SIZE, _STEPS = "script.per_device_train_batch_size", "script.gradient_accumulation_steps"
_TYPE, _PROCESSES, _MACHINES = "distributed_type", "num_processes", "num_machines"
_SHARDED, _ZERO_12, _REPLICAS, _ALONE = "FSDP", "DEEPSPEED", "MULTI_GPU", "NO"
_BY = "parallelism_config.parallelism_config_"
_REPLICATE, _SHARD, _TENSOR, _CONTEXT = (f"{_BY}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp"))
_ROTATE = f"{_BY}cp_comm_strategy"
_FSDP = "fsdp_config.fsdp_"
_RESHARD, _OFFLOAD, _CHECKPOINT = (
    f"{_FSDP}{name}" for name in ("reshard_after_forward", "offload_params", "activation_checkpointing")
)
_FIXED = {
    f"{_FSDP}version": 2,
    f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{_FSDP}state_dict_type": "SHARDED_STATE_DICT",
}
_DEEPSPEED = "deepspeed_config."
_STAGE, _DS_STEPS, _DS_OPTIMIZER = (
    f"{_DEEPSPEED}{name}" for name in ("zero_stage", "gradient_accumulation_steps", "offload_optimizer_device")
)
_ROTATIONS = ((Attention.RING, "alltoall"), (Attention.ALL_GATHER, "allgather"))


def _type(facts: Facts) -> str:
    """Return the back end that runs a plan: DeepSpeed for ZeRO 1 and 2, which FSDP does not have."""
    if facts["plan.zero"] in (1, 2):
        return _ZERO_12
    if facts["plan.zero"] == 3 or facts["plan.tensor"] * facts["plan.context"] > 1:
        return _SHARDED
    return _REPLICAS if facts["plan.data"] > 1 else _ALONE


def _say_degrees(facts: Facts) -> Values:
    kind, data, tensor, context = _type(facts), facts["plan.data"], facts["plan.tensor"], facts["plan.context"]
    values: Values = {_TYPE: kind, _PROCESSES: data * tensor * context}
    if kind != _SHARDED:
        return values | ({_STAGE: facts["plan.zero"]} if kind == _ZERO_12 else {})
    zero = facts["plan.zero"]
    shard = (facts["plan.zero_shards"] or data) if zero else 1
    if not zero and (data > 1 or context > 1):
        can = "3 with tensor or context ranks, over which FSDP spans"
        raise Unsayable(Reason("plan.zero", can, f"0 with data {data}, tensor {tensor} and context {context}"))
    if zero and shard * context == 1:
        raise Unsayable(Reason("plan.zero", f"0 where no rank shares states ({_SHARD} 1)", "3"))
    values |= _FIXED | {_REPLICATE: data // shard, _SHARD: shard, _TENSOR: tensor, _CONTEXT: context}
    values |= {_RESHARD: facts["plan.reshard_after_forward"]}
    return values | ({_ROTATE: _rotation(facts)} if context > 1 else {})


def _rotation(facts: Facts) -> str:
    for how, word in _ROTATIONS:
        if facts["plan.attention"] is how:
            return word
    raise Unsayable(Reason("plan.attention", f"ring or all_gather ({_ROTATE})", plainly(facts["plan.attention"])))


def _read_degrees(stated: Stated) -> Facts:
    kind = stated.word(_TYPE, (_SHARDED, _ZERO_12, _REPLICAS, _ALONE))
    _only(stated, kind)
    ranks = stated.count(_PROCESSES)
    shared: Facts = {"plan.tensor": 1, "plan.context": 1, "plan.attention": None, "plan.zero_shards": 0}
    shared |= {"plan.reshard_after_forward": True}
    if kind != _SHARDED:
        zero = int(stated.word(_STAGE, (1, 2))) if kind == _ZERO_12 else 0
        if (ranks == 1) != (kind == _ALONE) and kind != _ZERO_12:
            raise stated.fault(_PROCESSES, f"is 1 with {_ALONE} alone, met {ranks} with {kind}")
        return shared | {"plan.data": ranks, "plan.zero": zero}
    for key, value in _FIXED.items():
        stated.word(key, (value,))
    return shared | _read_sharded(stated, ranks)


def _read_sharded(stated: Stated, ranks: int) -> Facts:
    replicas, shard, tensor, context = (stated.count(key, 1) for key in (_REPLICATE, _SHARD, _TENSOR, _CONTEXT))
    if replicas * shard * tensor * context != ranks:
        product = f"dp_replicate({replicas}) * dp_shard({shard}) * tp({tensor}) * cp({context})"
        raise stated.fault(_PROCESSES, f"is {product}, met {ranks}")
    if replicas > 1 and shard == 1:
        raise stated.fault(_SHARD, "is more than 1 with replicas, met 1")
    word = stated.word(_ROTATE, tuple(word for _, word in _ROTATIONS), "allgather")
    sharded = shard * context > 1
    return {
        "plan.data": replicas * shard,
        "plan.tensor": tensor,
        "plan.context": context,
        "plan.attention": next(how for how, one in _ROTATIONS if one == word) if context > 1 else None,
        "plan.zero": 3 if sharded else 0,
        "plan.zero_shards": shard if sharded and replicas > 1 else 0,
        "plan.reshard_after_forward": stated.flag(_RESHARD, True) or not sharded,
    }


def _only(stated: Stated, kind: str) -> None:
    """Raise ``ScenarioError`` where a file has a section of another back end than its own."""
    for prefix, owner in ((_FSDP, _SHARDED), (_BY, _SHARDED), (_DEEPSPEED, _ZERO_12)):
        wrong = next((key for key in stated.values if key.startswith(prefix)), None)
        if wrong is not None and kind != owner:
            raise stated.fault(wrong, f"needs {_TYPE} {owner}, met {kind}")


def _say_batch(facts: Facts) -> Values:
    steps = accumulation(facts)
    return {_SIZE: one_size(facts), _STEPS: steps} | ({_DS_STEPS: steps} if _type(facts) == _ZERO_12 else {})


def _read_batch(stated: Stated) -> Facts:
    size, steps = stated.count(_SIZE), stated.count(_STEPS)
    if _DS_STEPS in stated and stated.count(_DS_STEPS) != steps:
        raise stated.fault(_DS_STEPS, f"is that of the script({steps}), met {stated.count(_DS_STEPS)}")
    return {"plan.microbatch": size, "training.global_batch": size * steps * _read_degrees(stated)["plan.data"]}


def _say_kept(facts: Facts) -> Values:
    """Return the keys of offload and recomputation, which differ between FSDP and DeepSpeed."""
    kind, offload, recompute = _type(facts), facts["plan.offload"], facts["plan.recompute"]
    wholes = {_SHARDED: (NOTHING, HOST_OPTIMIZER_AND_PARAMETERS), _ZERO_12: (NOTHING, HOST_STATES)}.get(
        kind, (NOTHING,)
    )
    reasons = []
    if offload not in wholes:
        can = f"{' or '.join(map(plainly, wholes))} with {kind} and zero {facts['plan.zero']}"
        reasons.append(Reason("plan.offload", can, plainly(offload)))
    if recompute is not Recompute.NONE and (recompute is not Recompute.FULL or kind != _SHARDED):
        can = f"none, or full with {_SHARDED} ({_CHECKPOINT})"
        reasons.append(Reason("plan.recompute", can, f"{plainly(recompute)} with {kind}"))
    if facts["plan.overlap_gradients"] != (kind != _ZERO_12):
        can = f"{plainly(kind != _ZERO_12)} with {kind}, whose choice is not in the file"
        reasons.append(Reason("plan.overlap_gradients", can, plainly(facts["plan.overlap_gradients"])))
    if reasons:
        raise Unsayable(*reasons)
    if kind == _SHARDED:
        return {_OFFLOAD: offload != NOTHING, _CHECKPOINT: recompute is Recompute.FULL}
    return {_DS_OPTIMIZER: "none" if offload == NOTHING else "cpu"} if kind == _ZERO_12 else {}


def _read_kept(stated: Stated) -> Facts:
    kind = stated.word(_TYPE, (_SHARDED, _ZERO_12, _REPLICAS, _ALONE))
    sharded = stated.flag(_OFFLOAD, False)
    states = stated.word(_DS_OPTIMIZER, ("none", "cpu"), "none") == "cpu"
    return {
        "plan.offload": HOST_OPTIMIZER_AND_PARAMETERS if sharded else HOST_STATES if states else NOTHING,
        "plan.recompute": Recompute.FULL if stated.flag(_CHECKPOINT, False) else Recompute.NONE,
        "plan.overlap_gradients": kind != _ZERO_12,
    }


def _combinations(facts: Facts) -> Iterator[Reason]:
    beside = facts["plan.tensor"] * facts["plan.context"]
    if facts["plan.zero"] in (1, 2) and beside > 1:
        can = "0 or 3 with tensor or context ranks: 1 and 2 are DeepSpeed's"
        yield Reason("plan.zero", can, str(facts["plan.zero"]))
    if facts["plan.zero"] in (1, 2) and facts["plan.zero_shards"]:
        yield Reason("plan.zero_shards", "0 with zero 1 and 2", str(facts["plan.zero_shards"]))


_MAP: tuple[Entry, ...] = (
    Needed("compute_environment", "LOCAL_MACHINE", fixed=True),
    Needed(_MACHINES, 1),
    Needed("machine_rank", 0),
    Word("mixed_precision", "training.precision", (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "no"))),
    Together(
        (_TYPE, _PROCESSES, _STAGE, *_FIXED, _REPLICATE, _SHARD, _TENSOR, _CONTEXT, _ROTATE, _RESHARD),
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
    Together(
        (_OFFLOAD, _CHECKPOINT, _DS_OPTIMIZER),
        ("plan.offload", "plan.recompute", "plan.overlap_gradients"),
        _say_kept,
        _read_kept,
    ),
    Together((_SIZE, _STEPS, _DS_STEPS), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    *no_pipeline("for it has no pipelines of its own"),
    ONE_STAGE,
    *always("its ParallelismConfig has no expert ranks", expert=1),
    *always("the model's tensor-parallel plan decides", sequence_parallel=False, overlap_tensor=False),
    Elsewhere(
        (
            "training.sequence",
            "training.optimizer",
            "training.gradient_precision",
            "training.gradient_clipping",
        )
    ),
    MODEL_ELSEWHERE,
    *PLAIN,
)

_LINE = re.compile(r"# script: ([a-z_]+) = ([0-9]{1,9})")


def _write(values: Values, request: Request, called: str) -> str:
    hosts, _ = request.hosts
    sections = nested(values | {_MACHINES: hosts})
    script = sections.pop("script")
    head = [
        f"# {request.title}",
        f"# For {called} (`meshwise export --to accelerate`): accelerate launch --config_file",
    ]
    head += ["# What the file has no key for, in the words of transformers.TrainingArguments:"]
    head += [f"# script: {key} = {value}" for key, value in script.items()]
    return "\n".join(head) + "\n" + yaml.safe_dump(sections, sort_keys=False)


def _parse(content: bytes, file: str) -> Document:
    read = parse(content, file)
    if not isinstance(read.data, dict):
        return read
    if "script" in read.data:
        raise ScenarioError((read.fault(("script",), "a comment says what the script does, met a key"),))
    script: dict[str, int] = {}
    places = dict(read.places)
    for number, line in enumerate(content.decode("utf-8-sig").split("\n"), 1):
        if found := _LINE.fullmatch(line.rstrip()):
            if found[1] in script:
                raise ScenarioError((Fault(file, number, 1, found[1], "is stated once, met it again"),))
            script[found[1]] = int(found[2])
            places["script", found[1]] = (number, 1)
    return Document(file, read.data | ({"script": script} if script else {}), places)


ACCELERATE = Target("accelerate", "1.15.0", _MAP, _write, _parse, _combinations)
to_accelerate, from_accelerate = ACCELERATE.to, ACCELERATE.read
