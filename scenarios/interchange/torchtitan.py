"""torchtitan: a Python module that applies a plan to a configuration, written, and read back without running it.

Since 0.3 torchtitan is configured in Python, by a function that returns a ``Trainer.Config``, and no longer by TOML.
The main function of the module, ``laid_out``, takes any such configuration and sets what the plan decides.

References
----------
torchtitan 0.3.0: ``torchtitan/config/configs.py`` (``TrainingConfig``, ``ParallelismConfig``, ``CompileConfig``),
``torchtitan/trainer.py`` (``Trainer.Config``), ``torchtitan/config/README.md`` (how configurations are written),
``torchtitan/distributed/parallel_dims.py`` (degrees and their order), ``.../pipeline_parallel.py`` (stages, schedules,
microbatches), ``.../fsdp.py`` (sharding, offload), ``.../activation_checkpoint.py``, ``.../context_parallel/api.py``;
``torchtitan/models/common/feed_forward.py`` and ``torchtitan/config/override.py`` (how one module takes another's
place), ``torchtitan/components/quantization/float8.py``;
PyTorch 2, ``torch/distributed/pipelining/schedules.py``, ``get_schedule_class``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwise.scenarios.files.errors import shown
from meshwise.scenarios.files.reader import Document
from meshwise.scenarios.interchange.entry import (
    HOST_OPTIMIZER_AND_PARAMETERS,
    MODEL_ELSEWHERE,
    ONE_FORWARD_ONE_BACKWARD,
    PLAIN,
    Always,
    Count,
    Elsewhere,
    Entry,
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
from meshwise.scenarios.interchange.lines import Pair, Stated, document, literal
from meshwise.scenarios.interchange.target import Target
from meshwise.strategies.plan.offloading import NOTHING
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators

FULL = "FullAC.Config()"
"""The policy that recomputes all layers whole."""

FIRST = "FirstLayersAC.Config(layers={})"
"""The policy, defined in the module, that recomputes the first layers of every stage whole."""

ACTIVATIONS = "recompute_activations"
"""The function of the module that makes dense feed-forwards recompute their activation."""

FLOAT8 = "multiply_in_float8"
"""The function of the module that makes the products of layers run in float8."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The code of a policy or function that the module defines, and its import statements."""

    code: str
    imports: tuple[str, ...]


