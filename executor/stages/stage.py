"""One stage of a user's module: parts that run one after the other, and its form for torch's pipeline."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.fx import Node

from meshwise.executor.modules.blocks import count_recomputed
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.sharding import DTYPES, shard_units
from meshwise.executor.parallel.module_offload import choose_offload_policy
from meshwise.executor.recording.accelerator import find_accelerator
from meshwise.executor.stages.export import StepGraph
from meshwise.executor.stages.parts import Part, StageNodes, build_code, list_parameter_names, make_key
from meshwise.strategies.plan.recomputation import Recompute, StageRecompute


class _Bound(torch.autograd.Function):
    """A value that depends on another one, with a gradient of zeros: boundaries have a gradient for every float."""

    @staticmethod
    def forward(context: Any, value: Tensor, other: Tensor) -> Tensor:
        context.save_for_backward(other)
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (other,) = context.saved_tensors
        return gradients[0], torch.zeros_like(other)


def bind(value: Tensor, other: Tensor) -> Tensor:
    """Return a value for which backward gives another one a gradient of zeros."""
    result: Tensor = _Bound.apply(value, other)  # type: ignore[no-untyped-call]
    return result


class Stage(nn.Module):
    """The parts of a stage, and the parameters that several of them read.

    Parameters
    ----------
    nodes
        Its part of the graph.
    parameters, buffers
        Those of the user's module, by name.
    recompute
        What backward computes again of it.
    dtype
        That of floats that it sends; ``None`` for those of the graph.
    copies_outputs
        Whether it sends copies: where backward is split, torch detaches what was sent, also from an operator that has
        kept it for backward.
    """

    def __init__(
        self,
        step: StepGraph,
        nodes: StageNodes,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        *,
        recompute: StageRecompute,
        dtype: torch.dtype | None = None,
        copies_outputs: bool = False,
    ) -> None:
        super().__init__()
        self.copies_outputs = copies_outputs
        fixed = {name: buffers[target] for name, target in step.buffers.items()} | dict(step.fixed)
        piece_names = [list_parameter_names(step, piece) for _, piece in nodes.pieces]
        counts = Counter(name for names in piece_names for name in names)
        self.shared = [name for name, count in counts.items() if count > 1]
        for name in self.shared:
            self.register_parameter(make_key(name), parameters[name])
        self.received = tuple(node.name for node in nodes.received)
        self.sent = tuple(node.name for node in nodes.sent)
        self.results = tuple(node.name for node in nodes.results)
        self.sent_dtypes = [example.dtype for example in make_examples(nodes.sent, dtype)]
        self.bound = nodes.bound
        own_nodes = set(nodes.operators)
        self.updates = {node.name: buffers[name] for name, node in step.updates.items() if node in own_nodes}
        kept = {*nodes.sent, *nodes.results, *(node for node in step.updates.values() if node in own_nodes)}
        parts: list[Part] = []
        blocks = nodes.blocks
        recomputed_names = blocks[: count_recomputed(len(blocks), recompute)]
        for (name, piece), names in zip(nodes.pieces, piece_names, strict=True):
            inside = set(piece)
            outputs = [
                node for node in piece if node in kept or any(u in own_nodes and u not in inside for u in node.users)
            ]
            code = build_code(step, piece, outputs, frozenset(names) - set(self.shared))
            choice = recompute.layer if name in recomputed_names else Recompute.NONE
            parts.append(Part(name, code, parameters, fixed, recompute=choice))
        self.parts = nn.ModuleList(parts)
        self.pieces = tuple(parts)
        self.inputs = step.inputs
        self._drops = self._list_drops()

    def _list_drops(self) -> list[list[str]]:
        """Return for every part the names of the values that nothing reads after it."""
        kept = {*self.sent, *self.results, *self.updates, *self.bound}
        last_parts = {name: place for place, part in enumerate(self.pieces) for name in (*part.inputs, *part.outputs)}
        return [
            [name for name, last in last_parts.items() if last == place and name not in kept]
            for place in range(len(self.pieces))
        ]

    def list_parameters(self) -> dict[str, nn.Parameter]:
        """Return its parameters as they are now, whole or shards, by their names in the user's module."""
        owners: list[tuple[nn.Module, Sequence[str]]] = [(self, self.shared)]
        owners += [(part, part.parameter_names) for part in self.pieces]
        return {name: getattr(owner, make_key(name)) for owner, names in owners for name in names}

    def forward(self, *received: Tensor, **batch: Tensor) -> tuple[Tensor, ...]:
        """Return what the stage sends, or the loss and its weight.

        Parameters
        ----------
        received
            What the stage before has sent.
        batch
            The tensors of the microbatch, by the names of `StepGraph.inputs`.
        """
        values: dict[str, Tensor] = dict(batch)
        values.update(zip(self.received, received, strict=False))
        values.update((name, getattr(self, make_key(name))) for name in self.shared)
        for part, drops in zip(self.pieces, self._drops, strict=True):
            outputs = part(*[values[name] for name in part.inputs])
            values.update(zip(part.outputs, outputs, strict=True))
            for name in drops:
                values.pop(name, None)
        with torch.no_grad():
            for name, buffer in self.updates.items():
                buffer.copy_(values[name])
        return self._finish(values)

    def _finish(self, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs; floats without a gradient depend on one that has one, and the other way round."""
        names = self.results or self.sent
        outputs = [values[name] for name in names]
        place = next(place for place, output in enumerate(outputs) if output.requires_grad)
        for name in self.received:
            if name in self.bound:
                outputs[place] = bind(outputs[place], values[name])
        anchor = outputs[place]
        results = [bind(v, anchor) if n in self.bound else v for n, v in zip(names, outputs, strict=True)]
        if not self.results:  # autocast makes other dtypes than the next stage has room for
            results = [result.to(dtype) for result, dtype in zip(results, self.sent_dtypes, strict=True)]
        return tuple(
            result.clone(memory_format=torch.contiguous_format) if self.copies_outputs else _own(result)
            for result in results
        )


class StageShards(nn.Module):
    """A stage whose parameters, gradients and states are shards; torch's pipeline does not see that they are.

    The pipeline would gather a sharded stage before its first pass, keep it to the last one, and reduce its gradients
    then. Here blocks are gathered as `meshwise.executor.modules.sharding` says of a whole module.
    """

    def __init__(
        self, stage: Stage, layout: ModuleLayout, mesh: DeviceMesh, precision: str, device: torch.device
    ) -> None:
        super().__init__()
        is_narrow = DTYPES[precision].itemsize == 2
        policy = MixedPrecisionPolicy(DTYPES[precision], torch.float32) if is_narrow else MixedPrecisionPolicy()
        self.layout, self.reshards = layout, layout.zero == 3 and layout.reshard_after_forward
        placement = choose_offload_policy(find_accelerator(device.type), is_on_host=bool(layout.offload.optimizer))
        options = {"reshard_after_forward": self.reshards, "mp_policy": policy, "offload_policy": placement}
        self.pieces = [part for part in stage.pieces if part.parameter_names]
        shard_units((*self.pieces, stage), mesh=mesh, **options)
        if self.pieces:
            first: Any = self.pieces[0]
            # by default it prefetches the unit with which the forward of another microbatch ended
            first.set_modules_to_backward_prefetch([first])
        self.stage = stage

    def prepare_forward(self, *, turns: bool) -> None:
        """Prepare a forward pass; where a backward of the stage follows at once, the last unit stays gathered."""
        last: Any = self.pieces[-1] if self.pieces else None
        if self.reshards and isinstance(last, FSDPModule):
            last.set_reshard_after_forward(not turns, recurse=False)

    def prepare_backward(self, *, is_last: bool) -> None:
        """Prepare a backward pass, which may be the last one of a step."""
        stage: Any = self.stage
        assert isinstance(stage, FSDPModule)
        stage.set_requires_gradient_sync(is_last or self.layout.zero > 1)
        stage.set_reshard_after_backward(is_last or self.reshards)

    def forward(self, *received: Tensor, **batch: Tensor) -> tuple[Tensor, ...]:
        """Return what the stage returns."""
        result: tuple[Tensor, ...] = self.stage(*received, **batch)
        return result


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor with its own memory, which torch's pipeline detaches in place from the graph that made it."""
    is_own = tensor.is_contiguous() and not tensor._is_view() and not tensor.is_leaf
    return tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)


def make_examples(nodes: Sequence[Node], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Return tensors without data of the shapes that values have at a boundary; floats are of ``dtype``, if any."""
    examples = []
    for node in nodes:
        value: Tensor = node.meta["val"]
        is_cast = dtype is not None and value.is_floating_point()
        example = torch.empty(value.shape, dtype=dtype if is_cast else value.dtype, device="meta")
        examples.append(example.requires_grad_(value.is_floating_point()))
    return tuple(examples)
