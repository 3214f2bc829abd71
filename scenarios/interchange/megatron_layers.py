"""Layers of Megatron-LM that compute some of their modules again: the Python module that ``--spec`` names.

Megatron-LM's own ``--recompute-modules`` holds for every layer, has the activation of experts alone, and recomputes no
norm of a dense layer: Transformer Engine's specification of one fuses norms into products. What it lacks stands in a
module of its own, which the script writes where Python finds it. Each flag in it is one that Megatron-LM's layers read;
the activation runs as that of experts does there, by the code of Megatron-LM's ``MLP`` with all its fusions.

References
----------
Megatron-LM at core_v0.16.1: ``gpt_builders.py`` (``--spec``: a name of a module, imported and not called);
``megatron/core/transformer/transformer_block.py`` (``_get_block_submodules``: the specification of one layer is that of
all; ``build_layer``: layers are counted from 1 within a stage), ``.../transformer_layer.py`` (the flags of norms;
what an MLP is built with), ``.../attention.py`` (``checkpoint_core_attention``), ``.../mlp.py``,
``.../moe/experts.py`` (``moe_act``); ``megatron/core/tensor_parallel/random.py`` (``CheckpointWithoutOutput``);
``megatron/core/models/gpt/gpt_layer_specs.py`` (the layer of Transformer Engine, and in the local one the names of
norms in checkpoints); ``.../transformer/transformer_config.py`` (no such recomputation beside fp8's delayed scaling).
"""

import re
from collections.abc import Mapping
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.interchange.entry import Values
from scenarios.interchange.lines import Pair, literal
from strategies.recomputation import FirstLayers, OfStage, PerStage, Recomputation, Recompute, SomeOperators

RECOMPUTED = "RECOMPUTED"
"""The name of the one literal of the module: what layers compute again."""

SPEC, LAYER_SPEC = "--spec", ["recomputed_layers", "layer_spec"]
"""The argument, and the module and the name in it."""

CORE = "core_attn"
"""Megatron-LM's word for the attention core."""

QUANTISED = ("input_layernorm", "pre_mlp_layernorm", "activation")
"""Modules whose output a product reads: it keeps that output in fp8 alone where scaling is delayed."""

_HEAD = """LAYERS=$(mktemp -d) || exit 1
trap 'rm -rf "$LAYERS"' EXIT
export PYTHONPATH="$LAYERS${PYTHONPATH:+:$PYTHONPATH}"
cat > "$LAYERS/recomputed_layers.py" << 'END'
"""
_IMPORTS = '''"""Layers of Megatron-LM (core 0.16.1) that compute some of their modules again in backward."""

from types import SimpleNamespace

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_rank
from megatron.training import get_args

# How many of a stage's first layers (None: all of them) compute which modules again: one pair for all stages, or a list
# with one a stage. Stages follow one another as their layers do: of virtual stages, the first of every rank come first.
'''
_CODE = '''

class RecomputedMLP(MLP):
    """Keep what the first product returns, and compute the activation again before backward of the second reads it."""

    def forward(self, hidden_states, **kwargs):
        product, bias = self.linear_fc1(hidden_states)
        checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8)
        output, output_bias = self.linear_fc2(checkpoint.checkpoint(self.activate, product, bias))
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias

    def activate(self, product, bias):
        """Return what MLP.forward computes between its products, by that code itself, fused kernels included."""
        between = SimpleNamespace(
            config=self.config,
            activation_func=self.activation_func,
            linear_fc1=lambda pair: pair,
            linear_fc2=lambda activation: (activation, None),
        )
        return MLP.forward(between, (product, bias))[0]


class RecomputedLayer(TransformerLayer):
    """Compute again what RECOMPUTED says of the layer's stage."""

    def __init__(self, config, submodules, layer_number=1, vp_stage=None, **kwargs):
        super().__init__(config, submodules, layer_number=layer_number, vp_stage=vp_stage, **kwargs)
        modules = recomputed_modules(config, vp_stage or 0, get_pg_rank(self.pg_collection.pp), layer_number)
        self.recompute_input_layernorm = "input_layernorm" in modules
        self.self_attention.checkpoint_core_attention = "core_attn" in modules
        self.recompute_pre_mlp_layernorm = "pre_mlp_layernorm" in modules
        if "activation" in modules:
            self.mlp.__class__ = RecomputedMLP  # only now: TransformerLayer gives its groups to no class but MLP


def recomputed_modules(config, vp_stage, pp_rank, layer_number):
    """Return the modules that a layer computes again; it is counted from 1 within its stage."""
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if isinstance(RECOMPUTED, list) and len(RECOMPUTED) != stages:
        raise ValueError(f"RECOMPUTED has a pair for each of {stages} stages, met {len(RECOMPUTED)}")
    stage = config.pipeline_model_parallel_size * vp_stage + pp_rank
    first, modules = RECOMPUTED[stage] if isinstance(RECOMPUTED, list) else RECOMPUTED
    return modules if first is None or layer_number <= first else ()


def make_layer_spec():
    """Return the layer of Transformer Engine, its norms apart from products where any is computed again."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=get_args().qk_layernorm)
    spec.module = RecomputedLayer
    pairs = RECOMPUTED if isinstance(RECOMPUTED, list) else [RECOMPUTED]
    if any(name.endswith("layernorm") for _, modules in pairs for name in modules):
        parts = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        parts.mlp.submodules.linear_fc1 = TEColumnParallelLinear
        parts.sharded_state_dict_keys_map = {  # in checkpoints their weights have the names that they have in products
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    return spec


layer_spec = make_layer_spec()
'''
_TAIL = "END\n"
_OPENED, _CLOSED = f"{RECOMPUTED} = [".encode(), b"]"
"""The lines between which a list has a pair a line."""
_ASSIGNMENT = re.compile(rf"{RECOMPUTED} = (.+)")


