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

from meshwise.simulator.memo import memoise
from meshwise.strategies.plan.group import PASS_DECISIONS, STATE_DECISIONS, Group
from meshwise.strategies.plan.layout import DECISIONS, Layout, Level, StepDecisions, names_at
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

Rule = Callable[[Layout], Iterable[str]]
"""Returns every reason against a layout. It depends on nothing but the layout's fields."""

FIELDS = frozenset(DECISIONS)
PASS_FIELDS, STATE_FIELDS = frozenset(PASS_DECISIONS), frozenset(STATE_DECISIONS)
FAMILY_FIELDS = frozenset(names_at(Level.DEGREE, Level.FAMILY))
"""The fields that rows and columns of a group choose, and the fields that the layouts of a family share."""


class Acceptor(Protocol):
    """Something that accepts or refuses plans; a frozen value that can be sent to other processes."""

    @property
    def cuts_operators(self) -> bool:
        """Whether it may accept plans whose operators are cut apart, each in its own way."""

    def list_rules(self, problem: Problem) -> Sequence[Rule]:
        """Return the rules for the layouts of a problem."""

    def list_refusals(self, problem: Problem, plan: Plan) -> tuple[str, ...]:
        """Return every reason against a plan; empty where it is accepted. The plan need not come from a layout."""


class _UndecidedField(Exception):
    """Raised when a rule reads a field whose value is not decided yet."""


class _RecordedLayout:
    """A layout that records the fields that are read, in order; reading an undecided one raises `_UndecidedField`."""

    __slots__ = ("_layout", "_undecided", "read_values")

    def __init__(self, layout: Layout, undecided: Collection[str]) -> None:
        self._layout, self._undecided = layout, undecided
        self.read_values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        # a property computes from fields, so it runs on this object and its reads are recorded
        if name not in FIELDS:
            return getattr(Layout, name).fget(self)
        if name in self._undecided:
            raise _UndecidedField(name)
        value = getattr(self._layout, name)
        self.read_values[name] = value
        return value


def _run_rule(
    rule: Callable[[Layout], Iterable[Any]], layout: Layout, undecided: Collection[str]
) -> tuple[dict[str, Any], "_Node"]:
    """Return the fields that a rule reads, in order and with values, and its answer or the undecided field it needs."""
    recorded_layout = _RecordedLayout(layout, undecided)
    try:
        return recorded_layout.read_values, _Node(reasons=tuple(rule(cast(Layout, recorded_layout))))
    except _UndecidedField as error:
        return recorded_layout.read_values, _Node(error.args[0])


