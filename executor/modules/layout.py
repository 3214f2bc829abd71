"""What a plan says of a user's module: data parallelism, shards of states, recomputation, stages of a pipeline."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwise.executor.supported import ALL_REDUCE
from meshwise.strategies.plan.layout import STEP_DECISIONS
from meshwise.strategies.plan.mesh import DATA, REPLICA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute
from meshwise.strategies.schedules.schedule import Schedule, build_schedule, find_rule

MOST_DIGITS = 6
"""Digits of a number in words, at most."""

RECOMPUTES = (Recompute.NONE, Recompute.FULL)
"""What may be computed again of the blocks of a module."""


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """How a user's module is trained.

    Parameters
    ----------
    data
        Ranks with samples of their own; with a pipeline those of each stage.
    zero
        What ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
    zero_shards
        Ranks over which one copy of the shared states is cut; 0 for all. It divides ``data``.
    reshard_after_forward
        Whether parameters that are shared are freed between forward and backward.
    num_microbatches
        Parts of a rank's samples, one after the other in a step.
    recompute
        What backward computes again: `Recompute.NONE`, or every block with `Recompute.FULL`.
    pipeline
        Ranks, each with other stages of the module.
    schedule
        The name of the order of passes, or its text (`meshwise.strategies.schedules`).
    chunks
        Stages of a pipeline rank, for schedules that interleave them.
    cuts
        Names of the modules at which stages after the first begin; none for stages of about equal work.
    """

    data: int = 1
    zero: int = 0
    zero_shards: int = 0
    reshard_after_forward: bool = True
    num_microbatches: int = 1
    recompute: Recompute = Recompute.NONE
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    cuts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.data < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"data and num_microbatches are at least 1, met {self.data} and {self.num_microbatches}; nearest: 1"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero is 0, 1, 2 or 3, met {self.zero}; nearest: {min(max(self.zero, 0), 3)}")
        if self.zero_shards < 0 or (self.zero_shards and self.data % self.zero_shards):
            raise ValueError(f"zero_shards divides data({self.data}), met {self.zero_shards}; nearest: {self.data}")
        if self.recompute not in RECOMPUTES:
            raise ValueError(
                f"recompute: a block of a module is computed again whole or not at all, met {self.recompute}; "
                f"nearest: {Recompute.FULL}"
            )
        if self.pipeline < 1 or self.chunks < 1:
            raise ValueError(f"pipeline and chunks are at least 1, met {self.pipeline} and {self.chunks}; nearest: 1")
        if self.pipeline > 1:
            self._require_stages()

    def _require_stages(self) -> None:
        """Raise where the schedule does not exist for these numbers, or cuts are not one fewer than stages."""
        rule = find_rule(self.schedule)
        if rule.is_asynchronous:
            raise ValueError(f"schedule: a step ends before the next begins, met {self.schedule}; nearest: 1f1b")
        if rule.splits_backward and (self.zero or self.recompute is not Recompute.NONE):
            raise ValueError(
                f"schedule: gradients of inputs and weights apart need whole states and kept activations, met "
                f"{self.schedule} with {self.describe()}; nearest: 1f1b"
            )
        actions = self.actions
        if self.cuts and len(self.cuts) != actions.num_stages - 1:
            met = f"met {len(self.cuts)} for {actions.num_stages} stages"
            raise ValueError(f"cuts are one fewer than stages, {met}; nearest: {actions.num_stages - 1}")

    @property
    def actions(self) -> Schedule:
        """The order of passes on every pipeline rank."""
        return build_schedule(self.schedule, self.pipeline, self.num_microbatches, self.chunks)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data * self.pipeline

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the shared states is cut."""
        return (self.zero_shards or self.data) if self.zero else 1

    def describe(self) -> str:
        """Return the layout in words.

        >>> ModuleLayout(4, zero=3, zero_shards=2, num_microbatches=2).describe()
        'data 4, 2 microbatches, ZeRO-3 over 2'
        """
        parts = [f"pipeline {self.pipeline} ({self.schedule})"] if self.pipeline > 1 else []
        if self.cuts:
            parts.append(f"cut at {', '.join(self.cuts)}")
        parts += [f"data {self.data}", f"{self.num_microbatches} microbatch{'es' * (self.num_microbatches > 1)}"]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}" + (f" over {self.shards}" if self.shards < self.data else ""))
        if self.zero == 3 and not self.reshard_after_forward:
            parts.append("parameters kept after forward")
        if self.recompute is not Recompute.NONE:
            parts.append("full recompute")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "ModuleLayout":
        """Return the layout of plain data."""
        return cls(**document | {"recompute": Recompute(document["recompute"]), "cuts": tuple(document["cuts"])})


