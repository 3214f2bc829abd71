"""What one block does on one rank: its segments, its memory and its parameters."""

from typing import NamedTuple

from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import BATCH, Block
from meshwise.strategies.lowering.costs.buffers import BlockBuffers, find_block_buffers
from meshwise.strategies.lowering.costs.keys import CutKey, RunKey
from meshwise.strategies.lowering.costs.kinds import Runs
from meshwise.strategies.lowering.costs.layout import BlockLayout, BlockTraining
from meshwise.strategies.lowering.costs.liveness import Liveness
from meshwise.strategies.lowering.costs.memory import BlockMemory
from meshwise.strategies.lowering.costs.operator import build_block_segments, find_exchange_axes
from meshwise.strategies.lowering.costs.recompute import Moments, compute_moments, with_recompute
from meshwise.strategies.lowering.costs.rewrites import (
    SplitBackward,
    split_backward,
    undeferred_elements,
    with_accumulation,
    with_overlap,
    with_tables,
)
from meshwise.strategies.lowering.costs.segments import BlockSegments
from meshwise.strategies.lowering.costs.weights import (
    Unit,
    factored_elements,
    find_unit,
    quantised_elements,
    replicated_elements,
)
from meshwise.strategies.plan.mesh import EXPERT, OPERATOR_AXES
from meshwise.strategies.plan.problem import Problem, count_node_ranks
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute, StageRecompute
from meshwise.strategies.tables.loads import TableLoad, TableWork, count_loads, find_work
from meshwise.strategies.tables.table import Table, list_tables


