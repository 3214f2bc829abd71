"""Another trainer as the target of an export: its field map, and how its configuration file is written and read."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwise.executor.export.launchers import UnsupportedRequest
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import Document, FieldPath
from meshwise.scenarios.interchange.entry import AnyOf, Entry, Reason, UnsayableError, Values, list_fixed
from meshwise.scenarios.interchange.facts import (
    PLAN,
    Facts,
    TrainerRequest,
    build_plan_document,
    collect_facts,
    format_fact,
)
from meshwise.scenarios.interchange.lines import ConfigValues, flatten_document, split_key
from meshwise.strategies.plan.layout import DECISIONS

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario


FactCheck = Callable[[Facts], Iterable[Reason]]
"""Returns the reasons why a target cannot express facts."""


def list_unsayable(entry: Entry, facts: Facts) -> tuple[Reason, ...]:
    """Return every reason why an entry cannot express its fields."""
    try:
        entry.say(facts)
    except UnsayableError as error:
        return error.reasons
    return ()


def is_compatible(file_value: Any, value: Any) -> bool:
    """Return whether the value of a field read from a file, which may be `AnyOf` several, can be ``value``."""
    return value in file_value.values if isinstance(file_value, AnyOf) else bool(file_value == value)


@dataclass(frozen=True, slots=True)
class Target:
    """A trainer whose configuration file can express a plan.

    Parameters
    ----------
    version
        The version of the trainer that the map is for; each file names it.
    entries
        The field map: every field of a plan is in one entry. A decision without an entry is one that the target does
        not have: it can express only the default.
    write, parse
        Write a file from values by key, and read it as a document.
    check_combinations
        Yields the reasons why the target cannot combine fields that it can express one by one.
    """

    name: str
    version: str
    entries: tuple[Entry, ...]
    write: Callable[[Values, TrainerRequest, str], str]
    parse: Callable[[bytes, str], Document]
    check_combinations: FactCheck

    def __post_init__(self) -> None:
        named_fields = {field for entry in self.entries for field in entry.fields}
        defaults = {name: item.default for name, item in DECISIONS.items() if f"plan.{name}" not in named_fields}
        fixed_entries = list_fixed("the rest is not in its field map", **defaults)
        object.__setattr__(self, "entries", (*self.entries, *fixed_entries))

    @property
    def versioned_name(self) -> str:
        """The name and version of the trainer."""
        return f"{self.name} {self.version}"

    def to_text(self, request: TrainerRequest) -> str:
        """Return the text of the configuration file of a request.

        Raises
        ------
        UnsupportedRequest
            Where the target cannot express the request; it has every reason.
        """
        try:
            facts = collect_facts(request)
        except ValueError as error:
            raise UnsupportedRequest(self.name, (str(error),)) from None
        if reasons := [reason for check in self.checks for reason in check(facts)]:
            raise UnsupportedRequest(self.versioned_name, tuple(dict.fromkeys(map(str, reasons))))
        values: Values = {}
        for entry in self.entries:
            values |= entry.say(facts)
        return self.write(values, request, self.versioned_name)

    @property
    def checks(self) -> tuple[FactCheck, ...]:
        """The checks that find reasons against facts: one for each entry, and one for combinations of fields."""
        return (*(partial(list_unsayable, entry) for entry in self.entries), self.check_combinations)

    def read(self, content: bytes, file: str = "<text>") -> Facts:
        """Return the facts that a file states.

        Raises
        ------
        ScenarioError
            Where it is no file of the target, or has a key that is not in the map.
        """
        return self._read_facts(flatten_document(self.parse(content, file)))

    def _read_facts(self, values: ConfigValues) -> Facts:
        facts: Facts = {}
        faults: list[Fault] = []
        for entry in self.entries:
            try:
                facts |= entry.read(values)
            except ScenarioError as error:
                faults += error.faults
        known_keys = {key for entry in self.entries for key in entry.keys}
        for key in values.values:
            if key not in known_keys:
                suggestions = [f"; nearest: {suggestion}" for suggestion in get_close_matches(key, known_keys, n=1)]
                message = f"the field map of {self.versioned_name} has no such key{''.join(suggestions)}"
                faults += values.build_error(key, message).faults
        if faults:
            raise ScenarioError(tuple(faults))
        return facts

    def read_plan(self, content: bytes, file: str) -> tuple[Document, Facts]:
        """Return the plan of a file as a plan document, whose places are those of the file's keys, and all facts.

        Raises
        ------
        ScenarioError
            As `read`.
        """
        values = flatten_document(self.parse(content, file))
        facts = self._read_facts(values)
        places: dict[FieldPath, tuple[int, int]] = {
            split_key(field.removeprefix("plan.")): values.document.places[split_key(key)]
            for entry in self.entries
            for field in entry.fields
            for key in entry.keys[:1]
            if field in PLAN and split_key(key) in values.document.places
        }
        return Document(file, build_plan_document(facts), places), facts

    def check_scenario(self, facts: Facts, scenario: "Scenario", file: str) -> None:
        """Raise ``ScenarioError`` where the facts of a file are of another model or training step than a scenario."""
        assert scenario.plan is not None
        own_facts = collect_facts(TrainerRequest(scenario.name, scenario.spec, scenario.problem, scenario.plan))
        shared = [(name, facts[name], own_facts[name]) for name in facts if name not in PLAN and name in own_facts]
        message = "is {} in the scenario that the plan is of, met {}"
        faults = tuple(
            Fault(file, 0, 0, name, message.format(format_fact(own_value), format_fact(file_value)))
            for name, file_value, own_value in shared
            if not is_compatible(file_value, own_value)
        )
        if faults:
            raise ScenarioError(faults)
