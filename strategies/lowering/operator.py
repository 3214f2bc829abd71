"""Operator parallel: the operators of a block on one rank, and the collectives between them.

Each operator runs on its local share; where the layout of a tensor is not the one its
reader asks for, the redistribution's collectives come in between, and their mirror in the
backward pass, where the gradient returns to the layout of its tensor.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from simulator.accelerator import Accelerator
from simulator.collective_kinds import Collective
from simulator.compute import Pass, local_bytes, operator_launches, operator_time
from simulator.operator_graph import BATCH, Block, Operator, OperatorKind, Tensor
from simulator.program import TaskKind
from simulator.units import to_ticks
from strategies.lowering.communicator import Communicator
from strategies.mesh import Mesh
from strategies.sharding import REPLICATED, OperatorSharding, ShardingSpec, redistribute

_DISTRIBUTED = frozenset({OperatorKind.MATMUL, OperatorKind.EMBEDDING, OperatorKind.CROSS_ENTROPY})
"""Operators that run on distributed tensors; those between them work on each rank's own part."""


class Step(NamedTuple):
    """A stretch of work of one rank: compute, or a collective over its tensor group.

    ``ticks`` are those where nothing contends; ``launches`` the kernels that the host starts for it.
    """

    kind: TaskKind
    ticks: int
    operators: str
    launches: int = 1
    collective: Collective | None = None
    size: float = 0.0


class BlockSteps(NamedTuple):
    """One block for one microbatch on one rank."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


class BlockLayout:
    """A block under the shardings of a plan: local sizes, and layouts tensor by tensor."""

    def __init__(self, block: Block, mesh: Mesh, shardings: Mapping[str, OperatorSharding], microbatch: int) -> None:
        self.block, self.mesh, self.microbatch = block, mesh, microbatch
        self.shardings = {
            op.name: shardings.get(f"{block.name}.{op.name}", OperatorSharding(op.name, ())) for op in block.operators
        }
        self.produced: dict[str, ShardingSpec] = {}
        for operator in block.operators:
            for name in operator.inputs:
                self.produced.setdefault(name, self.wanted(operator, name))  # the block's inputs come as first read
            for name in operator.outputs:
                self.produced[name] = self.shardings[operator.name].of_output(operator, block.tensor[name])

    def wanted(self, operator: Operator, name: str) -> ShardingSpec:
        """Return the layout in which ``operator`` reads the tensor ``name``."""
        return self.shardings[operator.name].of_input(self.block.tensor[name])

    def sizes(self, operator: Operator) -> dict[str, int]:
        """Return the local size of every dim of an operator's iteration space."""
        cuts = dict(self.shardings[operator.name].cuts)
        return {dim: self._scaled(dim, size) // self._ways(cuts.get(dim, ())) for dim, size in operator.dims}

    def tensor_bytes(self, name: str, spec: ShardingSpec = REPLICATED) -> int:
        """Return the bytes of one rank's share of a tensor in the layout ``spec``."""
        tensor = self.block.tensor[name]
        sizes = {
            dim: self._scaled(dim, size) // self._ways(spec.axes(dim))
            for dim, size in zip(tensor.dims, tensor.shape, strict=True)
        }
        return local_bytes(tensor, sizes)

    def parameter_elements(self) -> int:
        """Return the elements of one rank's share of the block's parameters."""
        return sum(self.parameter_share(tensor) for tensor in self.block.parameters)

    def parameter_share(self, tensor: Tensor) -> int:
        """Return the elements of one rank's share of a parameter: cut as its operators cut it."""
        cuts: dict[str, tuple[str, ...]] = {}
        for operator in self.block.operators:
            if tensor.name in operator.parameters:
                cuts |= {d: axes for d, axes in self.shardings[operator.name].cuts if d in tensor.dims}
        # a norm's weight stays whole where only the sequence is cut
        return prod(size // self._ways(cuts.get(d, ())) for d, size in zip(tensor.dims, tensor.shape, strict=True))

    def _scaled(self, dim: str, size: int) -> int:
        return size * self.microbatch if dim == BATCH else size

    def _ways(self, axes: tuple[str, ...]) -> int:
        return prod(self.mesh.size(axis) for axis in axes)


def block_steps(layout: BlockLayout, accelerator: Accelerator, tensor: Communicator | None) -> BlockSteps:
    """Return forward and backward of a block, compute and collectives over its tensor group in order."""
    forward: list[Step] = []
    backward: list[list[Step]] = []
    available: dict[tuple[str, ShardingSpec], None] = {}
    for operator in layout.block.operators:
        returning: list[Step] = []
        for name in operator.inputs:
            wanted = layout.wanted(operator, name)
            if (name, wanted) not in available:
                available[name, wanted] = None
                have = layout.produced[name]
                forward += _collectives(layout, tensor, name, have, wanted)
                if layout.block.tensor[name].dtype != "int64":
                    gradient = _gradient(layout, name, wanted)
                    returning += _collectives(layout, tensor, name, gradient, have.complete, "gradient of ")
        forward.append(_compute(accelerator, layout, operator, Pass.FORWARD))
        backward.append([_compute(accelerator, layout, operator, Pass.BACKWARD), *returning])
    return BlockSteps(tuple(forward), tuple(step for steps in reversed(backward) for step in steps))


def _gradient(layout: BlockLayout, name: str, wanted: ShardingSpec) -> ShardingSpec:
    """Return the layout of a gradient once all readers of ``(name, wanted)`` have added to it."""
    partial: dict[str, None] = {}
    for operator in layout.block.operators:
        if name in operator.inputs and layout.wanted(operator, name) == wanted:
            spec = layout.shardings[operator.name].of_gradient(layout.block.tensor[name])
            partial |= dict.fromkeys(spec.partial)
    return ShardingSpec(wanted.cuts, tuple(partial))


def _compute(accelerator: Accelerator, layout: BlockLayout, operator: Operator, direction: Pass) -> Step:
    seconds = operator_time(accelerator, layout.block, operator, layout.sizes(operator), direction)
    launches = operator_launches(operator, direction)
    if operator.kind in _DISTRIBUTED and layout.shardings[operator.name].cuts:
        seconds += launches * accelerator.sharded_launch
    kind = TaskKind.FORWARD if direction is Pass.FORWARD else TaskKind.BACKWARD
    return Step(kind, to_ticks(seconds), operator.name, launches)


def _collectives(
    layout: BlockLayout,
    tensor: Communicator | None,
    name: str,
    source: ShardingSpec,
    target: ShardingSpec,
    what: str = "",
) -> list[Step]:
    steps = []
    for move in redistribute(source, target):
        if layout.mesh.size(move.axis) == 1 or tensor is None:
            continue
        whole = ShardingSpec(tuple((d, tuple(a for a in axes if a != move.axis)) for d, axes in source.cuts))
        size = float(layout.tensor_bytes(name, whole))
        ticks, label = tensor.ticks(move.collective, size), f"{move.collective} {what}{name}"
        steps.append(Step(TaskKind.TENSOR_COMMUNICATION, ticks, label, 1, move.collective, size))
    return steps