class BlockWork(NamedTuple):
    """One block on one rank: its segments, its memory and its parameters.

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
    memory: BlockMemory
    parameters: int
    expert_parameters: int
    split_passes: SplitBackward | None = None
    offloaded_bytes: int = 0
    undeferred_parameters: int = 0
    unit: Unit = Unit()
    first_memory: BlockMemory | None = None

    def with_offload(self) -> "BlockWork":
        """Return the block where all that forward keeps goes to the host; buffers are counted elsewhere."""
        first_memory = self.first_memory and self.first_memory._replace(kept_bytes=0)
        return self._replace(
            memory=self.memory._replace(kept_bytes=0), offloaded_bytes=self.memory.kept_bytes, first_memory=first_memory
        )

    def with_first_gradients(self) -> "BlockWork":
        """Return the block in the pass that makes its first gradients."""
        return self._replace(memory=self.first_memory or self.memory)


class BlockWorks:
    """The blocks of one problem, each part worked out once for all plans that share it.

    A block is named by its kind (`CutKey.kinds`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.training = problem, problem.training
        self.conventions = problem.training.conventions

    def block(self, cut: CutKey, name: str) -> Block:
        """Return the block of a kind."""
        return cut.kinds.by_name[name].block

    @memoise
    def exchange_axes(self, cut: CutKey) -> tuple[str, ...]:
        """Return the operator axes along which all-to-alls run."""
        if all(cut.mesh.size(axis) == 1 for axis in OPERATOR_AXES):
            return ()
        layouts = (self.layout(cut, name, 1) for name in cut.kinds.by_name)
        exchange_axes = {axis for layout in layouts for axis in find_exchange_axes(layout)}
        return tuple(axis for axis in OPERATOR_AXES if axis in exchange_axes)

    def list_runs(
        self, cut: CutKey, runs: Runs, recompute_choice: StageRecompute
    ) -> list[tuple[str, int, LayerRecompute]]:
        """Return the blocks of a stage in order, with how often each occurs in a row and what is recomputed of it."""
        num_left = recompute_choice.layers
        if num_left is None:
            return [(block, count, recompute_choice.layer) for block, count in runs]
        result: list[tuple[str, int, LayerRecompute]] = []
        for block, count in runs:
            num_recomputed = min(num_left, count) if self.block(cut, block).layer else 0
            num_left -= num_recomputed
            result += [
                (block, n, choice)
                for n, choice in ((num_recomputed, recompute_choice.layer), (count - num_recomputed, Recompute.NONE))
                if n
            ]
        return result

    @memoise
    def work(self, run: RunKey, name: str, recompute_choice: LayerRecompute) -> BlockWork:
        """Return what a block does on a rank; ``recompute_choice`` is what is recomputed of it if it is a layer."""
        cut, layout = run.cut, self.layout(run.cut, name, run.sequences)
        # The order matters: recomputed products overlap collectives too, and sums of gradients between products and
        # collectives would keep these apart.
        segments = self.plain_segments(cut, name, run.sequences)
        conventions = self.conventions
        segments = with_recompute(
            layout.block,
            segments,
            recompute_choice,
            reruns_unread=conventions.recomputes_unread,
            num_launches=conventions.checkpoint_launches,
        )
        in_chunks = run.overlap_tensor and layout.block.layer
        if in_chunks or run.hides_gradients:
            segments = with_overlap(layout, segments, in_chunks=in_chunks)
        if run.adds_gradients:
            segments = with_accumulation(layout, segments, self.training.gradient_bytes)
        return BlockWork(
            segments,
            self.memory(run, name, recompute_choice),
            self.count_parameters(cut, name),
            self.count_expert_parameters(cut, name),
            split_backward(layout, segments.backward) if run.splits_backward else None,
            undeferred_parameters=self.count_undeferred(run, name),
            unit=self.unit(cut, name),
            first_memory=self.first_memory(run, name, recompute_choice),
        )

    def first_memory(self, run: RunKey, name: str, recompute_choice: LayerRecompute) -> BlockMemory | None:
        """Return the memory of the microbatch that makes a block's first gradients, if these have no memory before."""
        if not run.allocates_gradients or run.leaves_whole:
            return None
        return self._find_memory(run.cut, name, run.sequences, recompute_choice, self.training.gradient_bytes)

    def memory(self, run: RunKey, name: str, recompute_choice: LayerRecompute) -> BlockMemory:
        """Return the memory of one microbatch of a block on a rank."""
        separate_bytes = self.training.gradient_bytes if run.leaves_whole else 0
        return self._find_memory(run.cut, name, run.sequences, recompute_choice, separate_bytes)

    @memoise
    def _find_memory(
        self, cut: CutKey, name: str, sequences: int, recompute_choice: LayerRecompute, separate_bytes: int
    ) -> BlockMemory:
        """Return the memory of one microbatch; ``separate_bytes`` an element of gradients count elsewhere."""
        # Blocks that are no layers keep all.
        choice: LayerRecompute = recompute_choice if self.block(cut, name).layer else Recompute.NONE
        least_sequences = self._find_least_sequences(cut, name, sequences)
        moments = self._find_moments(cut, name, least_sequences, choice, separate_bytes)
        return moments.scale_memory(sequences // least_sequences)

    @memoise
    def _find_moments(
        self, cut: CutKey, name: str, sequences: int, recompute_choice: LayerRecompute, separate_bytes: int
    ) -> Moments:
        liveness = self._find_liveness(cut, name, sequences)
        return compute_moments(liveness, recompute_choice, separate_bytes=separate_bytes)

    @memoise
    def _find_liveness(self, cut: CutKey, name: str, sequences: int) -> Liveness:
        """Return the live tensors of a block with microbatches of so many sequences."""
        return Liveness(self.layout(cut, name, sequences), self.conventions)

    def find_liveness(self, run: RunKey, name: str) -> tuple[Liveness, int]:
        """Return the live tensors of a block with few sequences, and what multiplies them in a microbatch."""
        least_sequences = self._find_least_sequences(run.cut, name, run.sequences)
        return self._find_liveness(run.cut, name, least_sequences), run.sequences // least_sequences

    def _find_least_sequences(self, cut: CutKey, name: str, sequences: int) -> int:
        """Return the sequences whose moments give those of a microbatch, so that one walk serves many sizes."""
        return 1 if self._scales_with_batch(cut, name) else sequences

    @memoise
    def _scales_with_batch(self, cut: CutKey, name: str) -> bool:
        """Return whether a block's memory is linear in the batch: all tensors have that dim and no axis cuts it."""
        block = self.block(cut, name)
        names = {
            tensor for operator in block.operators for tensor in (*operator.inputs, *operator.outputs, *operator.saved)
        }
        cuts_batch = any(dim == BATCH for sharding in cut.shardings for dim, _ in sharding.cuts)
        return not cuts_batch and all(BATCH in block.tensor[tensor_name].dims for tensor_name in names)

    @memoise
    def buffers(self, cut: CutKey, name: str, sequences: int) -> BlockBuffers:
        """Return the buffers that a block asks its framework to keep on a rank."""
        return find_block_buffers(self._find_liveness(cut, name, sequences))

    @memoise
    def count_parameters(self, cut: CutKey, name: str) -> int:
        """Return the elements of a block's parameters on a rank."""
        return self.layout(cut, name, 1).parameter_elements()

    @memoise
    def count_expert_parameters(self, cut: CutKey, name: str) -> int:
        """Return the elements of a block's parameters on a rank that only one expert uses."""
        return self.layout(cut, name, 1).expert_elements() if cut.mesh.size(EXPERT) > 1 else 0

    @memoise
    def count_replicated(self, cut: CutKey, name: str) -> tuple[int, ...]:
        """Return the elements of a block's parameters whose gradients are summed along each operator axis."""
        return replicated_elements(self.layout(cut, name, 1), self.conventions)

    def count_undeferred(self, run: RunKey, name: str) -> int:
        """Return the elements on a rank whose gradients are made with those of inputs where backward is split."""
        return self._count_undeferred(run.cut, name) if run.splits_backward else 0

    @memoise
    def _count_undeferred(self, cut: CutKey, name: str) -> int:
        return undeferred_elements(self.layout(cut, name, 1))

    @memoise
    def count_factored(self, cut: CutKey, name: str) -> tuple[int, int]:
        """Return the rows and columns of a block's matrices on a rank, plus the elements of its vectors.

        The second number is the part of experts, 0 where ranks share no experts.
        """
        layout = self.layout(cut, name, 1)
        parameter_sets = layout.block.parameters, layout.expert_parameters()
        num_all, num_expert = (factored_elements(layout, parameters) for parameters in parameter_sets)
        return num_all, num_expert

    @memoise
    def count_quantised(self, cut: CutKey, name: str) -> int:
        """Return the elements of the weights on a rank by which a block multiplies in fp8."""
        return quantised_elements(self.layout(cut, name, 1))

    @memoise
    def unit(self, cut: CutKey, name: str) -> Unit:
        """Return what data ranks share at once of a block's parameters."""
        return find_unit(self.training, self.layout(cut, name, 1))

    @memoise
    def layout(self, cut: CutKey, name: str, sequences: int) -> BlockLayout:
        """Return a block as a plan cuts it, with microbatches of so many sequences."""
        return BlockLayout.from_kind(cut.kinds.by_name[name], cut.mesh, sequences, BlockTraining.of(self.training))

    @memoise
    def plain_segments(self, cut: CutKey, name: str, sequences: int) -> BlockSegments:
        """Return the segments of a block without recomputation."""
        layout = self.layout(cut, name, sequences)
        segments = build_block_segments(layout, keeps_gathered=self.conventions.keeps_gathered)
        tables = self._list_shared_tables(cut, name)
        if not tables:
            return segments
        work = find_work(self._count_loads(cut, tables, sequences), cut.mesh.size(EXPERT))
        return with_tables(segments, tables, work, cut.embeddings)

    def _list_shared_tables(self, cut: CutKey, name: str) -> tuple[Table, ...]:
        """Return the tables of a block that data ranks share."""
        shared, block = dict(cut.embeddings.tables), self.block(cut, name).name
        tables = list_tables(self.problem.graph) if shared else ()
        return tuple(table for table in tables if table.name in shared and table.block == block)

    @memoise
    def table_loads(self, cut: CutKey, sequences: int) -> tuple[TableLoad, ...]:
        """Return what the tables that data ranks share make each of them do; nothing where they share none."""
        return self._count_loads(cut, list_tables(self.problem.graph), sequences) if cut.embeddings else ()

    def _count_loads(self, cut: CutKey, tables: tuple[Table, ...], sequences: int) -> tuple[TableLoad, ...]:
        """Return what some tables make each data rank do."""
        ranks = cut.mesh.size(EXPERT)
        return count_loads(tables, cut.embeddings, sequences * ranks, ranks, count_node_ranks(self.problem, ranks))

    def table_work(self, cut: CutKey, sequences: int) -> TableWork:
        """Return the bytes of tables for which a rank waits in a microbatch."""
        return find_work(self.table_loads(cut, sequences), cut.mesh.size(EXPERT))
