"""The families and groups of a space, derived from the rules of a layout.

Answers of `meshwise.strategies.plan.rules` are kept by the fields on which they depend, so that families are cheap to
list.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from meshwise.simulator.memo import HashedTuple, memoise
from meshwise.strategies.plan.group import (
    PASS_DECISIONS,
    STATE_DECISIONS,
    FamilyKind,
    Group,
    select_passes,
    select_states,
)
from meshwise.strategies.plan.layout import (
    CORE_SCHEDULES,
    CUT_DECISIONS,
    DECISIONS,
    RANK_DEGREES,
    SYNCHRONOUS,
    USUAL_SCHEDULES,
    Layout,
    Level,
    StepDecisions,
    names_at,
)
from meshwise.strategies.plan.mesh import AXES, REPLICA, divisors
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading, count_fraction
from meshwise.strategies.plan.parallelism import EXPERTS, Attention
from meshwise.strategies.plan.partition import count_possible_stages, num_layers, partition_layers, share_ends
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import FirstLayers, PerStage, Recompute, SomeOperators, StageRecompute
from meshwise.strategies.plan.rules import (
    need_violations,
    offload_violations,
    pass_violations,
    violations,
)
from meshwise.strategies.schedules.rule import ScheduleRule, list_no_pairs
from meshwise.strategies.schedules.schedule import SCHEDULES, find_rule
from meshwise.strategies.search.acceptance import FAMILY_FIELDS, FIELDS, Answers
from meshwise.strategies.search.speed_division import divide_by_speed, find_position_times

if TYPE_CHECKING:
    from meshwise.strategies.search.space import Space


T = TypeVar("T")

EXPERT_SCHEDULES = ("dualpipev",)
"""Schedules that are also usual for a model with experts, whose exchange they hide (DeepSeek-V3)."""

ACTIVATION_OPERATOR = "activation"
"""The operator to recompute alone where a little memory is saved at almost no cost."""

OFFLOAD_FRACTIONS = (0.5, 1.0)
"""Fractions of optimizer states that a space with offload tries."""

RECOMPUTE_FRACTIONS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
"""Fractions of a stage's layers that a space recomputes, besides none and all."""

MIN_CONTEXT_TOKENS = 2048
"""Tokens of a sequence per context rank at least: context parallelism is for sequences that stay long when cut."""

MAX_MICROBATCH_TOKENS = 131_072
"""Tokens of a microbatch of several sequences at most: so many keep any accelerator busy."""

MIN_BUSY_SHARE = 7 / 8
"""The least part of the free devices that a wide space uses."""

_GROUP_NAMES = names_at(Level.GROUP)
"""The decisions that all members of a group share besides the schedule."""

_PASS_NAMES = tuple(name for name in PASS_DECISIONS if name != "recompute")
_STATE_NAMES = tuple(name for name in STATE_DECISIONS if name != "offload")
"""The decisions of a row and of a column that are chosen from a list of values."""

_FAMILY_NAMES = names_at(Level.DEGREE, Level.FAMILY)

_DIVISOR_DEGREES = ("data", "tensor", "pipeline")
"""The degrees that may be any divisor of the number of devices."""

_LEADING_DEGREES = ("tensor", "tensor_rows", "pipeline")
_MODEL_DEGREES = (*_LEADING_DEGREES, *(name for name in RANK_DEGREES if name not in ("data", *_LEADING_DEGREES)))
"""The degrees besides ``data``, in the order in which families are listed."""


