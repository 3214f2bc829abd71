"""The families and groups of a space, derived from the rules of a layout.

Answers of `meshwise.strategies.plan.rules` are kept by the fields on which they depend, so that families are cheap to
list. The layers of pipeline stages on devices of different speed are also divided here.

References
----------
Jia et al., "Whale: efficient giant model training over heterogeneous GPUs", USENIX ATC 2022 (inter-TaskGraph load
balance: the layers of a stage in proportion to the FLOP/s of its devices).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, isqrt, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, operator_time
from meshwise.simulator.operator_graph import BATCH, Block, OperatorGraph
from meshwise.strategies.plan.completion import mesh_of
from meshwise.strategies.plan.group import Group, PassChoice, StateChoice
from meshwise.strategies.plan.layout import (
    CORE_SCHEDULES,
    DECISIONS,
    DEGREES,
    RANK_DEGREES,
    SYNCHRONOUS,
    USUAL_SCHEDULES,
    Layout,
    Level,
    names_at,
)
from meshwise.strategies.plan.mesh import AXES, PIPELINE, REPLICA
from meshwise.strategies.plan.offloading import NOTHING, Offloading, fraction_of
from meshwise.strategies.plan.parallelism import EXPERTS, Attention
from meshwise.strategies.plan.partition import most_stages, num_layers, partition, share_ends
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, OfStage, PerStage, Recompute, SomeOperators
from meshwise.strategies.plan.rules import Around, offload_rules, violations
from meshwise.strategies.schedules.rule import ScheduleRule, no_pairs
from meshwise.strategies.schedules.schedule import SCHEDULES, rule_of
from meshwise.strategies.search.acceptance import FIELDS, OF_FAMILIES, Answers

if TYPE_CHECKING:
    from meshwise.strategies.search.space import Space


class Paces(NamedTuple):
    """Seconds of all layers, and of the blocks before and after them, on the slowest device of every position."""

    layers: tuple[float, ...]
    rest: tuple[float, ...]


def paces(problem: Problem, layout: Layout) -> Paces:
    """Return how long the whole model takes on the devices of every pipeline position, whatever the stages."""
    cluster, mesh = problem.cluster, mesh_of(layout)
    devices = np.array(layout.placement or cluster.free_devices)
    kinds, positions = cluster.device_kinds[devices], mesh.coordinates(PIPELINE)
    size = layout.microbatch if isinstance(layout.microbatch, int) else max(layout.microbatch)
    slowest = []
    for position in range(layout.pipeline):
        # one device of each kind is enough
        _, first = np.unique(kinds[positions == position], return_index=True)
        found = {cluster.accelerator_of(int(device)) for device in devices[positions == position][first]}
        slowest.append([max(_seconds(each, problem.graph, part, size) for each in found) for part in (True, False)])
    layers, rest = zip(*slowest, strict=True)
    return Paces(layers, rest)


def paced(problem: Problem, layout: Layout, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of layers per stage, at least 1, for which the slowest stage is fastest.

    Layers count as equal, and each in turn goes to the stage that ends first with it. A layer takes as long as on the
    slowest device of its position. The last stage also has the blocks before and after the layers.

    Parameters
    ----------
    layout
        Degrees, order and placement of ranks; its stages and schedule are ignored.
    positions
        The pipeline position of every stage.
    """
    layers, found = num_layers(problem.graph), paces(problem, layout)
    each = [found.layers[at] / max(layers, 1) for at in positions]
    counts = [1] * len(positions)
    load = list(each)
    load[-1] += found.rest[positions[-1]]
    for _ in range(layers - len(positions)):
        first = min(range(len(counts)), key=lambda stage: (load[stage] + each[stage], stage))
        counts[first] += 1
        load[first] += each[first]
    return tuple(counts)


