"""Runs a captured program on one rank, with every operator cut as a plan says.

Every value is a DTensor with one torch dim for each named dim. An operator reads a value in the layout that its
sharding needs; explicit collectives, one after the other, bring it there, and nothing moves implicitly. Gradients
return to the layout of their value; those of parameters are summed once a step.

A rank also renews its parts of buffers: running statistics and counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx import Node

from meshwise.executor.capture.captured import BufferUpdate, CapturedModule
from meshwise.executor.capture.source_lines import find_node_line, prefix_line
from meshwise.executor.operators.collectives import Dims, Move, OperatorPart, RankMesh, move_options, run_on_part
from meshwise.executor.operators.layouts import Layouts, ReadKey, StageProgram, build_stage_programs
from meshwise.executor.parallel.exchange import Share
from meshwise.executor.recording.private_torch import detach_saved
from meshwise.strategies.plan.mesh import DATA, PIPELINE
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec


class Buffers:
    """The buffers that this rank renews, by name.

    A buffer is cut as the value that it is renewed from is; it is whole where it is renewed from no value.

    Parameters
    ----------
    updates
        The updates of the stages of this rank.
    module_buffers
        The whole buffers of the module.
    """

    def __init__(
        self, layouts: Layouts, ranks: RankMesh, updates: Iterable[BufferUpdate], module_buffers: Mapping[str, Tensor]
    ) -> None:
        self.layouts, self.ranks = layouts, ranks
        self.updates = {update.buffer: update for update in updates}
        self._shapes = {name: module_buffers[name].shape for name in self.updates}
        self._parts = {name: self._cut(update, module_buffers[name]) for name, update in self.updates.items()}

    @torch.no_grad()
    def renew(self, update: BufferUpdate, value: Tensor | None) -> None:
        """Renew a buffer from this rank's part of the root of the value that its update reads."""
        part = self._parts[update.buffer]
        if value is None:
            self._parts[update.buffer] = update.program.forward(part)
            return
        root, (dims, spec) = self.layouts.roots[update.source], self._find_layout(update)
        root_dims = self.layouts.dims(root)
        value = self.ranks.redistribute(value.detach(), root_dims, self.layouts.value_layouts[root], spec)
        self._parts[update.buffer] = update.program.forward(part, value.permute([root_dims.index(dim) for dim in dims]))

    def gather_buffer(self, name: str) -> Tensor:
        """Return a whole buffer, gathered from the parts of all ranks."""
        dims, spec = self._find_layout(self.updates[name])
        return self.ranks.redistribute(self._parts[name], dims, spec, REPLICATED).reshape(self._shapes[name])

    def _cut(self, update: BufferUpdate, buffer: Tensor) -> Tensor:
        if not update.source:
            return buffer.clone()
        dims, spec = self._find_layout(update)
        values = buffer.reshape([self.layouts.sizes(self.layouts.roots[update.source])[dim] for dim in dims])
        return self.ranks.redistribute(values, dims, REPLICATED, spec).clone()

    def _find_layout(self, update: BufferUpdate) -> tuple[Dims, ShardingSpec]:
        """Return the named dims of a buffer, one for each torch dim of its part, and its layout."""
        if not update.source:
            return (), REPLICATED
        dims = tuple(dim for group in self.layouts.captured.dims[update.source] for dim in group)
        return dims, self.layouts.value_layouts[self.layouts.roots[update.source]].without_partial


