"""All targets by name, and which plans a target accepts: a trainer can express them, or the executor can run them.

A search for a target is limited to these plans. They follow from the target's field map itself, entry by entry, by the
same checks as an export, so that search and export cannot disagree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from meshwise.executor.supported import rules, unsupported
from meshwise.scenarios.interchange.accelerate import ACCELERATE
from meshwise.scenarios.interchange.deepspeed import DEEPSPEED
from meshwise.scenarios.interchange.facts import (
    Facts,
    LayoutFacts,
    Meanings,
    Request,
    decoder,
    facts_of,
    model_facts,
    training_facts,
)
from meshwise.scenarios.interchange.megatron import MEGATRON
from meshwise.scenarios.interchange.nanotron import NANOTRON
from meshwise.scenarios.interchange.target import Check, Target
from meshwise.scenarios.interchange.torchtitan import TORCHTITAN
from meshwise.simulator.models.model import Model
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.acceptance import FIELDS, Answers, Rule, assignments
from meshwise.strategies.search.space import Space

TARGETS: dict[str, Target] = {target.name: target for target in (TORCHTITAN, MEGATRON, DEEPSPEED, ACCELERATE, NANOTRON)}
"""Targets by the name that ``meshwise export --to`` takes."""


EXECUTE = "execute"
"""The name of the executor among targets."""

NAMES = (*TARGETS, EXECUTE)
"""The targets that a search can be limited to."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The plans of a model that a target accepts; the target is a trainer by name, or `EXECUTE` for the executor.

    Raises
    ------
    ValueError
        Where there is no such target.
    """

    target: str
    spec: Model

    def __post_init__(self) -> None:
        if self.target not in NAMES:
            close = [f"; nearest: {near}" for near in get_close_matches(self.target, NAMES, n=1)]
            raise ValueError(f"target is one of {', '.join(NAMES)}, met {self.target[:60]!r}{''.join(close)}")

    @property
    def called(self) -> str:
        """The target in words; a trainer with its version."""
        return "the executor" if self.target == EXECUTE else TARGETS[self.target].called

    @property
    def can(self) -> str:
        """The beginning of a message: the target, and that it can say or run what follows."""
        return f"{self.called} can {'run' if self.target == EXECUTE else 'say'}"

    def rules(self, problem: Problem) -> Sequence[Rule]:
        """Return the rules that decide which layouts of a problem are accepted.

        Raises
        ------
        ValueError
            Where the model is no decoder transformer, which no target has.
        """
        spec, training = decoder(self.spec), problem.training
        if self.target == EXECUTE:
            idle = len(problem.cluster.free_devices) != problem.cluster.num_devices
            return (*rules(spec, training), *([_idle] if idle else []))
        known, meanings = training_facts(training) | model_facts(spec, training), Meanings(problem)
        return [partial(_reasons, check, known, meanings) for check in TARGETS[self.target].checks]

    def refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every reason why the target does not accept a plan; empty where it does."""
        try:
            spec = decoder(self.spec)
            if self.target == EXECUTE:
                return unsupported(spec, problem.training, plan)
            facts = facts_of(Request("", spec, problem, plan))
        except ValueError as error:
            return (str(error),)
        return tuple(dict.fromkeys(str(reason) for check in TARGETS[self.target].checks for reason in check(facts)))

    def lacks(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every decision of a plan that the target does not accept, with what it accepts in its place."""
        if self.target == EXECUTE:
            return self.refusals(problem, plan)
        facts = facts_of(Request("", self.spec, problem, plan))
        reasons = (reason for check in TARGETS[self.target].checks for reason in check(facts))
        return tuple(dict.fromkeys(f"{each.field.removeprefix('plan.')} {each.met} ({each.can})" for each in reasons))

    def never(self, problem: Problem) -> tuple[str, ...]:
        """Return every reason that holds for all plans: those about the model or the training step."""
        try:
            found = Answers(self.rules(problem))
        except ValueError as error:
            return (str(error),)
        return found.refusals(Layout(), FIELDS)

    def space(self, problem: Problem, space: Space) -> Space:
        """Return the space limited to what the target accepts; limits that the space has already stay.

        Schedules and levels of ZeRO become all those that the target accepts. Another field gets a limit only where the
        target does not accept its usual value.
        """
        said = sayable(self.rules(problem))
        limits: dict[str, Any] = {name: values for name, values in said.items() if getattr(space, name) is None}
        return replace(space.with_limits(**limits), accepts=self)


def trainers_of(spec: Model, problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Return the names of all targets that accept a plan."""
    targets = (Acceptance(name, spec) for name in NAMES)
    return tuple(each.target for each in targets if not each.refusals(problem, plan))


def _reasons(check: Check, known: Facts, meanings: Meanings, layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, check(LayoutFacts(known, meanings, layout))))


def _idle(layout: Layout) -> Iterator[str]:
    """Yield that ranks need a placement, where devices that are not free shift them."""
    if not layout.placement:
        yield "placement: the executor runs rank i on device i, met devices that are not free"


_SOME: Mapping[str, tuple[Any, ...]] = (
    {name: (1, 2) for name in (*DEGREES, "chunks") if name != "tensor_rows"}
    | {"data": (1, 2, 4), "zero_shards": (0, 2), "stages": ("balanced",)}
    | {name: item.values for name, item in DECISIONS.items() if item.values}
)
"""Sample values of fields, the usual one first, to find out which of them a target accepts."""

_EVERY = ("schedule", "zero")
_OTHERS = tuple(name for name, item in DECISIONS.items() if item.values and name not in (*_EVERY, "sequence_parallel"))


def sayable(asked: Iterable[Rule]) -> dict[str, tuple[Any, ...]]:
    """Return the limits of a space by field: values that are accepted in at least one combination.

    Schedules and levels of ZeRO are limited to all accepted ones. Another choice has a limit only where some
    combination of other fields is accepted with another value than the usual one, but not with the usual one.
    """
    result: dict[str, tuple[Any, ...]] = {name: _SOME[name] for name in _EVERY}
    for rule in asked:
        found = list(assignments(rule, _SOME))
        for name in (*_EVERY, *_OTHERS):
            beside = [each for each in found if name in each]
            if (name in _EVERY and len(beside) < len(found)) or (name in _OTHERS and not _needed(name, beside, found)):
                continue  # the rule does not depend on the field, or the usual value is accepted wherever another is
            allowed = {each[name] for each in beside}
            result[name] = tuple(value for value in result.get(name, _SOME[name]) if value in allowed)
    return {name: values for name, values in result.items() if values}


def _needed(name: str, beside: list[dict[str, Any]], found: list[dict[str, Any]]) -> bool:
    """Return whether another value of a field is accepted in a combination where its usual one is not."""

    def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return all(other.get(field, value) == value for field, value in one.items())

    usual = (each | {name: _SOME[name][0]} for each in beside)
    return any(not any(agree(one, each) for one in found) for each in usual)