@lru_cache(maxsize=4096)
def _seconds(accelerator: Accelerator, graph: OperatorGraph, layers: bool, microbatch: int) -> float:
    """Return the seconds of forward and backward of all layers, or of all other blocks, uncut on one device."""
    blocks = (block for block in graph.blocks if block.layer is layers)
    return sum(block.repeat * _of_block(accelerator, block, microbatch) for block in blocks)


def _of_block(accelerator: Accelerator, block: Block, microbatch: int) -> float:
    total = 0.0
    for operator in block.operators:
        sizes = {dim: size * microbatch if dim == BATCH else size for dim, size in operator.dims}
        total += sum(operator_time(accelerator, block, operator, sizes, each) for each in Pass)
    return total


T = TypeVar("T")

EXPERT_SCHEDULES = ("dualpipev",)
"""Schedules that are also usual for a model with experts, whose exchange they hide (DeepSeek-V3)."""

ACTIVATIONS = "activation"
"""The operator to recompute alone where a little memory is saved at almost no cost."""

OFFLOADED = (0.5, 1.0)
"""Fractions of optimizer states that a space with offload tries."""

RECOMPUTED = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
"""Fractions of a stage's layers that a space recomputes, besides none and all."""

LEAST_TOKENS = 2048
"""Tokens of a sequence per context rank at least: context parallelism is for sequences that stay long when cut."""

MOST_TOKENS = 131_072
"""Tokens of a microbatch of several sequences at most: so many keep any accelerator busy."""

LEAST_BUSY = 7 / 8
"""The least part of the free devices that a wide space uses."""

_GROUP = names_at(Level.GROUP)
"""The decisions that all members of a group share besides the schedule."""

_FAMILY = names_at(Level.DEGREE, Level.FAMILY)
_CUT_FIELDS = (*(name for name in DEGREES if name not in ("data", "pipeline")), "sequence_parallel", "attention")
"""The decisions that determine which dims of operators are cut."""


_DIVIDED = ("data", "tensor", "pipeline")
"""The degrees that may be any divisor of the number of devices."""

_INNER = (*_DIVIDED, "tensor_rows")
"""The degrees that `Choices` lists by rules of their own."""


class Scheduled(NamedTuple):
    """A schedule that a family may have: its name, chunks and stages."""

    name: str
    chunks: int
    stages: str | tuple[int, ...]


