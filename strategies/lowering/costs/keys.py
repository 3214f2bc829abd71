"""Keys: what the costs of a plan depend on, as frozen values, each kind made in one place.

Functions that work out costs once for all plans that share them take a key in place of a plan: they cannot see what the
key lacks. Equal keys of one problem are one object, compared and hashed by identity. A new decision of a plan goes into
the key of what depends on it here, and nowhere else.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from meshwise.simulator.memo import memoise, remember_latest
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.lowering.costs.kinds import (
    BlockKinds,
    Runs,
    StageKinds,
    classify_blocks,
    classify_stages,
    list_stage_runs,
)
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.plan.mesh import (
    DATA,
    EXPERT_DATA,
    OPERATOR_AXES,
    PASS_AXES,
    REPLICA,
    TENSOR,
    TENSOR_ROWS,
    Axis,
    Mesh,
    Microbatch,
)
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan, StateKey
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import PerStage, Recomputation, StageRecompute, find_stage_recompute
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.tables.embeddings import NO_EMBEDDINGS, Embeddings
from meshwise.strategies.tables.table import without_tables


@dataclass(frozen=True, eq=False, slots=True)
class CutKey:
    """How a plan cuts operators and parameters: on what the layouts of its blocks depend.

    Parameters
    ----------
    mesh
        The axes along which ranks divide the operators of a pass, and no others.
    kinds
        The kinds of the blocks as ``shardings`` cut them, without the tables that data ranks share.
    embeddings
        Where these tables are.
    """

    mesh: Mesh
    shardings: tuple[OperatorSharding, ...]
    kinds: BlockKinds
    embeddings: Embeddings = NO_EMBEDDINGS


@dataclass(frozen=True, eq=False, slots=True)
class RunKey:
    """How the passes of a plan's blocks run, recomputation left out: on what the segments of its blocks depend.

    Parameters
    ----------
    microbatch
        The sequences of a microbatch on data ranks.
    leaves_whole
        Whether gradients are reduced when a block's backward has made all of them, and so count elsewhere.
    hides_gradients
        Whether sums of input gradients over tensor ranks overlap the products for gradients of weights.
    adds_gradients
        Whether kernels of their own add gradients to those of a step's other microbatches.
    allocates_gradients
        Whether gradients have memory only from the first backward of a step on.
    """

    cut: CutKey
    microbatch: Microbatch
    splits_backward: bool
    leaves_whole: bool
    overlap_tensor: bool
    hides_gradients: bool
    adds_gradients: bool
    allocates_gradients: bool

    @property
    def flags(self) -> tuple[bool, ...]:
        """All but the cuts and the sizes of microbatches."""
        return (
            self.splits_backward,
            self.leaves_whole,
            self.overlap_tensor,
            self.hides_gradients,
            self.adds_gradients,
            self.allocates_gradients,
        )

    @property
    def least_sequences(self) -> int:
        """The smallest size of microbatches on data ranks."""
        return self.microbatch if isinstance(self.microbatch, int) else min(self.microbatch)

    @property
    def sequences(self) -> int:
        """Sequences of a microbatch on every data rank; ``ValueError`` where data ranks differ."""
        if isinstance(self.microbatch, int):
            return self.microbatch
        raise ValueError(f"a plan as one rank sees it has one size of microbatches, met {list(self.microbatch)}")


@dataclass(frozen=True, eq=False, slots=True)
class PassKey:
    """How the passes of a plan run, with what they recompute."""

    run: RunKey
    recompute: Recomputation


@dataclass(frozen=True, eq=False, slots=True)
class StageKey:
    """Which blocks each pipeline position has, cut in which way.

    Parameters
    ----------
    kinds
        The kinds of the stages: equal ones have the same blocks, and the same recomputation where stages differ in it.
    positions
        The pipeline position of every stage.
    by_position
        The stages at every pipeline position, first chunk first.
    """

    cut: CutKey
    kinds: StageKinds
    stages: tuple[Stage, ...]
    positions: tuple[int, ...]
    by_position: tuple[tuple[int, ...], ...]

    @property
    def num_positions(self) -> int:
        """The number of pipeline positions."""
        return len(self.by_position)

    def find_recompute(self, recompute: Recomputation, kind: int) -> StageRecompute:
        """Return what is recomputed of the stages of a kind."""
        return find_stage_recompute(recompute, self.kinds.first_stages[kind])

    def find_runs(self, stage: int) -> Runs:
        """Return the blocks of a stage in order, each with how often it occurs in a row."""
        return self.kinds.kinds[self.kinds.kind_of[stage]]


class PlanKeys(NamedTuple):
    """The keys of one plan."""

    passes: PassKey
    stages: StageKey
    states: StateKey

    @property
    def cut(self) -> CutKey:
        """How the plan cuts operators."""
        return self.stages.cut

    @property
    def run(self) -> RunKey:
        """How the plan's passes run, recomputation left out."""
        return self.passes.run