_DATACLASS = "from dataclasses import dataclass"
_FULL_POLICY = "from torchtitan.distributed.activation_checkpoint import FullAC"
_FIRST_LAYERS = _Part(
    '''

class FirstLayersAC(FullAC):
    """Recompute the first layers of every stage: a policy is built anew for each of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: int = 1

    def _wrap_block(self, module, *, base_fqn=None):
        self.met = getattr(self, "met", 0) + 1
        return super()._wrap_block(module, base_fqn=base_fqn) if self.met <= self.config.layers else module
''',
    (_DATACLASS, _FULL_POLICY),
)
_FEED_FORWARD = _Part(
    '''

class RecomputedFeedForward(FeedForward):
    """Keep what the first two products return, and compute the activation that the third reads again in backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x):
        return checkpoint(self._narrow, self.w1(x), self.w3(x), use_reentrant=False, preserve_rng_state=False)

    def _narrow(self, gate, up):
        return self.w2(silu(gate) * up)


def recompute_activations(config: Trainer.Config) -> None:
    """Let the dense feed-forward of every layer compute its activation again, and no more."""
    every = list(config.model_spec.traverse(FeedForward.Config))
    dense = [each for each in every if each[0].endswith(".feed_forward")]
    others = {type(plain).__qualname__ for _, plain, _, _ in dense if type(plain) is not FeedForward.Config}
    if not dense or others:
        raise ValueError(f"the layers have a plain FeedForward, met {', '.join(sorted(others)) or 'none'}")
    for _, plain, layer, name in dense:
        setattr(layer, name, derive(plain, RecomputedFeedForward.Config))
''',
    (
        _DATACLASS,
        "from torch.nn.functional import silu",
        "from torch.utils.checkpoint import checkpoint",
        "from torchtitan.config import derive",
        "from torchtitan.models.common.feed_forward import FeedForward",
    ),
)
"""The product that reads the activation is inside the checkpoint, because it would keep the activation otherwise. It
does not run twice, nor does the collective after it: torch stops recomputing once it has all saved tensors, and those
of the product are complete before it runs."""
_PRODUCTS = _Part(
    '''

def multiply_in_float8(config: Trainer.Config) -> None:
    """Let the products of layers run in float8, scaled row by row; those of the head stay as they are."""
    compiled = config.compile.enable and "model" in config.compile.components
    converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=compiled)
    config.model_spec.model = converter.build().convert(config.model_spec.model)
''',
    ("from torchtitan.components.quantization import Float8LinearConverter",),
)
_CALLED = {ACTIVATIONS: _FEED_FORWARD, FLOAT8: _PRODUCTS}
"""Functions that the module defines and calls with the configuration, after all assignments."""
_HEAD = '''"""{title}.

For {called} (`meshwise export --to torchtitan`). In a module of your own:

    def mine() -> Trainer.Config:
        return laid_out(your_config())

`your_config` is any function that returns a Trainer.Config, and the model is the one that it names. The plan is for one
of {summary}.
"""

{imports}
{parts}

def laid_out(config: Trainer.Config) -> Trainer.Config:
    """Return the configuration with the plan laid upon it."""
'''
_FOOT = "    return config\n"
_ASSIGNMENT = re.compile(r"config\.([a-z_]+(?:\.[a-z_]+)?) = (.+)")
_CALL = re.compile(r"([a-z0-9_]+)\(config\)")
_IGNORED = re.compile(r"(#.*|from [a-z._]+ import [A-Za-z0-9]+|def laid_out\(.*|return config|\"\"\"Return .*\"\"\"|)")


def write(values: Values, request: Request, called: str) -> str:
    """Return the text of the module, whose function ``laid_out`` sets what the plan decides."""
    title = request.title.replace("\\", "/").replace('"', "'").rstrip(".")
    recomputes = values["activation_checkpoint"]
    parts = [] if recomputes in (FULL, str(None)) else [_FIRST_LAYERS]
    parts += [part for name, part in _CALLED.items() if name in values]
    head = _HEAD.format(
        title=title,
        called=called,
        summary=request.spec.summary,
        imports=_imports(parts, (_FULL_POLICY,) if recomputes == FULL else ()),
        parts="".join(part.code for part in parts),
    )
    lines = [f"    config.{key} = {_shown(key, value)}\n" for key, value in values.items() if key not in _CALLED]
    calls = [f"    {name}(config)\n" for name in _CALLED if name in values]
    return head + "".join(lines + calls) + _FOOT


def _imports(parts: list[_Part], others: tuple[str, ...]) -> str:
    """Return the import statements of the module, the standard library first."""
    found = {line for part in parts for line in part.imports} | {*others, "from torchtitan.trainer import Trainer"}
    own = f"{_DATACLASS}\n\n" if _DATACLASS in found else ""
    return own + "\n".join(sorted(found - {_DATACLASS}))


def _shown(key: str, value: Any) -> str:
    if key == "activation_checkpoint":
        return str(value)
    return (
        "[\n" + "".join(f"        {part!r},\n" for part in value) + "    ]" if isinstance(value, list) else repr(value)
    )


def parse(content: bytes, file: str) -> Document:
    """Return the document of a module, one key an assignment; ``ScenarioError`` where a line is something else."""
    return document(_on_one_line(content), file, _pair)


def _on_one_line(content: bytes) -> bytes:
    """Return the module without docstring, policy and functions, and with lists of stages on one line.

    Lines keep their numbers, so that faults have the right place.
    """
    text = re.sub(rb'\A"""(?:[^"\\]|"(?!""))*"""', lambda met: b"\n" * met[0].count(b"\n"), content)
    for part in (_FIRST_LAYERS, *_CALLED.values()):
        text = text.replace(part.code.encode(), b"\n" * part.code.count("\n"))
    return re.sub(rb"= \[\n((?:        \[[^\n]*\],\n)*)    \]", _joined, text)


