"""Plans that something else accepts, as a trainer in whose words they have to be said.

What accepts plans is a list of rules: functions of a layout that return every reason against it. A rule is asked as if
layouts were opaque, and of each answer is known which fields the rule has read: it is the same for all layouts that
agree in these. So most answers are remembered, and families and groups of layouts are refused as a whole where no
field that their members differ in was read.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import DECISIONS, Layout, Level, names_at
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

Rule = Callable[[Layout], Iterable[str]]
"""Returns every reason against a layout; it looks at nothing of it but its fields, and answers alike each time."""

FIELDS = frozenset(DECISIONS)
OF_PASSES = frozenset(names_at(Level.PASS))
OF_STATES = frozenset(names_at(Level.STATE))
OF_FAMILIES = frozenset(names_at(Level.DEGREE, Level.FAMILY))
"""The fields that rows and columns of a group choose, and those that the layouts of a family share."""


class Accepts(Protocol):
    """What accepts plans; a frozen value, which may go to other processes."""

    def rules(self, problem: Problem) -> Sequence[Rule]:
        """Return the rules for the layouts of a problem."""
        ...

    def refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every reason against a plan, which need not come from a layout; empty where it is accepted."""
        ...


class _UndecidedField(Exception):
    """Raised when a rule reads a field whose value is not chosen yet."""


class _RecordedLayout:
    """A layout that records which fields are read, in order; reading an undecided one raises `_UndecidedField`."""

    __slots__ = ("_layout", "_open", "read")

    def __init__(self, layout: Layout, undecided: Collection[str]) -> None:
        self._layout, self._open = layout, undecided
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            return getattr(Layout, name).fget(self)
        if name in self._open:
            raise _UndecidedField(name)
        value = getattr(self._layout, name)
        self.read[name] = value
        return value


def _run_rule(
    rule: Callable[[Layout], Iterable[Any]], layout: Layout, undecided: Collection[str]
) -> tuple[dict[str, Any], "_Node"]:
    """Return what a rule reads of a layout, in its order, and after it the answer or the undecided field."""
    watched = _RecordedLayout(layout, undecided)
    try:
        return watched.read, _Node(reasons=tuple(rule(cast(Layout, watched))))
    except _UndecidedField as hangs:
        return watched.read, _Node(hangs.args[0])


