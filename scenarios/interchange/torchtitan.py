"""torchtitan: a Python module that applies a plan to a configuration, written, and read back without running it.

Since 0.3 torchtitan is configured in Python, by a function that returns a ``Trainer.Config``, and no longer by TOML.
Where torchtitan has the parts of the model, the module's function ``train`` returns the configuration of the whole run
(`meshwise.scenarios.interchange.torchtitan_model`). Its function ``laid_out`` sets what the plan decides, on any
configuration.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.files.reader import Document
from meshwise.scenarios.interchange.entry import (
    COMMON_ENTRIES,
    HOST_OPTIMIZER_AND_PARAMETERS,
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
    list_fixed,
    map_count,
    map_word,
)
from meshwise.scenarios.interchange.facts import Facts, TrainerRequest
from meshwise.scenarios.interchange.lines import ConfigValues, Pair, parse_lines, parse_value
from meshwise.scenarios.interchange.target import Target
from meshwise.scenarios.interchange.torchtitan_model import (
    MODEL_CODE,
    MODEL_ENTRIES,
    MODEL_IMPORTS,
    RUN_CODE,
    RUN_IMPORTS,
    STANDARD_IMPORT,
    VARIABLES,
    has_model,
    list_variables,
)
from meshwise.strategies.plan.offloading import NO_OFFLOADING
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
class _ModulePart:
    """The code of a policy or function that the module defines, and its import statements."""

    code: str
    imports: tuple[str, ...]


_DATACLASS = "from dataclasses import dataclass"
_FULL_POLICY = "from torchtitan.distributed.activation_checkpoint import FullAC"
_FIRST_LAYERS = _ModulePart(
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
_FEED_FORWARD = _ModulePart(
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
_PRODUCTS = _ModulePart(
    '''

def multiply_in_float8(config: Trainer.Config) -> None:
    """Let the products of layers run in float8, scaled row by row; those of the head stay as they are."""
    compiled = config.compile.enable and "model" in config.compile.components
    converter = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=compiled)
    config.model_spec.model = converter.build().convert(config.model_spec.model)
''',
    ("from torchtitan.components.quantization import Float8LinearConverter",),
)
_CALLED_FUNCTIONS = {ACTIVATIONS: _FEED_FORWARD, FLOAT8: _PRODUCTS}
"""Functions that the module defines and calls with the configuration, after all assignments."""
_RUN = _ModulePart(RUN_CODE, RUN_IMPORTS)
_MODEL = _ModulePart(MODEL_CODE, (STANDARD_IMPORT, *MODEL_IMPORTS))
_HEAD = '''# {command}
"""{title}.

For {called} (`meshwise export --to torchtitan`).
{usage}
"""

{imports}

{variables}
{parts}

def laid_out(config: Trainer.Config) -> Trainer.Config:
    """Return the configuration with the plan laid upon it."""
'''
_WHOLE = """Run the first line in the folder of this file, once on each host. With
`--comm.mode fake_backend` and NGPU ranks it is checked without devices."""
_PLAN_ALONE = """torchtitan has no parts for a model
of {summary}. In a module of your own:

    def mine() -> Trainer.Config:
        return laid_out(set_run(your_config()))

