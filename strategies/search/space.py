"""What a search may choose from: every legal layout of a problem, and which are one decision apart.

A layout is legal where `strategies.layout.violations` finds nothing. Of layouts that mean the same step only one is in
the space: a choice that changes nothing has the first value that the limits allow, as the schedule of a single
pipeline rank, the ZeRO level of a single data rank or how a whole sequence computes attention.

Layouts come in families, which share degrees, ranks and microbatch, and those in groups, which share the schedule too
(`strategies.group`), so that a large space is counted, and most of it dropped, without listing it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import permutations, product
from math import prod
from typing import Literal

from strategies.divisors import divisors
from strategies.group import Group
from strategies.layout import GRADIENT_REDUCTIONS, ZERO_STAGES, Layout
from strategies.mesh import AXES
from strategies.offloading import Offloading
from strategies.operators.pins import Pin
from strategies.parallelism import Attention
from strategies.problem import Problem
from strategies.recomputation import FirstLayers, OfStage, Recompute, SomeOperators
from strategies.schedule import SCHEDULES
from strategies.search.choices import DEGREES, Choices, family_of

SYNCHRONOUS = tuple(name for name, rule in SCHEDULES.items() if not rule.asynchronous)
"""Schedules that end a step on all ranks before the next begins: others train on older weights."""

StageChoice = Literal["even", "balanced", "paced"] | tuple[int, ...]
"""Layers of stages: in words, where ``paced`` gives slow devices fewer, or written out."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": SYNCHRONOUS,
    "zero": ZERO_STAGES,
    "sequence_parallel": (False, True),
    "attention": tuple(Attention),
    "overlap_gradients": (False, True),
    "overlap_tensor": (False, True),
    "scatter_gather": (False, True),
    "reshard_after_forward": (False, True),
    "gradient_reduction": GRADIENT_REDUCTIONS,
}
_VALUES: dict[str, tuple[type, ...]] = {
    "recompute": (Recompute, FirstLayers, SomeOperators),
    "offload": (Offloading,),
    "stages": (str, tuple),
    "order": (tuple,),
}


