"""Compiles a stage of a captured module, cut as a plan says, into one program of torch on this rank's parts.

The program is generated once: shapes of parts, views, collectives and their transposes in backward are worked out here,
and nothing is planned while it runs. `meshwise.executor.operators.layouts` says in which layout every operator reads a
value, and in which its gradient comes back.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from meshwise.executor.capture.captured import BufferUpdate, CapturedModule, NamedDims
from meshwise.executor.capture.source_lines import find_node_line
from meshwise.executor.operators.arrangements import apply_views, emit_views, list_views
from meshwise.executor.operators.calls import (
    QUICK_CALLS,
    RESHAPES,
    Draws,
    Regathered,
    apply_changes,
    make_change,
    make_move,
    make_regathering,
    make_renewal,
    make_share,
)
from meshwise.executor.operators.collectives import OperatorPart, RankMesh, find_part_operator, move_options
from meshwise.executor.operators.cut_attention import find_attention_part
from meshwise.executor.operators.cut_experts import find_experts_part
from meshwise.executor.operators.layouts import Layouts, ReadKey, StageProgram, build_stage_programs
from meshwise.executor.operators.local_stage import LocalStage, Placement
from meshwise.strategies.plan.mesh import DATA
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.sharding import REPLICATED, ShardingSpec


def compile_stage(
    captured: CapturedModule,
    module: nn.Module,
    plan: Plan,
    ranks: RankMesh,
    stage_index: int,
    device: torch.device,
    parameters: Mapping[str, nn.Parameter] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    *,
    inputs_are_cut: bool = True,
    seed: int | None = 0,
) -> LocalStage:
    """Return a stage of a captured module on this rank.

    Parameters
    ----------
    module
        The module that was captured; this rank's parts of its parameters and buffers are copied. Parts of parameters
        on the meta device are there too.
    plan
        Its data axis cuts the batch of a microbatch.
    device
        Where the parts are, and what runs.
    parameters, buffers
        This rank's parts by the name of the whole tensor, where another stage or capture has made them already.
    inputs_are_cut
        Whether a rank is given its own samples of inputs alone; else those of all data ranks.
    seed
        That of the first draws (`meshwise.executor.operators.calls.Draws`).
    """
    axes = (DATA,) if ranks.size.get(DATA, 1) > 1 else ()
    shardings = {sharding.operator: sharding for sharding in plan.shardings}
    layouts = Layouts(captured, shardings, axes, inputs_are_cut=inputs_are_cut)
    program = build_stage_programs(layouts, plan.stages)[stage_index]
    compiler = _StageCompiler(layouts, ranks, module, device, parameters or {}, buffers or {}, seed)
    return compiler.compile(program, is_last=stage_index == len(plan.stages) - 1)


class _NamedGraph(Graph):
    """A graph whose nodes have the module and the line of the operator that is being compiled."""

    origin: Node | None = None

    def create_node(self, *arguments: Any, **options: Any) -> Node:
        """Return a new node."""
        node = super().create_node(*arguments, **options)
        if self.origin is not None:
            node.meta |= {key: self.origin.meta[key] for key in _ORIGIN_KEYS if key in self.origin.meta}
        return node


_ORIGIN_KEYS = ("nn_module_stack", "stack_trace")


class _Value(NamedTuple):
    """A value in a program: its node, or the tensor of a constant, and which named dims each torch dim has."""

    source: Node | Tensor
    dims: NamedDims


class _StageCompiler:
    def __init__(
        self,
        layouts: Layouts,
        ranks: RankMesh,
        module: nn.Module,
        device: torch.device,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        seed: int | None,
    ) -> None:
        self.layouts, self.captured, self.ranks, self.device = layouts, layouts.captured, ranks, device
        self.nodes = {node.name: node for node in self.captured.module.graph.nodes}
        named_parameters = dict(module.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = named_parameters | dict(module.named_buffers(remove_duplicate=False))
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names = {root: first_names[id(named_parameters[name])] for root, name in self.captured.parameters.items()}
        self.parts: dict[str, nn.Parameter] = dict(parameters)
        self.buffer_parts = buffers
        self.graph, self.owner, self.draws = _NamedGraph(), nn.Module(), Draws(seed)
        self.values: dict[str, _Value] = {}
        self.moved: dict[ReadKey, _Value] = {}
        self.lines: dict[str, str] = {}

    def compile(self, program: StageProgram, *, is_last: bool) -> LocalStage:
        """Return the stage that runs a program."""
        for root in program.received_roots:
            self.values[root] = _Value(self.graph.placeholder(f"received_{root}"), self.captured.dims[root])
        inputs = self._list_inputs(program)
        for name in inputs:
            self.values[name] = _Value(self.graph.placeholder(f"input_{name}"), self.captured.dims[name])
        own_parameters = [root for root in self.captured.parameters if root in program.parameters]
        for root in own_parameters:
            self._add_parameter(root)
        self._add_constants()
        for node in program.nodes:
            self._emit_operator(node)
        buffers = {update.buffer: self._emit_update(update) for update in program.updates}
        if is_last:
            self.graph.output(self._emit_loss())
        else:
            sent = tuple(
                self._arrange(self.values[root], root, self.captured.dims[root]) for root in program.sent_roots
            )
            self.graph.output(tuple(value.source for value in sent))
        names = {root: self.names[root] for root in own_parameters}
        boundary = (*program.received_roots, *program.sent_roots, *inputs)
        return LocalStage(
            GraphModule(self.owner, self.graph),
            self.ranks,
            received=program.received_roots,
            sent=() if is_last else program.sent_roots,
            inputs=inputs,
            input_places=tuple(map(self.captured.inputs.index, inputs)),
            examples={name: self._make_example(name) for name in boundary},
            parts={name: self.parts[name] for name in names.values()},
            placements={name: self._find_placement(root) for root, name in names.items()},
            summed_axes={name: self.layouts.list_summed_axes(root) for root, name in names.items()},
            buffers=buffers,
            draws=self.draws,
            lines=self.lines,
        )

    def _list_inputs(self, program: StageProgram) -> tuple[str, ...]:
        """Return the names of the inputs of the module that a program reads, in their order."""
        roots = {root for node in program.nodes for root in self.layouts.list_roots_read(node)}
        roots |= {self.layouts.roots[update.source] for update in program.updates if update.source}
        return tuple(name for name in self.captured.inputs if name in roots)

    # what a program begins with

    def _add_parameter(self, root: str) -> None:
        name = self.names[root]
        if name not in self.parts:
            placement = self._find_placement(root)
            whole = self.tensors[name]
            part = placement.cut(self.ranks, whole.detach())
            part = part if part.is_meta else part.to(self.device)
            self.parts[name] = nn.Parameter(part, requires_grad=whole.requires_grad)
        self.values[root] = _Value(self._add_attribute(self.parts[name], root), self.captured.dims[root])

    def _find_placement(self, root: str) -> Placement:
        dims = self.captured.dims[root]
        sizes = self.layouts.sizes(root)
        shape = tuple(self._get_value(root).shape)
        return Placement(dims, {dim: sizes[dim] for dim in self.layouts.dims(root)}, self._layout(root), shape)

    def _add_constants(self) -> None:
        """Compute what depends on no input, once and whole."""
        given = {name: self.tensors[target].detach().clone() for name, target in self.captured.buffers.items()}
        known: dict[str, Any] = given | dict(self.captured.constants)
        known = {name: tensor.to(self.device) for name, tensor in known.items()}
        with torch.no_grad():
            for node in self.nodes.values():
                if node.name in self.layouts.constants:
                    arguments = torch.fx.map_arg(node.args, lambda argument: known[argument.name])
                    options = torch.fx.map_arg(node.kwargs, lambda argument: known[argument.name])
                    known[node.name] = node.target(*arguments, **move_options(options, self.device))
        for name, tensor in known.items():
            if name in self.layouts.roots:
                self.values[name] = _Value(tensor, self.captured.dims[name])

    def _add_attribute(self, tensor: Tensor, name: str) -> Node:
        """Return the node that reads a tensor of the program."""
        attribute = name
        while hasattr(self.owner, attribute):
            attribute += "_"
        if isinstance(tensor, nn.Parameter):
            self.owner.register_parameter(attribute, tensor)
        else:
            self.owner.register_buffer(attribute, tensor, persistent=False)
        return self.graph.get_attr(attribute)

    # one operator

    def _emit_operator(self, node: Node) -> None:
        self.graph.origin = node
        read_values = {root: self._read_root(node, root) for root in self.layouts.list_roots_read(node)}

        def read_argument(argument: Node) -> Any:
            value = read_values[self.layouts.roots[argument.name]]
            return self._to_node(self._arrange_for(node, value, argument), argument.name)

        arguments = torch.fx.map_arg(node.args, read_argument)
        options = move_options(torch.fx.map_arg(node.kwargs, read_argument), self.device)
        names = self.layouts.list_values(node)
        if node.target is torch.ops.aten.alias.default:
            self.values[names[0]] = _Value(cast(Node, arguments[0]), self.captured.dims[names[0]])
            return
        if node.target in RESHAPES:  # one that regroups some dims may have others that are cut
            arguments = (arguments[0], self._find_part_shape(node))
        target = self._find_target(node)
        sources = self._list_regathered(node, read_values)
        if sources:
            target = make_regathering(target, [source for _, source in sources])
            arguments = ([value for value, _ in sources], *arguments)
        result = self.graph.call_function(target, arguments, options)
        self.lines[result.name] = find_node_line(node)
        if node.name in self.captured.dims:
            self.values[node.name] = _Value(result, self.captured.dims[node.name])
            return
        for user in node.users:
            if user.name in names:
                picked = self.graph.call_function(user.target, (result, user.args[1]))  # type: ignore[arg-type]
                self.values[user.name] = _Value(picked, self.captured.dims[user.name])

    def _find_target(self, node: Node) -> Callable[..., Any]:
        operator, sharding = self.layouts.operator(node), self.layouts.sharding(node)
        summed_axes = tuple(axis for dim, axes in sharding.cuts if dim in operator.reduced for axis in axes)
        part = OperatorPart(self.ranks, summed_axes, self.layouts.find_row_axes(node))
        computed = (
            find_attention_part(node, self.layouts, self.ranks)
            or find_experts_part(node, self.layouts, self.ranks)
            or find_part_operator(node, part)
        )
        target = QUICK_CALLS.get(computed, computed) if computed is node.target else _name_call(computed)
        if not _draws_numbers(node):
            return target
        layout = self._layout(self.layouts.list_values(node)[0])
        axes = tuple(axis for axis in self.ranks.size if axis in layout.cut_axes)
        number = list(self.nodes).index(node.name) * self.ranks.count_parts(tuple(self.ranks.size))
        return self.draws.make_seeded(target, number + self.ranks.find_part(axes))

    def _list_regathered(self, node: Node, values: Mapping[str, _Value]) -> list[tuple[Node, Regathered]]:
        result = []
        for root, value in values.items():
            if self.layouts.is_regathered(node, root) and isinstance(value.source, Node):
                dims, source = self.layouts.dims(root), self._layout(root)
                changes = self.ranks.list_changes(dims, source, self.layouts.find_reading(node, root).layout)
                if changes:
                    shape = tuple(self._count_local(root, source, dim) for dim in dims)
                    result.append((value.source, Regathered(self.parts[self.names[root]], shape, changes)))
        return result

    # layouts

    def _layout(self, root: str) -> ShardingSpec:
        return self.layouts.value_layouts[root]

    def _read_root(self, node: Node, root: str) -> _Value:
        """Return this rank's part of a root in the layout in which a node reads it."""
        reading, key = self.layouts.find_reading(node, root), self.layouts.find_read_key(node, root)
        union = self.layouts.gradient_layouts[key]
        if key not in self.moved:
            self.moved[key] = self._bring(root, reading.layout, union)
        missing_axes = tuple(axis for axis in union.partial if axis not in reading.gradient.partial)
        return self._share(root, self.moved[key], missing_axes)

    def _bring(self, root: str, target: ShardingSpec, union: ShardingSpec) -> _Value:
        source, value, gradient_layout = self._layout(root), self.values[root], union
        if root in self.captured.parameters:
            gradient_layout = ShardingSpec(union.cuts, tuple(axis for axis in union.partial if axis in source.cut_axes))
            late_axes = {axis for axis in union.partial if axis not in source.cut_axes}
            summed_axes = self.layouts.list_summed_axes(root)
            value = self._share(root, value, tuple(axis for axis in summed_axes if axis not in late_axes))
        return self._move(root, value, target, gradient_layout)

    def _share(self, root: str, value: _Value, axes: tuple[str, ...]) -> _Value:
        """Return a value whose gradient counts once in a sum over axes."""
        num_ranks = self.ranks.count_parts(axes)
        if num_ranks == 1 or not self._is_floating(root) or not isinstance(value.source, Node):
            return value
        return _Value(self.graph.call_function(make_share(num_ranks), (value.source,)), value.dims)

    def _move(self, root: str, value: _Value, target: ShardingSpec, gradient_layout: ShardingSpec) -> _Value:
        """Return a value in another layout; its gradient comes back in its own layout, with nothing left to sum."""
        dims, source = self.layouts.dims(root), self._layout(root)
        changes = self.ranks.list_changes(dims, source, target)
        gradient_changes = self.ranks.list_changes(dims, gradient_layout, source.without_partial)
        is_differentiable = self._is_floating(root) and isinstance(value.source, Node)
        if not changes and not (gradient_changes and is_differentiable):
            return value
        if source.cuts != target.cuts or gradient_layout.cuts != source.cuts:  # a change along a named dim
            value = self._arrange(value, root, tuple((dim,) for dim in dims))
        if isinstance(value.source, Tensor):
            return _Value(apply_changes(value.source, changes), value.dims)
        call = make_move(changes, gradient_changes) if is_differentiable else make_change(changes)
        return _Value(self.graph.call_function(call, (value.source,)), value.dims)

    def _arrange(self, value: _Value, root: str, dims: NamedDims) -> _Value:
        """Return a root in its own layout in another arrangement of dims."""
        sizes = {dim: self._count_local(root, self._layout(root), dim) for dim in self.layouts.dims(root)}
        return self._apply_views(value, dims, sizes)

    def _arrange_for(self, node: Node, value: _Value, argument: Node) -> _Value:
        """Return a value, in the layout in which a node reads it, in the arrangement of an argument."""
        cuts, dims = dict(self.layouts.sharding(node).cuts), self.captured.dims[argument.name]
        # dims along which values are repeated are of no operator where one without a rule reads them
        repeated = {group[0]: size for group, size in zip(dims, argument.meta["val"].shape, strict=True) if group}
        sizes = {**repeated, **self.layouts.sizes(node.name)}
        names = [dim for group in dims for dim in group]
        local_sizes = {dim: sizes[dim] // self.ranks.count_parts(cuts.get(dim, ())) for dim in names}
        return self._apply_views(value, dims, local_sizes)

    def _find_part_shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of this rank's part of what an operator returns."""
        cuts, sizes = dict(self.layouts.sharding(node).cuts), self.layouts.sizes(node.name)
        return tuple(
            prod(sizes[dim] // self.ranks.count_parts(cuts.get(dim, ())) for dim in group)
            for group in self.captured.dims[node.name]
        )

    def _apply_views(self, value: _Value, dims: NamedDims, sizes: Mapping[str, int]) -> _Value:
        views = list_views(value.dims, dims, sizes)
        if isinstance(value.source, Tensor):
            return _Value(apply_views(value.source, views), dims)
        return _Value(emit_views(self.graph, value.source, views), dims)

    def _to_node(self, value: _Value, name: str) -> Node:
        return value.source if isinstance(value.source, Node) else self._add_attribute(value.source, name)

    # how a program ends

    def _emit_update(self, update: BufferUpdate) -> tuple[Tensor, Placement]:
        """Renew a buffer; it is cut as the value that it is renewed from, and whole where it is renewed from none."""
        whole = self.tensors[update.buffer]
        if not update.source:
            placement = Placement(((),) * whole.dim(), {}, REPLICATED, tuple(whole.shape))
            values: tuple[Node, ...] = ()
        else:
            root, dims = self.layouts.roots[update.source], self.captured.dims[update.source]
            sizes, layout = self.layouts.sizes(root), self._layout(root).without_partial
            placement = Placement(
                dims, {dim: sizes[dim] for group in dims for dim in group}, layout, tuple(whole.shape)
            )
            changes = self.ranks.list_changes(self.layouts.dims(root), self._layout(root), layout)
            value = self.values[root]
            assert isinstance(value.source, Node)
            moved = self.graph.call_function(make_change(changes), (value.source,))
            values = (self._arrange(_Value(moved, value.dims), root, dims).source,)  # type: ignore[assignment]
        part = self.buffer_parts.get(update.buffer)
        if part is None:
            part = placement.cut(self.ranks, whole.detach()).to(self.device)
        self.graph.call_function(make_renewal(part, update.program), values)
        return part, placement

    def _emit_loss(self) -> Node:
        root = self.layouts.loss
        value = self._move(root, self.values[root], REPLICATED, REPLICATED)
        shape = tuple(1 for _ in value.dims)
        node = self._to_node(value, root)
        return self.graph.call_function(torch.reshape, (node, ())) if shape else node

    def _count_local(self, root: str, layout: ShardingSpec, dim: str) -> int:
        return self.layouts.sizes(root)[dim] // self.ranks.count_parts(layout.axes(dim))

    def _get_value(self, name: str) -> Tensor:
        value = self.nodes[name].meta["val"]
        assert isinstance(value, Tensor)
        return value

    def _is_floating(self, root: str) -> bool:
        value = self._get_value(root)
        return value.is_floating_point() or value.is_complex()

    def _make_example(self, root: str) -> Tensor:
        layout, groups = self._layout(root), self.captured.dims[root]
        shape = [1] * len(groups)
        for place, group in enumerate(groups):
            for dim in group:
                shape[place] *= self._count_local(root, layout, dim)
        return torch.empty(shape, dtype=self._get_value(root).dtype, device="meta")


def _name_call(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can stand in a program: one with a name."""

    def compute(*arguments: Any, **options: Any) -> Any:
        return target(*arguments, **options)

    return compute


def _draws_numbers(node: Node) -> bool:
    """Return whether an operator draws random numbers."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(probability)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "dropout" in str(node.target)
