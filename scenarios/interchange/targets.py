"""All targets by name, and which plans a target accepts: a trainer can express them, or the executor can run them.

A search for a target is limited to these plans. They follow from the target's field map itself, entry by entry, by the
same checks as an export, so that search and export cannot disagree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from meshwise.executor.stages.supported_modules import list_refusals as list_module_refusals
from meshwise.executor.stages.supported_modules import list_rules as list_module_rules
from meshwise.executor.supported import find_unsupported, list_rules
from meshwise.scenarios.inputs.graph_file import GraphModel
from meshwise.scenarios.interchange.accelerate import ACCELERATE
from meshwise.scenarios.interchange.deepspeed import DEEPSPEED
from meshwise.scenarios.interchange.facts import (
    Facts,
    LayoutFacts,
    Meanings,
    TrainerRequest,
    check_decoder,
    collect_facts,
    collect_model_facts,
    collect_training_facts,
)
from meshwise.scenarios.interchange.megatron import MEGATRON
from meshwise.scenarios.interchange.nanotron import NANOTRON
from meshwise.scenarios.interchange.target import FactCheck, Target
from meshwise.scenarios.interchange.torchtitan import TORCHTITAN
from meshwise.simulator.models.model import Model
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.acceptance import FIELDS, Answers, Rule, list_assignments
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
            suggestions = [f"; nearest: {suggestion}" for suggestion in get_close_matches(self.target, NAMES, n=1)]
            raise ValueError(f"target is one of {', '.join(NAMES)}, met {self.target[:60]!r}{''.join(suggestions)}")

    @property
    def versioned_name(self) -> str:
        """The target in words; a trainer with its version."""
        return "the executor" if self.target == EXECUTE else TARGETS[self.target].versioned_name

    @property
    def is_module(self) -> bool:
        """Whether what runs is a user's module, whose captured graph the model is."""
        return self.target == EXECUTE and isinstance(self.spec, GraphModel)

    @property
    def cuts_operators(self) -> bool:
        """Whether it may accept plans whose operators are cut apart: a run of a captured module follows these."""
        return self.is_module

    @property
    def can(self) -> str:
        """The beginning of a message: the target, and that it can say or run what follows."""
        return f"{self.versioned_name} can {'run' if self.target == EXECUTE else 'say'}"

    def list_rules(self, problem: Problem) -> Sequence[Rule]:
        """Return the rules that decide which layouts of a problem are accepted.

        Raises
        ------
        ValueError
            Where the model is no decoder transformer, which no trainer has; the executor also runs captured modules.
        """
        training = problem.training
        if self.target == EXECUTE:
            has_idle = len(problem.cluster.free_devices) != problem.cluster.num_devices
            rules = list_module_rules(training) if self.is_module else list_rules(check_decoder(self.spec), training)
            return (*rules, *([_check_idle] if has_idle else []))
        spec = check_decoder(self.spec)
        known_facts, meanings = (
            collect_training_facts(training) | collect_model_facts(spec, training),
            Meanings(problem),
        )
        return [partial(_list_reasons, check, known_facts, meanings) for check in TARGETS[self.target].checks]

    def list_refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every reason why the target does not accept a plan; empty where it does."""
        if self.is_module:
            return tuple(dict.fromkeys(list_module_refusals(problem.training, plan)))
        try:
            spec = check_decoder(self.spec)
            if self.target == EXECUTE:
                return find_unsupported(spec, problem.training, plan)
            facts = collect_facts(TrainerRequest("", spec, problem, plan))
        except ValueError as error:
            return (str(error),)
        return tuple(dict.fromkeys(str(reason) for check in TARGETS[self.target].checks for reason in check(facts)))

    def list_lacking(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every decision of a plan that the target does not accept, with what it accepts in its place."""
        if self.target == EXECUTE:
            return self.list_refusals(problem, plan)
        facts = collect_facts(TrainerRequest("", self.spec, problem, plan))
        reasons = (reason for check in TARGETS[self.target].checks for reason in check(facts))
        return tuple(
            dict.fromkeys(
                f"{lacking_reason.field.removeprefix('plan.')} {lacking_reason.value} ({lacking_reason.limit})"
                for lacking_reason in reasons
            )
        )

    def list_general_reasons(self, problem: Problem) -> tuple[str, ...]:
        """Return every reason that holds for all plans: those about the model or the training step."""
        try:
            answers = Answers(self.list_rules(problem))
        except ValueError as error:
            return (str(error),)
        return answers.list_refusals(Layout(), FIELDS)

    def limit_space(self, problem: Problem, space: Space) -> Space:
        """Return the space limited to what the target accepts; limits that the space has already stay.

        Schedules and levels of ZeRO become all those that the target accepts. Another field gets a limit only where the
        target does not accept its usual value.
        """
        sayable_values = find_sayable(self.list_rules(problem))
        limits: dict[str, Any] = {
            name: values for name, values in sayable_values.items() if getattr(space, name) is None
        }
        return replace(space.with_limits(**limits), accepts=self)