@dataclass(frozen=True, slots=True)
class Space:
    """Limits on the fields of a `Layout`; ``None`` allows what is usual, or with ``wide`` everything.

    Parameters
    ----------
    wide
        What a field without a limit may be: what an engineer tries first, or all that the field can be.
    devices
        How many of the free devices have ranks, the first ones; usually all of them. Wide: also those of fewer whole
        nodes, down to seven eighths of all.
    data, tensor, pipeline
        Degrees: every divisor of the number of devices.
    context
        Ranks that share a sequence; usually 1. Wide: every divisor that leaves each rank 2,048 tokens.
    expert
        Ranks that share experts: every divisor of the experts.
    tensor_rows
        Rows of a tensor-parallel grid; 1 unless a limit names others.
    tensor_depth
        Ranks along a third axis, outside the rows; by default 1. Only searches that choose for every operator read it.
    order
        Axes from the outermost to the innermost; `strategies.mesh.AXES` unless a limit names others.
    microbatch
        Sequences a microbatch; usually the powers of two that divide the batch of a data rank, and that batch itself
        (no gradient accumulation). Wide, or by a limit: any divisor.
    schedule
        Names; usually 1f1b, gpipe and interleaved. Wide: every one of `SYNCHRONOUS`.
    chunks
        Chunks a pipeline rank, 1 for schedules that are not looped; every divisor of the layers of a rank. A limit
        may name counts that do not divide them.
    stages
        ``even`` where stages divide the layers and ``balanced`` where not, and on devices of different speed also
        ``paced``: layers in proportion to it. A limit may name these, and counts a stage.
    sequence_parallel
        Both.
    attention
        How context ranks compute attention; usually a ring. Wide: all.
    zero, zero_shards
        Levels, usually 0 and 1, and wide all; data ranks that share states, all (0) unless a limit names others.
    reshard_after_forward
        Usually on. Wide: both.
    overlap_gradients
        On unless a limit says otherwise.
    overlap_tensor, scatter_gather
        Usually off. Wide: both.
    recompute
        Usually none, selective and full. Wide: also selective and full of a quarter, half and three quarters of a
        stage's layers, the first ones. A limit may name any number.
    offload
        Usually nothing. Wide: half of the optimizer states, and all. A limit may name any `Offloading`.
    gradient_reduction
        ``all_reduce`` unless a limit names others.
    pin
        What the user has decided of single operators; only searches that choose for every operator read it.

    Raises
    ------
    ValueError
        Where a limit allows nothing, or names what no layout can have.
    """

    data: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    schedule: tuple[str, ...] | None = None
    chunks: tuple[int, ...] | None = None
    zero: tuple[int, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    recompute: tuple[OfStage, ...] | None = None
    tensor_rows: tuple[int, ...] | None = None
    tensor_depth: tuple[int, ...] | None = None
    pin: tuple[Pin, ...] = ()
    wide: bool = False
    devices: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    attention: tuple[Attention, ...] | None = None
    expert: tuple[int, ...] | None = None
    order: tuple[tuple[str, ...], ...] | None = None
    stages: tuple[StageChoice, ...] | None = None
    zero_shards: tuple[int, ...] | None = None
    reshard_after_forward: tuple[bool, ...] | None = None
    overlap_gradients: tuple[bool, ...] | None = None
    overlap_tensor: tuple[bool, ...] | None = None
    scatter_gather: tuple[bool, ...] | None = None
    offload: tuple[Offloading, ...] | None = None
    gradient_reduction: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and field.name not in ("pin", "wide"):
                _check(field.name, limit)


def _check(name: str, limit: tuple[object, ...]) -> None:
    if not limit:
        raise ValueError(f"space: {name} names at least one value, met none; leave it out to allow all")
    for value in limit:
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                allowed = ", ".join(str(choice) for choice in _CHOICES[name])
                raise ValueError(f"space: {name} is one of {allowed}, met {value!r}")
        elif name in _VALUES:
            _check_value(name, value)
        elif type(value) is not int or value < (name != "zero_shards"):
            least = int(name != "zero_shards")
            raise ValueError(f"space: {name} is a whole number of at least {least}, met {value!r}; nearest: {least}")


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
"""The space without limits."""

WIDE = Space(wide=True)
"""The space of all that a layout can be."""


def layouts(problem: Problem, space: Space = EVERYTHING) -> Iterator[Layout]:
    """Yield every legal layout of ``space`` once, by rising tensor, pipeline and microbatch."""
    for group in groups(problem, space):
        yield from group


def groups(problem: Problem, space: Space = EVERYTHING) -> Iterator[Group]:
    """Yield the layouts of ``space`` in groups."""
    choices = choices_of(problem, space)
    for family in choices.families():
        yield from choices.groups(family)


def usual(space: Space) -> Space:
    """Return what an engineer tries first of a wide space, and communication beside products; others as they are."""
    return replace(space, wide=False, overlap_tensor=space.overlap_tensor or (False, True)) if space.wide else space


MOST_LISTED = 200_000
"""Layouts that are listed at once: some seconds, and some hundreds of MB."""


def listed(problem: Problem, space: Space = EVERYTHING) -> list[Layout]:
    """Return every legal layout of ``space``.

    Raises
    ------
    ValueError
        Where there are more than `MOST_LISTED`.
    """
    number = count(problem, space)
    if number > MOST_LISTED:
        raise ValueError(
            f"search.space: an algorithm that lists all plans takes at most {MOST_LISTED:,}, met {number:,}; "
            "nearest: limits, or best_first, auto and random, which list none"
        )
    return list(layouts(problem, space))


def count(problem: Problem, space: Space = EVERYTHING) -> int:
    """Return how many legal layouts ``space`` has."""
    choices = choices_of(problem, space)
    return sum(map(choices.count, choices.families()))


_LATEST: list[Choices] = []


def choices_of(problem: Problem, space: Space) -> Choices:
    """Return the choices of a space; the latest are kept, for neighbours are asked for one by one."""
    if not _LATEST or _LATEST[0].problem is not problem or _LATEST[0].space != space:
        _LATEST[:] = [Choices(problem, space)]
    return _LATEST[0]


def neighbours(problem: Problem, space: Space, layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts of ``space`` that differ from ``layout``, itself of ``space``, in one decision.

    A decision is one field, schedule and chunks with their stages together, or a factor traded between two of the
    degrees. Being neighbours is symmetric.
    """
    choices = choices_of(problem, space)
    found = [*_traded(choices, layout), *_resized(choices, layout), *choices.variants(layout)]
    legal = (each for candidate in found for each in _with_stages(choices, candidate) if choices.contains(each))
    return tuple(dict.fromkeys(candidate for candidate in legal if candidate != layout))


def _traded(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with a factor of one degree moved to another."""
    for source, target in permutations(choices.degrees, 2):
        for factor in divisors(getattr(layout, source))[1:]:
            moved = {source: getattr(layout, source) // factor, target: getattr(layout, target) * factor}
            yield replace(layout, **moved)


def _resized(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout on fewer or more devices, with another value of one degree."""
    ranks = prod(getattr(layout, name) for name in DEGREES)
    for devices, name in product(choices.devices, choices.degrees):
        value, left = divmod(devices * getattr(layout, name), ranks)
        if devices != ranks and not left and value:
            yield replace(layout, placement=choices.placement(devices), **{name: value})


def _with_stages(choices: Choices, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with each division into stages that its degrees and its schedule have."""
    for name, chunks, stages in choices.schedules(family_of(layout)):
        if (name, chunks) == (layout.schedule, layout.chunks):
            yield replace(layout, stages=stages)
