"""The layouts of the values and gradients of a captured program under a plan, and the program of each stage.

A view has no layout of its own: a node that reads a view reads the value behind it, its *root*, which is kept with one
torch dim for each named dim. The program of a pipeline stage has its nodes, and the values that cross its boundaries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torch.fx import Node

from meshwise.executor.capture.captured import BufferUpdate, CapturedModule, is_part
from meshwise.simulator.machine.compute import backward_parameters, is_bias
from meshwise.simulator.operator_graph import BATCH, Block, Operator, Tensor
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec

ReadKey = tuple[str, ShardingSpec, str]
"""Identifies one redistribution of a root: the root, the layout that it is read in, and the block's occurrence."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How an operator reads a root: the layout that it needs, and the layout of the gradient that it returns."""

    layout: ShardingSpec
    gradient: ShardingSpec


class Layouts:
    """The layouts of roots, by name.

    ``root_tasks`` has the root of every value, ``value_layouts`` the layout in which an operator makes each root, and
    ``gradient_layouts`` the layout of the gradient that comes back from all readers with one read key.

    Parameters
    ----------
    shardings
        Shardings by the name of an operator in the graph, or of an operator in one occurrence of a block.
    batch_axes
        Axes that cut the batch of every operator that has one, before the axes of its sharding: data parallelism.
    inputs_are_cut
        Whether a rank has its own samples of the inputs alone, as ``batch_axes`` cut them; else it has all.
    """

    def __init__(
        self,
        captured: CapturedModule,
        shardings: Mapping[str, OperatorSharding],
        batch_axes: tuple[str, ...] = (),
        *,
        inputs_are_cut: bool = False,
    ) -> None:
        self.captured = captured
        self._input_layout = ShardingSpec(((BATCH, batch_axes),)) if inputs_are_cut and batch_axes else REPLICATED
        self._operators = {
            f"{block.name}.{operator.name}": operator for block in captured.graph.blocks for operator in block.operators
        }
        self._repeats = {block.name: block.repeat for block in captured.graph.blocks}
        self._shardings = {name: self._find_sharding(name, shardings, batch_axes) for name in captured.operators}
        self._sizes = {block.name: _collect_sizes(block, captured.batch) for block in captured.graph.blocks}
        self._home_blocks = {placeholder: key[0] for key, placeholder in captured.parameter_names.items()}
        self.constants = _find_constants(captured)
        self._parameter_names = {placeholder: key[-1] for key, placeholder in captured.parameter_names.items()}
        self.roots: dict[str, str] = {}
        self.value_layouts: dict[str, ShardingSpec] = {}
        self.gradient_layouts: dict[ReadKey, ShardingSpec] = {}
        nodes = [node for node in captured.module.graph.nodes if node.op != "output"]
        for node in nodes:
            self._find_home(node)
            self._place(node)
        for node in nodes:
            for root in self.list_roots_read(node):
                reading = self.find_reading(node, root)
                key = self.find_read_key(node, root)
                partial = self.gradient_layouts.get(key, REPLICATED).partial
                union = tuple(dict.fromkeys([*partial, *reading.gradient.partial]))
                self.gradient_layouts[key] = ShardingSpec(reading.layout.cuts, union)

    @property
    def loss(self) -> str:
        """The root of the loss."""
        output = next(iter(self.captured.module.graph.find_nodes(op="output")))
        return self.roots[output.args[0][0].name]

    def dims(self, root: str) -> tuple[str, ...]:
        """Return the named dims of a root, one for each torch dim that it is kept with."""
        return tuple(dim for dims in self.captured.dims[root] for dim in dims)

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the sizes, by named dim, in the block that makes a value or reads it first."""
        return self._sizes[self._home_blocks[name]]

    def tensor(self, root: str) -> Tensor:
        """Return a root as a tensor of the operator graph."""
        dims = self.dims(root)
        return Tensor(root, dims, tuple(self.sizes(root)[dim] for dim in dims), "fp32")

    def _find_sharding(
        self, node: str, shardings: Mapping[str, OperatorSharding], batch_axes: tuple[str, ...]
    ) -> OperatorSharding:
        """Return the sharding of a node: that of its occurrence of the block, or that of all occurrences."""
        name = self.captured.operators[node]
        occurrence_name = f"{self.find_block(node)}.{name.rpartition('.')[2]}"
        chosen_sharding = shardings.get(occurrence_name) or shardings.get(name) or OperatorSharding(name, ())
        whole_dims = [dim for dim, _ in chosen_sharding.cuts if dim in self._operators[name].uncut]
        if whole_dims:
            raise ValueError(f"shardings: {name} needs {', '.join(whole_dims)} whole, met {chosen_sharding.cuts}")
        # where each sample depends on the whole batch, the operator reads it whole, gathered from data ranks
        is_cut_by_data = BATCH in dict(self._operators[name].dims) and BATCH not in self._operators[name].uncut
        return _with_batch(chosen_sharding, batch_axes) if is_cut_by_data else chosen_sharding

    def find_block(self, node: str) -> str:
        """Return the block of an operator's node, as stages of a plan name it: with its number if it repeats."""
        block = self.captured.operators[node].rpartition(".")[0]
        return f"{block}.{self.captured.occurrence[node]}" if self._repeats[block] > 1 else block

    def sharding(self, node: Node) -> OperatorSharding:
        """Return the sharding of a node's operator."""
        return self._shardings[node.name]

    def operator(self, node: Node) -> Operator:
        """Return the operator of a node in the graph."""
        return self._operators[self.captured.operators[node.name]]

    def list_roots_read(self, node: Node) -> tuple[str, ...]:
        """Return the roots that an operator's node reads, each once; other nodes, as aliases, read none."""
        names = [input_node.name for input_node in node.all_input_nodes if node.name in self.captured.operators]
        return tuple(dict.fromkeys(self.roots[name] for name in names if name in self.roots))

    def find_reading(self, node: Node, root: str) -> Reading:
        """Return how the operator of a node reads a root.

        Where the result of a product is partial, its bias is added on one rank only, as if to the sum, so the gradient
        of the bias is whole on every rank.
        """
        sharding, operator, tensor = self.sharding(node), self.operator(node), self.tensor(root)
        gradient = sharding.find_gradient_spec(tensor)
        if root in self.captured.parameters and is_bias(operator, tensor):
            summed_axes = {axis for dim in operator.reduced for axis in dict(sharding.cuts).get(dim, ())}
            gradient = ShardingSpec(gradient.cuts, tuple(axis for axis in gradient.partial if axis not in summed_axes))
        return Reading(sharding.find_input_spec(tensor), gradient)

    def find_read_key(self, node: Node, root: str) -> ReadKey:
        """Return the key of a reading, shared by readers of a root in one layout and one block occurrence."""
        block = self.captured.operators[node.name].rpartition(".")[0]
        return root, self.find_reading(node, root).layout, f"{block}.{self.captured.occurrence[node.name]}"

    def find_row_axes(self, node: Node) -> tuple[str, ...]:
        """Return the axes that cut the first dim of the first argument of a node."""
        argument = node.args[0] if node.args else None
        dims = self.captured.dims.get(argument.name, ()) if isinstance(argument, Node) else ()
        cuts = dict(self.sharding(node).cuts)
        return tuple(axis for dim in (dims[0] if dims else ()) for axis in cuts.get(dim, ()))

    def list_summed_axes(self, root: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of a parameter is summed once a step, not in every pass."""
        placed_axes = self.value_layouts[root].cut_axes
        partial_axes = [spec.partial for (name, *_), spec in self.gradient_layouts.items() if name == root]
        return tuple(axis for axis in dict.fromkeys(chain.from_iterable(partial_axes)) if axis not in placed_axes)

    def is_regathered(self, node: Node, root: str) -> bool:
        """Return whether a node's operator gathers a parameter again for backward.

        It does where its backward reads the parameter, and the parameter is kept in another layout than it is read in.
        """
        if root not in self.captured.parameters:
            return False
        is_reread = self._parameter_names.get(root) in backward_parameters(self.operator(node))
        return is_reread and self.find_reading(node, root).layout != self.value_layouts[root]

    def list_values(self, node: Node) -> list[str]:
        """Return the names of a node's values, in order; several values have the names of their ``getitem`` nodes."""
        if node.name in self.captured.dims:
            return [node.name]
        return [user.name for user in sorted(filter(is_part, node.users), key=lambda user: int(str(user.args[1])))]

    def _find_home(self, node: Node) -> None:
        users = [node, *_list_readers(self.captured, node)]
        name = next(
            (self.captured.operators[user.name] for user in users if user.name in self.captured.operators), None
        )
        if name is not None:
            for value in {node.name, *self.list_values(node)}:
                self._home_blocks.setdefault(value, name.rpartition(".")[0])

    def _place(self, node: Node) -> None:
        """Store the roots and the layouts of the values that a node makes."""
        if node.op == "placeholder" or node.name in self.constants:
            if node.name in self.captured.dims:
                self.roots[node.name] = node.name
                self.value_layouts[node.name] = self._find_placeholder_layout(node)
        elif node.name in self.captured.operators:
            sharding, operator = self.sharding(node), self.operator(node)
            for name in self.list_values(node):
                self.roots[name] = name
                self.value_layouts[name] = sharding.find_output_spec(operator, self.tensor(name))
        elif node.name in self.captured.dims and node.name not in self.roots:
            self.roots[node.name] = self.roots[_find_source(node).name]

    def _find_placeholder_layout(self, node: Node) -> ShardingSpec:
        """Return the layout of a placeholder: a parameter is cut as its first reader keeps it."""
        if node.name in self.captured.inputs:
            return self._input_layout
        readers = _list_readers(self.captured, node)
        if node.name not in self.captured.parameters or not readers:
            return REPLICATED
        name = self._parameter_names.get(node.name, node.name)  # the graph calls the parameter by another name
        return self.sharding(readers[0]).find_kept_spec(replace(self.tensor(node.name), name=name))


def _find_constants(captured: CapturedModule) -> frozenset[str]:
    """Return the nodes that depend on constants and buffers alone: the loss reads no buffer that changes."""
    given_names = captured.constants.keys() | captured.buffers.keys()
    names = set(given_names)
    for node in captured.module.graph.nodes:
        if node.op == "call_function" and all(input_node.name in names for input_node in node.all_input_nodes):
            names.add(node.name)
    return frozenset(names - given_names)


def _collect_sizes(block: Block, batch: int) -> dict[str, int]:
    tensors = [pair for tensor in block.tensors for pair in zip(tensor.dims, tensor.shape, strict=True)]
    return {**dict(tensors), **dict(pair for operator in block.operators for pair in operator.dims), BATCH: batch}


def _find_source(node: Node) -> Node:
    """Return the node behind a view; a ``getitem`` of a tuple is a view of the element that it picks."""
    source = node.all_input_nodes[0]
    if is_part(node):
        parts = source.args[0]
        assert isinstance(parts, list | tuple)
        source = parts[int(str(node.args[1]))]  # type: ignore[assignment]
    return source


def _list_readers(captured: CapturedModule, node: Node) -> list[Node]:
    """Return the operators' nodes that read a value, directly or through aliases, in order."""
    readers: list[Node] = []
    for user in node.users:
        readers += _list_readers(captured, user) if user.name not in captured.operators else [user]
    return readers


def _with_batch(sharding: OperatorSharding, axes: tuple[str, ...]) -> OperatorSharding:
    if not axes:
        return sharding
    cuts = dict(sharding.cuts)
    return replace(sharding, cuts=tuple((cuts | {BATCH: (*axes, *cuts.get(BATCH, ()))}).items()))


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The part of a captured program that one stage runs.

    Parameters
    ----------
    nodes
        The nodes that it runs, in order.
    parameters
        The parameters that it reads; other stages may read them too.
    updates
        The updates of buffers that it runs.
    received_roots, sent_roots
        The roots that come from the stage before and go to the next one, in the order in which they are made. These are
        all roots that a later stage reads, also those that this stage only passes on.
    """

    nodes: tuple[Node, ...]
    parameters: frozenset[str]
    updates: tuple[BufferUpdate, ...]
    received_roots: tuple[str, ...]
    sent_roots: tuple[str, ...]


def build_stage_programs(layouts: Layouts, stages: tuple[Stage, ...]) -> tuple[StageProgram, ...]:
    """Return the program of every stage."""
    captured = layouts.captured
    stage_of_block = {block: index for index, stage in enumerate(stages) for block in stage.blocks}
    nodes = [node for node in captured.module.graph.nodes if node.name in captured.operators]
    node_stages = {node: stage_of_block[layouts.find_block(node.name)] for node in nodes}
    value_stages = {name: node_stages[node] for node in nodes for name in layouts.list_values(node)}
    last_stages: dict[str, int] = {}
    for node in nodes:
        for root in layouts.list_roots_read(node):
            last_stages[root] = max(last_stages.get(root, 0), node_stages[node])
    last_stages[layouts.loss] = len(stages) - 1
    result = []
    for index in range(len(stages)):
        crossing = [
            tuple(root for root, start in value_stages.items() if start <= boundary < last_stages.get(root, start))
            for boundary in (index - 1, index)
        ]
        stage_nodes = tuple(node for node in nodes if node_stages[node] == index)
        roots_read = {root for node in stage_nodes for root in layouts.list_roots_read(node)}
        updates = tuple(
            update for update in captured.updates if value_stages.get(layouts.roots.get(update.source, ""), 0) == index
        )
        result.append(StageProgram(stage_nodes, frozenset(roots_read & captured.parameters.keys()), updates, *crossing))
    return tuple(result)