def _joined(met: re.Match[bytes]) -> bytes:
    return b"= [" + met[1].replace(b"\n", b"") + b"]" + b"\n" * (met[1].count(b"\n") + 1)


def _pair(line: str) -> Pair | None:
    if _IGNORED.fullmatch(line):
        return None
    call = _CALL.fullmatch(line)
    if call and call[1] in _CALLED:
        return call[1], True
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        raise ValueError(f"a line sets a field of config, as in config.training.seq_len = 8192, met {shown(line)}")
    key, value = found.groups()
    return (key, value) if key == "activation_checkpoint" else (key, literal(value))


_TRAINING, _BY, _COMPILE = "training", "parallelism", "compile"
_SCHEDULES = (
    ("gpipe", "GPipe"),
    ("1f1b", "1F1B"),
    ("interleaved", "Interleaved1F1B"),
    ("looped_bfs", "LoopedBFS"),
    ("interleaved_zero_bubble", "InterleavedZeroBubble"),
    ("zbv", "ZBVZeroBubble"),
    ("dualpipev", "DualPipeV"),
)
"""Schedules that have the same order in ``torch.distributed.pipelining``, with their names there."""

_LOCAL, _MICRO = f"{_TRAINING}.local_batch_size", f"{_BY}.pipeline_parallel_microbatch_size"
_REPLICATE, _SHARD = f"{_BY}.data_parallel_replicate_degree", f"{_BY}.data_parallel_shard_degree"
_RESHARD = f"{_BY}.fsdp_reshard_after_forward"
_PIPELINE, _SCHEDULE = f"{_BY}.pipeline_parallel_degree", f"{_BY}.pipeline_parallel_schedule"
_PARTS, _GLOBAL = f"{_BY}.module_fqns_per_model_part", f"{_TRAINING}.global_batch_size"
_CONTEXT = f"{_BY}.context_parallel_degree"
_ASYNC, _COMPILED = f"{_COMPILE}.enable_async_tensor_parallel", f"{_COMPILE}.enable"
_RECOMPUTE = "activation_checkpoint"
_ACTIVATION = SomeOperators(("activation",))
"""What `ACTIVATIONS` recomputes: the activation of dense feed-forwards. That of experts lies between products of a
layer that cannot be split there."""
_PARAMETERS = f"{_TRAINING}.mixed_precision_param"
_PRECISIONS: dict[str, Values] = {"bf16": {}, "fp8": {FLOAT8: True}, "fp32": {_PARAMETERS: "float32"}}
_NO_GRAPHS = f"{_TRAINING}.disable_cuda_graphs"
_TENSOR, _SEQUENCE = f"{_BY}.tensor_parallel_degree", f"{_BY}.enable_sequence_parallel"