def list_layer_modules(core: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the operators of every module that a layer can compute again, those of the attention core given."""
    return {
        "input_layernorm": ("input_norm",),
        CORE: core,
        "pre_mlp_layernorm": ("feed_forward_norm",),
        "activation": ("activation",),
    }


def split_into_modules(names: tuple[str, ...], modules: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the modules that operators make up one after another; none where they do not, or are the default's.

    >>> modules = list_layer_modules(("scores", "softmax", "context"))
    >>> split_into_modules(("scores", "softmax", "context", "activation"), modules)
    ['core_attn', 'activation']
    >>> split_into_modules(("activation", "down"), modules)
    []
    """
    words: list[str] = []
    while names:
        word = next((word for word, own in modules.items() if names[: len(own)] == own), None)
        if word is None:
            return []
        words.append(word)
        names = names[len(modules[word]) :]
    return [] if words == [CORE] else words


def say_layers(how: Recomputation, modules: Mapping[str, tuple[str, ...]]) -> Values:
    """Return the literal of the module and the argument that names it; nothing where a stage has no words.

    >>> say_layers(PerStage((FirstLayers(Recompute.SELECTIVE, 2), Recompute.NONE)), list_layer_modules(("attention",)))
    {'RECOMPUTED': [(2, ('core_attn',)), (None, ())], '--spec': ['recomputed_layers', 'layer_spec']}
    """
    pairs = [_pair_of(stage, modules) for stage in (how.stages if isinstance(how, PerStage) else (how,))]
    if None in pairs:
        return {}
    return {RECOMPUTED: pairs if isinstance(how, PerStage) else pairs[0], SPEC: LAYER_SPEC}


def _pair_of(how: OfStage, modules: Mapping[str, tuple[str, ...]]) -> tuple[int | None, tuple[str, ...]] | None:
    """Return how many layers of a stage compute which modules again; ``None`` where there are no words for it."""
    layer = how.layer
    if isinstance(layer, SomeOperators):
        words = tuple(split_into_modules(layer.names, modules))
        return (how.layers, words) if words else None
    known: dict[Recompute, tuple[str, ...]] = {Recompute.NONE: (), Recompute.SELECTIVE: (CORE,)}
    return (how.layers, known[layer]) if layer in known else None


def read_layers(value: Any, modules: Mapping[str, tuple[str, ...]]) -> Recomputation:
    """Return what the literal of a module says; ``ValueError`` where it is no such literal."""
    if isinstance(value, list) and value:
        return PerStage(tuple(_of_stage(pair, modules) for pair in value))
    return _of_stage(value, modules)


def _of_stage(value: Any, modules: Mapping[str, tuple[str, ...]]) -> OfStage:
    message = (
        f"a stage is (None, (...)) of {', '.join(modules)}, each once and in tuples, or of its first layers such as "
        f'(4, ("{CORE}",)), met {shown(value)}'
    )
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple)):
        raise ValueError(message)
    layers, words = value
    if layers is None and not words:
        return Recompute.NONE
    if not all(isinstance(word, str) and word in modules for word in words):
        raise ValueError(message)
    if words == (CORE,) and (layers is None or (type(layers) is int and layers > 0)):
        return Recompute.SELECTIVE if layers is None else FirstLayers(Recompute.SELECTIVE, layers)
    names = tuple(name for word in words for name in modules[word])
    if layers is not None or len(set(names)) < len(names) or not names:
        raise ValueError(message)
    return SomeOperators(names)


def collect_modules(value: Any) -> set[str]:
    """Return the modules that a literal names."""
    pairs = value if isinstance(value, list) else [value]
    return {word for _, words in pairs for word in words}


def write_layers(value: Any) -> str:
    """Return the lines of a script that write the module, and let Python find it on this host alone.

    The folder is the host's own: on a shared one the ranks of a host would read what another host is writing.
    """
    return _HEAD + _IMPORTS + f"{RECOMPUTED} = {_shown(value)}\n" + _CODE + _TAIL


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"    {_shown(pair)},\n" for pair in value) + "]"
    return repr(value).replace("'", '"')


def strip_layers(content: bytes, file: str) -> bytes:
    """Return a script whose module is one line, its literal, and all of which it was without one. Places stay.

    Raises
    ------
    ScenarioError
        At the first line where a module is not as it is written.
    """
    lines = content.split(b"\n")
    head, tail = (_HEAD + _IMPORTS).encode().splitlines(), (_CODE + _TAIL).encode().splitlines()
    if head[0] not in lines:
        return content
    start = lines.index(head[0])
    first = last = start + len(head)
    if lines[first : first + 1] == [_OPENED] and _CLOSED in lines[first:]:
        last = lines.index(_CLOSED, first)
    for number, line in (*enumerate(head, start), *enumerate(tail, last + 1)):
        met = lines[number] if number < len(lines) else b"the end"
        if met != line:
            message = f"a module of layers is as it was written, met {shown(met.decode(errors='replace'))}"
            raise ScenarioError((Fault(file, number + 1, 1, "", message),))
    end = last + 1 + len(tail)
    lines[start:end] = [*[b""] * len(head), b"".join(lines[first : last + 1]), *[b""] * (end - first - 1)]
    return b"\n".join(lines)


def parse_literal(line: str) -> Pair | None:
    """Return the literal that a line says, under its name; ``None`` where it is another line."""
    found = _ASSIGNMENT.fullmatch(line)
    return None if found is None else (RECOMPUTED, literal(found[1]))