`your_config` is any function that returns a Trainer.Config, and the model is the one that it names."""
_FOOT = "    return config\n"
_ASSIGNMENT = re.compile(r"config\.([a-z_]+(?:\.[a-z_]+)?) = (.+)")
_VARIABLE = re.compile(r"([A-Z_]+) = (.+)")
_CALL = re.compile(r"([a-z0-9_]+)\(config\)")
_NAME = "[A-Za-z0-9_]+"
_IGNORED_LINES = re.compile(
    rf"(#.*|from [a-z0-9_.]+ import {_NAME}(, {_NAME})*|def laid_out\(.*|return config|\"\"\"Return .*\"\"\"|)"
)


def write(values: Values, request: TrainerRequest, target_name: str) -> str:
    """Return the text of the module, whose functions set the run, build the model and set what the plan decides."""
    title = request.title.replace("\\", "/").replace('"', "'").rstrip(".")
    recompute_policy = values["activation_checkpoint"]
    is_whole = "LAYERS" in values
    parts = [_RUN, *([_MODEL] if is_whole else [])]
    parts += [] if recompute_policy in (FULL, str(None)) else [_FIRST_LAYERS]
    parts += [part for name, part in _CALLED_FUNCTIONS.items() if name in values]
    head = _HEAD.format(
        command=_format_command(request, is_whole),
        title=title,
        called=target_name,
        usage=_WHOLE if is_whole else _PLAN_ALONE.format(summary=request.spec.summary),
        imports=_imports(parts, (_FULL_POLICY,) if recompute_policy == FULL else ()),
        variables="\n".join(_format_variables(values, request)),
        parts="".join(part.code for part in parts),
    )
    lines = [
        f"    config.{key} = {_format_setting(key, value)}\n"
        for key, value in values.items()
        if key not in _CALLED_FUNCTIONS and key not in VARIABLES
    ]
    calls = [f"    {name}(config)\n" for name in _CALLED_FUNCTIONS if name in values]
    return head + "".join(lines + calls) + _FOOT


def _format_command(request: TrainerRequest, is_whole: bool) -> str:
    """Return the command that starts the run, on each of several hosts."""
    hosts, ranks = request.hosts
    meeting = "" if hosts == 1 else f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint HOST0:29500 "
    module = request.find_file_name("plan.py").removesuffix(".py") if is_whole else "YOUR_MODULE"
    function = "train" if is_whole else "mine"
    return f"torchrun {meeting}--nproc-per-node {ranks} -m torchtitan.train --module {module} --config {function}"


def _format_variables(values: Values, request: TrainerRequest) -> Iterator[str]:
    for heading, rows in list_variables(values, request):
        yield f"# {heading}"
        for name, value, comment in rows:
            yield f"{name} = {value!r}" + (f"  # {comment}" if comment else "")


def _imports(parts: list[_ModulePart], extra_imports: tuple[str, ...]) -> str:
    """Return the import statements of the module, the standard library first."""
    import_lines = {line for part in parts for line in part.imports}
    import_lines |= {*extra_imports, "from torchtitan.trainer import Trainer"}
    standard = [line for line in (_DATACLASS, STANDARD_IMPORT) if line in import_lines]
    prefix = "\n".join(standard) + "\n\n" if standard else ""
    return prefix + "\n".join(sorted(import_lines - {*standard}))


def _format_setting(key: str, value: Any) -> str:
    if key == "activation_checkpoint":
        return str(value)
    if isinstance(value, list):
        return "[\n" + "".join(f"        {part!r},\n" for part in value) + "    ]"
    return repr(value)


def parse(content: bytes, file: str) -> Document:
    """Return the document of a module, one key an assignment; ``ScenarioError`` where a line is something else."""
    return parse_lines(_flatten_text(content), file, _parse_line)


def _flatten_text(content: bytes) -> bytes:
    """Return the module without docstring, policy and functions, and with lists of stages on one line.

    Lines keep their numbers, so that faults have the right place.
    """
    text = re.sub(rb'\A((?:#[^\n]*\n)*)"""(?:[^"\\]|"(?!""))*"""', lambda match: b"\n" * match[0].count(b"\n"), content)
    for part in (_RUN, _MODEL, _FIRST_LAYERS, *_CALLED_FUNCTIONS.values()):
        text = text.replace(part.code.encode(), b"\n" * part.code.count("\n"))
    return re.sub(rb"= \[\n((?:        \[[^\n]*\],\n)*)    \]", _join_list, text)


def _join_list(match: re.Match[bytes]) -> bytes:
    return b"= [" + match[1].replace(b"\n", b"") + b"]" + b"\n" * (match[1].count(b"\n") + 1)


def _parse_line(line: str) -> Pair | None:
    if _IGNORED_LINES.fullmatch(line):
        return None
    call = _CALL.fullmatch(line)
    if call and call[1] in _CALLED_FUNCTIONS:
        return call[1], True
    if variable := _VARIABLE.fullmatch(line):
        return variable[1], parse_value(variable[2])
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        raise ValueError(
            f"a line sets a field of config, as in config.training.seq_len = 8192, met {format_value(line)}"
        )
    key, value = match.groups()
    return (key, value) if key == "activation_checkpoint" else (key, parse_value(value))


_TRAINING, _PARALLELISM, _COMPILE = "training", "parallelism", "compile"
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

_LOCAL, _MICRO = f"{_TRAINING}.local_batch_size", f"{_PARALLELISM}.pipeline_parallel_microbatch_size"
_REPLICATE, _SHARD = f"{_PARALLELISM}.data_parallel_replicate_degree", f"{_PARALLELISM}.data_parallel_shard_degree"
_RESHARD = f"{_PARALLELISM}.fsdp_reshard_after_forward"
_PIPELINE, _SCHEDULE = f"{_PARALLELISM}.pipeline_parallel_degree", f"{_PARALLELISM}.pipeline_parallel_schedule"
_PARTS, _GLOBAL = f"{_PARALLELISM}.module_fqns_per_model_part", f"{_TRAINING}.global_batch_size"
_CONTEXT = f"{_PARALLELISM}.context_parallel_degree"
_ASYNC, _COMPILED = f"{_COMPILE}.enable_async_tensor_parallel", f"{_COMPILE}.enable"
_RECOMPUTE = "activation_checkpoint"
_ACTIVATION = SomeOperators(("activation",))
"""What `ACTIVATIONS` recomputes: the activation of dense feed-forwards. That of experts lies between products of a
layer that cannot be split there."""
_PARAMETERS = f"{_TRAINING}.mixed_precision_param"
_PRECISIONS: dict[str, Values] = {"bf16": {}, "fp8": {FLOAT8: True}, "fp32": {_PARAMETERS: "float32"}}
_NO_GRAPHS = f"{_TRAINING}.disable_cuda_graphs"
_TENSOR, _SEQUENCE = f"{_PARALLELISM}.tensor_parallel_degree", f"{_PARALLELISM}.enable_sequence_parallel"


def _say_data(facts: Facts) -> Values:
    data, shards, context = facts["plan.data"], facts["plan.zero_shards"] or facts["plan.data"], facts["plan.context"]
    zero = facts["plan.zero"]
    limits = (
        (zero not in (0, 3), "0 (replicas) or 3 (FSDP) (data_parallel_shard_degree)"),
        (zero == 0 and context > 1, "3 where context ranks share a sequence, for FSDP spans them"),
        (zero == 3 and shards * context == 1, "0 where no rank shares states (data_parallel_shard_degree 1)"),
    )
    if limit := next((limit for is_wrong, limit in limits if is_wrong), None):
        raise UnsayableError(build_reason(facts, "plan.zero", limit))
    shard = shards if zero else 1
    values: Values = {_REPLICATE: data // shard, _SHARD: shard}
    return values | ({_RESHARD: "always" if facts["plan.reshard_after_forward"] else "never"} if zero else {})


def _read_data(config: ConfigValues) -> Facts:
    replicas, shard = config.count(_REPLICATE, 1), config.count(_SHARD)
    is_sharded = shard * config.count(_CONTEXT, 1) > 1
    # torchtitan's own default keeps parameters under pipelines: else every microbatch would gather them again
    default = "never" if config.count(_PIPELINE, 1) > 1 else "always"
    reshard = config.word(_RESHARD, ("default", "always", "never"), "default")
    reshard = default if reshard == "default" else reshard
    return {
        "plan.data": replicas * shard,
        "plan.zero": 3 if is_sharded else 0,
        "plan.zero_shards": shard if is_sharded and replicas > 1 else 0,
        "plan.reshard_after_forward": reshard == "always" or not is_sharded,
    }


def _say_batch(facts: Facts) -> Values:
    size, global_batch = find_microbatch(facts), facts["training.global_batch"]
    if facts["plan.pipeline"] == 1:
        return {_LOCAL: size, _GLOBAL: global_batch}
    return {_LOCAL: size * count_microbatches(facts), _GLOBAL: global_batch, _MICRO: size}


def _read_batch(config: ConfigValues) -> Facts:
    local_batch, global_batch = config.count(_LOCAL), config.count(_GLOBAL)
    is_pipelined = config.count(_PIPELINE, 1) > 1
    ranks = config.count(_REPLICATE, 1) * config.count(_SHARD)
    if is_pipelined and local_batch * ranks != global_batch:
        raise config.build_error(
            _GLOBAL,
            f"a step is one pass of the pipeline: local_batch_size({local_batch}) * data({ranks}), met {global_batch}",
        )
    size = config.count(_MICRO, 1) if is_pipelined else local_batch
    if local_batch % size:
        raise config.build_error(_MICRO, f"divides local_batch_size({local_batch}), met {size}")
    return {"plan.microbatch": size, "training.global_batch": global_batch}


def _say_pipeline(facts: Facts) -> Values:
    stages = facts["plan.stages"]
    if facts["plan.pipeline"] == 1:
        if facts["plan.schedule"] != ONE_FORWARD_ONE_BACKWARD:
            limit = f"{ONE_FORWARD_ONE_BACKWARD} of one pipeline rank"
            raise UnsayableError(build_reason(facts, "plan.schedule", limit))
        return {}
    word = dict(_SCHEDULES).get(facts["plan.schedule"])
    if word is None:
        limit = f"one of {', '.join(schedule for schedule, _ in _SCHEDULES)} ({_SCHEDULE})"
        raise UnsayableError(build_schedule_reason(facts, limit))
    if not all(stages[1:-1]):
        raise UnsayableError(build_reason(facts, "plan.stages", "a layer at least between the ends (module_fqns)"))
    return {_PIPELINE: facts["plan.pipeline"], _SCHEDULE: word, _PARTS: _list_parts(stages)}


def _list_parts(stages: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of every stage by name.

    >>> _list_parts((1, 2))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]
    """
    result, first_layer = [], 0
    for count in stages:
        result.append([f"layers.{layer}" for layer in range(first_layer, first_layer + count)])
        first_layer += count
    return [["tok_embeddings", *result[0]], *result[1:-1], [*result[-1], "norm", "lm_head"]]


def _read_pipeline(config: ConfigValues) -> Facts:
    pipeline = config.count(_PIPELINE, 1)
    if pipeline == 1:
        config.forbid((_PARTS,), "needs a pipeline, met pipeline_parallel_degree 1")
        return {"plan.pipeline": 1, "plan.schedule": ONE_FORWARD_ONE_BACKWARD, "plan.chunks": 1}
    schedule = config.choice(_SCHEDULE, _SCHEDULES, "1F1B")
    parts = config.get(_PARTS)
    if not isinstance(parts, list) or len(parts) % pipeline or not all(isinstance(part, list) for part in parts):
        message = f"is a list of modules for each stage of {pipeline} ranks, met {format_value(parts)}"
        raise config.build_error(_PARTS, message)
    stages = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
    if len(stages) < 2 or parts != _list_parts(stages):
        message = "names tok_embeddings, all layers in their order, norm and lm_head, met others"
        raise config.build_error(_PARTS, message)
    facts = {"plan.pipeline": pipeline, "plan.schedule": schedule, "plan.chunks": len(parts) // pipeline}
    return facts | {"plan.stages": stages}


def _say_tensor(facts: Facts) -> Values:
    tensor = facts["plan.tensor"]
    return {} if tensor == 1 else {_TENSOR: tensor, _SEQUENCE: facts["plan.sequence_parallel"]}


def _read_tensor(config: ConfigValues) -> Facts:
    tensor = config.count(_TENSOR, 1)
    return {"plan.tensor": tensor, "plan.sequence_parallel": config.flag(_SEQUENCE, True) and tensor > 1}


def _say_overlap(facts: Facts) -> Values:
    return {_COMPILED: True, _ASYNC: True} if facts["plan.overlap_tensor"] else {}


def _read_overlap(config: ConfigValues) -> Facts:
    is_enabled = config.flag(_ASYNC, False)
    if is_enabled and not config.flag(_COMPILED, False):
        raise config.build_error(_ASYNC, "needs compile.enable, met false")
    return {"plan.overlap_tensor": is_enabled}


def _say_attention(facts: Facts) -> Values:
    context = facts["plan.context"]
    if context > 1 and facts["plan.attention"] is not Attention.ALL_GATHER:
        raise UnsayableError(build_reason(facts, "plan.attention", "all_gather of keys and values"))
    return {} if context == 1 else {_CONTEXT: context}


def _read_attention(config: ConfigValues) -> Facts:
    context = config.count(_CONTEXT, 1)
    return {"plan.context": context, "plan.attention": Attention.ALL_GATHER if context > 1 else None}


def _say_recompute(facts: Facts) -> Values:
    recompute = facts["plan.recompute"]
    if recompute in (Recompute.NONE, Recompute.FULL):
        return {_RECOMPUTE: str(None) if recompute is Recompute.NONE else FULL}
    if isinstance(recompute, FirstLayers) and recompute.layer is Recompute.FULL:
        return {_RECOMPUTE: FIRST.format(recompute.layers)}
    if recompute == _ACTIVATION and (kind := facts["model.ffn_kind"]) != "swiglu":
        limit = "the activation of swiglu alone, which its feed-forward has"
        raise UnsayableError(Reason("plan.recompute", limit, f"{_ACTIVATION} of {kind}"))
    if recompute == _ACTIVATION:
        return {_RECOMPUTE: str(None), ACTIVATIONS: True}
    limit = f"none, full, full of the first layers of all stages, or the operator {_ACTIVATION} ({_RECOMPUTE})"
    raise UnsayableError(build_reason(facts, "plan.recompute", limit))


def _read_recompute(config: ConfigValues) -> Facts:
    policy, recomputes_activation = str(config.get(_RECOMPUTE)), config.flag(ACTIVATIONS, False)
    if recomputes_activation and policy != str(None):
        raise config.build_error(_RECOMPUTE, f"None where {ACTIVATIONS} is called, met {format_value(policy)}")
    if match := re.fullmatch(re.escape(FIRST).replace(r"\{\}", "([1-9][0-9]{0,8})"), policy):
        return {"plan.recompute": FirstLayers(Recompute.FULL, int(match[1]))}
    if policy not in (str(None), FULL):
        allowed = f"None, {FULL} or {FIRST.format(1)}"
        raise config.build_error(_RECOMPUTE, f"is {allowed} with a number of layers, met {format_value(policy)}")
    recompute = _ACTIVATION if recomputes_activation else Recompute.FULL if policy == FULL else Recompute.NONE
    return {"plan.recompute": recompute}


def _say_precision(facts: Facts) -> Values:
    precision = facts["training.precision"]
    if precision == "fp8" and facts["model.experts"] is not None:
        limit = "bf16 or fp32 with experts, whose products in float8 are a prototype of torchao's"
        raise UnsayableError(build_reason(facts, "training.precision", limit))
    if precision not in _PRECISIONS:
        raise UnsayableError(build_reason(facts, "training.precision", f"bf16, fp8 or fp32 ({_PARAMETERS})"))
    return dict(_PRECISIONS[precision])


def _read_precision(config: ConfigValues) -> Facts:
    is_quantised = config.flag(FLOAT8, False)
    word = config.word(_PARAMETERS, ("bfloat16", "float32"), "bfloat16")
    if is_quantised and word == "float32":
        raise config.build_error(_PARAMETERS, f"bfloat16 where {FLOAT8} is called, met {word}")
    return {"training.precision": "fp8" if is_quantised else "bf16" if word == "bfloat16" else "fp32"}


def _say_graphs(facts: Facts) -> Values:
    """Return the key that disables CUDA graphs where ``Trainer.Config`` refuses them: with pipeline or expert ranks."""
    return {_NO_GRAPHS: True} if facts["plan.pipeline"] > 1 or facts["plan.expert"] > 1 else {}


def _read_graphs(config: ConfigValues) -> Facts:
    config.flag(_NO_GRAPHS, False)
    return {}


def _check_combinations(facts: Facts) -> Iterator[Reason]:
    """Yield what torchtitan cannot combine: `ParallelDims` takes expert ranks first from tensor and context ranks."""
    expert, context = facts["plan.expert"], facts["plan.context"]
    parts = 2 * context * (facts["plan.tensor"] if facts["plan.sequence_parallel"] else 1)
    if context > 1 and facts["training.sequence"] % parts:
        limit = f"{parts} parts of the sequence, two a rank"
        yield Reason("plan.context", limit, f"{context} of {facts['training.sequence']} tokens")
    if has_model(facts):
        yield from _check_model(facts)
    if expert == 1:
        return
    for axis in ("tensor", "context"):
        if (num_ranks := facts[f"plan.{axis}"]) > 1:
            limit = f"1 with {axis} ranks, which it makes expert ranks first"
            yield Reason("plan.expert", limit, f"{axis} {num_ranks}")
    shards = facts["plan.zero_shards"] or facts["plan.data"]
    if facts["plan.zero"] != 3 or shards % expert:
        value = f"{expert} with zero {facts['plan.zero']}"
        yield Reason("plan.expert", "a divisor of data_parallel_shard_degree", value)


def _check_model(facts: Facts) -> Iterable[Reason]:
    """Yield what torchtitan's own models refuse, as ``Decoder.Config.update_from_config`` says."""
    if facts["plan.pipeline"] > 1 and facts["model.tied_embeddings"]:
        yield build_reason(facts, "model.tied_embeddings", "false with a pipeline, whose stages share no weights")
    tensor, kv_heads = facts["plan.tensor"], facts["model.kv_heads"]
    if kv_heads % tensor:
        yield build_reason(facts, "plan.tensor", f"a divisor of kv_heads({kv_heads})")


_MAP: tuple[Entry, ...] = (
    Entry(
        (_SHARD, _REPLICATE, _RESHARD),
        ("plan.data", "plan.zero", "plan.zero_shards", "plan.reshard_after_forward"),
        _say_data,
        _read_data,
    ),
    Entry((_TENSOR, _SEQUENCE), ("plan.tensor", "plan.sequence_parallel"), _say_tensor, _read_tensor),
    Entry(
        (_PIPELINE, _SCHEDULE, _PARTS),
        ("plan.pipeline", "plan.schedule", "plan.chunks", "plan.stages"),
        _say_pipeline,
        _read_pipeline,
    ),
    Entry((_CONTEXT,), ("plan.context", "plan.attention"), _say_attention, _read_attention),
    map_count(f"{_PARALLELISM}.expert_parallel_degree", "plan.expert", 1),
    Entry((_LOCAL, _GLOBAL, _MICRO), ("plan.microbatch", "training.global_batch"), _say_batch, _read_batch),
    map_count(f"{_TRAINING}.seq_len", "training.sequence"),
    Entry((_PARAMETERS, FLOAT8), ("training.precision",), _say_precision, _read_precision),
    map_word(
        f"{_TRAINING}.enable_cpu_offload",
        "plan.offload",
        ((NO_OFFLOADING, False), (HOST_OPTIMIZER_AND_PARAMETERS, True)),
        False,
    ),
    Entry((_RECOMPUTE, ACTIVATIONS), ("plan.recompute",), _say_recompute, _read_recompute),
    Entry((_ASYNC, _COMPILED), ("plan.overlap_tensor",), _say_overlap, _read_overlap),
    Entry((_NO_GRAPHS,), (), _say_graphs, _read_graphs),
    *list_fixed("FSDP overlaps", overlap_gradients=True),
    *list_fixed("stages send whole tensors", scatter_gather=False),
    fix_field("training.optimizer", "adamw", "in the configuration that is given"),
    Entry((), ("training.gradient_precision",)),
    *MODEL_ENTRIES,
    *COMMON_ENTRIES,
)

TORCHTITAN = Target("torchtitan", "0.3.0", _MAP, write, parse, _check_combinations)