class ScheduleChoice(NamedTuple):
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
        self.free_devices, self.num_layers = problem.cluster.free_devices, num_layers(problem.graph)
        self.is_mixed = len(set(problem.cluster.device_kinds.tolist())) > 1
        dims = (dim for block in self.graph.blocks for operator in block.operators for dim, _ in operator.dims)
        self._has_experts = EXPERTS in dims
        self._allowed_offloads = self._list_offloadings()
        self._answers = None if space.accepts is None else Answers(space.accepts.list_rules(problem))
        self._operator_choices = self._list_operator_choices()

    def families(self) -> Iterator[Layout]:
        """Yield the families: layouts of degrees, ranks and microbatch, by rising tensor, pipeline and microbatch."""
        for degrees in self._list_degrees():
            for microbatch in self.list_microbatches(degrees.data, degrees.tensor_rows):
                family = replace(degrees, microbatch=microbatch)
                if self._answers is None or not self._answers.refuses(family, FIELDS - FAMILY_FIELDS):
                    yield family

    def groups(self, family: Layout, *, pairs: bool | None = None) -> Iterator[Group]:
        """Yield the groups of a family: with ``pairs`` those whose passes run in pairs, or do not; ``None`` for all."""
        for schedule_choice in self.list_schedules(family):
            if pairs is not None and pairs is (SCHEDULES[schedule_choice.name].pairs is list_no_pairs):
                continue
            for shared_values in self._list_shared_values(family):
                group = self.filter_group(self._build_group(family, schedule_choice, shared_values))
                if group.num_members:
                    yield group

    def count_layouts(self, family: Layout) -> int:
        """Return how many layouts a family has."""
        return self._count_kind(self._find_kind(family))

    def _find_kind(self, family: Layout) -> FamilyKind:
        """Return a family with every property on which the number of its layouts depends."""
        if self._answers is not None:
            return FamilyKind(family, (family,))
        cuts = family.tensor > 1, family.tensor_rows > 1, family.sequence_parallel
        shared_values = tuple(self._list_values_beside(family, name) for name in _GROUP_NAMES)
        ranks, stages = (family.replicas > 1, family.zero_shards > 0), self._find_stage_key(family)
        properties = family.pipeline, self.batch // family.sequences, cuts, shared_values, ranks, stages
        return FamilyKind(family, properties)

    @memoise
    def _count_kind(self, kind: FamilyKind) -> int:
        return sum(group.num_members for group in self.groups(kind.family))

    def contains(self, layout: Layout) -> bool:
        """Return whether a layout is in the space."""
        # a space has one recompute choice for all stages
        if isinstance(layout.recompute, PerStage) or not self.has_family(find_family(layout)):
            return False
        if not self.has_group(layout):
            return False
        group = self.find_group(layout)
        pass_choice, state_choice = select_passes(layout), select_states(layout)
        if pass_choice not in group.passes or state_choice not in group.states:
            return False
        is_member = bool(group.member_mask[group.passes.index(pass_choice), group.states.index(state_choice)])
        return is_member and (self._answers is None or not self._answers.refuses(layout))

    def list_variants(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with another value of one field that is no degree; legal or not, and with its old stages."""
        family, rows = find_family(layout), layout.tensor_rows
        schedules = dict.fromkeys((name, chunks) for name, chunks, _ in self.list_schedules(family))
        yield from (replace(layout, schedule=name, chunks=chunks) for name, chunks in schedules)
        yield from (replace(layout, microbatch=size) for size in self.list_microbatches(layout.data, rows))
        for name, values in {
            "attention": self._list_attentions(),
            "expert": self._list_experts(layout.data),
            "zero_shards": self._list_shards(layout),
            "order": self._list_orders(layout),
            **{name: self._list_values_beside(layout, name) for name in _GROUP_NAMES},
            "offload": self._allowed_offloads,
            "recompute": [pass_choice.recompute for pass_choice in self.list_passes(layout)],
            **{name: sorted(DECISIONS[name].values) for name in ("sequence_parallel", *_PASS_NAMES)},
            **{
                name: dict.fromkeys(getattr(state, name) for state in self.list_states(layout)) for name in _STATE_NAMES
            },
        }.items():
            old_value = getattr(layout, name)
            yield from (replace(layout, **{name: value}) for value in values if value != old_value)

    def find_placement(self, devices: int) -> tuple[int, ...]:
        """Return the placement on the first ``devices`` free devices; empty for all of them."""
        return () if devices == len(self.free_devices) else tuple(self.free_devices[:devices])

    def express_layout(self, layout: Layout) -> Layout:
        """Return a layout with its stages and placement as the space writes them, where the space has them."""
        family = replace(find_family(layout), placement=self._express_placement(layout))
        layout = replace(layout, placement=family.placement)
        if not isinstance(layout.stages, tuple) or not self.has_family(family):
            return layout
        for name, chunks, stages in self.list_schedules(family):
            count = layout.pipeline * chunks
            if (name, chunks) == (layout.schedule, layout.chunks) and self._count_layers(
                count, stages
            ) == layout.stages:
                return replace(layout, stages=stages)
        return layout

    def _express_placement(self, layout: Layout) -> tuple[int, ...]:
        return () if layout.placement == tuple(self.free_devices) else layout.placement

    def has_group(self, layout: Layout) -> bool:
        """Return whether the layout's family, one of the space, has the layout's group."""
        family, schedule_choice = find_family(layout), ScheduleChoice(layout.schedule, layout.chunks, layout.stages)
        has_values = all(getattr(layout, name) in self._list_values_beside(family, name) for name in _GROUP_NAMES)
        return has_values and schedule_choice in self.list_schedules(family)

    def find_group(self, layout: Layout) -> Group:
        """Return the group of a layout in the space."""
        schedule_choice = ScheduleChoice(layout.schedule, layout.chunks, layout.stages)
        return self._build_group(
            find_family(layout), schedule_choice, {name: getattr(layout, name) for name in _GROUP_NAMES}
        )

    def filter_group(self, group: Group) -> Group:
        """Return the group with only the members that the space accepts."""
        return group if self._answers is None else self._answers.filter_group(group)

    def _build_group(self, family: Layout, schedule_choice: ScheduleChoice, shared_values: Mapping[str, Any]) -> Group:
        name, chunks, stages = schedule_choice
        layout = replace(family, schedule=name, chunks=chunks, stages=stages, **shared_values)
        passes, states = self.list_passes(layout), self.list_states(layout)
        return Group(layout, passes, states, self._find_mask(passes, states))

    def has_family(self, family: Layout) -> bool:
        """Return whether the space has a family."""
        degree_family = replace(family, microbatch=1)
        return (
            family.microbatch in self.list_microbatches(family.data, family.tensor_rows)
            and degree_family in self._degree_families
        )

    @cached_property
    def _degree_families(self) -> frozenset[Layout]:
        return frozenset(replace(family, microbatch=1) for family in self._list_degrees())

    def _list_degrees(self) -> Iterator[Layout]:
        """Yield the families without their microbatch, which is the least that a grid's rows divide."""
        for devices in self.devices:
            for degrees in self._divide_ranks(devices, {}):
                data = devices // prod(degrees.values())
                if allows_value(self.space.data, data) and self.batch % data == 0:
                    yield from self._list_family_variants(
                        Layout(**degrees, data=data, placement=self.find_placement(devices))
                    )

    def _divide_ranks(self, ranks: int, degrees: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield ``degrees`` with values of the other model degrees whose product divides ``ranks``."""
        name = next((name for name in _MODEL_DEGREES if name not in degrees), None)
        if name is None:
            yield degrees
            return
        for value in self._list_degree_values(name, ranks, degrees):
            if ranks % value == 0:
                yield from self._divide_ranks(ranks // value, degrees | {name: value})

    def _list_degree_values(self, name: str, ranks: int, degrees: Mapping[str, int]) -> Iterable[int]:
        """Return the values of a degree beside ``degrees``, in rising order."""
        limit = getattr(self.space, name)
        if name == "context":
            return self._list_contexts(ranks)
        if name in _DIVISOR_DEGREES:
            max_value = self.num_layers if name == "pipeline" else ranks
            return (value for value in divisors(ranks) if value <= max_value and allows_value(limit, value))
        values = tuple(sorted(set((1,) if limit is None else limit)))
        if name != "tensor_rows":
            return values
        return (rows for rows in values if ranks % rows == 0 and self._is_legal_tensor(degrees["tensor"], rows))

    def _list_family_variants(self, base: Layout) -> Iterator[Layout]:
        """Yield the layouts of the same degrees that differ in the other fields of a family."""
        attentions = self._list_attentions() if base.context > 1 else self._list_attentions()[:1]
        for attention, expert in product(attentions, self._list_experts(base.data)):
            for sequence_parallel in sorted(set(self.list_values("sequence_parallel"))):
                layout = replace(
                    base,
                    attention=attention,
                    expert=expert,
                    sequence_parallel=sequence_parallel,
                    microbatch=base.tensor_rows,
                )
                if self._is_legal_cut(layout):
                    for shards, order in product(self._list_shards(layout), self._list_orders(layout)):
                        yield replace(layout, zero_shards=shards, order=order)

    def _is_legal_tensor(self, tensor: int, rows: int) -> bool:
        """Return whether tensor parallelism of these degrees breaks none of its own rules."""
        return self._is_legal_cut(Layout(tensor=tensor, tensor_rows=rows, microbatch=rows))

    def _is_legal_cut(self, layout: Layout) -> bool:
        """Return whether no axis cuts a dim that it must not cut."""
        # rules about cuts do not depend on data and pipeline, so the probe has the least that they can be
        cuts = {name: getattr(layout, name) for name in CUT_DECISIONS}
        return self._is_legal_probe(Layout(data=layout.expert, microbatch=layout.tensor_rows, **cuts))

    @memoise
    def _is_legal_probe(self, probe: Layout) -> bool:
        """Return whether a layout breaks no rule about cuts."""
        return all(violation.field not in CUT_DECISIONS for violation in violations(self.problem, probe))

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The numbers of devices that may have ranks, the largest first."""
        num_free, cluster = len(self.free_devices), self.problem.cluster
        counts = {num_free}
        if self.space.devices is not None:
            counts = {devices for devices in self.space.devices if devices <= num_free}
        elif self.space.wide and num_free == cluster.num_devices:
            counts |= {node_end for node_end in cluster.first_devices.tolist() if node_end >= MIN_BUSY_SHARE * num_free}
        return tuple(sorted(counts, reverse=True))

    @property
    def degrees(self) -> tuple[str, ...]:
        """The names of the degrees that can be above 1."""
        is_always_one = {
            name: getattr(self.space, name) is None for name in RANK_DEGREES if name not in _DIVISOR_DEGREES
        }
        is_always_one["context"] = self.space.context is None and self.space.core
        return tuple(name for name in RANK_DEGREES if not is_always_one.get(name))

    def _list_contexts(self, ranks: int) -> Sequence[int]:
        if self.space.context is None and self.space.core:
            return (1,)
        limit = self.space.context or range(1, max(self.graph.sequence // MIN_CONTEXT_TOKENS, 1) + 1)
        return [context for context in divisors(ranks) if context in limit and self.graph.sequence % context == 0]

    def _list_attentions(self) -> tuple[Attention, ...]:
        return self.list_values("attention")

    def _list_experts(self, data: int) -> Sequence[int]:
        candidates = divisors(data) if self._has_experts else (1,)
        return [expert for expert in candidates if allows_value(self.space.expert, expert)]

    def _list_shards(self, layout: Layout) -> Sequence[int]:
        """Return over how many data ranks states may be shared; 0 for all.

        Usually all, or those of one node (hybrid sharding).
        """
        data, inner_ranks = layout.data, layout.model_ranks // layout.pipeline
        node_shards = self.problem.cluster.first_node.devices // inner_ranks
        usual_shards = (0, node_shards) if node_shards > 1 and layout.order == AXES else (0,)
        counts = self._select_extent(self.space.zero_shards, (0,), usual_shards, usual_shards)
        shard_counts = dict.fromkeys(0 if n == data else n for n in counts)
        has_zero = any(self._zero_stages)
        legal_shards = (n for n in shard_counts if n > 1 and has_zero and data % n == 0 and n % layout.expert == 0)
        return [0] * (0 in shard_counts) + list(legal_shards)

    def _list_orders(self, layout: Layout) -> list[tuple[str, ...]]:
        """Return the orders of axes; of several orders that place ranks alike the first."""
        long_axes = {name for name in AXES if name != REPLICA and getattr(layout, name) > 1}
        orders: dict[tuple[str, ...], tuple[str, ...]] = {}
        for order in self.space.order or (AXES,):
            if long_axes <= set(order):
                orders.setdefault(tuple(name for name in order if name in long_axes), order)
        return list(orders.values())

    def list_microbatches(self, data: int, rows: int) -> tuple[int, ...]:
        """Return the sizes of a microbatch on a data rank, in sequences; none where data does not divide the batch."""
        rank_batch, remainder = divmod(self.batch, data)
        if remainder:
            return ()
        sizes = (size for size in divisors(rank_batch) if size % rows == 0)
        if self.space.microbatch is not None:
            return tuple(size for size in sizes if size in self.space.microbatch)
        max_size = (
            rank_batch if self.space.core or self.space.wide else max(MAX_MICROBATCH_TOKENS // self.graph.sequence, 1)
        )
        return tuple(
            size
            for size in sizes
            if self.space.wide or (size <= max_size and (size & (size - 1) == 0 or size == rank_batch))
        )

    def list_schedules(self, family: Layout) -> tuple[ScheduleChoice, ...]:
        """Return the schedules of a family: first the ones with one chunk per rank, then the others."""
        properties = family.pipeline, self.batch // family.sequences, self._find_stage_key(family)
        return self._list_kind_schedules(FamilyKind(family, properties))

    @memoise
    def _list_kind_schedules(self, kind: FamilyKind) -> tuple[ScheduleChoice, ...]:
        family = kind.family
        pipeline, num_microbatches = family.pipeline, self.batch // family.sequences
        usual_names = USUAL_SCHEDULES + EXPERT_SCHEDULES * self._has_experts
        names = self._select_extent(self.space.schedule, CORE_SCHEDULES, usual_names, SYNCHRONOUS)
        ordered_names = [*(name for name in CORE_SCHEDULES if name in names), *dict.fromkeys(names)]
        rules = [SCHEDULES[name] for name in dict.fromkeys(ordered_names)]
        flat_pairs = [(rule, 1) for rule in rules if rule.chunks[0] == 1 and rule.name not in _LOOPED_SCHEDULES]
        looped_pairs = product(rules, self._list_chunks(pipeline) if pipeline > 1 else ())
        pairs = [*(pair for pair in flat_pairs if allows_value(self.space.chunks, 1)), *looped_pairs]
        legal_pairs = [pair for pair in pairs if self._is_legal_schedule(*pair, pipeline, num_microbatches)]
        return tuple(
            ScheduleChoice(rule.name, chunks, stages)
            for rule, chunks in (legal_pairs if pipeline > 1 else legal_pairs[:1])  # all are the same on one rank
            for stages in self._list_stages(family, rule, chunks)
        )

    def _is_legal_schedule(self, rule: ScheduleRule, chunks: int, pipeline: int, num_microbatches: int) -> bool:
        splits_frozen = self.problem.training.frozen and rule.splits_backward
        return not splits_frozen and rule.find_violation(pipeline, num_microbatches, chunks) is None

    def _list_chunks(self, pipeline: int) -> tuple[int, ...]:
        """Return the numbers of chunks above 1 that a rank may have.

        They divide the layers of the fullest rank, so that no rank has more layers than with one chunk.
        """
        max_chunks = count_possible_stages(self.graph) // pipeline
        # a limit may name counts that do not divide the layers: stages are then balanced
        if self.space.chunks is not None:
            return tuple(count for count in sorted(set(self.space.chunks)) if 2 <= count <= max_chunks)
        if self.space.core and self.num_layers % pipeline:
            return ()
        return tuple(count for count in divisors(ceil(self.num_layers / pipeline))[1:] if count <= max_chunks)

    def _find_stage_key(self, family: Layout) -> object:
        """Return what divisions depend on besides the number of stages: on a mixed cluster, the speed of positions."""
        return find_position_times(self.problem, family) if self.is_mixed else None

    def _list_stages(self, family: Layout, rule: ScheduleRule, chunks: int) -> list[str | tuple[int, ...]]:
        stages = family.pipeline * chunks
        usual_divisions: list[str | tuple[int, ...]] = ["balanced" if self.num_layers % stages else "even"]
        if not self.space.core and (shared_ends := self._find_shared_ends(stages, usual_divisions[0])):
            usual_divisions.append(shared_ends)
        usual_divisions += ["paced"] if self.is_mixed else []
        divisions: dict[tuple[int, ...], str | tuple[int, ...]] = {}
        for choice in self.space.stages or usual_divisions:
            positions = rule.list_stage_ranks(family.pipeline, chunks)
            division: str | tuple[int, ...] = (
                divide_by_speed(self.problem, family, positions) if choice == "paced" else choice
            )
            is_wrong = (
                len(division) != stages or sum(division) != self.num_layers if isinstance(division, tuple) else False
            )
            if not is_wrong and not (division == "even" and self.num_layers % stages):
                # of words that mean the same layers the first
                divisions.setdefault(self._count_layers(stages, division), division)
        return list(divisions.values())

    def _find_shared_ends(self, stages: int, usual_division: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers per stage with fewer at both ends, or none where a stage would have more than usual."""
        if stages < 2 or stages > self.num_layers + 2 or count_possible_stages(self.graph) < self.num_layers + 2:
            return ()
        counts = share_ends(self.num_layers, stages)
        return counts if max(counts) <= max(self._count_layers(stages, usual_division)) else ()

    def _count_layers(self, num_stages: int, division: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of layers of every stage."""
        return division if isinstance(division, tuple) else self._divide_layers(num_stages, division)

    @memoise
    def _divide_layers(self, num_stages: int, division: str) -> tuple[int, ...]:
        """Return the number of layers of every stage of a division by name."""
        layers = {name for name, block in self.graph.occurrences if block.layer}
        stages = partition_layers(self.graph, num_stages, division)
        return tuple(sum(name in layers for name in stage.blocks) for stage in stages)

    def list_values(self, name: str) -> tuple[Any, ...]:
        """Return the values of a decision: its limit, or without one the values of the space's extent."""
        item = DECISIONS[name]
        return tuple(dict.fromkeys(self._select_extent(getattr(self.space, name), item.core, item.usual, item.wide)))

    def _list_values_beside(self, layout: Layout, name: str) -> tuple[Any, ...]:
        """Return the legal values of a decision beside the others of a layout; the first where it changes nothing."""
        values = tuple(value for value in self.list_values(name) if self._is_legal(layout, name, value))
        return values if DECISIONS[name].changes(layout) else values[:1]

    def _is_legal(self, layout: Layout, name: str, value: Any) -> bool:
        """Return whether no rule blames a decision of a layout if it has a value; its default is always legal."""
        if value == DECISIONS[name].default:
            return True
        rules = violations(self.problem, replace(layout, **{name: value}))
        return all(violation.field != name for violation in rules)

    def _list_shared_values(self, family: Layout) -> Iterator[dict[str, Any]]:
        """Yield the values of the decisions that all members of a group share besides their schedule."""
        for values in product(*(self._list_values_beside(family, name) for name in _GROUP_NAMES)):
            yield dict(zip(_GROUP_NAMES, values, strict=True))

    def list_passes(self, layout: Layout) -> tuple[StepDecisions, ...]:
        """Return the rows of a group: how passes may run under the degrees and the schedule of a layout."""
        rule, counts = find_rule(layout.schedule), self._count_layers(layout.pipeline * layout.chunks, layout.stages)
        flag_values = tuple(
            tuple(value for value in self.list_values(name) if _is_legal_pass(layout, name, value))
            for name in _PASS_NAMES
        )
        runs_whole = not rule.splits_backward and rule.pairs is list_no_pairs and not rule.is_asynchronous
        return self._build_passes(counts, flag_values, runs_whole, layout.pipeline)

    @memoise
    def _build_passes(
        self, counts: tuple[int, ...], flag_values: tuple[tuple[Any, ...], ...], runs_whole: bool, pipeline: int
    ) -> tuple[StepDecisions, ...]:
        """Return how passes of stages of so many layers may run; ``runs_whole`` where activations may be offloaded."""
        activation_choices = self._list_activations(counts, pipeline) if runs_whole else ((),)
        rows = product(self._list_recomputes(max(counts)), *flag_values, activation_choices)
        return HashedTuple(
            StepDecisions(recompute=recompute, offload=Offloading(activations=activations), **_name_flags(flags))
            for recompute, *flags, activations in rows
        )

    def _list_recomputes(self, max_layers: int) -> tuple[StageRecompute, ...]:
        if self.space.recompute is not None:
            choices = (Recompute(choice) if isinstance(choice, str) else choice for choice in self.space.recompute)
            return tuple(dict.fromkeys(choice for choice in choices if (choice.layers or 0) <= max_layers))
        if self.space.core:
            return tuple(Recompute)
        recompute_choices = (Recompute.SELECTIVE, Recompute.FULL) if self.space.wide else (Recompute.FULL,)
        layer_counts = dict.fromkeys(ceil(max_layers * fraction) for fraction in RECOMPUTE_FRACTIONS)
        partial_choices = (
            FirstLayers(recompute_choice, n)
            for recompute_choice in recompute_choices
            for n in layer_counts
            if n < max_layers
        )
        return (*Recompute, *self._operator_choices, *partial_choices)

    def _list_operator_choices(self) -> tuple[SomeOperators, ...]:
        """Return the choices that recompute single operators: the activation functions, where layers have them."""
        names = {operator.name for block in self.graph.blocks if block.layer for operator in block.operators}
        return (SomeOperators((ACTIVATION_OPERATOR,)),) if ACTIVATION_OPERATOR in names else ()

    def _list_activations(self, counts: tuple[int, ...], pipeline: int) -> tuple[tuple[float, ...], ...]:
        """Return the fractions of activations that may be on hosts; of several that mean the same layers the first."""
        if not any(block.layer for block in self.graph.blocks):
            return ((),)
        choices: dict[tuple[int, ...], tuple[float, ...]] = {}
        for fractions in dict.fromkeys(offload.activations for offload in self._allowed_offloads):
            if len(fractions) in (0, 1, pipeline):
                rank_fractions = fractions * pipeline if len(fractions) == 1 else fractions
                num_offloaded = (
                    count_fraction(n, rank_fractions[index % pipeline] if rank_fractions else 0.0)
                    for index, n in enumerate(counts)
                )
                choices.setdefault(tuple(num_offloaded), fractions)
        return tuple(choices.values())

    def list_states(self, layout: Layout) -> tuple[StepDecisions, ...]:
        """Return the columns of a group: where states may be under the degrees and the schedule of a layout."""
        properties = layout.replicas > 1, layout.zero_shards > 0, layout.pipeline, layout.schedule
        return self._list_kind_states(FamilyKind(layout, properties))

    @memoise
    def _list_kind_states(self, kind: FamilyKind) -> tuple[StepDecisions, ...]:
        layout = kind.family
        values: dict[str, Sequence[Any]] = {name: self.list_values(name) for name in _STATE_NAMES}
        values["zero"] = [zero for zero in self._zero_stages if zero or not layout.zero_shards]
        if layout.replicas == 1:  # a single rank shares and sums nothing
            values = {name: choices[:1] for name, choices in values.items()}
        values["offload"] = list(dict.fromkeys(replace(item, activations=()) for item in self._allowed_offloads))
        states = (StepDecisions(**dict(zip(values, choice, strict=True))) for choice in product(*values.values()))
        return HashedTuple(state for state in states if self._is_legal_state(layout, state))

    @cached_property
    def _zero_stages(self) -> list[int]:
        return sorted(self.list_values("zero"))

    def _is_legal_state(self, layout: Layout, state: StepDecisions) -> bool:
        if next(need_violations(state), None) is not None:
            return False
        if not state.offload:
            return True
        member = replace(layout, **{name: getattr(state, name) for name in STATE_DECISIONS})
        return next(offload_violations(self.problem, member), None) is None

    @memoise
    def _find_mask(self, passes: tuple[StepDecisions, ...], states: tuple[StepDecisions, ...]) -> np.ndarray:
        """Return the mask of a group: the rows and columns whose offload together the space allows."""
        allowed_offloads = set(self._allowed_offloads)
        pairs = product({choice.offload.activations for choice in passes}, {choice.offload for choice in states})
        is_allowed = {pair: replace(pair[1], activations=pair[0]) in allowed_offloads for pair in pairs}
        rows = [[is_allowed[choice.offload.activations, state.offload] for state in states] for choice in passes]
        return np.array(rows, dtype=np.bool_).reshape(len(passes), len(states))

    def _list_offloadings(self) -> tuple[Offloading, ...]:
        if self.space.offload is not None:
            return tuple(dict.fromkeys(self.space.offload))
        if not self.space.wide:
            return (NO_OFFLOADING,)
        return list_offloadings()

    def _select_extent(
        self, limit: tuple[T, ...] | None, core: tuple[T, ...], usual: tuple[T, ...], wide: tuple[T, ...]
    ) -> tuple[T, ...]:
        """Return the limit, or without one the values of the space's extent."""
        if limit is not None:
            return limit
        return core if self.space.core else wide if self.space.wide else usual


def _name_flags(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_PASS_NAMES, values, strict=True))


_LOOPED_SCHEDULES = frozenset(name for name, rule in SCHEDULES.items() if rule.chunks == (1, None))
"""Schedules that with one chunk per rank are the same as another schedule."""


def find_family(layout: Layout) -> Layout:
    """Return the family of a layout: a layout with its degrees, ranks and microbatch, and defaults for the rest."""
    return Layout(**{name: getattr(layout, name) for name in _FAMILY_NAMES})


def _is_legal_pass(layout: Layout, name: str, value: Any) -> bool:
    """Return whether a decision about passes may have a value beside the other decisions of a layout."""
    return value == DECISIONS[name].default or next(pass_violations(replace(layout, **{name: value})), None) is None


def list_offloadings() -> tuple[Offloading, ...]:
    """Return the offloading that a space with offload tries: nothing, and a part or all of the optimizer states."""
    return (NO_OFFLOADING, *(Offloading(optimizer=(fraction,)) for fraction in OFFLOAD_FRACTIONS))


def allows_value(limit: Iterable[T] | None, value: T) -> bool:
    """Return whether a limit, ``None`` for none, has a value."""
    return limit is None or value in limit