def list_trainers(spec: Model, problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Return the names of all targets that accept a plan."""
    targets = (Acceptance(name, spec) for name in NAMES)
    return tuple(acceptance.target for acceptance in targets if not acceptance.list_refusals(problem, plan))


def _list_reasons(check: FactCheck, known_facts: Facts, meanings: Meanings, layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, check(LayoutFacts(known_facts, meanings, layout))))


def _check_idle(layout: Layout) -> Iterator[str]:
    """Yield that ranks need a placement, where devices that are not free shift them."""
    if not layout.placement:
        yield "placement: the executor runs rank i on device i, met devices that are not free"


_SAMPLE_VALUES: Mapping[str, tuple[Any, ...]] = (
    {name: (1, 2) for name in (*DEGREES, "chunks") if name != "tensor_rows"}
    | {"data": (1, 2, 4), "zero_shards": (0, 2), "stages": ("balanced",)}
    | {name: item.values for name, item in DECISIONS.items() if item.values}
)
"""Sample values of fields, the usual one first, to find out which of them a target accepts."""

_FULL_FIELDS = ("schedule", "zero")
_OTHER_FIELDS = tuple(
    name for name, item in DECISIONS.items() if item.values and name not in (*_FULL_FIELDS, "sequence_parallel")
)


def find_sayable(field_rules: Iterable[Rule]) -> dict[str, tuple[Any, ...]]:
    """Return the limits of a space by field: values that are accepted in at least one combination.

    Schedules and levels of ZeRO are limited to all accepted ones. Another choice has a limit only where some
    combination of other fields is accepted with another value than the usual one, but not with the usual one.
    """
    result: dict[str, tuple[Any, ...]] = {name: _SAMPLE_VALUES[name] for name in _FULL_FIELDS}
    for rule in field_rules:
        rows = list(list_assignments(rule, _SAMPLE_VALUES))
        for name in (*_FULL_FIELDS, *_OTHER_FIELDS):
            field_rows = [row for row in rows if name in row]
            if (name in _FULL_FIELDS and len(field_rows) < len(rows)) or (
                name in _OTHER_FIELDS and not _is_needed(name, field_rows, rows)
            ):
                continue  # the rule does not depend on the field, or the usual value is accepted wherever another is
            allowed_values = {row[name] for row in field_rows}
            result[name] = tuple(value for value in result.get(name, _SAMPLE_VALUES[name]) if value in allowed_values)
    return {name: values for name, values in result.items() if values}


def _is_needed(name: str, field_rows: list[dict[str, Any]], rows: list[dict[str, Any]]) -> bool:
    """Return whether another value of a field is accepted in a combination where its usual one is not."""

    def agree(row: dict[str, Any], other_row: dict[str, Any]) -> bool:
        return all(other_row.get(field, value) == value for field, value in row.items())

    usual_rows = (usual_row | {name: _SAMPLE_VALUES[name][0]} for usual_row in field_rows)
    return any(not any(agree(row, usual_row) for row in rows) for usual_row in usual_rows)
