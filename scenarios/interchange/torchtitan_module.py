"""The Python module that lays a plan upon a torchtitan configuration: written, and read without running any of it."""

import re
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

_IMPORT = "from torchtitan.distributed.activation_checkpoint import FullAC\n"
_POLICY_IMPORT = "from dataclasses import dataclass\n\n"
_POLICY = '''

class FirstLayersAC(FullAC):
    """Recompute the first layers of every stage: a policy is built anew for each of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: int = 1

    def _wrap_block(self, module, *, base_fqn=None):
        self.met = getattr(self, "met", 0) + 1
        return super()._wrap_block(module, base_fqn=base_fqn) if self.met <= self.config.layers else module
'''
_HEAD = '''"""{title}.

For {called} (`meshwise export --to torchtitan`). In a module of your own:

    def mine() -> Trainer.Config:
        return laid_out(llama3_8b())

The model is that of the configuration which is given; its sizes: {summary}.
"""

{imports}from torchtitan.trainer import Trainer
{policy}

def laid_out(config: Trainer.Config) -> Trainer.Config:
    """Return the configuration with the plan laid upon it."""
'''
_FOOT = "    return config\n"
_ASSIGNMENT = re.compile(r"config\.([a-z_]+(?:\.[a-z_]+)?) = (.+)")
_IGNORED = re.compile(r"(#.*|from [a-z._]+ import [A-Za-z]+|def laid_out\(.*|return config|\"\"\"Return .*\"\"\"|)")


def write(values: Values, request: Request, called: str) -> str:
    """Return the module whose one function sets what the plan decides."""
    title = request.title.replace("\\", "/").replace('"', "'").rstrip(".")
    recomputes = values["activation_checkpoint"]
    policy = "" if recomputes in (FULL, str(None)) else _POLICY
    imports = (_POLICY_IMPORT if policy else "") + (_IMPORT if recomputes != str(None) else "")
    head = _HEAD.format(title=title, called=called, summary=request.spec.summary, imports=imports, policy=policy)
    lines = [f"    config.{key} = {_shown(key, value)}\n" for key, value in values.items()]
    return head + "".join(lines) + _FOOT


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
    """Return the text without docstring and policy, each list of stages on the first of its lines; places stay."""
    text = re.sub(rb'\A"""(?:[^"\\]|"(?!""))*"""', lambda met: b"\n" * met[0].count(b"\n"), content)
    text = text.replace(_POLICY.encode(), b"\n" * _POLICY.count("\n"))
    return re.sub(rb"= \[\n((?:        \[[^\n]*\],\n)*)    \]", _joined, text)


def _joined(met: re.Match[bytes]) -> bytes:
    return b"= [" + met[1].replace(b"\n", b"") + b"]" + b"\n" * (met[1].count(b"\n") + 1)


def _pair(line: str) -> Pair | None:
    if _IGNORED.fullmatch(line):
        return None
    found = _ASSIGNMENT.fullmatch(line)
    if found is None:
        raise ValueError(f"a line sets a field of config, as in config.training.seq_len = 8192, met {shown(line)}")
    key, value = found.groups()
    return (key, value) if key == "activation_checkpoint" else (key, literal(value))
