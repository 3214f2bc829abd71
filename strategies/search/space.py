"""Spaces of layouts: the legal layouts of a problem, their neighbours, an expert's order, and their scope in words.

A layout is legal where `meshwise.strategies.plan.rules.violations` yields nothing. Of several layouts that mean the
same step only one is in the space: a decision that changes nothing has the first value that the limits allow, such as
the schedule of a single pipeline rank, the ZeRO stage of a single data rank or the attention of a whole sequence.

A space is divided into families, which share degrees, ranks and microbatch, and a family into groups, which also share
the schedule (`meshwise.strategies.plan.group`). So a large space is counted, and most of it dropped, without listing
its layouts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.operators.choices import Pin
from meshwise.strategies.plan.group import Group
from meshwise.strategies.plan.layout import DECISIONS, DEGREES, UNLIMITED, Layout
from meshwise.strategies.plan.mesh import AXES, divisors
from meshwise.strategies.plan.offloading import Offloading
from meshwise.strategies.plan.partition import num_layers, partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import (
    FirstLayers,
    Recomputation,
    Recompute,
    SomeOperators,
    StageRecompute,
    find_stage_recompute,
)
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.acceptance import Acceptor
from meshwise.strategies.search.choices import Choices, find_family, list_offloadings

StageChoice = Literal["even", "balanced", "paced"] | tuple[int, ...]
"""Layers of stages: a word, of which ``paced`` gives slow devices fewer layers, or the number of layers per stage."""

_VALUES: dict[str, tuple[type, ...]] = {
    "recompute": (Recompute, FirstLayers, SomeOperators),
    "offload": (Offloading,),
    "stages": (str, tuple),
    "order": (tuple,),
}
"""The types of values of decisions whose values are neither listed nor whole numbers."""

_LIMITS = tuple(name for name in DECISIONS if name not in UNLIMITED)
"""The decisions that a space limits."""

if TYPE_CHECKING:

    class _Limits:
        """A limit for every decision: the values that it may have, or ``None``."""

        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **limits: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    _Limits = make_dataclass(
        "_Limits", [(name, "tuple | None", None) for name in _LIMITS], frozen=True, slots=True, kw_only=True
    )
    _Limits.__module__ = __name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(_Limits):
    """Limits on the decisions of a `Layout`; a decision without a limit has the values in use today.

    Every decision of a layout but those of `UNLIMITED` is a keyword, whose limit is a tuple of values, or ``None``. The
    extent of a space says which values decisions without a limit have: its core, which is small enough to list, the
    usual values, or with ``wide`` all values. They are named in the ``extent`` of each decision in
    `meshwise.strategies.plan.layout.DECISIONS`.

    Parameters
    ----------
    wide, core
        The extent of decisions without a limit: all values, or the few values of 3-D parallelism.
    devices
        How many of the free devices have ranks, the first ones; usually all. With ``wide`` also those of fewer whole
        nodes, down to seven eighths of all.
    tensor_depth
        Ranks along a third axis, outside the rows; by default 1. Only searches for single operators read it.
    pin
        The user's decisions about single operators; only searches for single operators read it.
    accepts
        Something that must accept every plan, such as a trainer that will run it; every algorithm respects it.
    starts
        Layouts that `best_first` and `auto` evaluate first, such as published recipes, where they keep the limits.
        They may have values that the space does not have.

    Raises
    ------
    ValueError
        Where a limit has no values, or a value that no layout can have.
    """

    wide: bool = False
    core: bool = False
    devices: tuple[int, ...] | None = None
    tensor_depth: tuple[int, ...] | None = None
    pin: tuple[Pin, ...] = ()
    accepts: Acceptor | None = None
    starts: tuple[Layout, ...] = ()

    __repr__ = brief_repr()

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

    def __post_init__(self) -> None:
        if self.core and self.wide:
            raise ValueError("space: core and wide are two extents, met both; nearest: wide")
        for name, limit in self.limits.items():
            _check_limit(name, limit)

    @property
    def limits(self) -> dict[str, tuple[Any, ...]]:
        """The limits by name: on decisions, ``devices`` and ``tensor_depth``."""
        limits = {name: getattr(self, name) for name in (*_LIMITS, "devices", "tensor_depth")}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def with_limits(self, **limits: tuple[Any, ...] | None) -> "Space":
        """Return the space with other limits; ``None`` removes a limit."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Space(**values | limits)

    def allows(self, layout: Layout) -> bool:
        """Return whether a layout keeps every limit; without a limit every value does."""
        if self.devices is not None and layout.ranks not in self.devices:
            return False
        return all(getattr(layout, name) in limit for name, limit in self.limits.items() if name in DECISIONS)


