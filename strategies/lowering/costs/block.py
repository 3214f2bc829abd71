"""Costs of one block on one rank: its segments, its memory and its parameters."""

from typing import NamedTuple

from meshwise.simulator.operator_graph import BATCH, Block
from meshwise.strategies.lowering.costs.kinds import BlockKinds, Runs, classify_blocks
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import BlockBuffers, find_block_buffers
from meshwise.strategies.lowering.costs.operator import (
    BlockLayout,
    BlockSegments,
    BlockTraining,
    build_block_segments,
    find_exchange_axes,
)
from meshwise.strategies.lowering.costs.optimizer import allocates_gradients
from meshwise.strategies.lowering.costs.recompute import BlockMemory, Moments, compute_moments, with_recompute
from meshwise.strategies.lowering.costs.rewrites import (
    SplitBackward,
    split_backward,
    undeferred_elements,
    with_accumulation,
    with_overlap,
)
from meshwise.strategies.lowering.costs.steps import Segment, chain_ticks
from meshwise.strategies.lowering.costs.weights import (
    Unit,
    factored_elements,
    find_unit,
    quantised_elements,
    replicated_elements,
)
from meshwise.strategies.lowering.rank_classes.machine import RankProfile
from meshwise.strategies.lowering.rank_classes.numbers import Numbers
from meshwise.strategies.plan.mesh import OPERATOR_AXES, PASS_AXES, Axis, Microbatch
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import (
    LayerRecompute,
    Recomputation,
    Recompute,
    StageRecompute,
    find_stage_recompute,
)
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

    segments: BlockSegments
    forward_ticks: int
    backward_ticks: int
    memory: BlockMemory
    parameters: int
    expert_parameters: int
    parameter_tensors: int
    split_passes: SplitBackward | None = None
    offloaded_bytes: int = 0
    undeferred_parameters: int = 0
    unit: Unit = Unit()
    first_memory: BlockMemory | None = None

    def with_offload(self) -> "BlockCost":
        """Return the cost of the block where all that forward keeps goes to the host; buffers are counted elsewhere."""
        first_memory = self.first_memory and self.first_memory._replace(kept_bytes=0)
        return self._replace(
            memory=self.memory._replace(kept_bytes=0), offloaded_bytes=self.memory.kept_bytes, first_memory=first_memory
        )

    def with_first_gradients(self) -> "BlockCost":
        """Return the cost of the block in the pass that makes its first gradients."""
        return self._replace(memory=self.first_memory or self.memory)

    def select_segments(self, kind: ActionKind) -> tuple[Segment, ...]:
        """Return the segments of a pass of a kind."""
        if kind is ActionKind.FORWARD:
            return self.segments.forward
        if kind is ActionKind.BACKWARD:
            return self.segments.backward
        assert self.split_passes is not None
        return self.split_passes.inputs if kind is ActionKind.INPUT else self.split_passes.weights

    def find_first_read(self, kind: ActionKind) -> int:
        """Return the index of the first segment of a pass that is not of a loss: before it no parameters are read."""
        return self.segments.num_loss_segments if kind in (ActionKind.BACKWARD, ActionKind.INPUT) else 0

    def ticks(self, kind: ActionKind) -> int:
        """Return the idle ticks of a pass of a kind."""
        if kind is ActionKind.FORWARD:
            return self.forward_ticks
        return self.backward_ticks if kind is ActionKind.BACKWARD else chain_ticks(self.select_segments(kind))


def _list_degrees(plan: Plan) -> tuple[int, ...]:
    """Return the sizes of the axes that cut operators."""
    return tuple(plan.mesh.size(name) for name in PASS_AXES)