class OperatorNetwork(nn.Module):
    """A captured module on one rank of a mesh.

    ``parts`` has this rank's parts of parameters by root, ``names`` the names of the parameters in the module. A tied
    parameter has one of its names.

    Parameters
    ----------
    module
        The module that was captured; this rank's parts of its parameters and buffers are copied.
    device
        The device of these parts and of all computation.
    """

    def __init__(
        self, captured: CapturedModule, module: nn.Module, plan: Plan, ranks: RankMesh, device: torch.device
    ) -> None:
        super().__init__()
        self.captured, self.ranks, self.device = captured, ranks, device
        axes = (DATA,) if ranks.size.get(DATA, 1) > 1 else ()
        self.layouts = Layouts(captured, {sharding.operator: sharding for sharding in plan.shardings}, axes)
        self.programs = build_stage_programs(self.layouts, plan.stages)
        self._values = {node.name: node.meta.get("val") for node in captured.module.graph.nodes}
        parameters = module.named_parameters(remove_duplicate=False)
        tensors = dict(parameters) | dict(module.named_buffers(remove_duplicate=False))
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names = {root: first_names[id(tensors[name])] for root, name in captured.parameters.items()}
        self.parts = nn.ParameterDict()
        self._fixed: dict[str, Tensor] = {}
        readers = self._find_readers(plan)
        for placeholder, positions in readers.items():
            if ranks.coordinate.get(PIPELINE, 0) in positions:
                module_parameter = tensors[captured.parameters[placeholder]]
                part = self._cut_parameter(placeholder, module_parameter.detach())
                self.parts[placeholder] = nn.Parameter(part, requires_grad=module_parameter.requires_grad)
        shared_positions = {positions for positions in readers.values() if len(positions) > 1}
        groups = {positions: ranks.make_group(PIPELINE, positions) for positions in sorted(shared_positions)}
        self._shared_groups = {
            root: groups[positions] for root, positions in readers.items() if positions in shared_positions
        }
        buffers = {placeholder: tensors[name].detach().clone() for placeholder, name in captured.buffers.items()}
        self._fixed |= {name: value.to(device) for name, value in captured.constants.items()} | buffers
        self._evaluate_constants()
        stages = plan.stages_at(ranks.coordinate.get(PIPELINE, 0))
        updates = [update for stage in stages for update in self.programs[stage].updates]
        self.renewed_buffers = Buffers(self.layouts, ranks, updates, tensors)

    def _find_readers(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Return the pipeline positions that read each parameter, in order."""
        readers: dict[str, set[int]] = {}
        for program, position in zip(self.programs, plan.positions, strict=True):
            for root in program.parameters:
                readers.setdefault(root, set()).add(position)
        return {root: tuple(sorted(readers[root])) for root in self.captured.parameters if root in readers}

    def _evaluate_constants(self) -> None:
        """Compute the nodes that depend on no input, once and whole."""
        constants = dict(self._fixed)
        for node in self.captured.module.graph.nodes:
            if node.name in self.layouts.constants:
                arguments = torch.fx.map_arg(node.args, lambda argument: constants[argument.name])
                options = torch.fx.map_arg(node.kwargs, lambda argument: constants[argument.name])
                constants[node.name] = node.target(*arguments, **move_options(options, self.device))
        self._fixed = {name: value for name, value in constants.items() if name in self.layouts.roots}

    def _cut_parameter(self, root: str, parameter: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        dims = self.layouts.dims(root)
        values = parameter.reshape([self.layouts.sizes(root)[dim] for dim in dims])
        return self.ranks.redistribute(values, dims, REPLICATED, self.layouts.value_layouts[root]).clone()

    def gather_parameter(self, root: str, part: Tensor) -> Tensor:
        """Return a whole parameter, or its whole gradient, gathered from the parts of all ranks."""
        dims = self.layouts.dims(root)
        result = self.ranks.redistribute(part, dims, self.layouts.value_layouts[root], REPLICATED)
        return result.reshape(self._values[root].shape)

    def list_unread(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of a module, by name, that no stage reads and so no step changes."""
        names_read = {self.names[root] for program in self.programs for root in program.parameters}
        return {name: parameter for name, parameter in module.named_parameters() if name not in names_read}

    def dtype(self, root: str) -> torch.dtype:
        """Return the dtype of a root."""
        return self._values[root].dtype  # type: ignore[no-any-return]

    def sum_gradients(self) -> None:
        """Sum gradients over the axes along which ranks have the same parameter, but other parts of its operators.

        The gradients of a parameter that several pipeline ranks read are then summed over these ranks.
        """
        for axis in self.ranks.size:
            part_gradients = [part.grad for root, part in self.parts.items() if axis in self.list_summed_axes(root)]
            gradients = [gradient for gradient in part_gradients if gradient is not None]
            if gradients:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                total = self.ranks.all_reduce(flat, axis)
                for gradient, piece in zip(gradients, torch.split(total, [g.numel() for g in gradients]), strict=True):
                    gradient.copy_(piece.view_as(gradient))
        for root, group in self._shared_groups.items():
            if root in self.parts and self.parts[root].requires_grad:
                part = self.parts[root]
                gradient = torch.zeros_like(part) if part.grad is None else part.grad
                part.grad = self.ranks.all_reduce(gradient, PIPELINE, group)

    def list_summed_axes(self, root: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of a parameter is summed once a step, not in every pass."""
        placed_axes = self.layouts.value_layouts[root].cut_axes
        partial_axes = [spec.partial for (name, *_), spec in self.layouts.gradient_layouts.items() if name == root]
        return tuple(axis for axis in dict.fromkeys(chain.from_iterable(partial_axes)) if axis not in placed_axes)


class Pass:
    """One microbatch in one stage: its values so far, and these values in the layouts that operators read."""

    def __init__(self, network: OperatorNetwork, program: StageProgram, inputs: Sequence[Tensor]) -> None:
        self.network, self.ranks, self.layouts = network, network.ranks, network.layouts
        self.program = program
        self.values: dict[str, DTensor] = {}
        self.locals: dict[str, Tensor] = {}
        self.read_values: dict[ReadKey, Tensor] = {}
        named_inputs = dict(zip(network.captured.inputs, inputs, strict=True)) | network._fixed
        for name, tensor in named_inputs.items():
            self.locals[name] = tensor.reshape(self.layouts.tensor(name).shape)
        self.locals |= dict(network.parts.items())

    def forward(self, messages: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage on the values from the stage before, and return the values for the next one."""
        for root, value in zip(self.program.received_roots, messages, strict=True):
            self.locals[root] = value.requires_grad_(value.is_floating_point())
        for node in self.program.nodes:
            self._run_node(node)
        for update in self.program.updates:
            value_read = self._find_local(self.layouts.roots[update.source]) if update.source else None
            self.network.renewed_buffers.renew(update, value_read)
        self.sent_values = tuple(self._find_local(root) for root in self.program.sent_roots)
        return tuple(value.detach() for value in self.sent_values)

    def backward(self, gradients: Sequence[Tensor], loss: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run backward from the gradients of sent values, or from a loss; return the gradients of received values."""
        ends = list(zip(self.list_differentiable(self.sent_values), gradients, strict=True))
        ends += [(loss, torch.ones_like(loss))] if loss is not None else []
        ends = [(value, gradient) for value, gradient in ends if value.requires_grad]
        torch.autograd.backward([value for value, _ in ends], [gradient for _, gradient in ends])
        received_values = self.list_differentiable([self.locals[root] for root in self.program.received_roots])
        return tuple(torch.zeros_like(value) if value.grad is None else value.grad for value in received_values)

    def make_receive_buffers(self) -> list[Tensor]:
        """Return empty tensors for the values from the stage before."""
        network, roots = self.network, self.program.received_roots
        return [torch.empty(self._find_shape(r), dtype=network.dtype(r), device=network.device) for r in roots]

    def make_gradient_buffers(self) -> list[Tensor]:
        """Return empty tensors for the gradients of the values that this stage sent."""
        values = self.list_differentiable(self.sent_values)
        return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]

    def _find_shape(self, root: str) -> list[int]:
        """Return the sizes of a rank's part of a root."""
        tensor, spec = self.layouts.tensor(root), self.layouts.value_layouts[root]
        dim_sizes = zip(tensor.dims, tensor.shape, strict=True)
        return [size // self.ranks.count_parts(spec.axes(dim)) for dim, size in dim_sizes]

    @staticmethod
    def list_differentiable(values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that can have gradients: those of floating point."""
        return [value for value in values if value.is_floating_point()]

    def _run_node(self, node: Node) -> None:
        """Run the operator of a node on this rank's parts."""
        layouts = self.layouts
        reads = {name: self._read_root(node, name) for name in layouts.list_roots_read(node)}

        def read_argument(argument: Node) -> Any:
            return self._shape_argument(node, argument, reads[layouts.roots[argument.name]])

        arguments = torch.fx.map_arg(node.args, read_argument)
        options = torch.fx.map_arg(node.kwargs, read_argument)
        operator, sharding = layouts.operator(node), layouts.sharding(node)
        summed_axes = tuple(axis for dim, axes in sharding.cuts if dim in operator.reduced for axis in axes)
        part = OperatorPart(self.ranks, summed_axes, self._find_row_axes(node, sharding))
        options = move_options(options, self.network.device)
        try:
            with saved_tensors_hooks(*self._make_gather_hooks(node)):
                result = run_on_part(node, part, arguments, options)
            self._keep_result(node, result)
        except RuntimeError as error:
            error.args = (prefix_line(find_node_line(node), f"{node.target} on parts of its operands: {error}"),)
            raise

    def loss(self) -> Tensor:
        """Return the loss, summed over ranks where it is partial."""
        root = self.layouts.loss
        layout = self.layouts.value_layouts[root]
        part = self._find_local(root)
        result: Tensor = Move.apply(part, self.ranks, self.layouts.dims(root), layout, REPLICATED, REPLICATED)  # type: ignore[no-untyped-call]
        return result.reshape(())

    def _find_row_axes(self, node: Node, sharding: OperatorSharding) -> tuple[str, ...]:
        """Return the axes that cut the first dim of the first argument of a node."""
        argument = node.args[0] if node.args else None
        dims = self.network.captured.dims.get(argument.name, ()) if isinstance(argument, Node) else ()
        cuts = dict(sharding.cuts)
        return tuple(axis for dim in (dims[0] if dims else ()) for axis in cuts.get(dim, ()))

    def _keep_result(self, node: Node, result: Any) -> None:
        is_tuple = isinstance(result, tuple | list)
        indices = [int(str(user.args[1])) for user in node.users] if is_tuple else []
        values = [result[index] for index in sorted(indices)] if is_tuple else [result]
        for name, value in zip(self.layouts.list_values(node), values, strict=True):
            dims, spec = self.layouts.dims(name), self.layouts.value_layouts[name]
            part, placements = value.reshape(self._find_shape(name)), self._list_placements(dims, spec)
            self.values[name] = DTensor.from_local(part, self.ranks.mesh, placements, run_check=False)

    def _list_placements(self, dims: tuple[str, ...], spec: ShardingSpec) -> list[Placement]:
        placements: dict[str, Placement] = {axis: Partial() for axis in spec.partial}
        placements |= {axis: Shard(dims.index(dim)) for dim, axes in spec.cuts for axis in axes}
        return [placements.get(axis, Replicate()) for axis in self.ranks.size]

    def _find_local(self, root: str) -> Tensor:
        """Return this rank's part of a root; its gradient comes back in the layout of the root, complete."""
        if root not in self.locals:
            dims, spec = self.layouts.dims(root), self.layouts.value_layouts[root].without_partial
            self.locals[root] = self.values[root].to_local(grad_placements=self._list_placements(dims, spec))
        return self.locals[root]

    def _read_root(self, node: Node, root: str) -> Tensor:
        """Return this rank's part of a root in the layout in which a node reads it."""
        reading, dims = self.layouts.find_reading(node, root), self.layouts.dims(root)
        key = self.layouts.find_read_key(node, root)
        union = self.layouts.gradient_layouts[key]
        if key not in self.read_values:
            self.read_values[key] = self._bring_root(root, dims, reading.layout, union)
        value = self.read_values[key]
        missing_axes = tuple(axis for axis in union.partial if axis not in reading.gradient.partial)
        return self._share_value(value, missing_axes) if value.is_floating_point() else value

    def _share_value(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return a value for a reader whose gradient is complete on every rank, while others' are summed over ``axes``.

        The sum then counts this gradient once.
        """
        if self.ranks.count_parts(axes) == 1:
            return value
        result: Tensor = Share.apply(value, self.ranks.count_parts(axes))  # type: ignore[no-untyped-call]
        return result

    def _bring_root(self, root: str, dims: tuple[str, ...], target: ShardingSpec, union: ShardingSpec) -> Tensor:
        source, part = self.layouts.value_layouts[root], self._find_local(root)
        if not part.is_floating_point():
            return self.ranks.redistribute(part, dims, source, target)
        gradient_layout = union
        if root in self.network.parts:
            gradient_layout = ShardingSpec(union.cuts, tuple(axis for axis in union.partial if axis in source.cut_axes))
            late_axes = {axis for axis in union.partial if axis not in source.cut_axes}
            summed_axes = self.network.list_summed_axes(root)
            part = self._share_value(part, tuple(axis for axis in summed_axes if axis not in late_axes))
        result: Tensor = Move.apply(part, self.ranks, dims, source, target, gradient_layout)  # type: ignore[no-untyped-call]
        return result

    def _shape_argument(self, node: Node, argument: Node, value: Tensor) -> Tensor:
        """Return a root's part in the dims and the shape that a node's argument has."""
        captured, root = self.network.captured, self.layouts.roots[argument.name]
        root_dims, dims = self.layouts.dims(root), captured.dims[argument.name]
        cuts = dict(self.layouts.sharding(node).cuts)
        named_dims = [dim for group in dims for dim in group]
        sizes = self.layouts.sizes(node.name)
        size = {dim: sizes[dim] // self.ranks.count_parts(cuts.get(dim, ())) for dim in named_dims}
        value = value.permute([root_dims.index(dim) for dim in named_dims if dim in root_dims])
        for index, dim in enumerate(named_dims):
            if dim not in root_dims:
                value = value.unsqueeze(index).expand(*value.shape[:index], size[dim], *value.shape[index:])
        return value.reshape([prod(size[dim] for dim in group) for group in dims])

    def _make_gather_hooks(self, node: Node) -> tuple[Any, Any]:
        """Return hooks on saved tensors: of gathered weights only the part is kept, and gathered again for backward."""
        gathered_roots: dict[int, tuple[str, ShardingSpec]] = {}
        for root in self.layouts.list_roots_read(node):
            layout = self.layouts.find_reading(node, root).layout
            if self.layouts.is_regathered(node, root):
                value = self.read_values[self.layouts.find_read_key(node, root)]
                gathered_roots[value.untyped_storage().data_ptr()] = root, layout
        regathered: dict[str, Tensor] = {}

        def pack(tensor: Tensor) -> Any:
            entry = gathered_roots.get(tensor.untyped_storage().data_ptr())
            if entry is None:
                return detach_saved(tensor)
            return (*entry, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(entry: Any) -> Tensor:
            if isinstance(entry, Tensor):
                return entry
            root, layout, size, stride, offset = entry
            if root not in regathered:
                source, part = self.layouts.value_layouts[root], self.network.parts[root].detach()
                regathered[root] = self.ranks.redistribute(part, self.layouts.dims(root), source, layout)
            return regathered.pop(root).as_strided(size, stride, offset)

        return pack, unpack
