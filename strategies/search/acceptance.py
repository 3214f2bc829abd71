"""Acceptance of plans by something else, such as a trainer whose configuration must be able to express them.

An `Acceptor` has rules: functions of a layout that return every reason against it. Rules are opaque, but the fields
that a rule reads are recorded, and its answer is the same for all layouts that agree in these fields. So most answers
are remembered, and a family or group is refused as a whole where a rule refuses it without reading any field in which
its members differ.
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
"""Returns every reason against a layout. It depends on nothing but the layout's fields."""

FIELDS = frozenset(DECISIONS)
OF_PASSES = frozenset(names_at(Level.PASS))
OF_STATES = frozenset(names_at(Level.STATE))
OF_FAMILIES = frozenset(names_at(Level.DEGREE, Level.FAMILY))
"""The fields that rows and columns of a group choose, and the fields that the layouts of a family share."""


class Accepts(Protocol):
    """Something that accepts or refuses plans; a frozen value that can be sent to other processes."""

    def rules(self, problem: Problem) -> Sequence[Rule]:
        """Return the rules for the layouts of a problem."""
        ...

    def refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every reason against a plan; empty where it is accepted. The plan need not come from a layout."""
        ...


class _UndecidedField(Exception):
    """Raised when a rule reads a field whose value is not decided yet."""


class _RecordedLayout:
    """A layout that records the fields that are read, in order; reading an undecided one raises `_UndecidedField`."""

    __slots__ = ("_layout", "_open", "read")

    def __init__(self, layout: Layout, undecided: Collection[str]) -> None:
        self._layout, self._open = layout, undecided
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        # a property computes from fields, so it runs on this object and its reads are recorded
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
    """Return the fields that a rule reads, in order and with values, and its answer or the undecided field it needs."""
    watched = _RecordedLayout(layout, undecided)
    try:
        return watched.read, _Node(reasons=tuple(rule(cast(Layout, watched))))
    except _UndecidedField as hangs:
        return watched.read, _Node(hangs.args[0])


def assignments(rule: Rule, values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every assignment of the fields that a rule reads for which it has no reason against the layout.

    Fields without ``values`` have the defaults of ``Layout()``; assignments that are no valid layout are left out.
    """
    waiting: list[dict[str, Any]] = [{}]
    while waiting:
        known = waiting.pop()
        try:
            _, last = _run_rule(rule, replace(Layout(), **known), values.keys() - known.keys())
        except ValueError:
            continue
        # branch only on the fields that the rule reads: a product over all fields would be far too large
        if last.field is not None:
            waiting += [known | {last.field: value} for value in values[last.field]]
        elif not last.reasons:
            yield known


class _Member:
    """A member of a group, for rules to read: the fields of its row and column, and the fields that all members share.

    Unlike ``replace`` it copies nothing, for rules read thousands of members.
    """

    __slots__ = ("_chosen", "_shared")

    def __init__(self, shared: Layout, chosen: Mapping[str, Any]) -> None:
        self._shared, self._chosen = shared, chosen

    def __getattr__(self, name: str) -> Any:
        if name in self._chosen:
            return self._chosen[name]
        return getattr(self._shared, name) if name in FIELDS else getattr(Layout, name).fget(self)


class _Node:
    """A node of a rule's memo: after some values the rule reads ``field``, or answers with ``reasons``."""

    __slots__ = ("after", "field", "reasons")

    def __init__(self, field: str | None = None, reasons: tuple[Any, ...] = ()) -> None:
        self.field, self.reasons = field, reasons
        self.after: dict[Any, _Node] = {}


class _RuleMemo:
    """A rule and its answers so far: a tree of the fields that it read one after another, branching by their values."""

    __slots__ = ("_root", "_rule")

    def __init__(self, rule: Callable[[Layout], Iterable[Any]]) -> None:
        self._rule = rule
        self._root: _Node | None = None

    def answer(self, layout: Layout, undecided: Collection[str] = ()) -> tuple[Any, ...] | None:
        """Return the reasons against a layout; ``None`` where they depend on an undecided field."""
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
    """The answers of an acceptor's rules about the layouts of one problem."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._asked = [_RuleMemo(rule) for rule in rules]
        self._groups: dict[tuple[object, ...], _RuleMemo] = {}

    def refusals(self, layout: Layout, undecided: Collection[str] = ()) -> tuple[str, ...]:
        """Return every distinct reason against a layout that holds whatever the values of its ``undecided`` fields."""
        answers = (asked.answer(layout, undecided) or () for asked in self._asked)
        return tuple(dict.fromkeys(reason for reasons in answers for reason in reasons))

    def refuses(self, layout: Layout, undecided: Collection[str] = ()) -> bool:
        """Return whether a layout is refused whatever the values of its ``undecided`` fields."""
        return self._hanging(self._asked, layout, undecided) is None

    def accepted(self, group: Group) -> Group:
        """Return the group with its accepted members only.

        The mask of members is remembered like an answer of a rule: it holds for all groups of the same table whose
        layouts agree in the fields that were read.
        """
        if not group.count:
            return group
        hanging = self._hanging(self._asked, _member(group, group.layout, 0, 0), _rows(group) | OF_STATES)
        if hanging is None:
            return Group(group.layout, group.passes, group.states, np.zeros_like(group.legal))
        if not hanging:
            return group
        # rules that depend on no undecided field have answered above and need not be in the key
        key = group.passes, group.states, group.legal.tobytes(), *hanging
        if key not in self._groups:
            self._groups[key] = _RuleMemo(lambda layout: (self._legal(group, layout, hanging),))
        found = self._groups[key].answer(group.layout)
        assert found is not None  # no field is undecided
        return Group(group.layout, group.passes, group.states, found[0])

    def _legal(self, group: Group, shared: Layout, hanging: Sequence[_RuleMemo]) -> NDArray[np.bool_]:
        """Return the mask of accepted members by the undecided rules; all members have the fields of ``base_layout``.

        Most rules read fields of the row or of the column alone, so rows and columns are asked before single members.
        """
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
        """Return the rules whose answer depends on undecided fields; ``None`` where another rule refuses the layout."""
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
