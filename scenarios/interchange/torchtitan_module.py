"""The Python module that lays a plan upon a torchtitan configuration: written, and read without running any of it."""

import re
from dataclasses import dataclass
from typing import Any

from scenarios.errors import shown
from scenarios.interchange.entry import Values
from scenarios.interchange.facts import Request
from scenarios.interchange.lines import Pair, document, literal
from scenarios.reader import Document

FULL = "FullAC.Config()"
"""What recomputes whole layers; the one value that is no literal, beside ``None``."""

FIRST = "FirstLayersAC.Config(layers={})"
"""What recomputes so many whole layers of every stage, by a policy that the module defines."""

ACTIVATIONS = "recompute_activations"
"""The function of the module that lets dense feed-forwards compute their activation again."""

FLOAT8 = "multiply_in_float8"
"""The function of the module that lets the products of layers run in float8."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A policy or function that the module defines, and what it imports."""

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
"""The product that reads the activation is within what is computed again, for it would keep it else; what it would save
comes before it runs, so that torch stops there and neither the product nor the collective after it runs twice."""
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
"""Functions that the module defines and calls with the configuration, last of all."""
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
    """Return the module whose one function sets what the plan decides."""
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
    """Return the import statements of a module, those of the standard library first."""
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
    """Return the document of a module, assignment by assignment; ``ScenarioError`` where a line is something else."""
    return document(_on_one_line(content), file, _pair)


def _on_one_line(content: bytes) -> bytes:
    """Return the text without docstring, policy and functions, each list of stages on its first line; places stay."""
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