WORDS = ("data", "zero", "zero_shards", "num_microbatches", "recompute", "pipeline", "schedule", "chunks", "cuts")
"""What `parse_layout` reads."""


def parse_layout(text: str, default: ModuleLayout) -> ModuleLayout:
    """Return the layout of words ``NAME=VALUE,...``; what they do not say is as in ``default``.

    The names of ``cuts`` have ``+`` between them. Ranks that a pipeline leaves of those of ``default`` are data ranks.

    >>> parse_layout("data=4,zero=3,recompute=full", ModuleLayout()).describe()
    'data 4, 1 microbatch, ZeRO-3, full recompute'
    """
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in WORDS:
            matches = get_close_matches(name, WORDS, n=1)
            nearest = f"; nearest: {matches[0]}" if matches else ""
            raise ValueError(f"plan: words are {', '.join(WORDS)}, met {word.strip()!r}{nearest}")
        if name == "recompute":
            if value not in RECOMPUTES:
                raise ValueError(f"plan: recompute is {' or '.join(RECOMPUTES)}, met {value!r}; nearest: full")
            values[name] = Recompute(value)
        elif name == "schedule":
            values[name] = value
        elif name == "cuts":
            values[name] = tuple(filter(None, value.split("+")))
        elif not (value.isascii() and value.isdecimal()) or len(value) > MOST_DIGITS:
            raise ValueError(f"plan: {name} is a number, met {value!r}; nearest: 1")
        else:
            values[name] = int(value)
    if "data" not in values:
        values["data"] = max(default.num_ranks // values.get("pipeline", default.pipeline), 1)
    return replace(default, **values)


def read_plan(path: Path) -> Plan:
    """Return the plan in a file as ``meshwise search --out`` writes it; ``ValueError`` for other files."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return Plan.from_json(document.get("plan", document))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: a plan file as `meshwise search --out` writes it, met {error}") from error


def find_module_layout(plan: Plan) -> ModuleLayout:
    """Return what a plan says of a module that stays whole.

    Raises
    ------
    ValueError
        With every reason where the plan says more, such as a cut of operators.
    """
    if reasons := tuple(list_cuts(plan)):
        raise ValueError("a user's module stays whole on every rank: " + "; ".join(reasons))
    assert isinstance(plan.recompute, Recompute)
    shards = plan.shards if plan.zero and plan.replica > 1 else 0
    keeps_parameters = plan.zero == 3 and not plan.reshard_after_forward
    return ModuleLayout(plan.data, plan.zero, shards, not keeps_parameters, plan.num_microbatches, plan.recompute)


_TOLD = frozenset(("zero", "reshard_after_forward", "microbatch", "recompute", "offload", "gradient_reduction"))
_SILENT = frozenset(("schedule", "chunks", "placement", "overlap_gradients"))
"""Decisions that say nothing of a module in one stage; which device a rank is on is the launcher's."""


def list_cuts(plan: Plan) -> Iterator[str]:
    """Yield every reason why a module does not stay whole under a plan, or why a `ModuleLayout` cannot say the plan."""
    for axis in plan.mesh.axes:
        if axis.name not in (DATA, REPLICA) and axis.size > 1:
            yield f"{axis.name}: met {axis.size}; nearest: 1"
    if not isinstance(plan.microbatch, int):
        yield f"microbatch: one size on all data ranks, met {list(plan.microbatch)}; nearest: {plan.sizes[-1]}"
    if plan.recompute not in RECOMPUTES:
        yield f"recompute: a block is computed again whole or not at all, met {plan.recompute}; nearest: full"
    if plan.asynchronous:
        yield f"schedule: a step ends before the next begins, met {plan.schedule}; nearest: 1f1b"
    if plan.offload:
        yield f"offload: states and activations stay on the device, met {plan.offload}; nearest: none"
    if plan.gradient_reduction != ALL_REDUCE:
        yield f"gradient_reduction: all ranks update, met {plan.gradient_reduction}; nearest: {ALL_REDUCE}"
    for decision in STEP_DECISIONS:
        value = getattr(plan, decision.name)
        if decision.name not in _TOLD | _SILENT and value != decision.default and decision.changes(plan):
            yield f"{decision.name}: met {value}; nearest: {decision.default}"
