"""Costs of one block on one rank: its segments, its memory and its parameters."""

from typing import NamedTuple

from meshwise.simulator.operator_graph import BATCH, Block
from meshwise.strategies.lowering.costs.kinds import Kinds, Runs, kinds
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import BlockBuffers, block_buffers
from meshwise.strategies.lowering.costs.operator import (
    BlockLayout,
    BlockSteps,
    BlockTraining,
    block_steps,
    exchanged_axes,
)
from meshwise.strategies.lowering.costs.optimizer import begin_in_step
from meshwise.strategies.lowering.costs.recompute import BlockMemory, Moments, moments, with_recompute
from meshwise.strategies.lowering.costs.rewrites import (
    Split,
    split,
    undeferred_elements,
    with_accumulation,
    with_overlap,
)
from meshwise.strategies.lowering.costs.steps import Step, chain_ticks
from meshwise.strategies.lowering.costs.weights import (
    Unit,
    factored_elements,
    quantised_elements,
    replicated_elements,
    unit,
)
from meshwise.strategies.lowering.rank_classes.machine import Rank
from meshwise.strategies.lowering.rank_classes.numbers import Numbers
from meshwise.strategies.plan.mesh import OPERATOR_AXES, Axis, Microbatch
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import OfLayer, OfStage, Recomputation, Recompute, of_stage
from meshwise.strategies.plan.sharding import OperatorSharding
from meshwise.strategies.schedules.schedule import ActionKind


class BlockCost(NamedTuple):
    """One block on one rank: its segments, their idle ticks, its memory and its parameters.

    Parameters
    ----------
    parameters, expert_parameters
        Elements of parameters on the rank, and those among them that only one expert uses.
    split_passes
        The backward in two, where the schedule splits it.
    offloaded_bytes
        Bytes of one microbatch that are in host memory from forward to backward.
    undeferred_parameters
        Elements whose gradients are made with those of inputs where backward is split.
    unit
        What data ranks share at once of the parameters.
    first_memory
        Memory in the pass that makes the block's first gradients, where these have no memory before.
    """

    steps: BlockSteps
    forward_ticks: int
    backward_ticks: int
    memory: BlockMemory
    parameters: int
    experts: int
    parameter_tensors: int
    split: Split | None = None
    away: int = 0
    undeferred: int = 0
    unit: Unit = Unit()
    first: BlockMemory | None = None

    def offloaded(self) -> "BlockCost":
        """Return the cost of the block where all that forward keeps goes to the host; buffers are counted elsewhere."""
        first = self.first and self.first._replace(kept=0)
        return self._replace(memory=self.memory._replace(kept=0), away=self.memory.kept, first=first)

    def beginning(self) -> "BlockCost":
        """Return the cost of the block in the pass that makes its first gradients."""
        return self._replace(memory=self.first or self.memory)

    def steps_of(self, kind: ActionKind) -> tuple[Step, ...]:
        """Return the segments of a pass of a kind."""
        if kind is ActionKind.FORWARD:
            return self.steps.forward
        if kind is ActionKind.BACKWARD:
            return self.steps.backward
        assert self.split is not None
        return self.split.inputs if kind is ActionKind.INPUT else self.split.weights

    def first_reading(self, kind: ActionKind) -> int:
        """Return the index of the first segment of a pass that is not of a loss: before it no parameters are read."""
        return self.steps.loss if kind in (ActionKind.BACKWARD, ActionKind.INPUT) else 0

    def ticks(self, kind: ActionKind) -> int:
        """Return the idle ticks of a pass of a kind."""
        if kind is ActionKind.FORWARD:
            return self.forward_ticks
        return self.backward_ticks if kind is ActionKind.BACKWARD else chain_ticks(self.steps_of(kind))


def _degrees(plan: Plan) -> tuple[int, ...]:
    """Return the sizes of the axes that cut operators."""
    return plan.tensor, plan.tensor_rows, plan.tensor_depth, plan.context, plan.expert


