"""Runs a captured program on one rank, with every operator cut as a plan says.

Every value is a DTensor with one torch dim for each named dim. An operator reads a value in the layout that its
sharding needs; explicit collectives, one after the other, bring it there, and nothing moves implicitly. Gradients
return to the layout of their value; those of parameters are summed once a step.

A rank also renews its parts of buffers: running statistics and counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx import Node

from meshwise.executor.capture.captured import Captured, Update
from meshwise.executor.capture.source_lines import at, line_of_node
from meshwise.executor.operators.collectives import Dims, Move, Part, Ranks, on_device, run_on_part
from meshwise.executor.operators.layouts import Bringing, Layouts, StageProgram, stage_programs
from meshwise.executor.parallel.exchange import Share
from meshwise.executor.recording.private_torch import to_keep
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

    def __init__(self, layouts: Layouts, ranks: Ranks, updates: Iterable[Update], whole: Mapping[str, Tensor]) -> None:
        self.layouts, self.ranks = layouts, ranks
        self.updates = {update.buffer: update for update in updates}
        self._shapes = {name: whole[name].shape for name in self.updates}
        self._parts = {name: self._cut(update, whole[name]) for name, update in self.updates.items()}

    @torch.no_grad()
    def renew(self, update: Update, value: Tensor | None) -> None:
        """Renew a buffer from this rank's part of the root of the value that its update reads."""
        have = self._parts[update.buffer]
        if value is None:
            self._parts[update.buffer] = update.program.forward(have)
            return
        root, (dims, spec) = self.layouts.root[update.reads], self._layout(update)
        own = self.layouts.dims(root)
        value = self.ranks.redistribute(value.detach(), own, self.layouts.produced[root], spec)
        self._parts[update.buffer] = update.program.forward(have, value.permute([own.index(dim) for dim in dims]))

    def whole(self, name: str) -> Tensor:
        """Return a whole buffer, gathered from the parts of all ranks."""
        dims, spec = self._layout(self.updates[name])
        return self.ranks.redistribute(self._parts[name], dims, spec, REPLICATED).reshape(self._shapes[name])

    def _cut(self, update: Update, whole: Tensor) -> Tensor:
        if not update.reads:
            return whole.clone()
        dims, spec = self._layout(update)
        shaped = whole.reshape([self.layouts.sizes(self.layouts.root[update.reads])[dim] for dim in dims])
        return self.ranks.redistribute(shaped, dims, REPLICATED, spec).clone()

    def _layout(self, update: Update) -> tuple[Dims, ShardingSpec]:
        """Return the named dims of a buffer, one for each torch dim of its part, and its layout."""
        if not update.reads:
            return (), REPLICATED
        dims = tuple(dim for group in self.layouts.captured.dims[update.reads] for dim in group)
        return dims, self.layouts.produced[self.layouts.root[update.reads]].complete


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

    def __init__(self, captured: Captured, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device) -> None:
        super().__init__()
        self.captured, self.ranks, self.device = captured, ranks, device
        axes = (DATA,) if ranks.size.get(DATA, 1) > 1 else ()
        self.layouts = Layouts(captured, {each.operator: each for each in plan.shardings}, axes)
        self.programs = stage_programs(captured, self.layouts, plan.stages)
        self._values = {node.name: node.meta.get("val") for node in captured.program.graph.nodes}
        named = module.named_parameters(remove_duplicate=False)
        whole = dict(named) | dict(module.named_buffers(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names = {root: first[id(whole[name])] for root, name in captured.parameters.items()}
        self.parts = nn.ParameterDict()
        self._fixed: dict[str, Tensor] = {}
        readers = self._readers(plan)
        for placeholder, positions in readers.items():
            if ranks.coordinate.get(PIPELINE, 0) in positions:
                full = whole[captured.parameters[placeholder]]
                part = self._part(placeholder, full.detach())
                self.parts[placeholder] = nn.Parameter(part, requires_grad=full.requires_grad)
        several = {positions for positions in readers.values() if len(positions) > 1}
        groups = {positions: ranks.some(PIPELINE, positions) for positions in sorted(several)}
        self._kept_twice = {root: groups[positions] for root, positions in readers.items() if positions in several}
        buffers = {placeholder: whole[name].detach().clone() for placeholder, name in captured.buffers.items()}
        self._fixed |= {name: value.to(device) for name, value in captured.constants.items()} | buffers
        self._evaluate_constants()
        own = plan.stages_at(ranks.coordinate.get(PIPELINE, 0))
        updates = [update for stage in own for update in self.programs[stage].updates]
        self.renewed = Buffers(self.layouts, ranks, updates, whole)

    def _readers(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Return the pipeline positions that read each parameter, in order."""
        found: dict[str, set[int]] = {}
        for program, position in zip(self.programs, plan.positions, strict=True):
            for root in program.parameters:
                found.setdefault(root, set()).add(position)
        return {root: tuple(sorted(found[root])) for root in self.captured.parameters if root in found}

    def _evaluate_constants(self) -> None:
        """Compute the nodes that depend on no input, once and whole."""
        known = dict(self._fixed)
        for node in self.captured.program.graph.nodes:
            if node.name in self.layouts.constants:
                arguments = torch.fx.map_arg(node.args, lambda argument: known[argument.name])
                options = torch.fx.map_arg(node.kwargs, lambda argument: known[argument.name])
                known[node.name] = node.target(*arguments, **on_device(options, self.device))
        self._fixed = {name: value for name, value in known.items() if name in self.layouts.root}

    def _part(self, root: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter."""
        dims = self.layouts.dims(root)
        shaped = whole.reshape([self.layouts.sizes(root)[dim] for dim in dims])
        return self.ranks.redistribute(shaped, dims, REPLICATED, self.layouts.produced[root]).clone()

    def whole(self, root: str, part: Tensor) -> Tensor:
        """Return a whole parameter, or its whole gradient, gathered from the parts of all ranks."""
        dims = self.layouts.dims(root)
        full = self.ranks.redistribute(part, dims, self.layouts.produced[root], REPLICATED)
        return full.reshape(self._values[root].shape)

    def unread(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of a module, by name, that no stage reads and so no step changes."""
        read = {self.names[root] for program in self.programs for root in program.parameters}
        return {name: each for name, each in module.named_parameters() if name not in read}

    def dtype(self, root: str) -> torch.dtype:
        """Return the dtype of a root."""
        return self._values[root].dtype  # type: ignore[no-any-return]

    def sum_gradients(self) -> None:
        """Sum gradients over the axes along which ranks have the same parameter, but other parts of its operators.

        The gradients of a parameter that several pipeline ranks read are then summed over these ranks.
        """
        for axis in self.ranks.size:
            found = [part.grad for root, part in self.parts.items() if axis in self.summed(root)]
            gradients = [gradient for gradient in found if gradient is not None]
            if gradients:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                total = self.ranks.all_reduce(flat, axis)
                for gradient, piece in zip(gradients, torch.split(total, [g.numel() for g in gradients]), strict=True):
                    gradient.copy_(piece.view_as(gradient))
        for root, group in self._kept_twice.items():
            if root in self.parts and self.parts[root].requires_grad:
                part = self.parts[root]
                gradient = torch.zeros_like(part) if part.grad is None else part.grad
                part.grad = self.ranks.all_reduce(gradient, PIPELINE, group)

    def summed(self, root: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of a parameter is summed once a step, not in every pass."""
        placed = self.layouts.produced[root].placed
        found = [spec.partial for (name, *_), spec in self.layouts.gradient.items() if name == root]
        return tuple(axis for axis in dict.fromkeys(chain.from_iterable(found)) if axis not in placed)


class Pass:
    """One microbatch in one stage: its values so far, and these values in the layouts that operators read."""

    def __init__(self, network: OperatorNetwork, program: StageProgram, inputs: Sequence[Tensor]) -> None:
        self.network, self.ranks, self.layouts = network, network.ranks, network.layouts
        self.program = program
        self.values: dict[str, DTensor] = {}
        self.locals: dict[str, Tensor] = {}
        self.brought: dict[Bringing, Tensor] = {}
        given = dict(zip(network.captured.inputs, inputs, strict=True)) | network._fixed
        for name, tensor in given.items():
            self.locals[name] = tensor.reshape(self.layouts.tensor(name).shape)
        self.locals |= dict(network.parts.items())

    def forward(self, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage on the values from the stage before, and return the values for the next one."""
        for root, value in zip(self.program.received, received, strict=True):
            self.locals[root] = value.requires_grad_(value.is_floating_point())
        for node in self.program.nodes:
            self._run(node)
        for update in self.program.updates:
            read = self._local(self.layouts.root[update.reads]) if update.reads else None
            self.network.renewed.renew(update, read)
        self.sent = tuple(self._local(root) for root in self.program.sent)
        return tuple(value.detach() for value in self.sent)

    def backward(self, gradients: Sequence[Tensor], loss: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run backward from the gradients of sent values, or from a loss; return the gradients of received values."""
        ends = [(value, gradient) for value, gradient in zip(self.flowing(self.sent), gradients, strict=True)]
        ends += [(loss, torch.ones_like(loss))] if loss is not None else []
        ends = [(value, gradient) for value, gradient in ends if value.requires_grad]
        torch.autograd.backward([value for value, _ in ends], [gradient for _, gradient in ends])
        received = self.flowing([self.locals[root] for root in self.program.received])
        return tuple(torch.zeros_like(value) if value.grad is None else value.grad for value in received)

    def empty_received(self) -> list[Tensor]:
        """Return empty tensors for the values from the stage before."""
        return [self._empty(root) for root in self.program.received]

    def empty_gradients(self) -> list[Tensor]:
        """Return empty tensors for the gradients of the values that this stage sent."""
        return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in self.flowing(self.sent)]

    def _empty(self, root: str) -> Tensor:
        return torch.empty(self._shape(root), dtype=self.network.dtype(root), device=self.network.device)

    def _shape(self, root: str) -> list[int]:
        """Return the sizes of a rank's part of a root."""
        tensor, spec = self.layouts.tensor(root), self.layouts.produced[root]
        whole = zip(tensor.dims, tensor.shape, strict=True)
        return [size // self.ranks.ways(spec.axes(dim)) for dim, size in whole]

    @staticmethod
    def flowing(values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that can have gradients: those of floating point."""
        return [value for value in values if value.is_floating_point()]

    def _run(self, node: Node) -> None:
        """Run the operator of a node on this rank's parts."""
        layouts = self.layouts
        reads = {name: self._read(node, name) for name in layouts.read_by(node)}

        def local(argument: Node) -> Any:
            return self._shaped(node, argument, reads[layouts.root[argument.name]])

        arguments = torch.fx.map_arg(node.args, local)
        options = torch.fx.map_arg(node.kwargs, local)
        operator, sharding = layouts.operator(node), layouts.sharding(node)
        summed: tuple[str, ...] = ()
        rows: tuple[str, ...] = ()
        if operator is not None and sharding is not None:
            summed = tuple(axis for dim, axes in sharding.cuts if dim in operator.reduced for axis in axes)
            rows = self._rows(node, sharding)
        part = Part(self.ranks, summed, rows)
        options = on_device(options, self.network.device)
        try:
            with saved_tensors_hooks(*self._gathering(node)):
                result = run_on_part(node, part, arguments, options)
            self._keep(node, result)
        except RuntimeError as error:
            error.args = (at(line_of_node(node), f"{node.target} on parts of its operands: {error}"),)
            raise

    def loss(self) -> Tensor:
        """Return the loss, summed over ranks where it is partial."""
        root = self.layouts.loss
        have = self.layouts.produced[root]
        local = self._local(root)
        moved: Tensor = Move.apply(local, self.ranks, self.layouts.dims(root), have, REPLICATED, REPLICATED)  # type: ignore[no-untyped-call]
        return moved.reshape(())

    def _rows(self, node: Node, sharding: OperatorSharding) -> tuple[str, ...]:
        """Return the axes that cut the first dim of the first argument of a node."""
        first = node.args[0] if node.args else None
        dims = self.network.captured.dims.get(first.name, ()) if isinstance(first, Node) else ()
        cuts = dict(sharding.cuts)
        return tuple(axis for dim in (dims[0] if dims else ()) for axis in cuts.get(dim, ()))

    def _keep(self, node: Node, result: Any) -> None:
        several = isinstance(result, tuple | list)
        picked = [int(str(user.args[1])) for user in node.users] if several else []
        values = [result[index] for index in sorted(picked)] if several else [result]
        for name, value in zip(self.layouts.values(node), values, strict=True):
            dims, spec = self.layouts.dims(name), self.layouts.produced[name]
            self.values[name] = self._placed(value.reshape(self._shape(name)), dims, spec)

    def _placed(self, local: Tensor, dims: tuple[str, ...], spec: ShardingSpec) -> DTensor:
        return DTensor.from_local(local, self.ranks.mesh, self._placements(dims, spec), run_check=False)

    def _placements(self, dims: tuple[str, ...], spec: ShardingSpec) -> list[Placement]:
        found: dict[str, Placement] = {axis: Partial() for axis in spec.partial}
        found |= {axis: Shard(dims.index(dim)) for dim, axes in spec.cuts for axis in axes}
        return [found.get(axis, Replicate()) for axis in self.ranks.size]

    def _local(self, root: str) -> Tensor:
        """Return this rank's part of a root; its gradient comes back in the layout of the root, complete."""
        if root not in self.locals:
            dims, spec = self.layouts.dims(root), self.layouts.produced[root].complete
            self.locals[root] = self.values[root].to_local(grad_placements=self._placements(dims, spec))
        return self.locals[root]

    def _read(self, node: Node, root: str) -> Tensor:
        """Return this rank's part of a root in the layout in which a node reads it."""
        reading, dims = self.layouts.reading(node, root), self.layouts.dims(root)
        key = self.layouts.bringing(node, root)
        union = self.layouts.gradient[key]
        if key not in self.brought:
            self.brought[key] = self._bring(root, dims, reading.wanted, union)
        value = self.brought[key]
        missing = tuple(axis for axis in union.partial if axis not in reading.gradient.partial)
        return self._shared(value, missing) if value.is_floating_point() else value

    def _shared(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return a value for a reader whose gradient is complete on every rank, while others' are summed over ``axes``.

        The sum then counts this gradient once.
        """
        if self.ranks.ways(axes) == 1:
            return value
        shared: Tensor = Share.apply(value, self.ranks.ways(axes))  # type: ignore[no-untyped-call]
        return shared

    def _bring(self, root: str, dims: tuple[str, ...], wanted: ShardingSpec, union: ShardingSpec) -> Tensor:
        have, local = self.layouts.produced[root], self._local(root)
        if not local.is_floating_point():
            return self.ranks.redistribute(local, dims, have, wanted)
        back = union
        if root in self.network.parts:
            back = ShardingSpec(union.cuts, tuple(axis for axis in union.partial if axis in have.placed))
            left = tuple(axis for axis in union.partial if axis not in have.placed)
            local = self._shared(local, tuple(axis for axis in self.network.summed(root) if axis not in left))
        moved: Tensor = Move.apply(local, self.ranks, dims, have, wanted, back)  # type: ignore[no-untyped-call]
        return moved

    def _shaped(self, node: Node, argument: Node, value: Tensor) -> Tensor:
        """Return a root's part in the dims and the shape that a node's argument has."""
        captured, root = self.network.captured, self.layouts.root[argument.name]
        have, dims = self.layouts.dims(root), captured.dims[argument.name]
        sharding = self.layouts.sharding(node)
        assert sharding is not None
        cuts = dict(sharding.cuts)
        named = [dim for group in dims for dim in group]
        whole = self.layouts.sizes(node.name)
        size = {dim: whole[dim] // self.ranks.ways(cuts.get(dim, ())) for dim in named}
        value = value.permute([have.index(dim) for dim in named if dim in have])
        for index, dim in enumerate(named):
            if dim not in have:
                value = value.unsqueeze(index).expand(*value.shape[:index], size[dim], *value.shape[index:])
        shape = []
        for group in dims:
            length = 1
            for dim in group:
                length *= size[dim]
            shape.append(length)
        return value.reshape(shape)

    def _gathering(self, node: Node) -> tuple[Any, Any]:
        """Return hooks on saved tensors: of gathered weights only the part is kept, and gathered again for backward."""
        gathered: dict[int, tuple[str, ShardingSpec]] = {}
        for root in self.layouts.read_by(node):
            wanted = self.layouts.reading(node, root).wanted
            if self.layouts.gathered_again(node, root):
                brought = self.brought[self.layouts.bringing(node, root)]
                gathered[brought.untyped_storage().data_ptr()] = root, wanted
        again: dict[str, Tensor] = {}

        def pack(saved: Tensor) -> Any:
            found = gathered.get(saved.untyped_storage().data_ptr())
            if found is None:
                return to_keep(saved)
            return (*found, saved.size(), saved.stride(), saved.storage_offset())

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            root, wanted, size, stride, offset = kept
            if root not in again:
                have, part = self.layouts.produced[root], self.network.parts[root].detach()
                again[root] = self.ranks.redistribute(part, self.layouts.dims(root), have, wanted)
            return again.pop(root).as_strided(size, stride, offset)

        return pack, unpack
