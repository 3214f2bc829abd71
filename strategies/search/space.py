"""What a search may choose from: every legal layout of a problem, and which are one decision apart.

A layout is legal where `strategies.layout.violations` finds nothing. Of layouts that mean the same
step only one is in the space: a single pipeline rank has one schedule, a single data rank one
ZeRO level (the first that the limits allow, of ``1f1b`` before ``gpipe`` and 0 before 1). Fields without a
limit have their defaults, so that `Layout.overlap_tensor` stays off.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import permutations, product
from math import isqrt

from strategies.layout import ZERO_STAGES, Layout
from strategies.layout_rules import violations
from strategies.operators.pins import Pin
from strategies.partition import num_layers
from strategies.plan import Recompute
from strategies.problem import Problem
from strategies.schedule import SCHEDULES

FLAT_SCHEDULES = ("1f1b", "gpipe")
"""Schedules with one model chunk a pipeline rank."""
LOOPED_SCHEDULES = ("interleaved",)
"""Schedules with several model chunks a pipeline rank."""
ZERO_LEVELS = (0, 1)
"""What the space has where no limit names others."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": FLAT_SCHEDULES + LOOPED_SCHEDULES,
    "zero": ZERO_STAGES,
    "sequence_parallel": (False, True),
    "recompute": tuple(Recompute),
}
_DEGREES = ("data", "tensor", "pipeline")


@dataclass(frozen=True, slots=True)
class Space:
    """Limits on the fields of a `Layout`; ``None`` allows the default set.

    Parameters
    ----------
    data, tensor, pipeline
        Degrees; by default every divisor of the number of devices.
    tensor_rows
        Rows of a tensor-parallel grid; by default 1.
    tensor_depth
        Ranks along a third axis, outside the rows; by default 1. Only searches that choose for every operator read it.
    microbatch
        Sequences a microbatch; by default the powers of two that divide the batch of a data
        rank, and that batch itself (no gradient accumulation). A limit may name any divisor.
    schedule
        Names; by default 1f1b, gpipe and interleaved.
    chunks
        Chunks a pipeline rank, 1 for schedules that are not looped; by default every divisor of
        the layers of a rank. A limit may name counts that do not divide them.
    zero, sequence_parallel, recompute
        By default 0 and 1 (a limit may name 2 and 3); both; none, selective and full.
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
    recompute: tuple[Recompute, ...] | None = None
    tensor_rows: tuple[int, ...] | None = None
    tensor_depth: tuple[int, ...] | None = None
    pin: tuple[Pin, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and field.name != "pin":
                _check(field.name, limit)


def _check(name: str, limit: tuple[object, ...]) -> None:
    if not limit:
        raise ValueError(f"space: {name} names at least one value, met none; leave it out to allow all")
    for value in limit:
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                allowed = ", ".join(str(choice) for choice in _CHOICES[name])
                raise ValueError(f"space: {name} is one of {allowed}, met {value!r}")
        elif type(value) is not int or value < 1:
            raise ValueError(f"space: {name} is a whole number of at least 1, met {value!r}; nearest: 1")


EVERYTHING = Space()
"""The space without limits."""


def layouts(problem: Problem, space: Space = EVERYTHING) -> Iterator[Layout]:
    """Yield every legal layout of ``space`` once, by rising tensor, pipeline and microbatch.

    Layers are split evenly where the stages divide them and balanced where not.
    """
    for data, tensor, rows, pipeline in _degrees(problem, space):
        choices = _sequence_parallels(problem, space, tensor, rows)
        rest = tuple(product(_zeros(space, data), choices, _recomputes(space)))
        for microbatch in _microbatches(problem, space, data, rows):
            for schedule, chunks in _schedules(problem, space, pipeline, data * microbatch):
                stages = _stages(problem, pipeline * chunks)
                for zero, sequence_parallel, recompute in rest:
                    yield Layout(
                        data=data,
                        tensor=tensor,
                        tensor_rows=rows,
                        pipeline=pipeline,
                        microbatch=microbatch,
                        schedule=schedule,
                        chunks=chunks,
                        zero=zero,
                        sequence_parallel=sequence_parallel,
                        recompute=recompute,
                        stages=stages,
                    )


def neighbours(problem: Problem, space: Space, layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts of ``space`` that differ from ``layout``, itself of ``space``, in one decision.

    A decision is one field, schedule and chunks together, or a factor traded between two of the
    degrees. Being neighbours is symmetric.
    """
    result = [trade for trade in _trades(problem, space, layout) if _admits(problem, space, trade)]
    data, pipeline = layout.data, layout.pipeline
    looped = (layout.schedule, layout.chunks)
    result += [
        replace(layout, microbatch=microbatch)
        for microbatch in _microbatches(problem, space, data, layout.tensor_rows)
        if looped in _schedules(problem, space, pipeline, data * microbatch)
    ]
    result += [
        replace(layout, schedule=schedule, chunks=chunks, stages=_stages(problem, pipeline * chunks))
        for schedule, chunks in _schedules(problem, space, pipeline, layout.sequences)
    ]
    result += [replace(layout, zero=zero) for zero in _zeros(space, data)]
    choices = _sequence_parallels(problem, space, layout.tensor, layout.tensor_rows)
    result += [replace(layout, sequence_parallel=choice) for choice in choices]
    result += [replace(layout, recompute=recompute) for recompute in _recomputes(space)]
    return tuple(candidate for candidate in result if candidate != layout)


