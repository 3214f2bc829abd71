"""The complete plan of a training step, and its document."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil, prod
from typing import Any

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.layout import STEP_DECISIONS, Decision, StepDecisions
from meshwise.strategies.plan.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PASS_AXES,
    PIPELINE,
    REPLICA,
    SEQUENCE_AXES,
    TENSOR,
    TENSOR_DEPTH,
    TENSOR_ROWS,
    Axis,
    Mesh,
    Microbatch,
)
from meshwise.strategies.plan.offloading import count_fraction
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.schedules.rule import Placement, ScheduleRule
from meshwise.strategies.schedules.schedule import Schedule, build_schedule, find_rule

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(StepDecisions):
    """A complete plan: only sizes are left to derive from the problem.

    A plan states how a step runs, in normal form where several layouts mean the same step
    (`meshwise.strategies.plan.completion.complete`). The other decisions of a layout become the mesh, the stages and
    the shardings for one model and machine. A plan has no layout as a field: a plan document is read without the
    model that says which blocks are layers, and no layout means a plan that cuts single operators.

    Parameters
    ----------
    mesh
        The ranks along every axis.
    stages
        The blocks of every stage; the schedule says at which pipeline position a stage is (`positions`).
    shardings
        The axes that cut the dims of operators: ``layers.up`` names the operator in all layers, ``layers.3.up`` in
        one.
    num_microbatches
        Microbatches of a step.
    """

    mesh: Mesh
    stages: tuple[Stage, ...]
    shardings: tuple[OperatorSharding, ...]
    num_microbatches: int

    __repr__ = brief_repr("describe")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The distinct sizes of microbatches on data ranks, smallest first."""
        return (self.microbatch,) if isinstance(self.microbatch, int) else tuple(sorted(set(self.microbatch)))

    @property
    def sequences(self) -> int:
        """Sequences of a microbatch on every data rank; ``ValueError`` where data ranks differ."""
        if isinstance(self.microbatch, int):
            return self.microbatch
        raise ValueError(f"a plan as one rank sees it has one size of microbatches, met {list(self.microbatch)}")

    @property
    def data(self) -> int:
        """Data-parallel degree: the ranks that divide the batch, including expert ranks and replicas."""
        return self.replica * self.mesh.size(DATA) * self.mesh.size(EXPERT)

    @property
    def replica(self) -> int:
        """The number of groups that share states; every group holds equal states."""
        return self.mesh.size(REPLICA)

    @property
    def expert(self) -> int:
        """Expert-parallel degree; 1 where ranks share tables along its axis."""
        return 1 if self.embeddings else self.mesh.size(EXPERT)

    @property
    def context(self) -> int:
        """Context-parallel degree."""
        return self.mesh.size(CONTEXT)

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO shares states of parameters outside experts."""
        return self.mesh.group_size(DATA)

    @property
    def expert_shards(self) -> int:
        """The number of ranks over which ZeRO shares states of an expert's parameters."""
        return self.mesh.group_size(EXPERT_DATA)

    @property
    def replicas(self) -> int:
        """The number of ranks that sum gradients of the same parameters outside experts."""
        return self.replica * self.shards

    @property
    def offloads_parameters(self) -> bool:
        """Whether some parameters are in host memory."""
        return any(self.offload.parameters)

    @property
    def tensor(self) -> int:
        """Tensor-parallel degree; the columns of a tensor-parallel grid."""
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
        """The number of ranks along all axes that may cut any dim of an operator."""
        return self.tensor_depth * self.tensor_rows * self.tensor

    @property
    def pass_ranks(self) -> int:
        """The number of ranks that divide the operators of a pass between them."""
        return prod(self.mesh.size(name) for name in PASS_AXES)

    @property
    def slices_boundaries(self) -> bool:
        """Whether a stage boundary crosses in one slice a tensor rank."""
        return self.scatter_gather and self.tensor == self.operator_ranks > 1 and not self.sequence_parallel

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel degree."""
        return self.mesh.size(PIPELINE)

    @property
    def rule(self) -> ScheduleRule:
        """The rule of the schedule."""
        return find_rule(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes make input gradients and weight gradients apart."""
        return self.rule.splits_backward

    @property
    def asynchronous(self) -> bool:
        """Whether steps follow each other without a flush, on older versions of the weights."""
        return self.rule.is_asynchronous

    @property
    def updates(self) -> int:
        """Updates of the weights in a step."""
        return self.num_microbatches if self.rule.updates_every_microbatch else 1

    def count_weight_versions(self, position: int) -> int:
        """Return how many versions of its weights a rank at a pipeline position keeps."""
        return self.rule.weight_versions(position, self.pipeline)

    @property
    def depth(self) -> int:
        """Without a flush, one more than the number of steps that fill the pipeline; 0 with a flush."""
        return 1 + ceil(self.pipeline / self.num_microbatches) if self.asynchronous else 0

    @property
    def ordered_microbatches(self) -> int:
        """Microbatches of as many whole steps as show how a step runs: `depth` steps, at least one."""
        return self.num_microbatches * max(self.depth, 1)

    @property
    def overlaps_passes(self) -> bool:
        """Whether the schedule runs passes in pairs, each computing during the communication of the other."""
        return self.rule.overlaps_passes

    @property
    def positions(self) -> tuple[int, ...]:
        """The pipeline position of every stage."""
        return self.rule.list_stage_ranks(self.pipeline, self.chunks)

    @property
    def looped(self) -> bool:
        """Whether the last pipeline rank sends to the first."""
        return self.chunks > 1 and self.rule.placement is Placement.LOOP

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The pairs of pipeline positions, sender first, that exchange boundaries without being neighbours."""
        if self.rule.placement is not Placement.WRITTEN:
            return ()
        forward_hops = [pair for pair in pairwise(self.positions) if abs(pair[0] - pair[1]) > 1]
        # gradients cross every boundary the other way
        return tuple(dict.fromkeys([*forward_hops, *((receiver, sender) for sender, receiver in forward_hops)]))

    def stages_at(self, position: int) -> tuple[int, ...]:
        """Return the stages at a pipeline position, first chunk first."""
        return tuple(stage for stage, stage_position in enumerate(self.positions) if stage_position == position)

    @property
    def actions(self) -> Schedule:
        """The order of actions on every pipeline rank."""
        return build_schedule(self.schedule, self.pipeline, self.num_microbatches, self.chunks)

    def with_microbatch(self, size: int) -> "Plan":
        """Return the plan in which the microbatches of all data ranks have ``size`` sequences."""
        return self if self.microbatch == size else replace(self, microbatch=size)

    def describe(self) -> str:
        """Return the plan in one line.

        For example ``data 16 x tensor 8 x pipeline 8, interleaved (2 chunks), 48 microbatches of 2, ZeRO-1``.
        """
        grid_text = f"{self.tensor_rows} by " if self.tensor_rows > 1 else ""
        grid_text = f"{self.tensor_depth} by {grid_text}" if self.tensor_depth > 1 else grid_text
        degrees = f"data {self.data} x tensor {grid_text}{self.tensor} x pipeline {self.pipeline}"
        for name in SEQUENCE_AXES:
            if self.mesh.size(name) > 1:
                degrees += f" x {name} {self.mesh.size(name)}"
                degrees += f" ({self.attention})" if name == CONTEXT and self.attention else ""
        parts = [degrees]
        parts += [f"experts over {self.expert}"] if self.expert > 1 else []
        if self.pipeline > 1:
            parts.append(self.rule.name + (f" ({self.chunks} chunks)" if self.chunks > 1 else ""))
        microbatches = "microbatch" if self.num_microbatches == 1 else "microbatches"
        parts.append(f"{self.num_microbatches} {microbatches} of {_describe_sizes(self.microbatch)}")
        parts += [f"ZeRO-{self.zero}" + (f" over {self.shards}" if self.replica > 1 else "")] if self.zero else []
        parts += [words for item in STEP_DECISIONS if (words := self._describe_decision(item))]
        return ", ".join(parts)

    def _describe_decision(self, item: Decision) -> str:
        """Return the words of a decision; empty where it has its default, changes nothing or has no words."""
        value = getattr(self, item.name)
        if item.words is None or value == item.default or not item.changes(self):
            return ""
        return item.words(value)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data with the version of the format."""
        keys = {item.name: item.key for item in STEP_DECISIONS}
        # these have documents of their own, shorter than the nested fields of asdict
        values = asdict(self) | {name: getattr(self, name).document for name in ("recompute", "offload", "embeddings")}
        return {"version": PLAN_VERSION} | {keys.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Plan":
        """Return the plan of a document; ``ValueError`` where the document states no plan of this version."""
        if document.get("version") != PLAN_VERSION:
            raise ValueError(f"version: a plan document of this program has version {PLAN_VERSION}")
        try:
            return cls(
                mesh=Mesh(tuple(Axis(name, int(size)) for name, size in document["mesh"]["axes"])),
                stages=tuple(Stage(tuple(stage["blocks"])) for stage in document["stages"]),
                shardings=tuple(_parse_sharding(item) for item in document["shardings"]),
                num_microbatches=document["num_microbatches"],
                **{item.name: item.read(document) for item in STEP_DECISIONS},
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a plan document states every field of a plan; {error} is missing or of a wrong kind"
            ) from error


@dataclass(frozen=True, slots=True)
class StateKey:
    """What a plan says of the states of its parameters and of the sums of their gradients, by the names of the plan.

    Functions that ask for a plan or this need no more of a plan.
    """

    zero: int
    shards: int
    expert_shards: int
    replicas: int
    operator_ranks: int
    expert: int
    gradient_reduction: str
    overlap_gradients: bool
    offloads_parameters: bool
    splits_backward: bool
    asynchronous: bool


SharedStates = Plan | StateKey
"""A plan, or the part of one that says how states are shared."""


def count_host_blocks(plan: Plan, stage: int) -> int:
    """Return for how many blocks of a stage, the first ones, the parameters are on the host."""
    return count_fraction(len(plan.stages[stage].blocks), plan.offload.fraction_at("parameters", plan.positions[stage]))


def _describe_sizes(sizes: Microbatch) -> str:
    """Return microbatch sizes in words.

    >>> _describe_sizes((3, 3, 1))
    '3 on 2 data ranks and 1 on 1'
    """
    if isinstance(sizes, int):
        return str(sizes)
    (first_size, count), *other_sizes = Counter(sizes).items()
    parts = [
        f"{first_size} on {count} data rank{'s' if count > 1 else ''}",
        *(f"{size} on {count}" for size, count in other_sizes),
    ]
    return " and ".join(parts)


def _parse_sharding(document: dict[str, Any]) -> OperatorSharding:
    kept_cuts = tuple((name, _parse_cuts(cuts)) for name, cuts in document.get("kept", ()))
    return OperatorSharding(document["operator"], _parse_cuts(document["cuts"]), kept_cuts)


def _parse_cuts(document: list[Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((dim, tuple(axes)) for dim, axes in document)