class BlockCosts:
    """Costs of the blocks of one problem, each part computed once for all plans that share it.

    Methods take a plan and the name of a block kind. Values are cached by keys: `cut_key` for what depends on how
    parameters are cut, `cost_key` for what depends on how blocks run.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._kinds: dict[int, Kinds] = {}
        self._exchanging: dict[int, tuple[str, ...]] = {}
        self._shardings: Numbers[tuple[OperatorSharding, ...]] = Numbers()
        self._cuts: Numbers[tuple[int, ...]] = Numbers()
        self._cut_of: dict[tuple[tuple[Axis, ...], int], int] = {}
        self._ways: Numbers[tuple[int, Microbatch, bool, bool, bool, bool, bool]] = Numbers()
        self._hows: Numbers[tuple[int, Recomputation]] = Numbers()
        self._latest: tuple[Plan | None, int, int, int] = None, -1, -1, -1
        self._seen: tuple[Plan | None, dict[int, Plan]] = None, {}
        self._layouts: dict[tuple[str, int, int], BlockLayout] = {}
        self._units: dict[tuple[str, int], Unit] = {}
        self._parameters: dict[tuple[str, int], int] = {}
        self._replicated: dict[tuple[str, int], tuple[int, ...]] = {}
        self._scaling: dict[tuple[str, int], bool] = {}
        self._liveness: dict[tuple[str, int, int], Liveness] = {}
        self._moments: dict[tuple[str, int, int, OfLayer, int], Moments] = {}
        self._memories: dict[tuple[str, int, int, OfLayer, int], BlockMemory] = {}
        self._buffers: dict[tuple[str, int, int], BlockBuffers] = {}
        self._steps: dict[tuple[object, ...], BlockSteps] = {}
        self._costs: dict[tuple[str, int, OfLayer, object], BlockCost] = {}

    def kinds(self, plan: Plan) -> Kinds:
        """Return the block kinds of a plan; everywhere in this class a block is named by its kind."""
        number = self._shardings.of_same(plan.shardings)
        if number not in self._kinds:
            self._kinds[number] = kinds(self.problem.graph, plan.shardings)
        return self._kinds[number]

    def exchanging(self, plan: Plan) -> tuple[str, ...]:
        """Return the operator axes along which all-to-alls run."""
        cut = self.cut(plan)
        if cut not in self._exchanging:
            layouts = (self.layout(plan, name) for name in self.kinds(plan).of_name)
            found = (
                {axis for layout in layouts for axis in exchanged_axes(layout)} if plan.operator_ranks > 1 else set()
            )
            self._exchanging[cut] = tuple(axis for axis in OPERATOR_AXES if axis in found)
        return self._exchanging[cut]

    def cut(self, plan: Plan) -> int:
        """Return a number for how a plan cuts parameters: equal numbers mean equal shares."""
        return self._numbers(plan)[1]

    def how(self, plan: Plan) -> int:
        """Return a number for how a plan's blocks run: equal numbers cost the same on the same rank."""
        return self._numbers(plan)[3]

    def _numbers(self, plan: Plan) -> tuple[Plan | None, int, int, int]:
        # Many methods ask about one plan in a row, so that its numbers are looked up once.
        """Return the plan, and its numbers for cuts, for passes without recomputation, and for passes with it."""
        if self._latest[0] is not plan:  # much is asked about one plan after another
            key = (plan.mesh.axes, self._shardings.of_same(plan.shardings))
            if key not in self._cut_of:
                self._cut_of[key] = self._cuts.of((*_degrees(plan), key[1]))
            cut = self._cut_of[key]
            adds, begins = self.adds_gradients(plan), begin_in_step(self.problem.training, plan)
            runs = plan.splits_backward, self._leaves_whole(plan), plan.overlap_tensor, adds, begins
            way = self._ways.of((cut, plan.microbatch, *runs))
            self._latest = plan, cut, way, self._hows.of((way, plan.recompute))
        return self._latest

    def seen(self, plan: Plan, batch: int) -> Plan:
        """Return a plan as ranks with microbatches of ``batch`` sequences see it; 0 stands for the plan's own."""
        if not batch or plan.microbatch == batch:
            return plan
        if self._seen[0] is not plan:
            self._seen = plan, {}
        if batch not in self._seen[1]:
            self._seen[1][batch] = plan.even(batch)
        return self._seen[1][batch]

    def runs(self, plan: Plan, runs: Runs, how: OfStage) -> list[tuple[str, int, OfLayer]]:
        """Return the blocks of a stage in order, with how often each occurs in a row and what is recomputed of it."""
        left = how.layers
        if left is None:
            return [(block, count, how.layer) for block, count in runs]
        result: list[tuple[str, int, OfLayer]] = []
        for block, count in runs:
            again = min(left, count) if self.block(plan, block).layer else 0
            left -= again
            result += [(block, n, of) for n, of in ((again, how.layer), (count - again, Recompute.NONE)) if n]
        return result

    def cost(self, plan: Plan, name: str, rank: Rank, how: OfLayer | None = None) -> BlockCost:
        """Return the cost of a block on a rank.

        ``recompute_choice`` is what is recomputed of the block if it is a layer: by default what the plan recomputes of
        its first stage.
        """
        plan = self.seen(plan, rank.batch)
        how = of_stage(plan.recompute, 0).layer if how is None else how
        key = (name, self._numbers(plan)[2], how, rank.key)
        if key not in self._costs:
            unread = self.problem.training.conventions.recomputes_unread
            # The order matters: recomputed products overlap collectives too, and sums of gradients between products and
            # collectives would keep these apart.
            steps = self.plain_steps(plan, name, rank)
            steps = with_recompute(self.block(plan, name), steps, how, rank.accelerator, unread=unread)
            chunks = plan.overlap_tensor and self.block(plan, name).layer
            if chunks or self.hides_gradients(plan):
                steps = with_overlap(self.layout(plan, name), rank.accelerator, steps, chunks=chunks)
            if self.adds_gradients(plan):
                layout, each = self.layout(plan, name), self.problem.training.gradient_bytes
                steps = with_accumulation(layout, rank.accelerator, steps, each)
            self._costs[key] = BlockCost(
                steps,
                chain_ticks(steps.forward),
                chain_ticks(steps.backward),
                self.memory(plan, name, how),
                self.parameters(plan, name),
                self.experts(plan, name),
                len(self.block(plan, name).parameters),
                split(self.layout(plan, name), rank.accelerator, steps.backward) if plan.splits_backward else None,
                undeferred=self.undeferred(plan, name),
                unit=self.unit(plan, name),
                first=self.first_memory(plan, name, how),
            )
        return self._costs[key]

    def hides_gradients(self, plan: Plan) -> bool:
        """Return whether sums of input gradients over tensor ranks overlap the products for gradients of weights."""
        whole = plan.tensor > 1 and plan.tensor_rows == 1 and not plan.splits_backward
        return whole and self.problem.training.conventions.hides_input_gradients

    def adds_gradients(self, plan: Plan) -> bool:
        """Return whether kernels of their own add gradients to those of a step's other microbatches."""
        training = self.problem.training
        adds = training.conventions.adds_gradients and not training.frozen
        return adds and not self._leaves_whole(plan)

    def block(self, plan: Plan, name: str) -> Block:
        """Return the block of a kind."""
        return self.kinds(plan).of_name[name].block

    def first_memory(self, plan: Plan, name: str, how: OfLayer | None = None) -> BlockMemory | None:
        """Return the memory of the microbatch that makes a block's first gradients, if these have no memory before."""
        if not begin_in_step(self.problem.training, plan) or self._leaves_whole(plan):
            return None
        return self._memory(plan, name, how, self.problem.training.gradient_bytes)

    def memory(self, plan: Plan, name: str, how: OfLayer | None = None) -> BlockMemory:
        """Return the memory of one microbatch of a block on a rank; ``recompute_choice`` is as in `cost`."""
        apart = self.problem.training.gradient_bytes if self._leaves_whole(plan) else 0
        return self._memory(plan, name, how, apart)

    def _memory(self, plan: Plan, name: str, how: OfLayer | None, apart: int) -> BlockMemory:
        """Return the memory of one microbatch; ``separate_bytes`` an element of gradients count elsewhere."""
        how = of_stage(plan.recompute, 0).layer if how is None else how
        recompute: OfLayer = how if self.block(plan, name).layer else Recompute.NONE  # others keep all
        size = plan.sequences
        key = (name, self.cut(plan), size, recompute, apart)
        if key not in self._memories:
            # The moments of one sequence give those of any number of sequences, so that one walk serves all microbatch
            # sizes.
            sequences = 1 if self._scales(plan, name) else size
            which = (name, self.cut(plan), sequences, recompute, apart)
            if which not in self._moments:
                live = self._live(plan, name, sequences)
                self._moments[which] = moments(live, recompute, apart_gradients=apart)
            self._memories[key] = self._moments[which].memory(size // sequences)
        return self._memories[key]

    def _leaves_whole(self, plan: Plan) -> bool:
        """Return whether gradients are reduced when a block's backward has made all of them, and so count elsewhere."""
        return plan.zero >= 2 and plan.shards > 1

    def _live(self, plan: Plan, name: str, sequences: int) -> Liveness:
        """Return the live tensors of a block with microbatches of so many sequences."""
        key = (name, self.cut(plan), sequences)
        if key not in self._liveness:
            self._liveness[key] = Liveness(self._layout(plan, name, sequences), self.problem.training.conventions)
        return self._liveness[key]

    def _scales(self, plan: Plan, name: str) -> bool:
        """Return whether a block's memory is linear in the batch: all tensors have that dim and no axis cuts it."""
        key = (name, self.cut(plan))
        if key not in self._scaling:
            block = self.block(plan, name)
            names = {t for o in block.operators for t in (*o.inputs, *o.outputs, *o.saved)}
            cut = any(dim == BATCH for sharding in plan.shardings for dim, _ in sharding.cuts)
            self._scaling[key] = not cut and all(BATCH in block.tensor[each].dims for each in names)
        return self._scaling[key]

    def buffers(self, plan: Plan, name: str) -> BlockBuffers:
        """Return the buffers that a block asks its framework to keep on a rank."""
        key = (name, self.cut(plan), plan.sequences)
        if key not in self._buffers:
            self._buffers[key] = block_buffers(self._live(plan, name, plan.sequences))
        return self._buffers[key]

    def parameters(self, plan: Plan, name: str) -> int:
        """Return the elements of a block's parameters on a rank."""
        key = (name, self.cut(plan))
        if key not in self._parameters:
            self._parameters[key] = self.layout(plan, name).parameter_elements()
        return self._parameters[key]

    def experts(self, plan: Plan, name: str) -> int:
        """Return the elements of a block's parameters on a rank that only one expert uses."""
        return self.layout(plan, name).expert_elements() if plan.expert > 1 else 0

    def replicated(self, plan: Plan, name: str) -> tuple[int, ...]:
        """Return the elements of a block's parameters whose gradients are summed along each operator axis."""
        key = (name, self.cut(plan))
        if key not in self._replicated:
            framework = self.problem.training.conventions
            self._replicated[key] = replicated_elements(self.layout(plan, name), framework)
        return self._replicated[key]

    def undeferred(self, plan: Plan, name: str) -> int:
        """Return the elements on a rank whose gradients are made with those of inputs where backward is split."""
        return undeferred_elements(self.layout(plan, name)) if plan.splits_backward else 0

    def factored(self, plan: Plan, name: str) -> tuple[int, int]:
        """Return the rows and columns of a block's matrices on a rank, plus the elements of its vectors.

        The second number is the part of experts, 0 where ranks share no experts.
        """
        layout = self.layout(plan, name)
        owned = layout.block.parameters, layout.expert_parameters()
        every, experts = (factored_elements(layout, parameters) for parameters in owned)
        return every, experts

    def quantised(self, plan: Plan, name: str) -> int:
        """Return the elements of the weights on a rank by which a block multiplies in fp8."""
        return quantised_elements(self.layout(plan, name))

    def unit(self, plan: Plan, name: str) -> Unit:
        """Return what data ranks share at once of a block's parameters."""
        key = (name, self.cut(plan))
        if key not in self._units:
            self._units[key] = unit(self.problem.training, self.layout(plan, name))
        return self._units[key]

    def layout(self, plan: Plan, name: str) -> BlockLayout:
        """Return a block under the plan's shardings, with the smallest of its microbatch sizes."""
        return self._layout(plan, name, plan.sizes[0])

    def _layout(self, plan: Plan, name: str, sequences: int) -> BlockLayout:
        """Return a block under the plan's shardings, with microbatches of so many sequences."""
        key = (name, self.cut(plan), sequences)
        if key not in self._layouts:
            kind, training = self.kinds(plan).of_name[name], BlockTraining.of(self.problem.training)
            self._layouts[key] = BlockLayout.of_kind(kind, plan.mesh, sequences, training)
        return self._layouts[key]

    def plain_steps(self, plan: Plan, name: str, rank: Rank) -> BlockSteps:
        """Return the segments of a block without recomputation."""
        key = (name, self.cut(plan), plan.sequences, rank.key)
        if key not in self._steps:
            keeps = self.problem.training.conventions.keeps_gathered
            layout = self.layout(plan, name)
            self._steps[key] = block_steps(layout, rank.accelerator, rank.groups, keeps_gathered=keeps)
        return self._steps[key]
