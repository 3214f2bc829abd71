"""The graph of a module whose operators are cut over ranks, as one rank runs it.

It is a graph as that of the whole module (`meshwise.executor.stages.export.StepGraph`): with parts of parameters, and
with collectives among its operators. So it is cut into stages, sharded and computed again as any other.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import CutError
from meshwise.executor.modules.losses import LossKind
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.local_stage import LocalStage
from meshwise.executor.operators.stage_compiler import compile_stage
from meshwise.executor.stages.cuts import find_free_nodes
from meshwise.executor.stages.export import StepGraph, list_paths
from meshwise.strategies.plan.plan import Plan

NUM_ITEMS = "num_items"


class CutGraph(NamedTuple):
    """The graph of a rank, and the program that it comes from, which has the parts of parameters."""

    step: StepGraph
    program: LocalStage


def build_cut_graph(
    captured: CapturedModule,
    module: nn.Module,
    plan: Plan,
    ranks: RankMesh,
    device: torch.device,
    *,
    whole: StepGraph | None = None,
    kind: LossKind = LossKind.SAMPLES,
) -> CutGraph:
    """Return the graph of this rank.

    Parameters
    ----------
    captured
        The module with a microbatch of this rank's samples; its loss is a mean.
    module
        It has the whole parameters.
    plan
        Its shardings cut operators over the axes of ``ranks``.
    whole
        The graph of the whole module with the weight of its loss, where that is no mean over samples.
    kind
        What the loss becomes.

    Raises
    ------
    CutError
        Where forward changes buffers, or the weight of a loss depends on parameters.
    """
    program = compile_stage(captured, module, plan, ranks, 0, device, seed=None)
    if program.buffer_parts:
        name = next(iter(program.buffer_parts))
        rule = "a module that is cut changes no buffers in stages, with ZeRO or recomputation"
        raise CutError(f"{rule}, met {name}; nearest: tensor={ranks.count_parts(tuple(ranks.size))}")
    root = program.program
    placeholders = _make_placeholders(root, program.names)
    graph: Graph = root.graph
    inputs = _name_inputs(graph, program, captured)
    output = next(iter(graph.find_nodes(op="output")))
    results = tuple(output.all_input_nodes[:1])
    if whole is not None:
        results = _weigh(graph, output, results[0], whole, inputs, kind)
        inputs += (NUM_ITEMS,) if kind is LossKind.SHARES else ()
    _separate_parameters(graph)
    values = {node.name: node.meta["val"] for node in captured.module.graph.find_nodes(op="placeholder")}
    examples = {own_name: values[name] for own_name, name in zip(inputs, captured.inputs, strict=False)}
    examples |= {name: program.parts[target] for name, target in placeholders.items()}
    _record_values(root, examples | {NUM_ITEMS: torch.empty(1, dtype=torch.long)}, device)
    trained = frozenset(name for name, part in program.parts.items() if part.requires_grad)
    return CutGraph(StepGraph(graph, root, placeholders, {}, {}, inputs, tuple(results), {}, trained), program)


def _make_placeholders(root: GraphModule, names: Mapping[str, str]) -> dict[str, str]:
    """Have a program take its parameters; return the names of those in the user's module by placeholder.

    Parameters
    ----------
    names
        By the attribute of the program.
    """
    own_names = {name.removeprefix("program."): target for name, target in names.items()}
    targets = {id(parameter): own_names[name] for name, parameter in root.named_parameters()}
    parameters = dict(root.named_parameters(remove_duplicate=False))
    placeholders: dict[str, str] = {}
    first = next(iter(root.graph.nodes))
    for node in root.graph.find_nodes(op="get_attr"):
        if node.target in parameters:
            with root.graph.inserting_before(first):
                placeholder = root.graph.placeholder(f"parameter_{node.name}")
            node.replace_all_uses_with(placeholder)
            root.graph.erase_node(node)
            placeholders[placeholder.name] = targets[id(parameters[str(node.target)])]
    return placeholders


def _name_inputs(graph: Graph, program: LocalStage, captured: CapturedModule) -> tuple[str, ...]:
    """Return the names of the placeholders of all tensors of a batch; those that nothing reads get one."""
    known = {str(node.target): node.name for node in graph.find_nodes(op="placeholder")}
    first = next(iter(graph.nodes))
    names = []
    for name in captured.inputs:
        if name in program.inputs:
            names.append(known[f"input_{name}"])
        else:
            with graph.inserting_before(first):
                names.append(graph.placeholder(f"unread_{name}").name)
    return tuple(names)


def _weigh(
    graph: Graph, output: Node, mean: Node, whole: StepGraph, inputs: tuple[str, ...], kind: LossKind
) -> tuple[Node, ...]:
    """Add the weight of a loss to a graph, as the whole graph computes it of the batch; return the loss and its weight.

    A share is the sum of a loss over the labels of the step.
    """
    weight = whole.results[1]
    if weight not in find_free_nodes(whole):
        raise CutError("the weight of a loss depends on the batch alone where operators are cut, met one that does not")
    nodes = {node.name: node for node in graph.nodes}
    copies: dict[Node, Node] = {}
    places = {name: nodes[own_name] for name, own_name in zip(whole.inputs, inputs, strict=False)}
    with graph.inserting_before(output):
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                if node.name in places:
                    copies[node] = places[node.name]
            elif node.op == "call_function" and all(source in copies for source in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if weight not in copies:
            raise CutError("the weight of a loss is computed of the batch alone, met one of buffers; nearest: data=1")
        count = copies[weight]
        finite = graph.call_function(torch.nan_to_num, (mean,))  # a mean over no labels is no number
        is_counted = graph.call_function(torch.gt, (count, 0))
        total = graph.call_function(torch.where, (is_counted, mean, finite))
        total = graph.call_function(torch.mul, (total, count))
    if kind is not LossKind.SHARES:
        return total, count
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        num_items = graph.placeholder(NUM_ITEMS)
    with graph.inserting_before(output):
        scalar = graph.call_function(torch.reshape, (num_items, ()))
        return (graph.call_function(torch.div, (total, scalar)),)


def _separate_parameters(graph: Graph) -> None:
    """Copy what is computed of parameters alone for every module that reads it: no stage sends it to another one."""
    own_nodes: list[Node] = []
    for node in graph.nodes:
        sources = node.all_input_nodes
        is_parameter = node.op == "placeholder" and node.name.startswith("parameter_")
        if is_parameter or (node.op == "call_function" and sources and all(source in own_nodes for source in sources)):
            own_nodes.append(node)
    for node in reversed(own_nodes):
        if node.op != "call_function":
            continue
        readers = list(node.users)
        first_paths = list_paths(readers[0]) if readers else ()
        for reader in readers[1:]:
            if list_paths(reader) != first_paths:
                with graph.inserting_before(reader):
                    copy = graph.node_copy(node, lambda source: source)
                copy.meta = {key: value for key, value in reader.meta.items() if key != "val"}
                reader.replace_input_with(node, copy)


def _record_values(root: GraphModule, examples: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the shape and dtype of every value of a graph, without computing anything.

    Parameters
    ----------
    examples
        A tensor of the shape and dtype of every placeholder.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root.recompile()
    with mode, torch.no_grad():
        placeholders = [examples[node.name] for node in root.graph.find_nodes(op="placeholder")]
        arguments = [torch.empty(tuple(item.shape), dtype=item.dtype, device=device) for item in placeholders]
        _ValueRecorder(root, mode).run(*arguments, enable_io_processing=False)


class _ValueRecorder(Interpreter):
    """Runs a graph on tensors without data, and keeps every value at its node."""

    def __init__(self, root: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(root)
        self.mode = mode

    def run_node(self, n: Node) -> Any:
        """Return the value of a node."""
        n.meta["val"] = value = super().run_node(n)
        return value

    def fetch_attr(self, target: str) -> Any:
        """Return a constant of the program without its data."""
        return self.mode.from_tensor(super().fetch_attr(target))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator; one that draws random numbers draws none."""
        own_target: Callable[..., Any] = getattr(target, "__wrapped__", target)
        return own_target(*args, **kwargs)