def _trades(problem: Problem, space: Space, layout: Layout) -> Iterator[Layout]:
    names = _DEGREES if space.tensor_rows is None else (*_DEGREES, "tensor_rows")
    degrees = {name: getattr(layout, name) for name in names}
    for source, target in permutations(names, 2):
        for factor in _divisors(degrees[source])[1:]:
            traded = degrees | {source: degrees[source] // factor, target: degrees[target] * factor}
            stages = _stages(problem, traded["pipeline"] * layout.chunks)
            yield replace(layout, **traded, stages=stages)


def _admits(problem: Problem, space: Space, layout: Layout) -> bool:
    """Return whether `layouts` yields ``layout``, given a legal product of degrees and a legal recompute."""
    data, tensor, rows, pipeline = layout.data, layout.tensor, layout.tensor_rows, layout.pipeline
    return (
        _allowed(space.data, data)
        and _allowed(space.tensor, tensor)
        and rows in _rows(space)
        and _allowed(space.pipeline, pipeline)
        and pipeline <= num_layers(problem.graph)
        and layout.microbatch in _microbatches(problem, space, data, rows)
        and (layout.schedule, layout.chunks) in _schedules(problem, space, pipeline, layout.sequences)
        and layout.zero in _zeros(space, data)
        and layout.sequence_parallel in _sequence_parallels(problem, space, tensor, rows)
    )


def _allowed(limit: Container[object] | None, value: object) -> bool:
    return limit is None or value in limit


def _rows(space: Space) -> tuple[int, ...]:
    return tuple(sorted(set(space.tensor_rows or (1,))))


def _degrees(problem: Problem, space: Space) -> Iterator[tuple[int, int, int, int]]:
    devices = problem.cluster.num_devices
    layers = num_layers(problem.graph)
    for tensor, rows in product(_divisors(devices), _rows(space)):
        whole = devices % (tensor * rows) == 0
        if not whole or not _allowed(space.tensor, tensor) or not _cuts(problem, tensor, rows, sequence_parallel=False):
            continue
        for pipeline in _divisors(devices // (tensor * rows)):
            data = devices // (tensor * rows * pipeline)
            if pipeline <= layers and _allowed(space.pipeline, pipeline) and _allowed(space.data, data):
                yield data, tensor, rows, pipeline


def _microbatches(problem: Problem, space: Space, data: int, rows: int) -> tuple[int, ...]:
    """Return the sequences a microbatch may have on one of ``data`` ranks; none where they divide no batch."""
    share, left = divmod(problem.training.global_batch, data)
    if left:
        return ()
    sizes = (size for size in _divisors(share) if size % rows == 0)
    if space.microbatch is not None:
        return tuple(size for size in sizes if size in space.microbatch)
    return tuple(size for size in sizes if size & (size - 1) == 0 or size == share)


def _schedules(problem: Problem, space: Space, pipeline: int, sequences: int) -> tuple[tuple[str, int], ...]:
    """Return the names and chunks that a pipeline may have whose microbatches have so many sequences in all."""
    count = problem.training.global_batch // sequences
    names = (name for name in FLAT_SCHEDULES if SCHEDULES[name].violation(pipeline, count, 1) is None)
    flat = [(name, 1) for name in names if _allowed(space.schedule, name) and _allowed(space.chunks, 1)]
    if pipeline == 1:
        return tuple(flat[:1])
    if count % pipeline:
        return tuple(flat)
    looped = [name for name in LOOPED_SCHEDULES if _allowed(space.schedule, name)]
    return tuple(flat) + tuple(product(looped, _chunks(problem, space, pipeline)))


def _chunks(problem: Problem, space: Space, pipeline: int) -> tuple[int, ...]:
    layers = num_layers(problem.graph)
    if space.chunks is not None:
        return tuple(count for count in sorted(set(space.chunks)) if 2 <= count <= layers // pipeline)
    return _divisors(layers // pipeline)[1:] if layers % pipeline == 0 else ()


def _zeros(space: Space, data: int) -> tuple[int, ...]:
    levels = ZERO_LEVELS if space.zero is None else tuple(sorted(set(space.zero)))
    return levels if data > 1 else levels[:1]


def _sequence_parallels(problem: Problem, space: Space, tensor: int, rows: int) -> tuple[bool, ...]:
    return tuple(
        choice
        for choice in (False, True)
        if _allowed(space.sequence_parallel, choice) and _cuts(problem, tensor, rows, sequence_parallel=choice)
    )


def _recomputes(space: Space) -> tuple[Recompute, ...]:
    return tuple(recompute for recompute in Recompute if _allowed(space.recompute, recompute))


def _cuts(problem: Problem, tensor: int, rows: int, *, sequence_parallel: bool) -> bool:
    """Return whether tensor parallelism of those degrees breaks no rule of its own."""
    probe = Layout(tensor=tensor, tensor_rows=rows, microbatch=rows, sequence_parallel=sequence_parallel)
    own = ("tensor", "tensor_rows", "sequence_parallel")
    return all(broken.field not in own for broken in violations(problem, probe))


def _stages(problem: Problem, stages: int) -> str:
    return "balanced" if num_layers(problem.graph) % stages else "even"


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return tuple(small + large)