class Choices:
    """The values that the fields of layouts in one space may have.

    What depends on few fields is memoised by these, because a large space has thousands of families.
    """

    def __init__(self, problem: Problem, space: "Space") -> None:
        self.problem, self.space = problem, space
        self.graph, self.batch = problem.graph, problem.training.global_batch
        self.free, self.layers = problem.cluster.free_devices, num_layers(problem.graph)
        self.mixed = len(set(problem.cluster.device_kinds.tolist())) > 1
        dims = (dim for block in self.graph.blocks for each in block.operators for dim, _ in each.dims)
        self._has_experts = EXPERTS in dims
        self._cuts: dict[tuple[object, ...], bool] = {}
        self._schedules: dict[tuple[object, ...], tuple[Scheduled, ...]] = {}
        self._passes: dict[tuple[object, ...], tuple[PassChoice, ...]] = {}
        self._states: dict[tuple[object, ...], tuple[StateChoice, ...]] = {}
        self._legal: dict[tuple[object, ...], np.ndarray] = {}
        self._counts: dict[tuple[object, ...], int] = {}
        self._layers_of: dict[tuple[int, str | tuple[int, ...]], tuple[int, ...]] = {}
        self._allowed_offloads = self._offloadings()
        self._answers = None if space.accepts is None else Answers(space.accepts.rules(problem))
        self._alone = self._operators_alone()

    def families(self) -> Iterator[Layout]:
        """Yield the families: layouts of degrees, ranks and microbatch, by rising tensor, pipeline and microbatch."""
        for degrees in self._degrees():
            for microbatch in self.microbatches(degrees.data, degrees.tensor_rows):
                family = replace(degrees, microbatch=microbatch)
                if self._answers is None or not self._answers.refuses(family, FIELDS - OF_FAMILIES):
                    yield family

    def groups(self, family: Layout, *, pairs: bool | None = None) -> Iterator[Group]:
        """Yield the groups of a family: with ``pairs`` those whose passes run in pairs, or do not; ``None`` for all."""
        for scheduled in self.schedules(family):
            if pairs is not None and pairs is (SCHEDULES[scheduled.name].pairs is no_pairs):
                continue
            for shared in self._shared_choices(family):
                found = self.accepted(self._group(family, scheduled, shared))
                if found.count:
                    yield found

    def count(self, family: Layout) -> int:
        """Return how many layouts a family has."""
        # the key has every property of a family on which the number depends; no family is listed twice for one key
        cut = family.tensor > 1, family.tensor_rows > 1, family.sequence_parallel
        open_choices = tuple(DECISIONS[name].changes(family) for name in _GROUP)
        shared = family.data * family.context > 1, family.zero_shards > 0
        paces = family if self._answers is not None else self._paces(family)
        key = (family.pipeline, self.batch // family.sequences, cut, open_choices, shared, paces)
        if key not in self._counts:
            self._counts[key] = sum(group.count for group in self.groups(family))
        return self._counts[key]

    def contains(self, layout: Layout) -> bool:
        """Return whether a layout is in the space."""
        family = family_of(layout)
        if not self.has_family(family):
            return False
        if not self.has_group(layout):
            return False
        group = self.group_of(layout)
        if isinstance(layout.recompute, PerStage):
            return False  # a space has one recompute choice for all stages
        of_pass = PassChoice(layout.recompute, layout.overlap_tensor, layout.offload.activations)
        if of_pass not in group.passes or (of_state := _state_of(layout)) not in group.states:
            return False
        legal = bool(group.legal[group.passes.index(of_pass), group.states.index(of_state)])
        return legal and (self._answers is None or not self._answers.refuses(layout))

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with another value of one field that is no degree; legal or not, and with its old stages."""
        family, rows = family_of(layout), layout.tensor_rows
        scheduled = dict.fromkeys((name, chunks) for name, chunks, _ in self.schedules(family))
        yield from (replace(layout, schedule=name, chunks=chunks) for name, chunks in scheduled)
        yield from (replace(layout, microbatch=size) for size in self.microbatches(layout.data, rows))
        for name, values in {
            "attention": self._attentions(),
            "expert": self._experts(layout.data),
            "zero_shards": self._shards(layout),
            "order": self._orders(layout),
            **{name: self._values_beside(layout, name) for name in _GROUP},
            "offload": self._allowed_offloads,
            "recompute": [each.recompute for each in self.passes(layout)],
            **{name: sorted(DECISIONS[name].values) for name in ("sequence_parallel", "overlap_tensor")},
            **{
                name: dict.fromkeys(getattr(state, name) for state in self.states(layout))
                for name in StateChoice._fields
                if name != "offload"
            },
        }.items():
            now = getattr(layout, name)
            yield from (replace(layout, **{name: value}) for value in values if value != now)

    def placement(self, devices: int) -> tuple[int, ...]:
        """Return the placement on the first ``devices`` free devices; empty for all of them."""
        return () if devices == len(self.free) else tuple(self.free[:devices])

    def in_words(self, layout: Layout) -> Layout:
        """Return a layout with its stages and placement as the space writes them, where the space has them."""
        family = replace(family_of(layout), placement=self._placement_in_words(layout))
        layout = replace(layout, placement=family.placement)
        if not isinstance(layout.stages, tuple) or not self.has_family(family):
            return layout
        for name, chunks, stages in self.schedules(family):
            count = layout.pipeline * chunks
            if (name, chunks) == (layout.schedule, layout.chunks) and self._layers(count, stages) == layout.stages:
                return replace(layout, stages=stages)
        return layout

    def _placement_in_words(self, layout: Layout) -> tuple[int, ...]:
        return () if layout.placement == tuple(self.free) else layout.placement

    def has_group(self, layout: Layout) -> bool:
        """Return whether the layout's family, one of the space, has the layout's group."""
        family, scheduled = family_of(layout), Scheduled(layout.schedule, layout.chunks, layout.stages)
        shared = all(getattr(layout, name) in self._values_beside(family, name) for name in _GROUP)
        return shared and scheduled in self.schedules(family)

    def group_of(self, layout: Layout) -> Group:
        """Return the group of a layout in the space."""
        scheduled = Scheduled(layout.schedule, layout.chunks, layout.stages)
        return self._group(family_of(layout), scheduled, {name: getattr(layout, name) for name in _GROUP})

    def accepted(self, group: Group) -> Group:
        """Return the group with only the members that the space accepts."""
        return group if self._answers is None else self._answers.accepted(group)

    def _group(self, family: Layout, scheduled: Scheduled, shared: Mapping[str, Any]) -> Group:
        name, chunks, stages = scheduled
        layout = replace(family, schedule=name, chunks=chunks, stages=stages, **shared)
        passes, states = self.passes(layout), self.states(layout)
        return Group(layout, passes, states, self._together(passes, states))

    def has_family(self, family: Layout) -> bool:
        """Return whether the space has a family."""
        same = replace(family, microbatch=1)
        return family.microbatch in self.microbatches(family.data, family.tensor_rows) and same in self._known

    @cached_property
    def _known(self) -> frozenset[Layout]:
        return frozenset(replace(each, microbatch=1) for each in self._degrees())

    def _degrees(self) -> Iterator[Layout]:
        """Yield the families without their microbatch, which is the least that a grid's rows divide."""
        for devices in self.devices:
            for degrees in self._model_degrees(devices):
                data = devices // prod(degrees.values())
                if _allows(self.space.data, data) and self.batch % data == 0:
                    yield from self._variants(Layout(**degrees, data=data, placement=self.placement(devices)))

    def _model_degrees(self, devices: int) -> Iterator[dict[str, Any]]:
        """Yield the degrees besides ``data`` whose product divides ``devices``, by rising tensor and pipeline."""
        for tensor, rows in product(_divisors(devices), _limited(self.space.tensor_rows, (1,))):
            if devices % (tensor * rows) or not _allows(self.space.tensor, tensor) or not self._cut(tensor, rows):
                continue
            for pipeline in _divisors(devices // (tensor * rows)):
                if pipeline > self.layers or not _allows(self.space.pipeline, pipeline):
                    continue
                others = devices // (tensor * rows * pipeline)
                for rest in self._divide(others, [name for name in RANK_DEGREES if name not in _INNER]):
                    yield {"tensor": tensor, "tensor_rows": rows, "pipeline": pipeline} | rest

    def _divide(self, ranks: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the values of the named degrees whose product divides ``ranks``."""
        if not names:
            yield {}
            return
        name, *others = names
        legal = self._contexts(ranks) if name == "context" else _limited(getattr(self.space, name), (1,))
        for value in legal:
            if ranks % value == 0:
                yield from ({name: value} | rest for rest in self._divide(ranks // value, others))

    def _variants(self, base: Layout) -> Iterator[Layout]:
        """Yield the layouts of the same degrees that differ in the other fields of a family."""
        attentions = self._attentions() if base.context > 1 else self._attentions()[:1]
        for attention, expert in product(attentions, self._experts(base.data)):
            for sequence_parallel in sorted(set(self.values("sequence_parallel"))):
                how = replace(
                    base,
                    attention=attention,
                    expert=expert,
                    sequence_parallel=sequence_parallel,
                    microbatch=base.tensor_rows,
                )
                if self._legal_cut(how):
                    for shards, order in product(self._shards(how), self._orders(how)):
                        yield replace(how, zero_shards=shards, order=order)

    def _cut(self, tensor: int, rows: int) -> bool:
        """Return whether tensor parallelism of these degrees breaks none of its own rules."""
        return self._legal_cut(Layout(tensor=tensor, tensor_rows=rows, microbatch=rows))

    def _legal_cut(self, layout: Layout) -> bool:
        """Return whether no axis cuts a dim that it must not cut."""
        # rules about cuts do not depend on data and pipeline, so the probe has the least that they can be
        key = tuple(getattr(layout, name) for name in _CUT_FIELDS)
        if key not in self._cuts:
            probe = Layout(
                data=layout.expert, microbatch=layout.tensor_rows, **dict(zip(_CUT_FIELDS, key, strict=True))
            )
            self._cuts[key] = all(broken.field not in _CUT_FIELDS for broken in violations(self.problem, probe))
        return self._cuts[key]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that may have ranks, the largest first."""
        free, cluster = len(self.free), self.problem.cluster
        counts = {free}
        if self.space.devices is not None:
            counts = {devices for devices in self.space.devices if devices <= free}
        elif self.space.wide and free == cluster.num_devices:
            counts |= {end for end in cluster.first_devices.tolist() if end >= LEAST_BUSY * free}
        return tuple(sorted(counts, reverse=True))

    @property
    def degrees(self) -> tuple[str, ...]:
        """The names of the degrees that can be above 1."""
        always = {name: getattr(self.space, name) is None for name in RANK_DEGREES if name not in _DIVIDED}
        always["context"] = self.space.context is None and self.space.core
        return tuple(name for name in RANK_DEGREES if not always.get(name))

    def _contexts(self, ranks: int) -> Sequence[int]:
        if self.space.context is None and self.space.core:
            return (1,)
        limit = self.space.context or range(1, max(self.graph.sequence // LEAST_TOKENS, 1) + 1)
        return [context for context in _divisors(ranks) if context in limit and self.graph.sequence % context == 0]

    def _attentions(self) -> tuple[Attention, ...]:
        return self.values("attention")

    def _experts(self, data: int) -> Sequence[int]:
        every = _divisors(data) if self._has_experts else (1,)
        return [expert for expert in every if _allows(self.space.expert, expert)]

    def _shards(self, layout: Layout) -> Sequence[int]:
        """Return over how many data ranks states may be shared; 0 for all.

        Usually all, or those of one node (hybrid sharding).
        """
        data, inner = layout.data, layout.tensor * layout.tensor_rows * layout.context
        inside = self.problem.cluster.first.devices // inner
        usual = (0, inside) if inside > 1 and layout.order == AXES else (0,)
        found = dict.fromkeys(
            0 if n == data else n for n in self._of_extent(self.space.zero_shards, (0,), usual, usual)
        )
        zero = any(self._zeros)
        legal = (n for n in found if n > 1 and zero and data % n == 0 and n % layout.expert == 0)
        return [0] * (0 in found) + list(legal)

    def _orders(self, layout: Layout) -> list[tuple[str, ...]]:
        """Return the orders of axes; of several orders that place ranks alike the first."""
        long = {name for name in AXES if name != REPLICA and getattr(layout, name) > 1}
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for order in self.space.order or (AXES,):
            if long <= set(order):
                found.setdefault(tuple(name for name in order if name in long), order)
        return list(found.values())

    def microbatches(self, data: int, rows: int) -> tuple[int, ...]:
        """Return the sizes of a microbatch on a data rank, in sequences; none where data does not divide the batch."""
        share, left = divmod(self.batch, data)
        if left:
            return ()
        sizes = (size for size in _divisors(share) if size % rows == 0)
        if self.space.microbatch is not None:
            return tuple(size for size in sizes if size in self.space.microbatch)
        most = share if self.space.core or self.space.wide else max(MOST_TOKENS // self.graph.sequence, 1)
        return tuple(
            size for size in sizes if self.space.wide or (size <= most and (size & (size - 1) == 0 or size == share))
        )

    def schedules(self, family: Layout) -> tuple[Scheduled, ...]:
        """Return the schedules of a family: first the ones with one chunk per rank, then the others."""
        pipeline, count = family.pipeline, self.batch // family.sequences
        key = (pipeline, count, self._paces(family))
        if key not in self._schedules:
            usual = USUAL_SCHEDULES + EXPERT_SCHEDULES * self._has_experts
            names = self._of_extent(self.space.schedule, CORE_SCHEDULES, usual, SYNCHRONOUS)
            ordered = [*(name for name in CORE_SCHEDULES if name in names), *dict.fromkeys(names)]
            rules = [SCHEDULES[name] for name in dict.fromkeys(ordered)]
            flat = [(rule, 1) for rule in rules if rule.chunks[0] == 1 and rule.name not in _LOOPED]
            looped = product(rules, self._chunks(pipeline) if pipeline > 1 else ())
            found = [*(each for each in flat if _allows(self.space.chunks, 1)), *looped]
            legal = [each for each in found if self._schedule_legal(*each, pipeline, count)]
            self._schedules[key] = tuple(
                Scheduled(rule.name, chunks, stages)
                for rule, chunks in (legal if pipeline > 1 else legal[:1])  # all are the same on one rank
                for stages in self._stages(family, rule, chunks)
            )
        return self._schedules[key]

    def _schedule_legal(self, rule: ScheduleRule, chunks: int, pipeline: int, count: int) -> bool:
        frozen = self.problem.training.frozen and rule.splits_backward
        return not frozen and rule.violation(pipeline, count, chunks) is None

    def _chunks(self, pipeline: int) -> tuple[int, ...]:
        """Return the numbers of chunks above 1 that a rank may have.

        They divide the layers of the fullest rank, so that no rank has more layers than with one chunk.
        """
        most = most_stages(self.graph) // pipeline
        # a limit may name counts that do not divide the layers: stages are then balanced
        if self.space.chunks is not None:
            return tuple(count for count in sorted(set(self.space.chunks)) if 2 <= count <= most)
        if self.space.core and self.layers % pipeline:
            return ()
        return tuple(count for count in _divisors(ceil(self.layers / pipeline))[1:] if count <= most)

    def _paces(self, family: Layout) -> object:
        """Return what divisions depend on besides the number of stages: on a mixed cluster, the speed of positions."""
        return paces(self.problem, family) if self.mixed else None

    def _stages(self, family: Layout, rule: ScheduleRule, chunks: int) -> list[str | tuple[int, ...]]:
        stages = family.pipeline * chunks
        usual: list[str | tuple[int, ...]] = ["balanced" if self.layers % stages else "even"]
        if not self.space.core and (shared := self._shared_ends(stages, usual[0])):
            usual.append(shared)
        usual += ["paced"] if self.mixed else []
        found: dict[tuple[int, ...], str | tuple[int, ...]] = {}
        for choice in self.space.stages or usual:
            positions = rule.stage_ranks(family.pipeline, chunks)
            how: str | tuple[int, ...] = paced(self.problem, family, positions) if choice == "paced" else choice
            wrong = len(how) != stages or sum(how) != self.layers if isinstance(how, tuple) else False
            if not wrong and not (how == "even" and self.layers % stages):
                found.setdefault(self._layers(stages, how), how)  # of words that mean the same layers the first
        return list(found.values())

    def _shared_ends(self, stages: int, usual: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers per stage with fewer at both ends, or none where a stage would have more than usual."""
        if stages < 2 or stages > self.layers + 2 or most_stages(self.graph) < self.layers + 2:
            return ()
        counts = share_ends(self.layers, stages)
        return counts if max(counts) <= max(self._layers(stages, usual)) else ()

    def _layers(self, stages: int, how: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of layers of every stage."""
        if isinstance(how, tuple):
            return how
        if (stages, how) not in self._layers_of:
            layers = {name for name, block in self.graph.occurrences if block.layer}
            found = partition(self.graph, stages, how)
            self._layers_of[stages, how] = tuple(sum(name in layers for name in each.blocks) for each in found)
        return self._layers_of[stages, how]

    def values(self, name: str) -> tuple[Any, ...]:
        """Return the values of a decision: its limit, or without one the values of the space's extent."""
        item = DECISIONS[name]
        return tuple(dict.fromkeys(self._of_extent(getattr(self.space, name), item.core, item.usual, item.wide)))

    def _values_beside(self, layout: Layout, name: str) -> tuple[Any, ...]:
        """Return the values of a decision, given the others of a layout; the first alone where it changes nothing."""
        values = self.values(name)
        return values if DECISIONS[name].changes(layout) else values[:1]

    def _shared_choices(self, family: Layout) -> Iterator[dict[str, Any]]:
        """Yield the values of the decisions that all members of a group share besides their schedule."""
        for values in product(*(self._values_beside(family, name) for name in _GROUP)):
            yield dict(zip(_GROUP, values, strict=True))

    def passes(self, layout: Layout) -> tuple[PassChoice, ...]:
        """Return the rows of a group: how passes may run under the degrees and the schedule of a layout."""
        rule, counts = rule_of(layout.schedule), self._layers(layout.pipeline * layout.chunks, layout.stages)
        overlaps = layout.tensor > 1 and layout.sequence_parallel and not rule.splits_backward
        whole = not rule.splits_backward and rule.pairs is no_pairs and not rule.asynchronous
        key = (counts, overlaps, whole, layout.pipeline)
        if key not in self._passes:
            away = self._activations(counts, layout.pipeline) if whole else ((),)
            chosen = tuple(each for each in self.values("overlap_tensor") if overlaps or not each)
            self._passes[key] = tuple(
                PassChoice(recompute, overlap, activations)
                for recompute, overlap, activations in product(self._recomputes(max(counts)), chosen, away)
            )
        return self._passes[key]

    def _recomputes(self, most: int) -> tuple[OfStage, ...]:
        if self.space.recompute is not None:
            named = (Recompute(each) if isinstance(each, str) else each for each in self.space.recompute)
            return tuple(dict.fromkeys(each for each in named if (each.layers or 0) <= most))
        if self.space.core:
            return tuple(Recompute)
        hows = (Recompute.SELECTIVE, Recompute.FULL) if self.space.wide else (Recompute.FULL,)
        first = dict.fromkeys(ceil(most * part) for part in RECOMPUTED)
        some = (FirstLayers(how, n) for how in hows for n in first if n < most)
        return (*Recompute, *self._alone, *some)

    def _operators_alone(self) -> tuple[SomeOperators, ...]:
        """Return the choices that recompute single operators: the activation functions, where layers have them."""
        names = {each.name for block in self.graph.blocks if block.layer for each in block.operators}
        return (SomeOperators((ACTIVATIONS,)),) if ACTIVATIONS in names else ()

    def _activations(self, counts: tuple[int, ...], pipeline: int) -> tuple[tuple[float, ...], ...]:
        """Return the fractions of activations that may be on hosts; of several that mean the same layers the first."""
        if not any(block.layer for block in self.graph.blocks):
            return ((),)
        found: dict[tuple[int, ...], tuple[float, ...]] = {}
        for each in dict.fromkeys(offload.activations for offload in self._allowed_offloads):
            if len(each) in (0, 1, pipeline):
                parts = each * pipeline if len(each) == 1 else each
                away = (fraction_of(n, parts[at % pipeline] if parts else 0.0) for at, n in enumerate(counts))
                found.setdefault(tuple(away), each)
        return tuple(found.values())

    def states(self, layout: Layout) -> tuple[StateChoice, ...]:
        """Return the columns of a group: where states may be under the degrees and the schedule of a layout."""
        ranks = layout.data * layout.context
        key = (ranks > 1, layout.zero_shards > 0, layout.pipeline, layout.schedule)
        if key not in self._states:
            zeros = [zero for zero in self._zeros if zero or not layout.zero_shards]
            kept, overlaps = self.values("reshard_after_forward"), self.values("overlap_gradients")
            central = self.values("gradient_reduction")
            away = tuple(dict.fromkeys(replace(each, activations=()) for each in self._allowed_offloads))
            if ranks == 1:  # on a single rank these choices change nothing
                zeros, overlaps, central = zeros[:1], overlaps[:1], central[:1]
            states = (StateChoice(*each) for each in product(zeros, kept, overlaps, central, away))
            self._states[key] = tuple(state for state in states if self._state_legal(layout, state))
        return self._states[key]

    @cached_property
    def _zeros(self) -> list[int]:
        return sorted(self.values("zero"))

    def _state_legal(self, layout: Layout, state: StateChoice) -> bool:
        if (not state.reshard_after_forward and state.zero != 3) or (
            state.gradient_reduction != "all_reduce" and state.zero
        ):
            return False
        if not state.offload:
            return True
        rule = rule_of(layout.schedule)
        around = Around(
            self.graph,
            self.problem.training,
            pipeline=layout.pipeline,
            schedule=rule.name,
            whole_backward=not rule.splits_backward and rule.pairs is no_pairs,
            flushes=not rule.asynchronous,
            ranks=layout.data * layout.context,
            shards=(layout.zero_shards or layout.data) * layout.context,
            zero=state.zero,
        )
        return next(offload_rules(state.offload, around), None) is None

    def _together(self, passes: tuple[PassChoice, ...], states: tuple[StateChoice, ...]) -> np.ndarray:
        """Return the mask of a group: the rows and columns whose offload together the space allows."""
        key = (id(passes), id(states))  # no id is reused, since the memos keep both tuples
        if key not in self._legal:
            away = set(self._allowed_offloads)
            pairs = {
                (of_pass, of_state): _joined(of_state, of_pass) in away
                for of_pass in {each.activations for each in passes}
                for of_state in {each.offload for each in states}
            }
            rows = [[pairs[each.activations, state.offload] for state in states] for each in passes]
            self._legal[key] = np.array(rows, dtype=np.bool_).reshape(len(passes), len(states))
        return self._legal[key]

    def _offloadings(self) -> tuple[Offloading, ...]:
        if self.space.offload is not None:
            return tuple(dict.fromkeys(self.space.offload))
        if not self.space.wide:
            return (NOTHING,)
        return offloadings()

    def _of_extent(
        self, limit: tuple[T, ...] | None, core: tuple[T, ...], usual: tuple[T, ...], wide: tuple[T, ...]
    ) -> tuple[T, ...]:
        """Return the limit, or without one the values of the space's extent."""
        if limit is not None:
            return limit
        return core if self.space.core else wide if self.space.wide else usual


_LOOPED = frozenset({"interleaved", "looped_bfs", "interleaved_zero_bubble"})
"""Schedules that with one chunk per rank are the same as another schedule."""


def family_of(layout: Layout) -> Layout:
    """Return the family of a layout: a layout with its degrees, ranks and microbatch, and defaults for the rest."""
    return Layout(**{name: getattr(layout, name) for name in _FAMILY})


def _state_of(layout: Layout) -> StateChoice:
    values = {name: getattr(layout, name) for name in StateChoice._fields}
    return StateChoice(**values | {"offload": replace(layout.offload, activations=())})


def offloadings() -> tuple[Offloading, ...]:
    """Return the offloading that a space with offload tries: nothing, and a part or all of the optimizer states."""
    return (NOTHING, *(Offloading(optimizer=(part,)) for part in OFFLOADED))


def _joined(states: Offloading, activations: tuple[float, ...]) -> Offloading:
    return replace(states, activations=activations)


def _allows(limit: Iterable[T] | None, value: T) -> bool:
    return limit is None or value in limit


def _limited(limit: Iterable[T] | None, otherwise: Iterable[T]) -> tuple[T, ...]:
    """Return the distinct values of a limit in rising order."""
    return tuple(sorted(set(otherwise if limit is None else limit)))  # type: ignore[type-var]


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small) if divisor * divisor != number]
    return tuple(small + large)
