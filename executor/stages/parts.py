"""The parts of a stage: pieces of the graph as modules with parameters of their own.

A block of the user's module is a part, and so is what lies between two blocks. Its code is that of ``torch.fx``: plain
Python that calls the operators.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from meshwise.executor.modules.blocks import make_recompute_contexts
from meshwise.executor.stages.cuts import find_free_nodes
from meshwise.executor.stages.export import StepGraph, list_paths
from meshwise.strategies.plan.recomputation import LayerRecompute, Recompute


@dataclass(frozen=True)
class StageNodes:
    """The nodes of a stage.

    Parameters
    ----------
    pieces
        The nodes of every part in order, and the name of the block that the part is; empty for other parts.
    received, sent
        Values of earlier stages that this stage or a later one reads, and those that it hands to the next stage.
    bound
        Names of floats that cross boundaries without a gradient.
    results
        The loss, and its weight, on the last stage.
    """

    pieces: tuple[tuple[str, tuple[Node, ...]], ...]
    received: tuple[Node, ...]
    sent: tuple[Node, ...]
    bound: frozenset[str]
    results: tuple[Node, ...] = ()

    @property
    def operators(self) -> tuple[Node, ...]:
        """All nodes of the stage."""
        return tuple(node for _, nodes in self.pieces for node in nodes)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that are parts of the stage, in order."""
        return tuple(name for name, _ in self.pieces if name)


def divide_graph(
    step: StepGraph, operators: Sequence[Node], cuts: Sequence[int], blocks: frozenset[str]
) -> tuple[StageNodes, ...]:
    """Return the nodes of every stage.

    Parameters
    ----------
    operators
        Those that belong to stages (`meshwise.executor.stages.cuts.list_operators`).
    cuts
        Places of operators at which stages after the first begin.
    blocks
        Names of the blocks of the user's module.
    """
    ends = [*cuts, len(operators)]
    stage_of: dict[Node, int] = {}
    for place, node in enumerate(operators):
        # boundaries carry tensors: who takes apart a list of them is where it is made
        lists = [stage_of[source] for source in node.all_input_nodes if _is_list(source) and source in stage_of]
        stage_of[node] = max(lists, default=bisect_right(cuts, place))
    stage_nodes = [tuple(node for node in operators if stage_of[node] == stage) for stage in range(len(ends))]
    last_stages: dict[Node, int] = {}
    for node in operators:
        for source in node.all_input_nodes:
            if source in stage_of:
                last_stages[source] = max(last_stages.get(source, 0), stage_of[node])
    last_stages |= {node: len(cuts) for node in step.results if node in stage_of}
    crossing = [
        tuple(node for node in operators if stage_of[node] <= boundary < last_stages.get(node, 0))
        for boundary in range(-1, len(ends))
    ]
    differentiable_nodes = _find_differentiable(step)
    bound = frozenset(
        node.name
        for nodes in crossing
        for node in nodes
        if node not in differentiable_nodes and node.meta["val"].is_floating_point()
    )
    free_nodes, final = find_free_nodes(step), len(ends) - 1
    return tuple(
        StageNodes(
            tuple(_list_pieces(step, nodes, free_nodes, blocks, step.results if stage == final else ())),
            crossing[stage],
            crossing[stage + 1],
            bound,
            step.results if stage == final else (),
        )
        for stage, nodes in enumerate(stage_nodes)
    )


def splits_by_inputs(step: StepGraph, nodes: StageNodes) -> bool:
    """Return whether torch can compute the gradients of a stage's parameters after those of what it has received.

    Torch goes on from the operators that lie on a path from a received value to what is sent. A parameter that is read
    beside such paths, as by the embedding of a decoder that receives an encoder's states, would have no gradient, or
    twice its own (`torch.distributed.pipelining._backward.get_param_groups`). What is computed of parameters alone, as
    a bias of positions, may be beside: what lies on a path reads it.
    """
    inner = {node for node in nodes.received if node.name not in nodes.bound and _passes_gradients(node)}
    if len(inner) != 1 or nodes.bound:  # of several paths torch merges the groups of parameters wrongly
        return False
    beside = {node for node in step.graph.nodes if step.parameters.get(node.name) in step.trained}
    of_batch = {node for node in step.graph.nodes if node.op == "placeholder" and node.name in step.inputs}
    for node in step.graph.nodes:
        if node.op == "call_function" and _meets(node, of_batch):
            of_batch.add(node)
    for node in nodes.operators:
        if _meets(node, inner):
            inner.add(node)
        elif _meets(node, beside):
            if _meets(node, of_batch):
                return False
            beside.add(node)
    return bool(inner) and beside.isdisjoint(nodes.sent)