def assignments(rule: Rule, values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield with which values of the fields that a rule reads it has nothing against a layout.

    Fields without ``values`` are those of ``Layout()``; combinations that mean no layout are left out.
    """
    waiting: list[dict[str, Any]] = [{}]
    while waiting:
        known = waiting.pop()
        try:
            _, last = _run_rule(rule, replace(Layout(), **known), values.keys() - known.keys())
        except ValueError:
            continue
        if last.field is not None:
            waiting += [known | {last.field: value} for value in values[last.field]]
        elif not last.reasons:
            yield known


class _Member:
    """A member of a group for rules to look at: what is chosen for it, and else what all members share."""

    __slots__ = ("_chosen", "_shared")

    def __init__(self, shared: Layout, chosen: Mapping[str, Any]) -> None:
        self._shared, self._chosen = shared, chosen

    def __getattr__(self, name: str) -> Any:
        if name in self._chosen:
            return self._chosen[name]
        return getattr(self._shared, name) if name in FIELDS else getattr(Layout, name).fget(self)


class _Node:
    """What a rule does after it has read some values: it reads one more field, or answers."""

    __slots__ = ("after", "field", "reasons")

    def __init__(self, field: str | None = None, reasons: tuple[Any, ...] = ()) -> None:
        self.field, self.reasons = field, reasons
        self.after: dict[Any, _Node] = {}


class _RuleMemo:
    """A rule and what it has answered: a tree of the fields that it read, one after another, and their values."""

    __slots__ = ("_root", "_rule")

    def __init__(self, rule: Callable[[Layout], Iterable[Any]]) -> None:
        self._rule = rule
        self._root: _Node | None = None

    def answer(self, layout: Layout, undecided: Collection[str] = ()) -> tuple[Any, ...] | None:
        """Return the reasons against a layout; ``None`` where they hang on an undecided field."""
        node = self._root
        while node is not None:
            if node.field is None:
                return node.reasons
            if node.field in undecided:
                return None
            node = node.after.get(getattr(layout, node.field))
        return self._ask(layout, undecided)

    def _ask(self, layout: Layout, undecided: Collection[str]) -> tuple[Any, ...] | None:
        read, last = _run_rule(self._rule, layout, undecided)
        path = list(read.items())
        nodes = [*(_Node(name) for name, _ in path), last]
        self._root = node = self._root or nodes[0]
        for (_, value), following in zip(path, nodes[1:], strict=True):
            node = node.after.setdefault(value, following)
        return None if node.field is not None else node.reasons


class Answers:
    """What the rules of `Accepts` say of the layouts of one problem."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._asked = [_RuleMemo(rule) for rule in rules]
        self._groups: dict[tuple[object, ...], _RuleMemo] = {}

    def refusals(self, layout: Layout, undecided: Collection[str] = ()) -> tuple[str, ...]:
        """Return every reason against a layout, each once, that holds whatever its ``undecided`` fields are."""
        answers = (asked.answer(layout, undecided) or () for asked in self._asked)
        return tuple(dict.fromkeys(reason for reasons in answers for reason in reasons))

    def refuses(self, layout: Layout, undecided: Collection[str] = ()) -> bool:
        """Return whether a layout is refused, whatever its ``undecided`` fields are."""
        return self._hanging(self._asked, layout, undecided) is None

    def accepted(self, group: Group) -> Group:
        """Return the members of a group that are accepted.

        Which they are is remembered as answers of rules are: for all groups of one table whose layouts agree in the
        fields that were read to find it.
        """
        if not group.count:
            return group
        hanging = self._hanging(self._asked, _member(group, group.layout, 0, 0), _rows(group) | OF_STATES)
        if hanging is None:
            return Group(group.layout, group.passes, group.states, np.zeros_like(group.legal))
        if not hanging:
            return group
        key = group.passes, group.states, group.legal.tobytes(), *hanging
        if key not in self._groups:
            self._groups[key] = _RuleMemo(lambda layout: (self._legal(group, layout, hanging),))
        found = self._groups[key].answer(group.layout)
        assert found is not None  # no field is undecided
        return Group(group.layout, group.passes, group.states, found[0])

    def _legal(self, group: Group, shared: Layout, hanging: Sequence[_RuleMemo]) -> NDArray[np.bool_]:
        """Return which members of a group, with the fields of ``shared``, are accepted by rules that hang on them."""
        rows = _rows(group)

        def member(row: int, column: int) -> Layout:
            return _member(group, shared, row, column)

        of_rows = [self._hanging(hanging, member(row, 0), OF_STATES) for row in range(len(group.passes))]
        of_columns = [self._hanging(hanging, member(0, column), rows) for column in range(len(group.states))]
        legal = group.legal.copy()
        for row, column in np.argwhere(legal).tolist():
            of_row, of_column = of_rows[row], of_columns[column]
            if of_row is None or of_column is None:
                legal[row, column] = False
            elif both := [asked for asked in of_row if asked in of_column]:
                legal[row, column] = self._hanging(both, member(row, column), ()) is not None
        legal.setflags(write=False)  # all groups that agree share it
        return legal

    @staticmethod
    def _hanging(among: Sequence[_RuleMemo], layout: Layout, undecided: Collection[str]) -> list[_RuleMemo] | None:
        """Return the rules whose answer hangs on undecided fields; ``None`` where another one has a reason against."""
        result = []
        for asked in among:
            answer = asked.answer(layout, undecided)
            if answer is None:
                result.append(asked)
            elif answer:
                return None
        return result


def _rows(group: Group) -> frozenset[str]:
    """Return the fields that the rows of a group choose."""
    return OF_PASSES | {"offload"} if any(choice.activations for choice in group.passes) else OF_PASSES


def _member(group: Group, shared: Layout, row: int, column: int) -> Layout:
    return cast(Layout, _Member(shared, group.choices(row, column)))
