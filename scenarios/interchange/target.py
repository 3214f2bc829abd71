"""Another trainer as the target of an export: its field map, and how its configuration file is written and read."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwise.executor.export.request import CannotSay
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.reader import Document, FieldPath
from meshwise.scenarios.interchange.entry import Always, Either, Entry, Reason, Unsayable, Values
from meshwise.scenarios.interchange.facts import PLAN, Facts, Request, facts_of, model_facts, plainly, plan_document
from meshwise.scenarios.interchange.lines import Stated, path_of, stated
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.layout import DECISIONS

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario


Check = Callable[[Facts], Iterable[Reason]]
"""Returns the reasons why a target cannot express facts."""


def unsayable(entry: Entry, facts: Facts) -> tuple[Reason, ...]:
    """Return every reason why an entry cannot express its fields."""
    try:
        entry.say(facts)
    except Unsayable as error:
        return error.reasons
    return ()


def agrees(said: Any, value: Any) -> bool:
    """Return whether the value of a field read from a file, which may be `AnyOf` several, can be ``value``."""
    return value in said.values if isinstance(said, Either) else bool(said == value)


def no_more(facts: Facts) -> Iterator[Reason]:
    """Yield no reason: the target can combine everything that it can express."""
    return iter(())


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
    write: Callable[[Values, Request, str], str]
    parse: Callable[[bytes, str], Document]
    combinations: Check = no_more

    def __post_init__(self) -> None:
        named = {field for entry in self.entries for field in entry.fields}
        rest = [item for item in DECISIONS.values() if f"plan.{item.name}" not in named]
        own = (Always(f"plan.{item.name}", item.default, "the rest is not in its field map") for item in rest)
        object.__setattr__(self, "entries", (*self.entries, *own))

    @property
    def called(self) -> str:
        """The name and version of the trainer."""
        return f"{self.name} {self.version}"

    def to(self, request: Request) -> str:
        """Return the text of the configuration file of a request.

        Raises
        ------
        CannotSay
            Where the target cannot express the request; it has every reason.
        """
        try:
            facts = facts_of(request)
        except ValueError as error:
            raise CannotSay(self.name, (str(error),)) from None
        if reasons := [reason for check in self.checks for reason in check(facts)]:
            raise CannotSay(self.called, tuple(dict.fromkeys(map(str, reasons))))
        values: Values = {}
        for entry in self.entries:
            values |= entry.say(facts)
        return self.write(values, request, self.called)

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks that find reasons against facts: one for each entry, and one for combinations of fields."""
        return (*(partial(unsayable, entry) for entry in self.entries), self.combinations)

    def read(self, content: bytes, file: str = "<text>") -> Facts:
        """Return the facts that a file states.

        Raises
        ------
        ScenarioError
            Where it is no file of the target, or has a key that is not in the map.
        """
        return self._facts(stated(self.parse(content, file)))

    def _facts(self, values: Stated) -> Facts:
        facts: Facts = {}
        faults: list[Fault] = []
        for entry in self.entries:
            try:
                facts |= entry.read(values)
            except ScenarioError as error:
                faults += error.faults
        known = {key for entry in self.entries for key in entry.keys}
        for key in values.values:
            if key not in known:
                close = [f"; nearest: {near}" for near in get_close_matches(key, known, n=1)]
                message = f"the field map of {self.called} has no such key{''.join(close)}"
                faults += values.fault(key, message).faults
        if faults:
            raise ScenarioError(tuple(faults))
        return facts

    def plan(self, content: bytes, file: str) -> tuple[Document, Facts]:
        """Return the plan of a file as a plan document, whose places are those of the file's keys, and all facts.

        Raises
        ------
        ScenarioError
            As `read`.
        """
        values = stated(self.parse(content, file))
        facts = self._facts(values)
        places: dict[FieldPath, tuple[int, int]] = {
            path_of(field.removeprefix("plan.")): values.document.places[path_of(key)]
            for entry in self.entries
            for field in entry.fields
            for key in entry.keys[:1]
            if field in PLAN and path_of(key) in values.document.places
        }
        return Document(file, plan_document(facts), places), facts

    def check(self, facts: Facts, scenario: "Scenario", file: str) -> None:
        """Raise ``ScenarioError`` where the facts of a file are of another model or training step than a scenario."""
        assert scenario.plan is not None
        own = facts_of(Request(scenario.name, scenario.spec, scenario.problem, scenario.plan))
        if isinstance(scenario.spec, Transformer):
            own |= model_facts(scenario.spec, scenario.problem.training)
        different = [name for name in facts if name not in PLAN and name in own and not agrees(facts[name], own[name])]
        if different:
            message = "is {} in the scenario that the plan is of, met {}"
            raise ScenarioError(
                tuple(
                    Fault(file, 0, 0, name, message.format(plainly(own[name]), plainly(facts[name])))
                    for name in different
                )
            )
