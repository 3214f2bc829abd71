"""Layout: a block under the shardings of a plan, as one rank has it: local sizes, and the layout of every tensor."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from meshwise.simulator.machine.casts import DELAYED_SCALING
from meshwise.simulator.machine.compute import PRODUCTS, local_bytes
from meshwise.simulator.operator_graph import BATCH, ITEMSIZE, SEQUENCE, Block, Operator, OperatorKind, Tensor
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, SEQUENCE_AXES, TENSOR, Mesh
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.sharding import REPLICATED, OperatorSharding, ShardingSpec

_DEFERRED_KINDS = PRODUCTS | {OperatorKind.EMBEDDING}
"""Kinds of operators whose gradients of weights are computed apart from those of inputs."""

_ADDING_KINDS = frozenset({OperatorKind.ELEMENTWISE, OperatorKind.DROPOUT})
"""Kinds of operators that may add parameters to their inputs."""


class BlockKind(NamedTuple):
    """A block under the shardings of some of its occurrences, and the layouts in which its inputs arrive."""

    block: Block
    shardings: tuple[OperatorSharding, ...]
    input_layouts: tuple[ShardingSpec, ...]


class BlockTraining(NamedTuple):
    """What the segments of a block depend on of the training.

    Parameters
    ----------
    precision
        Of products; "fp8" is quantised before them.
    gradient_bytes
        Of an element of sums to which products add; 0 where gradients are written apart.
    frozen
        Whether weights have no gradients.
    composed
        Kinds of operators that run several kernels, as `Training.composed`.
    keeps_quantised
        Whether fp8 copies of weights are kept.
    scaling
        As `Training.scaling`.
    loops_experts, waits_in_attention, composes_ring
        As `meshwise.strategies.plan.framework.Framework` has them.
    """

    precision: str = ""
    gradient_bytes: int = 0
    frozen: bool = False
    composed: tuple[str, ...] = ()
    keeps_quantised: bool = True
    scaling: str = DELAYED_SCALING
    loops_experts: bool = False
    waits_in_attention: bool = False
    composes_ring: bool = False

    @classmethod
    def of(cls, training: Training) -> "BlockTraining":
        """Return what blocks depend on of a training."""
        conventions = training.conventions
        return cls(
            training.precision,
            training.gradient_bytes if conventions.fused_gradients else 0,
            training.frozen,
            training.composed,
            conventions.keeps_quantised,
            training.scaling,
            conventions.loops_experts,
            conventions.waits_in_attention,
            conventions.composes_ring,
        )


PLAIN_TRAINING = BlockTraining()
"""Products are not quantised, and their gradients are written apart."""


class BlockLayout:
    """A block under the shardings of a plan: local sizes, and the layout of every tensor."""

    def __init__(
        self,
        block: Block,
        mesh: Mesh,
        shardings: Mapping[str, OperatorSharding],
        microbatch: int,
        training: BlockTraining = PLAIN_TRAINING,
        input_layouts: Sequence[ShardingSpec] = (),
    ) -> None:
        self.block, self.mesh = block, mesh
        self.training = training
        self.precision, self.gradient_bytes, self.frozen = training.precision, training.gradient_bytes, training.frozen
        self.microbatch = microbatch * mesh.size(EXPERT)  # sequences of an expert group, cut by its axis where whole
        self.shardings = {
            op.name: shardings.get(f"{block.name}.{op.name}", OperatorSharding(op.name, ())) for op in block.operators
        }
        self.produced_layouts: dict[str, ShardingSpec] = dict(zip(block.inputs, input_layouts, strict=False))
        for operator in block.operators:
            for name in operator.inputs:
                self.produced_layouts.setdefault(
                    name, self.kept_layout(operator, name)
                )  # inputs of which nothing is known come as first read
            for name in operator.outputs:
                self.produced_layouts[name] = self.shardings[operator.name].find_output_spec(
                    operator, block.tensor[name]
                )
        for name in block.inputs:
            self.produced_layouts.setdefault(name, REPLICATED)  # no operator reads it: it passes the block by
        self._produced_names = frozenset((*block.inputs, *(name for op in block.operators for name in op.outputs)))

    @classmethod
    def from_kind(
        cls,
        kind: BlockKind,
        mesh: Mesh,
        microbatch: int,
        training: BlockTraining = PLAIN_TRAINING,
    ) -> "BlockLayout":
        """Return the layout of a kind of block."""
        pairs = zip(kind.block.operators, kind.shardings, strict=True)
        shardings = {f"{kind.block.name}.{operator.name}": sharding for operator, sharding in pairs}
        return cls(kind.block, mesh, shardings, microbatch, training, kind.input_layouts)

    def input_layout(self, operator: Operator, name: str) -> ShardingSpec:
        """Return the layout in which ``operator`` reads the tensor ``name``."""
        return self.shardings[operator.name].find_input_spec(self.block.tensor[name])

    def local_sizes(self, operator: Operator) -> dict[str, int]:
        """Return the local size of every dim of an operator's iteration space."""
        cuts = dict(self.shardings[operator.name].cuts)
        return {
            dim: -(-self._scale_dim(dim, size) // self._count_shards(cuts.get(dim, ()))) for dim, size in operator.dims
        }

    def has_gradient(self, name: str) -> bool:
        """Return whether a tensor has a gradient: indices have none, and neither has data that no operator makes."""
        return name in self._produced_names and self.block.tensor[name].has_gradient

    def gives_gradient(self, operator: Operator) -> bool:
        """Return whether backward runs through an operator: whether some output of it has a gradient."""
        return any(self.block.tensor[name].has_gradient for name in operator.outputs)

    def list_readers(self, name: str, target: ShardingSpec) -> list[Operator]:
        """Return the operators that read a tensor in a layout."""
        readers = (operator for operator in self.block.operators if name in operator.inputs)
        return [operator for operator in readers if self.input_layout(operator, name) == target]

    def tensor_bytes(self, name: str, spec: ShardingSpec = REPLICATED) -> int:
        """Return the bytes of one rank's share of a tensor in the layout ``spec``."""
        tensor = self.block.tensor[name]
        sizes = {
            dim: -(-self._scale_dim(dim, size) // self._count_shards(spec.axes(dim)))
            for dim, size in zip(tensor.dims, tensor.shape, strict=True)
        }
        return local_bytes(tensor, sizes)

    def quantises(self, operator: Operator) -> bool:
        """Return whether an operator multiplies in fp8: products with a weight, but not the router or the fp32 logits.

        These are Transformer Engine's linear and grouped linear layers, and convolutions, which cuDNN has in fp8 (XLA
        calls it, tensorflow/tensorflow pull request 60807). Embedding, norms, attention, the choice of experts and the
        output layer keep their precision (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.3.1, keeps the
        same ones).
        """
        if self.precision != "fp8" or operator.kind not in PRODUCTS or not operator.parameters:
            return False
        is_router = operator.kind is OperatorKind.MATMUL and EXPERTS in dict(operator.dims)
        return not is_router and self.block.tensor[operator.outputs[0]].dtype != "fp32"

    def parameter_elements(self) -> int:
        """Return the elements of one rank's share of the block's parameters."""
        return sum(self.parameter_share(tensor) for tensor in self.block.parameters)

    def parameter_share(self, tensor: Tensor) -> int:
        """Return the elements of one rank's share of a parameter."""
        return prod(self.parameter_shape(tensor))

    def parameter_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of one rank's share of a parameter, cut as its operators cut it."""
        cuts: dict[str, tuple[str, ...]] = {}
        for operator in self.block.operators:
            if tensor.name in operator.parameters:
                kept_cuts = self.shardings[operator.name].find_kept_spec(tensor).cuts
                cuts |= {dim: axes for dim, axes in kept_cuts if dim != SEQUENCE}
        # where the sequence is cut a table of positions stays whole, and no other parameter is cut along it
        num_shards = {
            dim: self._count_shards(tuple(axis for axis in axes if axis not in SEQUENCE_AXES))
            for dim, axes in cuts.items()
        }
        return tuple(size // num_shards.get(dim, 1) for dim, size in zip(tensor.dims, tensor.shape, strict=True))

    def expert_parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that only one expert uses, where ranks share experts."""
        if self.mesh.size(EXPERT) == 1:
            return ()
        return tuple(tensor for tensor in self.block.parameters if EXPERTS in self._find_cut_dims(tensor))

    def expert_elements(self) -> int:
        """Return the elements of one rank's share of the parameters that only one expert uses."""
        return sum(self.parameter_share(tensor) for tensor in self.expert_parameters())

    def kept_layout(self, operator: Operator, name: str) -> ShardingSpec:
        """Return the layout in which a parameter or input of ``operator`` is kept."""
        return self.shardings[operator.name].find_kept_spec(self.block.tensor[name])

    def gathers_again(self, operator: Operator, name: str) -> bool:
        """Return whether an operator gathers a parameter or input for each pass that reads it."""
        keeps_cut = bool(self.shardings[operator.name].kept)
        return keeps_cut and self.kept_layout(operator, name) != self.input_layout(operator, name)

    def adds_before_cut(self, operator: Operator) -> bool:
        """Return whether an operator adds parameters to a sum over tensor ranks before it is cut along the sequence.

        Learned positions are added to all embedded tokens on every rank, and only then are the tokens scattered
        (Megatron-LM, ``models/common/embeddings/language_model_embedding.py``).
        """
        return any(
            adds_before_cut(operator, self.produced_layouts[name], self.input_layout(operator, name))
            for name in operator.inputs
        )

    def statistics_bytes(self, operator: Operator, dim: str, count: int) -> float:
        """Return the bytes on a rank of ``count`` fp32 values along ``dim`` for every point of the other dims."""
        return float(
            count * ITEMSIZE["fp32"] * prod(size for name, size in self.local_sizes(operator).items() if name != dim)
        )

    def runs_ring(self, operator: Operator) -> bool:
        """Return whether an operator attends to the keys of a context group part by part as they go round."""
        return operator.kind is OperatorKind.ATTENTION and CONTEXT in dict(self.shardings[operator.name].cuts).get(
            "key", ()
        )

    def ring_bytes(self, operator: Operator) -> float:
        """Return the bytes of keys and values that one rank hands to the next."""
        names = [name for name in operator.inputs if "key" in self.block.tensor[name].dims]
        num_copies = self.local_sizes(operator).get("group", 1) if self.training.composes_ring else 1
        return float(num_copies * sum(self.tensor_bytes(name, self.input_layout(operator, name)) for name in names))

    def _find_cut_dims(self, tensor: Tensor) -> set[str]:
        """Return the dims of a parameter that some operator with this parameter cuts."""
        users = [operator for operator in self.block.operators if tensor.name in operator.parameters]
        return {dim for user in users for dim, _ in self.shardings[user.name].cuts if dim in tensor.dims}

    def _scale_dim(self, dim: str, size: int) -> int:
        """Return the size of a dim for a microbatch."""
        return size * self.microbatch if dim == BATCH else size

    def _count_shards(self, axes: tuple[str, ...]) -> int:
        """Return the number of shards that some axes cut a dim into."""
        return prod(map(self.mesh.size, axes)) if axes else 1  # most dims are whole


def defers(operator: Operator) -> bool:
    """Return whether an operator computes the gradients of its weights apart: products and embeddings do."""
    return bool(operator.parameters) and operator.kind in _DEFERRED_KINDS


def adds_before_cut(operator: Operator, source: ShardingSpec, target: ShardingSpec) -> bool:
    """Return whether an operator adds parameters to an input summed over tensor ranks before it is cut along tokens."""
    adds = operator.kind in _ADDING_KINDS and bool(operator.parameters)
    return adds and TENSOR in source.partial and TENSOR in target.axes(SEQUENCE)
