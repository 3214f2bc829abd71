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

from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.files.reader import parse
from meshwise.scenarios.interchange.entry import (
    MODEL_ELSEWHERE,
    ONE_STAGE,
    PLAIN,
    Count,
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
from meshwise.strategies.plan.offloading import NOTHING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import Recompute

_WHOLE, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_STAGE, _OVERLAP = f"{_ZERO}.stage", f"{_ZERO}.overlap_comm"
_OPTIMIZER, _RATIO = f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.offload_optimizer.ratio"
_PARAMETERS = f"{_ZERO}.offload_param.device"
_SEQUENCE, _DATA = "sequence_parallel_size", "data_parallel_size"
_TENSOR = "tensor_parallel.autotp_size"
_EXPERTS, _EXPERT = "expert_parallel.enabled", "expert_parallel.autoep_size"
_BF16, _FP16, _GRADIENTS = "bf16.enabled", "fp16.enabled", "data_types.grad_accum_dtype"


def _say_batch(facts: Facts) -> Values:
    return {_WHOLE: facts["training.global_batch"], _MICRO: one_size(facts), _STEPS: accumulation(facts)}


def _read_batch(stated: Stated) -> Facts:
    whole, size, steps = (stated.count(key) for key in (_WHOLE, _MICRO, _STEPS))
    if whole % (size * steps):
        raise stated.fault(_WHOLE, f"is a multiple of {_MICRO}({size}) * {_STEPS}({steps}), met {whole}")
    return {"training.global_batch": whole, "plan.microbatch": size, "plan.data": whole // (size * steps)}


def _say_zero(facts: Facts) -> Values:
    zero, overlap = facts["plan.zero"], facts["plan.overlap_gradients"]
    alone = facts["plan.data"] * facts["plan.context"] == 1
    if not zero and overlap != alone:
        can = "true where no rank shares gradients" if alone else "false with zero 0, whose gradients are summed after"
        raise Unsayable(Reason("plan.overlap_gradients", can, plainly(overlap)))
    return {_STAGE: zero} | ({_OVERLAP: overlap} if zero else {})


def _read_zero(stated: Stated) -> Facts:
    zero = stated.count(_STAGE, 0, 0)
    if zero > 3:
        raise stated.fault(_STAGE, f"is 0, 1, 2 or 3, met {zero}")
    alone = _read_batch(stated)["plan.data"] * stated.count(_SEQUENCE, 1) == 1
    return {"plan.zero": zero, "plan.overlap_gradients": stated.flag(_OVERLAP, zero == 3) if zero else alone}


def _say_offload(facts: Facts) -> Values:
    how: Offloading = facts["plan.offload"]
    if how == NOTHING:
        return {}
    zero, states = facts["plan.zero"], how.optimizer
    whole = how.parameters in ((), (1.0,)) and not how.activations and how == Offloading(states, how.parameters)
    if not whole or len(states) > 1:
        can = "one fraction of the optimizer's states, stepped on the host, and all parameters (offload_optimizer)"
        raise Unsayable(Reason("plan.offload", can, plainly(how)))
    if zero < 1 or (zero < 3 and (how.parameters or states != (1.0,))):
        can = "nothing with zero 0, the optimizer's states as a whole with zero 1 and 2"
        raise Unsayable(Reason("plan.offload", can, f"{plainly(how)} with zero {zero}"))
    values: Values = {_OPTIMIZER: "cpu"} if states else {}
    values |= {_RATIO: states[0]} if states and states != (1.0,) else {}
    return values | ({_PARAMETERS: "cpu"} if how.parameters else {})


def _read_offload(stated: Stated) -> Facts:
    places = ("none", "cpu")
    states, parameters = (stated.word(key, places, "none") == "cpu" for key in (_OPTIMIZER, _PARAMETERS))
    ratio = stated.get(_RATIO, 1.0)
    if type(ratio) not in (int, float) or not 0 < ratio <= 1 or (_RATIO in stated and not states):
        raise stated.fault(_RATIO, f"is more than 0 and at most 1, of states on the cpu, met {shown(ratio)}")
    return {"plan.offload": Offloading((float(ratio),) if states else (), (1.0,) if parameters else ())}


def _say_context(facts: Facts) -> Values:
    if facts["plan.context"] == 1:
        return {}
    if facts["plan.attention"] is not Attention.ULYSSES:
        raise Unsayable(Reason("plan.attention", f"ulysses ({_SEQUENCE})", plainly(facts["plan.attention"])))
    return {_SEQUENCE: facts["plan.context"], _DATA: facts["plan.data"]}


def _read_context(stated: Stated) -> Facts:
    context = stated.count(_SEQUENCE, 1)
    if context > 1 or _DATA in stated:
        data = _read_batch(stated)["plan.data"]
        if stated.count(_DATA) != data:
            raise stated.fault(_DATA, f"is the {data} of {_WHOLE}, met {stated.count(_DATA)}")
    return {"plan.context": context, "plan.attention": Attention.ULYSSES if context > 1 else None}


def _say_expert(facts: Facts) -> Values:
    return {} if facts["plan.expert"] == 1 else {_EXPERTS: True, _EXPERT: facts["plan.expert"]}


def _read_expert(stated: Stated) -> Facts:
    on = stated.flag(_EXPERTS, False)
    return {"plan.expert": stated.count(_EXPERT, 1) if on else 1}


def _say_precision(facts: Facts) -> Values:
    words: dict[str, Values] = {"fp32": {}, "bf16": {_BF16: True}, "fp16": {_FP16: True}}
    precision = facts["training.precision"]
    if precision not in words:
        raise Unsayable(Reason("training.precision", "fp32, bf16 or fp16", precision))
    return words[precision]


def _read_precision(stated: Stated) -> Facts:
    bf16, fp16 = stated.flag(_BF16, False), stated.flag(_FP16, False)
    if bf16 and fp16:
        raise stated.fault(_FP16, "one of bf16 and fp16, met both")
    return {"training.precision": "bf16" if bf16 else "fp16" if fp16 else "fp32"}


def _say_gradients(facts: Facts) -> Values:
    return {_GRADIENTS: "fp32" if facts["training.gradient_precision"] == "fp32" else facts["training.precision"]}


def _read_gradients(stated: Stated) -> Facts:
    own = _read_precision(stated)["training.precision"]
    word = stated.word(_GRADIENTS, tuple(dict.fromkeys(("fp32", own))))
    return {"training.gradient_precision": "fp32" if word == "fp32" else "same"}


def _combinations(facts: Facts) -> Iterator[Reason]:
    together = [axis for axis in ("tensor", "context", "expert") if facts[f"plan.{axis}"] > 1]
    if len(together) > 1:
        met = " and ".join(f"{axis} {facts[f'plan.{axis}']}" for axis in together)
        yield Reason(f"plan.{together[-1]}", "one of tensor, context and expert ranks in a file", met)


_MAP: tuple[Entry, ...] = (
    Together(
        (_MICRO, _WHOLE, _STEPS), ("plan.microbatch", "plan.data", "training.global_batch"), _say_batch, _read_batch
    ),
    Count(_TENSOR, "plan.tensor", 1),
    Together((_SEQUENCE, _DATA), ("plan.context", "plan.attention"), _say_context, _read_context),
    Together((_EXPERT, _EXPERTS), ("plan.expert",), _say_expert, _read_expert),
    Together((_STAGE, _OVERLAP), ("plan.zero", "plan.overlap_gradients"), _say_zero, _read_zero),
    Together((_OPTIMIZER, _RATIO, _PARAMETERS), ("plan.offload",), _say_offload, _read_offload),
    Together((_BF16, _FP16), ("training.precision",), _say_precision, _read_precision),
    Together((_GRADIENTS,), ("training.gradient_precision",), _say_gradients, _read_gradients),
    Word("optimizer.type", "training.optimizer", (("adamw", "AdamW"), ("sgd", "SGD"), ("lion", "Lion"))),
    Needed("optimizer.params.lr", 3e-4),
    Word("gradient_clipping", "training.gradient_clipping", ((True, 1.0), (False, 0.0))),
    Needed("meshwise", ""),
    *no_pipeline("of which the model's code decides (PipelineModule)"),
    ONE_STAGE,
    *always("the model's code decides (deepspeed.checkpointing)", recompute=Recompute.NONE),
    *always("AutoTP sums whole activations", sequence_parallel=False, overlap_tensor=False),
    *always("MiCS was removed in 0.19", zero_shards=0),
    *always("parameters are given up after forward", reshard_after_forward=True),
    Elsewhere(("training.sequence",)),
    MODEL_ELSEWHERE,
    *PLAIN,
)


def _write(values: Values, request: Request, called: str) -> str:
    return (
        json.dumps(nested({"meshwise": ""} | values | {"meshwise": f"{request.title} (for {called})"}), indent=2) + "\n"
    )


DEEPSPEED = Target("deepspeed", "0.19.8", _MAP, _write, parse, _combinations)
to_deepspeed, from_deepspeed = DEEPSPEED.to, DEEPSPEED.read