class KeyMaker:
    """Makes the keys of the plans of one problem; equal keys are one object."""

    def __init__(self, problem: Problem) -> None:
        self.graph: OperatorGraph = problem.graph
        self.training = problem.training

    @remember_latest
    def find_keys(self, plan: Plan) -> PlanKeys:
        """Return the keys of a plan."""
        axes, rule = plan.mesh.axes, plan.rule
        cut = self._find_cut(axes, plan.shardings, plan.embeddings)
        states = self._find_states(
            axes,
            plan.zero,
            plan.expert,
            plan.gradient_reduction,
            plan.overlap_gradients,
            plan.offloads_parameters,
            rule.splits_backward,
            rule.is_asynchronous,
        )
        stage_choices = plan.recompute if isinstance(plan.recompute, PerStage) else None
        stages = self._find_stages(cut, plan.stages, plan.positions, stage_choices)
        run = self._find_run(cut, states, plan.microbatch, plan.overlap_tensor)
        return PlanKeys(self._find_passes(run, plan.recompute), stages, states)

    @memoise
    def _find_states(
        self, axes: tuple[Axis, ...], zero: int, expert: int, gradient_reduction: str, *flags: bool
    ) -> StateKey:
        mesh = Mesh(axes)
        shards = mesh.group_size(DATA)
        operator_ranks = prod(mesh.size(name) for name in OPERATOR_AXES)
        degrees = shards, mesh.group_size(EXPERT_DATA), mesh.size(REPLICA) * shards, operator_ranks, expert
        return StateKey(zero, *degrees, gradient_reduction, *flags)

    @memoise
    def _find_run(self, cut: CutKey, states: StateKey, microbatch: Microbatch, overlap_tensor: bool) -> RunKey:
        conventions, mesh = self.training.conventions, cut.mesh
        leaves_whole = states.zero >= 2 and states.shards > 1
        is_hideable = mesh.size(TENSOR) > 1 and mesh.size(TENSOR_ROWS) == 1 and not states.splits_backward
        return self._build_run(
            cut,
            microbatch,
            states.splits_backward,
            leaves_whole,
            overlap_tensor,
            is_hideable and conventions.hides_input_gradients,
            conventions.adds_gradients and not self.training.frozen and not leaves_whole,
            allocates_gradients(self.training, states),
        )

    @memoise
    def with_microbatch(self, run: RunKey, microbatch: Microbatch) -> RunKey:
        """Return how the same passes run with microbatches of another size."""
        return self._build_run(run.cut, microbatch, *run.flags)

    @memoise
    def _find_cut(
        self, axes: tuple[Axis, ...], shardings: tuple[OperatorSharding, ...], embeddings: Embeddings
    ) -> CutKey:
        """Return how the operators of blocks are cut on a mesh."""
        sizes = dict(axes)
        pass_axes = (Axis(name, sizes.get(name, 1)) for name in PASS_AXES)
        return self._build_cut(tuple(axis for axis in pass_axes if axis.size > 1), shardings, embeddings)

    @memoise
    def _build_cut(
        self, axes: tuple[Axis, ...], shardings: tuple[OperatorSharding, ...], embeddings: Embeddings
    ) -> CutKey:
        tables = tuple(name for name, _ in embeddings.tables)
        return CutKey(Mesh(axes), shardings, self._classify_blocks(shardings, tables), embeddings)

    @memoise
    def _classify_blocks(self, shardings: tuple[OperatorSharding, ...], tables: tuple[str, ...]) -> BlockKinds:
        return classify_blocks(without_tables(self.graph, tables), shardings)

    @memoise
    def _build_run(self, cut: CutKey, microbatch: Microbatch, *flags: bool) -> RunKey:
        return RunKey(cut, microbatch, *flags)

    @memoise
    def _find_passes(self, run: RunKey, recompute: Recomputation) -> PassKey:
        return PassKey(run, recompute)

    @memoise
    def _find_stages(
        self, cut: CutKey, stages: tuple[Stage, ...], positions: tuple[int, ...], choices: PerStage | None
    ) -> StageKey:
        runs = list_stage_runs(stages, cut.kinds.kind_names)
        by_position: list[list[int]] = [[] for _ in range(max(positions) + 1)]
        for stage, position in enumerate(positions):
            by_position[position].append(stage)
        rows = tuple(map(tuple, by_position))
        return StageKey(cut, self._classify_stages(runs, choices), stages, positions, rows)

    @memoise
    def _classify_stages(self, runs: tuple[Runs, ...], choices: PerStage | None) -> StageKinds:
        """Return the kinds of stages; equal stages share one value."""
        return classify_stages(runs, choices)