class BlockCosts:
    """Costs of the blocks of one problem, each part computed once for all plans that share it.

    Methods take a plan and the name of a block kind. Values are cached by keys: `cut_key` for what depends on how
    parameters are cut, `cost_key` for what depends on how blocks run.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._block_kinds: dict[int, BlockKinds] = {}
        self._exchange_axes: dict[int, tuple[str, ...]] = {}
        self._sharding_numbers: Numbers[tuple[OperatorSharding, ...]] = Numbers()
        self._cut_numbers: Numbers[tuple[int, ...]] = Numbers()
        self._cut_keys: dict[tuple[tuple[Axis, ...], int], int] = {}
        self._run_numbers: Numbers[tuple[int, Microbatch, bool, bool, bool, bool, bool]] = Numbers()
        self._cost_numbers: Numbers[tuple[int, Recomputation]] = Numbers()
        self._latest_keys: tuple[Plan | None, int, int, int] = None, -1, -1, -1
        self._even_plans: tuple[Plan | None, dict[int, Plan]] = None, {}
        self._layouts: dict[tuple[str, int, int], BlockLayout] = {}
        self._units: dict[tuple[str, int], Unit] = {}
        self._parameters: dict[tuple[str, int], int] = {}
        self._replicated: dict[tuple[str, int], tuple[int, ...]] = {}
        self._batch_scaling: dict[tuple[str, int], bool] = {}
        self._liveness: dict[tuple[str, int, int], Liveness] = {}
        self._moments: dict[tuple[str, int, int, LayerRecompute, int], Moments] = {}
        self._memories: dict[tuple[str, int, int, LayerRecompute, int], BlockMemory] = {}
        self._buffers: dict[tuple[str, int, int], BlockBuffers] = {}
        self._segments: dict[tuple[object, ...], BlockSegments] = {}
        self._costs: dict[tuple[str, int, LayerRecompute, object], BlockCost] = {}

    def block_kinds(self, plan: Plan) -> BlockKinds:
        """Return the block kinds of a plan; everywhere in this class a block is named by its kind."""
        number = self._sharding_numbers.number_identical(plan.shardings)
        if number not in self._block_kinds:
            self._block_kinds[number] = classify_blocks(self.problem.graph, plan.shardings)
        return self._block_kinds[number]

    def exchange_axes(self, plan: Plan) -> tuple[str, ...]:
        """Return the operator axes along which all-to-alls run."""
        cut_key = self.cut_key(plan)
        if cut_key not in self._exchange_axes:
            layouts = (self.layout(plan, name) for name in self.block_kinds(plan).by_name)
            axes_found = (
                {axis for layout in layouts for axis in find_exchange_axes(layout)}
                if plan.operator_ranks > 1
                else set()
            )
            self._exchange_axes[cut_key] = tuple(axis for axis in OPERATOR_AXES if axis in axes_found)
        return self._exchange_axes[cut_key]

    def cut_key(self, plan: Plan) -> int:
        """Return a number for how a plan cuts parameters: equal numbers mean equal shares."""
        return self._number_plan(plan)[1]

    def cost_key(self, plan: Plan) -> int:
        """Return a number for how a plan's blocks run: equal numbers cost the same on the same rank."""
        return self._number_plan(plan)[3]

    def _number_plan(self, plan: Plan) -> tuple[Plan | None, int, int, int]:
        """Return the plan, and its numbers for cuts, for passes without recomputation, and for passes with it."""
        if self._latest_keys[0] is not plan:  # much is asked about one plan after another
            key = (plan.mesh.axes, self._sharding_numbers.number_identical(plan.shardings))
            if key not in self._cut_keys:
                self._cut_keys[key] = self._cut_numbers.number((*_list_degrees(plan), key[1]))
            cut_key = self._cut_keys[key]
            adds_gradients, allocates = self.adds_gradients(plan), allocates_gradients(self.problem.training, plan)
            run_options = plan.splits_backward, self._leaves_whole(plan), plan.overlap_tensor, adds_gradients, allocates
            run_key = self._run_numbers.number((cut_key, plan.microbatch, *run_options))
            self._latest_keys = plan, cut_key, run_key, self._cost_numbers.number((run_key, plan.recompute))
        return self._latest_keys

    def with_batch(self, plan: Plan, batch: int) -> Plan:
        """Return a plan as ranks with microbatches of ``batch`` sequences see it; 0 stands for the plan's own."""
        if not batch or plan.microbatch == batch:
            return plan
        if self._even_plans[0] is not plan:
            self._even_plans = plan, {}
        if batch not in self._even_plans[1]:
            self._even_plans[1][batch] = plan.with_microbatch(batch)
        return self._even_plans[1][batch]

    def list_runs(
        self, plan: Plan, runs: Runs, recompute_choice: StageRecompute
    ) -> list[tuple[str, int, LayerRecompute]]:
        """Return the blocks of a stage in order, with how often each occurs in a row and what is recomputed of it."""
        num_left = recompute_choice.layers
        if num_left is None:
            return [(block, count, recompute_choice.layer) for block, count in runs]
        result: list[tuple[str, int, LayerRecompute]] = []
        for block, count in runs:
            num_recomputed = min(num_left, count) if self.block(plan, block).layer else 0
            num_left -= num_recomputed
            result += [
                (block, n, choice)
                for n, choice in ((num_recomputed, recompute_choice.layer), (count - num_recomputed, Recompute.NONE))
                if n
            ]
        return result

    def cost(
        self, plan: Plan, name: str, rank: RankProfile, recompute_choice: LayerRecompute | None = None
    ) -> BlockCost:
        """Return the cost of a block on a rank.

        ``recompute_choice`` is what is recomputed of the block if it is a layer: by default what the plan recomputes of
        its first stage.
        """
        plan = self.with_batch(plan, rank.batch)
        recompute_choice = (
            find_stage_recompute(plan.recompute, 0).layer if recompute_choice is None else recompute_choice
        )
        key = (name, self._number_plan(plan)[2], recompute_choice, rank.key)
        if key not in self._costs:
            reruns_unread = self.problem.training.conventions.recomputes_unread
            # The order matters: recomputed products overlap collectives too, and sums of gradients between products and
            # collectives would keep these apart.
            segments = self.plain_segments(plan, name, rank)
            segments = with_recompute(
                self.block(plan, name), segments, recompute_choice, rank.accelerator, reruns_unread=reruns_unread
            )
            in_chunks = plan.overlap_tensor and self.block(plan, name).layer
            if in_chunks or self.hides_gradients(plan):
                segments = with_overlap(self.layout(plan, name), rank.accelerator, segments, in_chunks=in_chunks)
            if self.adds_gradients(plan):
                layout, gradient_bytes = self.layout(plan, name), self.problem.training.gradient_bytes
                segments = with_accumulation(layout, rank.accelerator, segments, gradient_bytes)
            self._costs[key] = BlockCost(
                segments,
                chain_ticks(segments.forward),
                chain_ticks(segments.backward),
                self.memory(plan, name, recompute_choice),
                self.count_parameters(plan, name),
                self.count_expert_parameters(plan, name),
                len(self.block(plan, name).parameters),
                split_backward(self.layout(plan, name), rank.accelerator, segments.backward)
                if plan.splits_backward
                else None,
                undeferred_parameters=self.count_undeferred(plan, name),
                unit=self.unit(plan, name),
                first_memory=self.first_memory(plan, name, recompute_choice),
            )
        return self._costs[key]

    def hides_gradients(self, plan: Plan) -> bool:
        """Return whether sums of input gradients over tensor ranks overlap the products for gradients of weights."""
        is_hideable = plan.tensor > 1 and plan.tensor_rows == 1 and not plan.splits_backward
        return is_hideable and self.problem.training.conventions.hides_input_gradients

    def adds_gradients(self, plan: Plan) -> bool:
        """Return whether kernels of their own add gradients to those of a step's other microbatches."""
        training = self.problem.training
        adds = training.conventions.adds_gradients and not training.frozen
        return adds and not self._leaves_whole(plan)

    def block(self, plan: Plan, name: str) -> Block:
        """Return the block of a kind."""
        return self.block_kinds(plan).by_name[name].block

    def first_memory(self, plan: Plan, name: str, recompute_choice: LayerRecompute | None = None) -> BlockMemory | None:
        """Return the memory of the microbatch that makes a block's first gradients, if these have no memory before."""
        if not allocates_gradients(self.problem.training, plan) or self._leaves_whole(plan):
            return None
        return self._find_memory(plan, name, recompute_choice, self.problem.training.gradient_bytes)

    def memory(self, plan: Plan, name: str, recompute_choice: LayerRecompute | None = None) -> BlockMemory:
        """Return the memory of one microbatch of a block on a rank; ``recompute_choice`` is as in `cost`."""
        separate_bytes = self.problem.training.gradient_bytes if self._leaves_whole(plan) else 0
        return self._find_memory(plan, name, recompute_choice, separate_bytes)

    def _find_memory(
        self, plan: Plan, name: str, recompute_choice: LayerRecompute | None, separate_bytes: int
    ) -> BlockMemory:
        """Return the memory of one microbatch; ``separate_bytes`` an element of gradients count elsewhere."""
        recompute_choice = (
            find_stage_recompute(plan.recompute, 0).layer if recompute_choice is None else recompute_choice
        )
        layer_choice: LayerRecompute = (
            recompute_choice if self.block(plan, name).layer else Recompute.NONE
        )  # others keep all
        size = plan.sequences
        key = (name, self.cut_key(plan), size, layer_choice, separate_bytes)
        if key not in self._memories:
            # The moments of one sequence give those of any number of sequences, so that one walk serves all microbatch
            # sizes.
            sequences = 1 if self._scales_with_batch(plan, name) else size
            moments_key = (name, self.cut_key(plan), sequences, layer_choice, separate_bytes)
            if moments_key not in self._moments:
                liveness = self._find_liveness(plan, name, sequences)
                self._moments[moments_key] = compute_moments(liveness, layer_choice, separate_bytes=separate_bytes)
            self._memories[key] = self._moments[moments_key].scale_memory(size // sequences)
        return self._memories[key]

    def _leaves_whole(self, plan: Plan) -> bool:
        """Return whether gradients are reduced when a block's backward has made all of them, and so count elsewhere."""
        return plan.zero >= 2 and plan.shards > 1

    def _find_liveness(self, plan: Plan, name: str, sequences: int) -> Liveness:
        """Return the live tensors of a block with microbatches of so many sequences."""
        key = (name, self.cut_key(plan), sequences)
        if key not in self._liveness:
            self._liveness[key] = Liveness(self._find_layout(plan, name, sequences), self.problem.training.conventions)
        return self._liveness[key]

    def _scales_with_batch(self, plan: Plan, name: str) -> bool:
        """Return whether a block's memory is linear in the batch: all tensors have that dim and no axis cuts it."""
        key = (name, self.cut_key(plan))
        if key not in self._batch_scaling:
            block = self.block(plan, name)
            names = {
                tensor
                for operator in block.operators
                for tensor in (*operator.inputs, *operator.outputs, *operator.saved)
            }
            cuts_batch = any(dim == BATCH for sharding in plan.shardings for dim, _ in sharding.cuts)
            self._batch_scaling[key] = not cuts_batch and all(
                BATCH in block.tensor[tensor_name].dims for tensor_name in names
            )
        return self._batch_scaling[key]

    def buffers(self, plan: Plan, name: str) -> BlockBuffers:
        """Return the buffers that a block asks its framework to keep on a rank."""
        key = (name, self.cut_key(plan), plan.sequences)
        if key not in self._buffers:
            self._buffers[key] = find_block_buffers(self._find_liveness(plan, name, plan.sequences))
        return self._buffers[key]

    def count_parameters(self, plan: Plan, name: str) -> int:
        """Return the elements of a block's parameters on a rank."""
        key = (name, self.cut_key(plan))
        if key not in self._parameters:
            self._parameters[key] = self.layout(plan, name).parameter_elements()
        return self._parameters[key]

    def count_expert_parameters(self, plan: Plan, name: str) -> int:
        """Return the elements of a block's parameters on a rank that only one expert uses."""
        return self.layout(plan, name).expert_elements() if plan.expert > 1 else 0

    def count_replicated(self, plan: Plan, name: str) -> tuple[int, ...]:
        """Return the elements of a block's parameters whose gradients are summed along each operator axis."""
        key = (name, self.cut_key(plan))
        if key not in self._replicated:
            framework = self.problem.training.conventions
            self._replicated[key] = replicated_elements(self.layout(plan, name), framework)
        return self._replicated[key]

    def count_undeferred(self, plan: Plan, name: str) -> int:
        """Return the elements on a rank whose gradients are made with those of inputs where backward is split."""
        return undeferred_elements(self.layout(plan, name)) if plan.splits_backward else 0

    def count_factored(self, plan: Plan, name: str) -> tuple[int, int]:
        """Return the rows and columns of a block's matrices on a rank, plus the elements of its vectors.

        The second number is the part of experts, 0 where ranks share no experts.
        """
        layout = self.layout(plan, name)
        parameter_sets = layout.block.parameters, layout.expert_parameters()
        num_all, num_expert = (factored_elements(layout, parameters) for parameters in parameter_sets)
        return num_all, num_expert

    def count_quantised(self, plan: Plan, name: str) -> int:
        """Return the elements of the weights on a rank by which a block multiplies in fp8."""
        return quantised_elements(self.layout(plan, name))

    def unit(self, plan: Plan, name: str) -> Unit:
        """Return what data ranks share at once of a block's parameters."""
        key = (name, self.cut_key(plan))
        if key not in self._units:
            self._units[key] = find_unit(self.problem.training, self.layout(plan, name))
        return self._units[key]

    def layout(self, plan: Plan, name: str) -> BlockLayout:
        """Return a block under the plan's shardings, with the smallest of its microbatch sizes."""
        return self._find_layout(plan, name, plan.sizes[0])

    def _find_layout(self, plan: Plan, name: str, sequences: int) -> BlockLayout:
        """Return a block under the plan's shardings, with microbatches of so many sequences."""
        key = (name, self.cut_key(plan), sequences)
        if key not in self._layouts:
            kind, training = self.block_kinds(plan).by_name[name], BlockTraining.of(self.problem.training)
            self._layouts[key] = BlockLayout.from_kind(kind, plan.mesh, sequences, training)
        return self._layouts[key]

    def plain_segments(self, plan: Plan, name: str, rank: RankProfile) -> BlockSegments:
        """Return the segments of a block without recomputation."""
        key = (name, self.cut_key(plan), plan.sequences, rank.key)
        if key not in self._segments:
            keeps_gathered = self.problem.training.conventions.keeps_gathered
            layout = self.layout(plan, name)
            self._segments[key] = build_block_segments(
                layout, rank.accelerator, rank.groups, keeps_gathered=keeps_gathered
            )
        return self._segments[key]