def _say_data(facts: Facts) -> Values:
    data, shards, context = facts["plan.data"], facts["plan.zero_shards"] or facts["plan.data"], facts["plan.context"]
    zero = facts["plan.zero"]
    if zero not in (0, 3):
        raise Unsayable(Reason("plan.zero", "0 (replicas) or 3 (FSDP) (data_parallel_shard_degree)", str(zero)))
    if zero == 0 and context > 1:
        raise Unsayable(Reason("plan.zero", "3 where context ranks share a sequence, for FSDP spans them", "0"))
    if zero == 3 and shards * context == 1:
        raise Unsayable(Reason("plan.zero", "0 where no rank shares states (data_parallel_shard_degree 1)", "3"))
    shard = shards if zero else 1
    values: Values = {_REPLICATE: data // shard, _SHARD: shard}
    return values | ({_RESHARD: "always" if facts["plan.reshard_after_forward"] else "never"} if zero else {})


def _read_data(stated: Stated) -> Facts:
    replicas, shard = stated.count(_REPLICATE, 1), stated.count(_SHARD)
    sharded = shard * stated.count(_CONTEXT, 1) > 1
    # torchtitan's own default keeps parameters under pipelines: else every microbatch would gather them again
    default = "never" if stated.count(_PIPELINE, 1) > 1 else "always"
    reshard = stated.word(_RESHARD, ("default", "always", "never"), "default")
    reshard = default if reshard == "default" else reshard
    return {
        "plan.data": replicas * shard,
        "plan.zero": 3 if sharded else 0,
        "plan.zero_shards": shard if sharded and replicas > 1 else 0,
        "plan.reshard_after_forward": reshard == "always" or not sharded,
    }


def _say_batch(facts: Facts) -> Values:
    size, whole = one_size(facts), facts["training.global_batch"]
    if facts["plan.pipeline"] == 1:
        return {_LOCAL: size, _GLOBAL: whole}
    return {_LOCAL: size * accumulation(facts), _GLOBAL: whole, _MICRO: size}


def _read_batch(stated: Stated) -> Facts:
    local, whole = stated.count(_LOCAL), stated.count(_GLOBAL)
    piped = stated.count(_PIPELINE, 1) > 1
    ranks = stated.count(_REPLICATE, 1) * stated.count(_SHARD)
    if piped and local * ranks != whole:
        raise stated.fault(
            _GLOBAL, f"a step is one pass of the pipeline: local_batch_size({local}) * data({ranks}), met {whole}"
        )
    size = stated.count(_MICRO, 1) if piped else local
    if local % size:
        raise stated.fault(_MICRO, f"divides local_batch_size({local}), met {size}")
    return {"plan.microbatch": size, "training.global_batch": whole}


def _say_pipeline(facts: Facts) -> Values:
    name, stages = facts["plan.schedule"], facts["plan.stages"]
    if facts["plan.pipeline"] == 1:
        if name != ONE_FORWARD_ONE_BACKWARD:
            raise Unsayable(Reason("plan.schedule", f"{ONE_FORWARD_ONE_BACKWARD} of one pipeline rank", plainly(name)))
        return {}
    word = dict(_SCHEDULES).get(name)
    if word is None:
        can = f"one of {', '.join(own for own, _ in _SCHEDULES)} ({_SCHEDULE})"
        raise Unsayable(Reason("plan.schedule", can, plainly(name).split("\n")[0][:60]))
    if not all(stages[1:-1]):
        raise Unsayable(Reason("plan.stages", "a layer at least between the ends (module_fqns)", plainly(stages)))
    return {_PIPELINE: facts["plan.pipeline"], _SCHEDULE: word, _PARTS: _parts(stages)}


def _parts(stages: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of every stage by name.

    >>> _parts((1, 2))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]
    """
    result, first = [], 0
    for count in stages:
        result.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    return [["tok_embeddings", *result[0]], *result[1:-1], [*result[-1], "norm", "lm_head"]]


def _read_pipeline(stated: Stated) -> Facts:
    pipeline = stated.count(_PIPELINE, 1)
    if pipeline == 1:
        if _PARTS in stated:
            raise stated.fault(_PARTS, "needs a pipeline, met pipeline_parallel_degree 1")
        return {"plan.pipeline": 1, "plan.schedule": ONE_FORWARD_ONE_BACKWARD, "plan.chunks": 1}
    met = stated.word(_SCHEDULE, tuple(word for _, word in _SCHEDULES), "1F1B")
    parts = stated.get(_PARTS)
    if not isinstance(parts, list) or len(parts) % pipeline or not all(isinstance(part, list) for part in parts):
        raise stated.fault(_PARTS, f"is a list of modules for each stage of {pipeline} ranks, met {shown(parts)}")
    stages = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
    if len(stages) < 2 or parts != _parts(stages):
        raise stated.fault(_PARTS, "names tok_embeddings, all layers in their order, norm and lm_head, met others")
    return {
        "plan.pipeline": pipeline,
        "plan.schedule": next(own for own, word in _SCHEDULES if word == met),
        "plan.chunks": len(parts) // pipeline,
        "plan.stages": stages,
    }


def _say_tensor(facts: Facts) -> Values:
    tensor = facts["plan.tensor"]
    return {} if tensor == 1 else {_TENSOR: tensor, _SEQUENCE: facts["plan.sequence_parallel"]}


def _read_tensor(stated: Stated) -> Facts:
    tensor = stated.count(_TENSOR, 1)
    return {"plan.tensor": tensor, "plan.sequence_parallel": stated.flag(_SEQUENCE, True) and tensor > 1}


def _say_overlap(facts: Facts) -> Values:
    return {_COMPILED: True, _ASYNC: True} if facts["plan.overlap_tensor"] else {}


def _read_overlap(stated: Stated) -> Facts:
    on = stated.flag(_ASYNC, False)
    if on and not stated.flag(_COMPILED, False):
        raise stated.fault(_ASYNC, "needs compile.enable, met false")
    return {"plan.overlap_tensor": on}


def _say_attention(facts: Facts) -> Values:
    context, how = facts["plan.context"], facts["plan.attention"]
    if context > 1 and how is not Attention.ALL_GATHER:
        raise Unsayable(Reason("plan.attention", "all_gather of keys and values", plainly(how)))
    return {} if context == 1 else {_CONTEXT: context}


def _read_attention(stated: Stated) -> Facts:
    context = stated.count(_CONTEXT, 1)
    return {"plan.context": context, "plan.attention": Attention.ALL_GATHER if context > 1 else None}


def _say_recompute(facts: Facts) -> Values:
    how = facts["plan.recompute"]
    if how in (Recompute.NONE, Recompute.FULL):
        return {_RECOMPUTE: str(None) if how is Recompute.NONE else FULL}
    if isinstance(how, FirstLayers) and how.layer is Recompute.FULL:
        return {_RECOMPUTE: FIRST.format(how.layers)}
    if how == _ACTIVATION and (kind := facts["model.ffn_kind"]) != "swiglu":
        can = "the activation of swiglu alone, which its feed-forward has"
        raise Unsayable(Reason("plan.recompute", can, f"{_ACTIVATION} of {kind}"))
    if how == _ACTIVATION:
        return {_RECOMPUTE: str(None), ACTIVATIONS: True}
    can = f"none, full, full of the first layers of all stages, or the operator {_ACTIVATION} ({_RECOMPUTE})"
    raise Unsayable(Reason("plan.recompute", can, plainly(how)))


def _read_recompute(stated: Stated) -> Facts:
    met, again = str(stated.get(_RECOMPUTE)), stated.flag(ACTIVATIONS, False)
    if again and met != str(None):
        raise stated.fault(_RECOMPUTE, f"None where {ACTIVATIONS} is called, met {shown(met)}")
    if found := re.fullmatch(re.escape(FIRST).replace(r"\{\}", "([1-9][0-9]{0,8})"), met):
        return {"plan.recompute": FirstLayers(Recompute.FULL, int(found[1]))}
    if met not in (str(None), FULL):
        allowed = f"None, {FULL} or {FIRST.format(1)}"
        raise stated.fault(_RECOMPUTE, f"is {allowed} with a number of layers, met {shown(met)}")
    return {"plan.recompute": _ACTIVATION if again else Recompute.FULL if met == FULL else Recompute.NONE}


def _say_precision(facts: Facts) -> Values:
    precision = facts["training.precision"]
    if precision == "fp8" and facts["model.experts"] is not None:
        can = "bf16 or fp32 with experts, whose products in float8 are a prototype of torchao's"
        raise Unsayable(Reason("training.precision", can, precision))
    if precision not in _PRECISIONS:
        raise Unsayable(Reason("training.precision", f"bf16, fp8 or fp32 ({_PARAMETERS})", precision))
    return dict(_PRECISIONS[precision])


def _read_precision(stated: Stated) -> Facts:
    quantised = stated.flag(FLOAT8, False)
    word = stated.word(_PARAMETERS, ("bfloat16", "float32"), "bfloat16")
    if quantised and word == "float32":
        raise stated.fault(_PARAMETERS, f"bfloat16 where {FLOAT8} is called, met {word}")
    return {"training.precision": "fp8" if quantised else "bf16" if word == "bfloat16" else "fp32"}


def _say_graphs(facts: Facts) -> Values:
    """Return the key that disables CUDA graphs where ``Trainer.Config`` refuses them: with pipeline or expert ranks."""
    return {_NO_GRAPHS: True} if facts["plan.pipeline"] > 1 or facts["plan.expert"] > 1 else {}


def _read_graphs(stated: Stated) -> Facts:
    stated.flag(_NO_GRAPHS, False)
    return {}


def _combinations(facts: Facts) -> Iterator[Reason]:
    """Yield what torchtitan cannot combine: `ParallelDims` takes expert ranks first from tensor and context ranks."""
    expert, context = facts["plan.expert"], facts["plan.context"]
    parts = 2 * context * (facts["plan.tensor"] if facts["plan.sequence_parallel"] else 1)
    if context > 1 and facts["training.sequence"] % parts:
        can = f"{parts} parts of the sequence, two a rank"
        yield Reason("plan.context", can, f"{context} of {facts['training.sequence']} tokens")
    if expert == 1:
        return
    for axis in ("tensor", "context"):
        if (met := facts[f"plan.{axis}"]) > 1:
            yield Reason("plan.expert", f"1 with {axis} ranks, which it makes expert ranks first", f"{axis} {met}")
    shards = facts["plan.zero_shards"] or facts["plan.data"]
    if facts["plan.zero"] != 3 or shards % expert:
        yield Reason(
            "plan.expert", "a divisor of data_parallel_shard_degree", f"{expert} with zero {facts['plan.zero']}"
        )


_MAP: tuple[Entry, ...] = (
    Together(
        (_SHARD, _REPLICATE, _RESHARD),
        ("plan.data", "plan.zero", "plan.zero_shards", "plan.reshard_after_forward"),
        _say_data,
        _read_data,
    ),
    Together((_TENSOR, _SEQUENCE), ("plan.tensor", "plan.sequence_parallel"), _say_tensor, _read_tensor),
    Together(
        (_PIPELINE, _SCHEDULE, _PARTS),
        ("plan.pipeline", "plan.schedule", "plan.chunks", "plan.stages"),
        _say_pipeline,
        _read_pipeline,
    ),
    Together((_CONTEXT,), ("plan.context", "plan.attention"), _say_attention, _read_attention),
    Count(f"{_BY}.expert_parallel_degree", "plan.expert", 1),
    Together((_LOCAL, _GLOBAL, _MICRO), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    Count(f"{_TRAINING}.seq_len", "training.sequence"),
    Together((_PARAMETERS, FLOAT8), ("training.precision",), _say_precision, _read_precision),
    Word(
        f"{_TRAINING}.enable_cpu_offload",
        "plan.offload",
        ((NOTHING, False), (HOST_OPTIMIZER_AND_PARAMETERS, True)),
        False,
    ),
    Together((_RECOMPUTE, ACTIVATIONS), ("plan.recompute",), _say_recompute, _read_recompute),
    Together((_ASYNC, _COMPILED), ("plan.overlap_tensor",), _say_overlap, _read_overlap),
    Together((_NO_GRAPHS,), (), _say_graphs, _read_graphs),
    *always("FSDP overlaps", overlap_gradients=True),
    *always("stages send whole tensors", scatter_gather=False),
    Always("training.optimizer", "adamw", "in the configuration that is given"),
    Elsewhere(("training.gradient_precision", "training.gradient_clipping")),
    MODEL_ELSEWHERE,
    *PLAIN,
)

TORCHTITAN = Target("torchtitan", "0.3.0", _MAP, write, parse, _combinations)
to_torchtitan, from_torchtitan = TORCHTITAN.to, TORCHTITAN.read
