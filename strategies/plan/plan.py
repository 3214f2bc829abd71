"""Every decision about how a training step is laid out, complete and as plain data."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

from meshwise.simulator.brief import brief
from meshwise.strategies.plan.layout import STEP_DECISIONS, Decision, StepDecisions
from meshwise.strategies.plan.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    REPLICA,
    TENSOR,
    TENSOR_DEPTH,
    TENSOR_ROWS,
    Axis,
    Mesh,
    Microbatch,
)
from meshwise.strategies.plan.offloading import fraction_of
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.schedules.rule import Placement, ScheduleRule, no_pairs
from meshwise.strategies.schedules.schedule import Schedule, rule_of, schedule

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(StepDecisions):
    """A complete plan: nothing is left to derive from the problem but sizes.

    It states the decisions of its layout that are how a step runs, in one way where a layout has several
    (`meshwise.strategies.plan.completion.complete`), and what the others mean for one model and machine: the mesh,
    the stages and the shardings. The layout is not a field of it, for a plan document is read without the model
    that says which blocks are layers, and a plan that cuts single operators is that of no layout.

    Parameters
    ----------
    mesh
        The ranks along every axis.
    stages
        Blocks of every stage; where it is the schedule says (`positions`).
    shardings
        Which dims of which operators which axes cut: of ``layers.up`` in all layers, of ``layers.3.up`` in one.
    num_microbatches
        Microbatches of a step.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    shardings: tuple[OperatorSharding, ...]
    num_microbatches: int

    __repr__ = brief("describe")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes of microbatches that data ranks run, smallest first."""
        return (self.microbatch,) if isinstance(self.microbatch, int) else tuple(sorted(set(self.microbatch)))

    @property
    def sequences(self) -> int:
        """Sequences of a microbatch on every data rank; ``ValueError`` where they differ."""
        if isinstance(self.microbatch, int):
            return self.microbatch
        raise ValueError(f"a plan as one rank sees it has one size of microbatches, met {list(self.microbatch)}")

    @property
    def data(self) -> int:
        """Data-parallel degree: ranks along which the batch is divided, those of expert groups too."""
        return self.replica * self.mesh.size(DATA) * self.mesh.size(EXPERT)

    @property
    def replica(self) -> int:
        """Groups of ranks that share states: all groups keep the same."""
        return self.mesh.size(REPLICA)

    @property
    def expert(self) -> int:
        """Expert-parallel degree."""
        return self.mesh.size(EXPERT)

    @property
    def context(self) -> int:
        """Context-parallel degree."""
        return self.mesh.size(CONTEXT)

    @property
    def shards(self) -> int:
        """Ranks that ZeRO shares the states of what is no expert over."""
        return self.mesh.group_size(DATA)

    @property
    def expert_shards(self) -> int:
        """Ranks that ZeRO shares the states of an expert over."""
        return self.mesh.group_size(EXPERT_DATA)

    @property
    def replicas(self) -> int:
        """Ranks whose gradients of the same part of what is no expert are summed."""
        return self.replica * self.shards

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree; of a grid, its columns."""
        return self.mesh.size(TENSOR)

    @property
    def tensor_rows(self) -> int:
        """Rows of the tensor-parallel grid; 1 where tensor parallelism has one axis."""
        return self.mesh.size(TENSOR_ROWS)

    @property
    def tensor_depth(self) -> int:
        """Ranks along the third axis of operator parallelism."""
        return self.mesh.size(TENSOR_DEPTH)

    @property
    def operator_ranks(self) -> int:
        """Ranks along all axes that may cut any dim of an operator."""
        return self.tensor_depth * self.tensor_rows * self.tensor

    @property
    def slices_boundaries(self) -> bool:
        """Whether a stage boundary crosses in one slice a tensor rank."""
        return self.scatter_gather and self.tensor == self.operator_ranks > 1 and not self.sequence_parallel

    def boundary_part(self, size: float) -> float:
        """Return the bytes that one tensor rank sends of a boundary of ``size`` bytes.

        With ``scatter_gather`` each sends its slice, and the slices are gathered again in the receiving
        node (Narayanan et al., SC 2021, section 4.1).
        """
        return size / self.tensor if self.slices_boundaries else float(size)

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel degree."""
        return self.mesh.size(PIPELINE)

    @property
    def rule(self) -> ScheduleRule:
        """What the schedule is."""
        return rule_of(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are apart from those of inputs, in places at least."""
        return self.rule.splits_backward

    @property
    def asynchronous(self) -> bool:
        """Whether steps run in a row without a flush, on older versions of the weights."""
        return self.rule.asynchronous

    @property
    def updates(self) -> int:
        """Updates of the weights in a step."""
        return self.num_microbatches if self.rule.updates_every_microbatch else 1

    def weight_versions(self, position: int) -> int:
        """Return how many versions of its weights a rank of a pipeline position keeps."""
        return self.rule.weight_versions(position, self.pipeline)

    @property
    def depth(self) -> int:
        """Steps that are under way at once, and one: without a flush so many that the pipeline is full; else 0."""
        return 1 + ceil(self.pipeline / self.num_microbatches) if self.asynchronous else 0

    @property
    def ordered_microbatches(self) -> int:
        """The fewest microbatches of whole steps whose order shows how a step runs."""
        return self.num_microbatches * max(self.depth, 1)

    @property
    def overlaps_passes(self) -> bool:
        """Whether the schedule runs passes in pairs, one beneath the communication of the other."""
        return self.rule.pairs is not no_pairs

    @property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.rule.stage_ranks(self.pipeline, self.chunks)

    @property
    def looped(self) -> bool:
        """Whether the last pipeline rank sends to the first."""
        return self.chunks > 1 and self.rule.placement is Placement.LOOP

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The pairs of pipeline positions, sender first, that exchange boundaries though they are no neighbours."""
        if self.rule.placement is not Placement.WRITTEN:
            return ()
        ahead = [pair for pair in pairwise(self.positions) if abs(pair[0] - pair[1]) > 1]
        return tuple(dict.fromkeys([*ahead, *((after, before) for before, after in ahead)]))

    def stages_at(self, position: int) -> tuple[int, ...]:
        """Return the stages at a pipeline position, first chunk first."""
        return tuple(stage for stage, at in enumerate(self.positions) if at == position)

    @property
    def actions(self) -> Schedule:
        """The order of actions on every pipeline rank."""
        return schedule(self.schedule, self.pipeline, self.num_microbatches, self.chunks)

    def even(self, size: int) -> "Plan":
        """Return the plan as data ranks see it whose microbatches have ``size`` sequences: as if all had."""
        return self if self.microbatch == size else replace(self, microbatch=size)

    def describe(self) -> str:
        """Return the plan in one line.

        As in ``data 16 x tensor 8 x pipeline 8, interleaved (2 chunks), microbatch 1, ZeRO-1``.
        """
        rows = f"{self.tensor_rows} by " if self.tensor_rows > 1 else ""
        rows = f"{self.tensor_depth} by {rows}" if self.tensor_depth > 1 else rows
        degrees = f"data {self.data} x tensor {rows}{self.tensor} x pipeline {self.pipeline}"
        parts = [degrees + (f" x context {self.context} ({self.attention})" if self.attention else "")]
        parts += [f"experts over {self.expert}"] if self.expert > 1 else []
        if self.pipeline > 1:
            parts.append(self.rule.name + (f" ({self.chunks} chunks)" if self.chunks > 1 else ""))
        microbatches = "microbatch" if self.num_microbatches == 1 else "microbatches"
        parts.append(f"{self.num_microbatches} {microbatches} of {_sizes(self.microbatch)}")
        parts += [f"ZeRO-{self.zero}" + (f" over {self.shards}" if self.replica > 1 else "")] if self.zero else []
        parts += [words for item in STEP_DECISIONS if (words := self._describe_decision(item))]
        return ", ".join(parts)

    def _describe_decision(self, item: Decision) -> str:
        """Return a decision that has not its default in words; empty where it changes nothing or has none."""
        value = getattr(self, item.name)
        if item.words is None or value == item.default or not item.changes(self):
            return ""
        return item.words(value)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data with its version."""
        keys = {item.name: item.key for item in STEP_DECISIONS}
        values = asdict(self) | {name: getattr(self, name).document for name in ("recompute", "offload")}
        return {"version": PLAN_VERSION} | {keys.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Plan":
        """Return the plan that ``document`` states; ``ValueError`` where it is no plan."""
        if document.get("version") != PLAN_VERSION:
            raise ValueError(f"version: a plan document of this program has version {PLAN_VERSION}")
        try:
            return cls(
                mesh=Mesh(tuple(Axis(name, int(size)) for name, size in document["mesh"]["axes"])),
                stages=tuple(Stage(tuple(stage["blocks"])) for stage in document["stages"]),
                shardings=tuple(_sharding(item) for item in document["shardings"]),
                num_microbatches=document["num_microbatches"],
                **{item.name: item.read(document) for item in STEP_DECISIONS},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a plan document states every field of a plan; {error} is missing or of a wrong kind"
            ) from error


def blocks_on_host(plan: Plan, stage: int) -> int:
    """Return of how many blocks of a stage, the first ones, the parameters are on the host."""
    return fraction_of(len(plan.stages[stage].blocks), plan.offload.at("parameters", plan.positions[stage]))


def _sizes(sizes: Microbatch) -> str:
    """Return the sizes of microbatches in words.

    >>> _sizes((3, 3, 1))
    '3 on 2 data ranks and 1 on 1'
    """
    if isinstance(sizes, int):
        return str(sizes)
    (first, count), *rest = Counter(sizes).items()
    found = [f"{first} on {count} data rank{'s' if count > 1 else ''}", *(f"{size} on {count}" for size, count in rest)]
    return " and ".join(found)


def _sharding(document: dict[str, Any]) -> OperatorSharding:
    kept = tuple((name, _cuts(cuts)) for name, cuts in document.get("kept", ()))
    return OperatorSharding(document["operator"], _cuts(document["cuts"]), kept)


def _cuts(document: list[Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((dim, tuple(axes)) for dim, axes in document)