def list_assignments(rule: Rule, values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every assignment of the fields that a rule reads for which it has no reason against the layout.

    Fields without ``values`` have the defaults of ``Layout()``; assignments that are no valid layout are left out.
    """
    stack: list[dict[str, Any]] = [{}]
    while stack:
        chosen_values = stack.pop()
        try:
            _, node = _run_rule(rule, replace(Layout(), **chosen_values), values.keys() - chosen_values.keys())
        except ValueError:
            continue
        # branch only on the fields that the rule reads: a product over all fields would be far too large
        if node.field is not None:
            stack += [chosen_values | {node.field: value} for value in values[node.field]]
        elif not node.reasons:
            yield chosen_values


class _Member:
    """A member of a group, for rules to read: the fields of its row and column, and the fields that all members share.

    Unlike ``replace`` it copies nothing, for rules read thousands of members.
    """

    __slots__ = ("_base_layout", "_choices")

    def __init__(self, base_layout: Layout, choices: Mapping[str, Any]) -> None:
        self._base_layout, self._choices = base_layout, choices

    def __getattr__(self, name: str) -> Any:
        if name in self._choices:
            return self._choices[name]
        return getattr(self._base_layout, name) if name in FIELDS else getattr(Layout, name).fget(self)


class _Node:
    """A node of a rule's memo: after some values the rule reads ``field``, or answers with ``reasons``."""

    __slots__ = ("branches", "field", "reasons")

    def __init__(self, field: str | None = None, reasons: tuple[Any, ...] = ()) -> None:
        self.field, self.reasons = field, reasons
        self.branches: dict[Any, _Node] = {}


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
            node = node.branches.get(getattr(layout, node.field))
        return self._ask_rule(layout, undecided)

    def _ask_rule(self, layout: Layout, undecided: Collection[str]) -> tuple[Any, ...] | None:
        read_values, last_node = _run_rule(self._rule, layout, undecided)
        path = list(read_values.items())
        nodes = [*(_Node(name) for name, _ in path), last_node]
        self._root = node = self._root or nodes[0]
        for (_, value), next_node in zip(path, nodes[1:], strict=True):
            node = node.branches.setdefault(value, next_node)
        return None if node.field is not None else node.reasons


class Answers:
    """The answers of an acceptor's rules about the layouts of one problem."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._memos = [_RuleMemo(rule) for rule in rules]

    def list_refusals(self, layout: Layout, undecided: Collection[str] = ()) -> tuple[str, ...]:
        """Return every distinct reason against a layout that holds whatever the values of its ``undecided`` fields."""
        answers = (memo.answer(layout, undecided) or () for memo in self._memos)
        return tuple(dict.fromkeys(reason for reasons in answers for reason in reasons))

    def refuses(self, layout: Layout, undecided: Collection[str] = ()) -> bool:
        """Return whether a layout is refused whatever the values of its ``undecided`` fields."""
        return self._find_undecided(self._memos, layout, undecided) is None

    def filter_group(self, group: Group) -> Group:
        """Return the group with its accepted members only.

        The mask of members is remembered like an answer of a rule: it holds for all groups of the same table whose
        layouts agree in the fields that were read.
        """
        if not group.num_members:
            return group
        undecided_memos = self._find_undecided(
            self._memos, _build_member(group, group.layout, 0, 0), _list_row_fields(group) | STATE_FIELDS
        )
        if undecided_memos is None:
            return Group(group.layout, group.passes, group.states, np.zeros_like(group.member_mask))
        if not undecided_memos:
            return group
        # rules that depend on no undecided field have answered above and need not be in the key
        table = group.passes, group.states, group.member_mask.tobytes()
        answer = self._find_table_memo(*table, tuple(undecided_memos)).answer(group.layout)
        assert answer is not None  # no field is undecided
        return Group(group.layout, group.passes, group.states, answer[0])

    @memoise
    def _find_table_memo(
        self,
        passes: tuple[StepDecisions, ...],
        states: tuple[StepDecisions, ...],
        mask: bytes,
        undecided_memos: tuple["_RuleMemo", ...],
    ) -> "_RuleMemo":
        """Return the answers of undecided rules about all groups of a table, by the layout that members share."""
        member_mask = np.frombuffer(mask, dtype=np.bool_).reshape(len(passes), len(states))

        def find_members(layout: Layout) -> tuple[NDArray[np.bool_]]:
            return (self._find_members(Group(layout, passes, states, member_mask), layout, undecided_memos),)

        return _RuleMemo(find_members)

    def _find_members(
        self, group: Group, base_layout: Layout, undecided_memos: Sequence[_RuleMemo]
    ) -> NDArray[np.bool_]:
        """Return the mask of accepted members by the undecided rules; all members have the fields of ``base_layout``.

        Most rules read fields of the row or of the column alone, so rows and columns are asked before single members.
        """
        row_fields = _list_row_fields(group)

        def build_member(row: int, column: int) -> Layout:
            return _build_member(group, base_layout, row, column)

        memos_by_row = [
            self._find_undecided(undecided_memos, build_member(row, 0), STATE_FIELDS)
            for row in range(len(group.passes))
        ]
        memos_by_column = [
            self._find_undecided(undecided_memos, build_member(0, column), row_fields)
            for column in range(len(group.states))
        ]
        mask = group.member_mask.copy()
        for row, column in np.argwhere(mask).tolist():
            row_memos, column_memos = memos_by_row[row], memos_by_column[column]
            if row_memos is None or column_memos is None:
                mask[row, column] = False
            elif pair_memos := [memo for memo in row_memos if memo in column_memos]:
                mask[row, column] = self._find_undecided(pair_memos, build_member(row, column), ()) is not None
        mask.setflags(write=False)  # all groups that agree share it
        return mask

    @staticmethod
    def _find_undecided(
        memos: Sequence[_RuleMemo], layout: Layout, undecided: Collection[str]
    ) -> list[_RuleMemo] | None:
        """Return the rules whose answer depends on undecided fields; ``None`` where another rule refuses the layout."""
        result = []
        for memo in memos:
            answer = memo.answer(layout, undecided)
            if answer is None:
                result.append(memo)
            elif answer:
                return None
        return result


def _list_row_fields(group: Group) -> frozenset[str]:
    """Return the fields that the rows of a group choose."""
    return PASS_FIELDS | {"offload"} if any(choice.offload.activations for choice in group.passes) else PASS_FIELDS


def _build_member(group: Group, base_layout: Layout, row: int, column: int) -> Layout:
    return cast(Layout, _Member(base_layout, group.choose_fields(row, column)))