def _check_limit(name: str, limit: tuple[object, ...]) -> None:
    if not limit:
        raise ValueError(f"space: {name} names at least one value, met none; leave it out to allow all")
    decision = DECISIONS.get(name)
    values, minimum = (decision.values, decision.least) if decision is not None else ((), 1)
    for value in limit:
        if values:
            if value not in values:
                allowed = ", ".join(str(choice) for choice in values)
                raise ValueError(f"space: {name} is one of {allowed}, met {value!r}")
        elif name in _VALUES:
            _check_value(name, value)
        elif type(value) is not int or value < minimum:
            raise ValueError(
                f"space: {name} is a whole number of at least {minimum}, met {value!r}; nearest: {minimum}"
            )


def _check_value(name: str, value: object) -> None:
    if name == "recompute" and value not in tuple(Recompute) and not isinstance(value, _VALUES[name]):
        raise ValueError(f"space: recompute is one of {', '.join(Recompute)}, met {value!r}; or of layers or operators")
    if name == "stages" and isinstance(value, str) and value not in ("even", "balanced", "paced"):
        raise ValueError(f"space: stages is one of even, balanced, paced, or layers a stage, met {value!r}")
    if name == "order" and not (isinstance(value, tuple) and set(value) <= set(AXES)):
        raise ValueError(f"space: order names axes of {', '.join(AXES)}, met {value!r}")
    if name != "recompute" and not isinstance(value, _VALUES[name]):
        raise ValueError(f"space: {name} holds a value of a layout, met {value!r}")


EVERYTHING = Space()
"""The space without limits: the values in use today."""

CORE = Space(core=True)
"""The space of 3-D parallelism alone, small enough to list."""

WIDE = Space(wide=True)
"""The space of nearly all values that a layout can have."""


def layouts(problem: Problem, space: Space = EVERYTHING) -> Iterator[Layout]:
    """Yield every legal layout of ``space`` once, by rising tensor, pipeline and microbatch."""
    for group in groups(problem, space):
        yield from group


def groups(problem: Problem, space: Space = EVERYTHING) -> Iterator[Group]:
    """Yield the layouts of ``space`` in groups."""
    choices = find_choices(problem, space)
    for family in choices.families():
        yield from choices.groups(family)


def to_core(space: Space) -> Space:
    """Return the core of a space, within the same limits, which is small enough to list."""
    return replace(space, wide=False, core=True)


MOST_LISTED = 50_000
"""Layouts that are listed at once at most: they take some seconds and some hundreds of MB."""


def limit_space(problem: Problem, space: Space, max_layouts: int) -> Space:
    """Return ``space``, or its core where it has more than ``max_layouts`` legal layouts."""
    return space if space.core or count_layouts(problem, space) <= max_layouts else to_core(space)


def list_layouts(problem: Problem, space: Space = EVERYTHING) -> list[Layout]:
    """Return every legal layout of ``space``.

    Raises
    ------
    ValueError
        Where the space has more than `MOST_LISTED`.
    """
    num_layouts = count_layouts(problem, space)
    if num_layouts > MOST_LISTED:
        raise ValueError(
            f"search.space: an algorithm that lists all plans takes at most {MOST_LISTED:,}, met {num_layouts:,}; "
            "nearest: limits, or best_first, auto, genetic and random, which list none"
        )
    return list(layouts(problem, space))


def count_layouts(problem: Problem, space: Space = EVERYTHING) -> int:
    """Return the number of legal layouts of ``space``."""
    choices = find_choices(problem, space)
    return sum(map(choices.count_layouts, choices.families()))


@lru_cache(maxsize=1)
def find_choices(problem: Problem, space: Space) -> Choices:
    """Return the choices of a space; the latest are kept, since searches ask for neighbours layout by layout."""
    return Choices(problem, space)