def _is_list(node: Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _find_differentiable(step: StepGraph) -> set[Node]:
    """Return the nodes through which the loss depends on trained parameters."""
    trained_nodes: set[Node] = set()
    for node in step.graph.nodes:
        is_trained = node.op == "placeholder" and step.parameters.get(node.name) in step.trained
        if is_trained or (node.op == "call_function" and _passes_gradients(node) and _meets(node, trained_nodes)):
            trained_nodes.add(node)
    result = {step.results[0]}
    for node in reversed(step.graph.nodes):
        if node in result and _passes_gradients(node):
            result.update(trained_nodes.intersection(node.all_input_nodes))
    return result


def _meets(node: Node, nodes: set[Node]) -> bool:
    return any(source in nodes for source in node.all_input_nodes)


def _passes_gradients(node: Node) -> bool:
    """Return whether gradients of an operator's results go on to its arguments."""
    value = node.meta.get("val")
    outputs = value if isinstance(value, tuple | list) else [value]
    is_numeric = any(
        isinstance(output, Tensor) and (output.is_floating_point() or output.is_complex()) for output in outputs
    )
    return is_numeric and "detach" not in str(node.target)


def _list_pieces(
    step: StepGraph,
    nodes: Sequence[Node],
    free_nodes: frozenset[Node],
    blocks: frozenset[str],
    results: Sequence[Node],
) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Yield the parts of a stage; first what it computes of the batch alone, outside its own blocks."""
    needed: set[Node] = set()
    pending = [*nodes, *results]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in free_nodes and source not in needed:
                needed.add(source)
                pending.append(source)
    needed.update(node for node in results if node in free_nodes)
    first_nodes = tuple(node for node in step.graph.nodes if node in needed and node.op == "call_function")
    if first_nodes:
        yield "", first_nodes
    named_nodes = zip(_name_blocks(nodes, blocks), nodes, strict=True)
    runs = [(name, tuple(node for _, node in run)) for name, run in groupby(named_nodes, lambda pair: pair[0])]
    counts = Counter(name for name, _ in runs)
    for name, run in runs:
        yield (name if counts[name] == 1 else ""), run


def _name_blocks(nodes: Sequence[Node], blocks: frozenset[str]) -> Iterator[str]:
    """Yield the name of the block of every node; a node without a module is of the block of the node before."""
    name = ""
    for node in nodes:
        if node.meta.get("nn_module_stack"):
            name = next((path for path in list_paths(node) if path in blocks), "")
        yield name


class Part(nn.Module):
    """A piece of the graph, with the parameters that no other part of its stage reads.

    Parameters
    ----------
    name
        The block that it is, or empty.
    code
        What it computes.
    parameters
        The parameters of its own, by their names in the user's module.
    fixed
        Buffers and tensors made out of numbers, by the names of their placeholders.
    recompute
        What backward computes of it again instead of keeping what forward makes.
    """

    def __init__(
        self,
        name: str,
        code: "PartCode",
        parameters: Mapping[str, nn.Parameter],
        fixed: Mapping[str, Tensor],
        *,
        recompute: LayerRecompute,
    ) -> None:
        super().__init__()
        self.name, self.inputs, self.outputs, self.recompute = name, code.inputs, code.outputs, recompute
        self._keys = tuple(map(make_key, code.parameters))
        self._fixed = tuple(fixed[fixed_name] for fixed_name in code.fixed)
        self.parameter_names = tuple(dict.fromkeys(code.parameters))
        for parameter_name in self.parameter_names:
            self.register_parameter(make_key(parameter_name), parameters[parameter_name])
        self._program = (code.program,)  # in a tuple: it is no module of this one

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the part."""
        if self.recompute is Recompute.NONE:
            return self._run(*values)
        contexts = partial(make_recompute_contexts, self.recompute)
        result: tuple[Tensor, ...] = checkpoint(self._run, *values, use_reentrant=False, context_fn=contexts)
        return result

    def _run(self, *values: Tensor) -> tuple[Tensor, ...]:
        parameters = [getattr(self, key) for key in self._keys]
        result: tuple[Tensor, ...] = self._program[0](*values, *parameters, *self._fixed)
        return result


def make_key(name: str) -> str:
    """Return the attribute for a parameter of the user's module, whose name has dots.

    >>> make_key("layers.0.weight")
    'layers/0/weight'
    """
    return name.replace(".", "/")


class PartCode(NamedTuple):
    """The code of a piece of the graph: a function of values, then parameters of its own, then what is fixed.

    Parameters
    ----------
    inputs, outputs
        Names of values; a parameter that several parts read is a value of its name in the user's module.
    parameters
        Names in the user's module; a tied one may be there twice.
    fixed
        Names of placeholders.
    """

    program: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    fixed: tuple[str, ...]


def build_code(step: StepGraph, nodes: Sequence[Node], outputs: Sequence[Node], own: frozenset[str]) -> PartCode:
    """Return the code of a piece of the graph.

    Parameters
    ----------
    outputs
        What it returns.
    own
        Names of the parameters that are the part's.
    """
    inside = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    sources |= dict.fromkeys(node for node in outputs if node not in inside)
    attributes = [source for source in sources if source.op == "get_attr"]
    arguments = [source for source in sources if source.op != "get_attr"]
    fixed = [source for source in arguments if source.name in step.buffers or source.name in step.fixed]
    parameters = [source for source in arguments if step.parameters.get(source.name) in own]
    values = [source for source in arguments if source not in fixed and source not in parameters]
    graph = Graph()
    copies = {source: graph.placeholder(source.name) for source in (*values, *parameters, *fixed)}
    copies |= {source: graph.get_attr(str(source.target)) for source in attributes}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    root: dict[str, Any] = {str(source.target): getattr(step.root, str(source.target)) for source in attributes}
    return PartCode(
        GraphModule(root, graph),
        tuple(step.parameters.get(source.name, source.name) for source in values),
        tuple(node.name for node in outputs),
        tuple(step.parameters[source.name] for source in parameters),
        tuple(source.name for source in fixed),
    )


def list_parameter_names(step: StepGraph, nodes: Iterable[Node]) -> list[str]:
    """Return the names of the parameters that nodes read, each once."""
    sources = (source.name for node in nodes for source in node.all_input_nodes)
    return list(dict.fromkeys(step.parameters[name] for name in sources if name in step.parameters))