def neighbours(problem: Problem, space: Space, layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts of ``space`` that are one decision away from ``layout``, which is in ``space`` too.

    A decision is the value of one field, the schedule with its chunks and stages, or a factor moved from one degree to
    another. The relation is symmetric.
    """
    choices = find_choices(problem, space)
    candidates = [*_trade_factors(choices, layout), *_resize_layout(choices, layout), *choices.list_variants(layout)]
    legal_layouts = (
        staged_layout
        for candidate in candidates
        for staged_layout in _with_stages(choices, candidate)
        if choices.contains(staged_layout)
    )
    return tuple(dict.fromkeys(candidate for candidate in legal_layouts if candidate != layout))


def groups_near(problem: Problem, space: Space, layout: Layout) -> Iterator[tuple[bool, dict[Layout, Iterable[Group]]]]:
    """Yield the groups of ``space`` around a layout, the nearest first: whether they are far, and the groups by family.

    First comes the layout's own group, then the groups of its family, and last, as far, the groups with its schedule
    (and any chunks and stages) in the families that are one decision away.
    """
    choices, own_family = find_choices(problem, space), find_family(layout)
    if choices.has_family(own_family):
        yield False, {own_family: [choices.find_group(layout)] if choices.has_group(layout) else []}
        yield False, {own_family: choices.groups(own_family)}
    candidates = [*_trade_factors(choices, layout), *_resize_layout(choices, layout), *choices.list_variants(layout)]
    families = (family for family in dict.fromkeys(map(find_family, candidates)) if choices.has_family(family))
    yield (
        True,
        {family: _filter_groups(choices, family, layout.schedule) for family in families if family != own_family},
    )


def _filter_groups(choices: Choices, family: Layout, schedule: str) -> Iterator[Group]:
    """Yield the groups of a family that have a schedule; all groups where one pipeline rank leaves no choice."""
    # a generator: a descent often moves on before it has looked at all families
    return (group for group in choices.groups(family) if family.pipeline == 1 or group.layout.schedule == schedule)


def _trade_factors(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with a factor of one degree moved to another degree."""
    for source, target in permutations(choices.degrees, 2):
        for factor in divisors(getattr(layout, source))[1:]:
            degrees = {source: getattr(layout, source) // factor, target: getattr(layout, target) * factor}
            yield replace(layout, **degrees)


def _resize_layout(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout on fewer or more devices, with another value of one degree."""
    ranks = layout.ranks
    for devices, name in product(choices.devices, choices.degrees):
        value, remainder = divmod(devices * getattr(layout, name), ranks)
        if devices != ranks and not remainder and value:
            yield replace(layout, placement=choices.find_placement(devices), **{name: value})


def _with_stages(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with each division into stages that its schedule can have in the space."""
    family = find_family(layout)
    for name, chunks, stages in choices.list_schedules(family) if choices.has_family(family) else ():
        if (name, chunks) == (layout.schedule, layout.chunks):
            yield replace(layout, stages=stages)


def keeps_limits(problem: Problem, space: Space, plan: Plan) -> bool:
    """Return whether the layers and the recomputation of a plan's stages keep the limits of a space.

    With ``paced`` among the limits, any layers do.
    """
    recompute_choices = {find_stage_recompute(plan.recompute, stage) for stage in range(len(plan.stages))}
    if space.recompute is not None and not all(
        _allows_recompute(recompute_choice, space.recompute) for recompute_choice in recompute_choices
    ):
        return False
    if space.stages is None or "paced" in space.stages:
        return True
    blocks = tuple(stage.blocks for stage in plan.stages)
    return blocks in _list_divisions(problem.graph, len(blocks), space.stages)


def _allows_recompute(recompute_choice: StageRecompute, limit: tuple[StageRecompute, ...]) -> bool:
    """Return whether a limit has a stage's recompute choice, or the choices of both parts of its layers."""
    parts = (
        {recompute_choice.layer, Recompute.NONE} if isinstance(recompute_choice, FirstLayers) else {recompute_choice}
    )
    return recompute_choice in limit or parts <= set(limit)


@lru_cache(maxsize=256)
def _list_divisions(
    graph: OperatorGraph, stages: int, divisions: tuple[str | tuple[int, ...], ...]
) -> frozenset[tuple[tuple[str, ...], ...]]:
    """Return the blocks of every stage in each legal division into ``stages`` stages."""
    layers = num_layers(graph)

    def is_legal(division: str | tuple[int, ...]) -> bool:
        if isinstance(division, tuple):
            return len(division) == stages and sum(division) == layers
        return division != "even" or layers % stages == 0

    return frozenset(
        tuple(stage.blocks for stage in partition_layers(graph, stages, division))
        for division in divisions
        if is_legal(division)
    )


def list_by_habit(problem: Problem, space: Space) -> list[Layout]:
    """Return the layouts of ``space`` in the order in which an expert tries them.

    Layouts with microbatches of one sequence and 1f1b come first. Within both parts data parallelism comes before
    model parallelism, tensor parallelism inside a node before pipeline parallelism, and tensor parallelism across
    nodes last (Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    SC 2021, section 3, takeaways 1 and 2).
    """
    node = problem.cluster.first_node.devices

    def key(layout: Layout) -> tuple[bool, bool, int, int]:
        is_unusual = layout.microbatch != 1 or layout.schedule != "1f1b"
        return is_unusual, layout.tensor > node, layout.tensor * layout.pipeline, layout.pipeline

    return sorted(list_layouts(problem, space), key=key)


_LEFT_OUT = {name: item.left_out for name, item in DECISIONS.items() if item.left_out} | {"devices": "idle devices"}
"""By decision, what a space without a limit on it leaves out."""

_APART = "single operators sharded apart"
_ALWAYS_LEFT_OUT = (_APART, "recompute that differs by stage but near the best plan")
"""What every space of layouts leaves out."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The plans that a proof about a space covers.

    Parameters
    ----------
    plans
        The number of legal plans, including those that do not fit.
    tried, left_out
        What the plans choose among, and what people may choose besides, in words.
    beyond
        Plans outside of any space that the proof covers too, in words; empty for none.
    """

    plans: int
    tried: tuple[str, ...]
    left_out: tuple[str, ...]
    beyond: str = ""

    def __str__(self) -> str:
        return f"{self.count}: {'; '.join(self.tried)}; not tried: {', '.join(self.left_out)}"

    def extend(self, beyond: str) -> "Scope":
        """Return the scope with plans outside of any space, which cut operators apart, in words."""
        if not beyond:
            return self
        left_out = tuple(words for words in self.left_out if words not in _ALWAYS_LEFT_OUT)
        return replace(self, left_out=(*left_out, f"{_APART} on other meshes or schedules"), beyond=beyond)

    @property
    def count(self) -> str:
        """How many plans there are, in words."""
        return f"{self.plans:,} plans" + (f", and {self.beyond}" if self.beyond else "")


def scope_of(problem: Problem, space: Space) -> Scope:
    """Return the scope of a proof about the plans of a space."""
    choices = find_choices(problem, space)
    families = tuple(choices.families())
    plans = sum(map(choices.count_layouts, families))
    return Scope(plans, tuple(_describe_tried(choices, families)), tuple(_describe_left_out(problem, space)))


def _describe_tried(choices: Choices, families: tuple[Layout, ...]) -> Iterator[str]:
    axes = [axis for axis in DEGREES if any(getattr(family, axis) > 1 for family in families)]
    yield " x ".join(axes) or "one device"
    sizes = sorted({family.microbatch for family in families if isinstance(family.microbatch, int)})
    if sizes:
        yield f"microbatches of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
    names = {
        schedule_choice.name
        for family in families
        if family.pipeline > 1
        for schedule_choice in choices.list_schedules(family)
    }
    if names:
        yield ", ".join(name for name in SCHEDULES if name in names)
    groups = [group for family in _list_representatives(families) for group in choices.groups(family)]
    zeros = sorted({state.zero for group in groups for state in group.states})
    shards = any(family.zero_shards for family in families)
    if zeros != [0]:
        yield f"ZeRO {_format_numbers(zeros)}" + (" over all or a node" if shards else "")
    yield f"recompute {', '.join(_name_recomputes(choice.recompute for group in groups for choice in group.passes))}"
    if len({choice.overlap_tensor for group in groups for choice in group.passes}) > 1:
        yield "tensor communication beside products or not"
    if any(state.offload for group in groups for state in group.states):
        yield "offload of optimizer states"


def _list_representatives(families: tuple[Layout, ...]) -> Iterator[Layout]:
    """Yield the first and the last family of every kind; families of a kind differ in the layers of their stages.

    Listing the groups of all families would take as long as a search.
    """
    kinds: dict[tuple[bool, ...], list[Layout]] = {}
    for family in families:
        kind = family.pipeline > 1, family.tensor > 1, family.data > 1, family.zero_shards > 0
        kinds.setdefault(kind, []).append(family)
    for members in kinds.values():
        yield from dict.fromkeys((members[0], members[-1]))


def _name_recomputes(values: Iterable[Recomputation]) -> dict[str, None]:
    return dict.fromkeys("some layers" if isinstance(value, FirstLayers) else str(value) for value in values)


def _format_numbers(numbers: list[int]) -> str:
    """Return rising numbers in words.

    >>> _format_numbers([0, 1, 2, 3]), _format_numbers([1, 3])
    ('0 to 3', '1 and 3')
    """
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return " and ".join(map(str, numbers))


def _describe_left_out(problem: Problem, space: Space) -> Iterator[str]:
    # a search adds this limit by itself where nothing fits: the user has not stated it
    stated_space = space.with_limits(offload=None) if space.offload == list_offloadings() else space
    limits = [name for name in stated_space.limits if name != "tensor_depth"]
    if space.accepts is not None:
        yield "what the target cannot say"
    elif limits:
        yield f"what the limits of {', '.join(limits)} forbid"
    for name, words in _LEFT_OUT.items():
        if getattr(space, name) is None and (not space.wide or (name in DECISIONS and DECISIONS[name].never_tried)):
            yield words
    if space.core:
        yield "more than 3-D parallelism with ZeRO 0 and 1"
    yield from _ALWAYS_LEFT_OUT
