"""Operator parallelism: the operators of a block on one rank, and the collectives between them.

Each operator runs on its local share. Where its reader asks for another layout of a tensor, the collectives of a
redistribution come in between, and their mirror image in backward, where the gradient returns to the layout of its
tensor. An operator also has collectives of its own: gathers and scatters of parameters that are kept cut, and sums of
statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import (
    PRODUCTS,
    Pass,
    local_bytes,
    operator_launches,
    operator_time,
    read_again,
    weight_gradient_time,
)
from meshwise.simulator.machine.kernels import streaming_time
from meshwise.simulator.operator_graph import BATCH, ITEMSIZE, SEQUENCE, Block, Operator, OperatorKind, Tensor
from meshwise.simulator.program import TaskKind
from meshwise.simulator.units import to_ticks
from meshwise.strategies.lowering.costs.kinds import Kind
from meshwise.strategies.lowering.costs.steps import Step, communication, ring_backward, ring_forward
from meshwise.strategies.lowering.rank_classes.machine import Communicator
from meshwise.strategies.plan.mesh import CONTEXT, EXPERT, OPERATOR_AXES, TENSOR, Mesh
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.problem import Training
from meshwise.strategies.plan.sharding import (
    REPLICATED,
    OperatorSharding,
    Redistribution,
    ShardingSpec,
    after,
    redistribute,
)

Groups = Mapping[str, Communicator]
"""The communicators of a rank, by mesh axis."""

_DEFERRED = PRODUCTS | {OperatorKind.EMBEDDING}
"""Kinds of operators whose gradients of weights are computed apart from those of inputs."""


def transfers(
    layout: "BlockLayout", name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Redistribution, float]]:
    """Yield the collectives that move a tensor from one layout to another, each with its bytes.

    The bytes are those of the tensor that a group has together; of an all-to-all those that each rank has before it.
    """
    current = source
    for move in redistribute(source, target):
        exchanges, found = move.collective is Collective.ALL_TO_ALL, move.before(current)
        yield move, float(layout.tensor_bytes(name, found.complete if exchanges else found.without(move.axis)))
        current = after(current, move)


def collectives(
    layout: "BlockLayout", groups: Groups, name: str, source: ShardingSpec, target: ShardingSpec, what: str = ""
) -> list[Step]:
    """Return the collectives that move a tensor from one layout to another; labels begin with ``prefix``."""
    return [
        communication(groups[move.axis], move.axis, move.collective, size, f"{what}{name}")._replace(tensor=name)
        for move, size in transfers(layout, name, source, target)
        if move.axis in groups
    ]


def exchanged_axes(layout: "BlockLayout") -> frozenset[str]:
    """Return the axes along which redistributions between the operators of a block run all-to-alls."""
    pairs = {
        (layout.produced[name], layout.wanted(operator, name))
        for operator in layout.block.operators
        for name in operator.inputs
    }
    # Gradients go the other way, to the complete layout of the producer.
    moves = (
        move for have, wanted in pairs for move in (*redistribute(have, wanted), *redistribute(wanted, have.complete))
    )
    return frozenset(move.axis for move in moves if move.collective is Collective.ALL_TO_ALL)


class Around(NamedTuple):
    """The segments around an operator: before its forward, before its backward and after its backward."""

    forward: list[Step]
    backward: list[Step]
    after: list[Step]


def defers(operator: Operator) -> bool:
    """Return whether an operator computes the gradients of its weights apart: products and embeddings do."""
    return bool(operator.parameters) and operator.kind in _DEFERRED


def kept_cut(layout: "BlockLayout", groups: Groups, operator: Operator, inputs: tuple[str, ...]) -> Around:
    """Return the gathers and scatters of what an operator keeps cut, and the sums of its statistics.

    Parameters
    ----------
    inputs
        Inputs that are gathered again for the gradients of its weights.
    """
    names = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    statistics, late = _statistics(layout, groups, operator), defers(operator)
    of_gradients = [step._replace(tensor="") for step in statistics]  # they move nothing that another operator makes
    parameters = {name: _gather(layout, groups, operator, name) for name in names}
    again = chain.from_iterable(_gather(layout, groups, operator, name) for name in inputs)
    weights = chain.from_iterable(parameters[name] for name in read_again(operator) if name in parameters)
    gradients = chain.from_iterable(_scatter(layout, groups, operator, name) for name in names)
    return Around(
        [*chain.from_iterable(parameters.values()), *statistics],
        [*(step._replace(deferred=late) for step in again), *weights, *of_gradients],
        [step._replace(deferred=late) for step in gradients],
    )


def _gather(layout: "BlockLayout", groups: Groups, operator: Operator, name: str) -> list[Step]:
    """Return the collectives that bring a parameter or input from the layout in which it is kept to an operator."""
    return collectives(layout, groups, name, layout.kept(operator, name), layout.wanted(operator, name))


def _scatter(layout: "BlockLayout", groups: Groups, operator: Operator, name: str) -> list[Step]:
    """Return the collectives that sum the gradient of a parameter and leave it in the parameter's layout."""
    kept, gradient = layout.kept(operator, name), layout.shardings[operator.name].of_gradient(layout.block.tensor[name])
    gathered = {axis for _, axes in kept.cuts for axis in axes} - {axis for _, axes in gradient.cuts for axis in axes}
    partial = ShardingSpec(gradient.cuts, tuple(axis for axis in gradient.partial if axis in gathered))
    return collectives(layout, groups, name, partial, kept, "gradient of ")


def gathered_again(layout: "BlockLayout") -> dict[str, tuple[str, ...]]:
    """Return the inputs that are gathered again in backward, by the last operator that reads each.

    The backward of the last reader is the first one to need the input.
    """
    last: dict[tuple[str, ShardingSpec], str] = {}
    for operator in layout.block.operators:
        again = (name for name in operator.inputs if layout.gathers_again(operator, name))
        last |= {(name, layout.wanted(operator, name)): operator.name for name in again}
    found: dict[str, tuple[str, ...]] = {}
    for (name, _), reader in last.items():
        found[reader] = (*found.get(reader, ()), name)
    return found


def _statistics(layout: "BlockLayout", groups: Groups, operator: Operator) -> list[Step]:
    """Return the sums of an operator's statistics over the ranks that cut the dims they are taken along."""
    cuts = dict(layout.shardings[operator.name].cuts)
    every = ((dim, count, axis) for dim, count in operator.statistics for axis in cuts.get(dim, ()) if axis in groups)
    steps = []
    for dim, count, axis in every:
        size = layout.statistics_bytes(operator, dim, count)
        step = communication(groups[axis], axis, Collective.ALL_REDUCE, size, f"statistics of {operator.name}")
        steps.append(step._replace(tensor=operator.outputs[0]))
    return steps


_DISTRIBUTED = frozenset(
    {
        OperatorKind.MATMUL,
        OperatorKind.GROUPED_MATMUL,
        OperatorKind.EMBEDDING,
        OperatorKind.NORM,
        OperatorKind.CROSS_ENTROPY,
    }
)
"""Kinds of operators that run on distributed tensors where they are cut along an operator axis. Operators between them
work on each rank's own part, as all operators do under context parallelism."""

FUSED_SQUARES = 4
"""Softmax with its scale, mask and casts is one kernel where a rank's heads of all sequences are a multiple of this
(Megatron-LM, ``model/fused_softmax.py``, ``is_kernel_available``)."""
EAGER_SOFTMAX = 5
"""Kernels of a softmax that is not fused: cast, scale, mask, softmax and cast (``forward_torch_softmax``)."""

_ADDS = frozenset({OperatorKind.ELEMENTWISE, OperatorKind.DROPOUT})
"""Kinds of operators that may add parameters to their inputs."""


class BlockSteps(NamedTuple):
    """The segments of one block for one microbatch on one rank; a backward may begin with segments of a loss."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    loss: int = 0


class BlockTraining(NamedTuple):
    """What the steps of a block depend on of the training.

    Parameters
    ----------
    precision
        Of products; "fp8" is quantised before them.
    gradient_bytes
        Of an element of sums to which products add; 0 where gradients are written apart.
    frozen
        Whether weights have no gradients.
    """

    precision: str = ""
    gradient_bytes: int = 0
    frozen: bool = False

    @classmethod
    def of(cls, training: Training) -> "BlockTraining":
        """Return what blocks depend on of a training."""
        summed = training.gradient_bytes if training.conventions.fused_gradients else 0
        return cls(training.precision, summed, training.frozen)


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
        arriving: Sequence[ShardingSpec] = (),
    ) -> None:
        self.block, self.mesh = block, mesh
        self.precision, self.gradient_bytes, self.frozen = training
        self.microbatch = microbatch * mesh.size(EXPERT)  # sequences of an expert group, cut by its axis where whole
        self.shardings = {
            op.name: shardings.get(f"{block.name}.{op.name}", OperatorSharding(op.name, ())) for op in block.operators
        }
        self.produced: dict[str, ShardingSpec] = dict(zip(block.inputs, arriving, strict=False))
        for operator in block.operators:
            for name in operator.inputs:
                self.produced.setdefault(
                    name, self.kept(operator, name)
                )  # inputs of which nothing is known come as first read
            for name in operator.outputs:
                self.produced[name] = self.shardings[operator.name].of_output(operator, block.tensor[name])
        for name in block.inputs:
            self.produced.setdefault(name, REPLICATED)  # no operator reads it: it passes the block by
        self._made = frozenset((*block.inputs, *(name for op in block.operators for name in op.outputs)))

    @classmethod
    def of_kind(
        cls,
        kind: Kind,
        mesh: Mesh,
        microbatch: int,
        training: BlockTraining = PLAIN_TRAINING,
    ) -> "BlockLayout":
        """Return the layout of a kind of block."""
        pairs = zip(kind.block.operators, kind.shardings, strict=True)
        shardings = {f"{kind.block.name}.{operator.name}": sharding for operator, sharding in pairs}
        return cls(kind.block, mesh, shardings, microbatch, training, kind.arriving)

    def wanted(self, operator: Operator, name: str) -> ShardingSpec:
        """Return the layout in which ``operator`` reads the tensor ``name``."""
        return self.shardings[operator.name].of_input(self.block.tensor[name])

    def sizes(self, operator: Operator) -> dict[str, int]:
        """Return the local size of every dim of an operator's iteration space."""
        cuts = dict(self.shardings[operator.name].cuts)
        return {dim: -(-self._scaled(dim, size) // self._ways(cuts.get(dim, ()))) for dim, size in operator.dims}

    def has_gradient(self, name: str) -> bool:
        """Return whether a tensor has a gradient: indices have none, and neither has data that no operator makes."""
        return name in self._made and self.block.tensor[name].has_gradient

    def gives_gradient(self, operator: Operator) -> bool:
        """Return whether backward runs through an operator: whether some output of it has a gradient."""
        return any(self.block.tensor[name].has_gradient for name in operator.outputs)

    def readers(self, name: str, wanted: ShardingSpec) -> list[Operator]:
        """Return the operators that read a tensor in a layout."""
        found = (operator for operator in self.block.operators if name in operator.inputs)
        return [operator for operator in found if self.wanted(operator, name) == wanted]

    def tensor_bytes(self, name: str, spec: ShardingSpec = REPLICATED) -> int:
        """Return the bytes of one rank's share of a tensor in the layout ``spec``."""
        tensor = self.block.tensor[name]
        sizes = {
            dim: -(-self._scaled(dim, size) // self._ways(spec.axes(dim)))
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
        routes = operator.kind is OperatorKind.MATMUL and EXPERTS in dict(operator.dims)
        return not routes and self.block.tensor[operator.outputs[0]].dtype != "fp32"

    def weight_gradient_time(self, accelerator: Accelerator, operator: Operator) -> float:
        """Return the seconds that an operator's backward spends on gradients of its parameters."""
        return 0.0 if self.frozen else self.frozen_time(accelerator, operator)

    def frozen_time(self, accelerator: Accelerator, operator: Operator) -> float:
        """Return the seconds that an operator's backward would save with frozen parameters."""
        return weight_gradient_time(
            accelerator,
            self.block,
            operator,
            self.sizes(operator),
            quantised=self.quantises(operator),
            gradient_bytes=self.gradient_bytes,
        )

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
                kept = self.shardings[operator.name].of_kept(tensor).cuts
                cuts |= {dim: axes for dim, axes in kept if dim != SEQUENCE}
        # where the sequence is cut a table of positions stays whole, and the context axis cuts no parameter
        ways = {dim: self._ways(tuple(axis for axis in axes if axis != CONTEXT)) for dim, axes in cuts.items()}
        return tuple(size // ways.get(dim, 1) for dim, size in zip(tensor.dims, tensor.shape, strict=True))

    def expert_parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters that only one expert uses, where ranks share experts."""
        if self.mesh.size(EXPERT) == 1:
            return ()
        return tuple(tensor for tensor in self.block.parameters if EXPERTS in self._cut_dims(tensor))

    def expert_elements(self) -> int:
        """Return the elements of one rank's share of the parameters that only one expert uses."""
        return sum(self.parameter_share(tensor) for tensor in self.expert_parameters())

    def kept(self, operator: Operator, name: str) -> ShardingSpec:
        """Return the layout in which a parameter or input of ``operator`` is kept."""
        return self.shardings[operator.name].of_kept(self.block.tensor[name])

    def gathers_again(self, operator: Operator, name: str) -> bool:
        """Return whether an operator gathers a parameter or input for each pass that reads it."""
        cut = bool(self.shardings[operator.name].kept)
        return cut and self.kept(operator, name) != self.wanted(operator, name)

    def adds_before_cut(self, operator: Operator) -> bool:
        """Return whether an operator adds parameters to a sum over tensor ranks before it is cut along the sequence.

        Learned positions are added to all embedded tokens on every rank, and only then are the tokens scattered
        (Megatron-LM, ``models/common/embeddings/language_model_embedding.py``).
        """
        return any(adds_before_cut(operator, self.produced[n], self.wanted(operator, n)) for n in operator.inputs)

    def statistics_bytes(self, operator: Operator, dim: str, count: int) -> float:
        """Return the bytes on a rank of ``count`` fp32 values along ``dim`` for every point of the other dims."""
        return float(
            count * ITEMSIZE["fp32"] * prod(size for name, size in self.sizes(operator).items() if name != dim)
        )

    def rings(self, operator: Operator) -> bool:
        """Return whether an operator attends to the keys of a context group part by part as they go round."""
        return operator.kind is OperatorKind.ATTENTION and CONTEXT in dict(self.shardings[operator.name].cuts).get(
            "key", ()
        )

    def passed_on(self, operator: Operator) -> float:
        """Return the bytes of keys and values that one rank hands to the next."""
        names = [name for name in operator.inputs if "key" in self.block.tensor[name].dims]
        return float(sum(self.tensor_bytes(name, self.wanted(operator, name)) for name in names))

    def _cut_dims(self, tensor: Tensor) -> set[str]:
        """Return the dims of a parameter that some operator with this parameter cuts."""
        users = [operator for operator in self.block.operators if tensor.name in operator.parameters]
        return {dim for user in users for dim, _ in self.shardings[user.name].cuts if dim in tensor.dims}

    def _scaled(self, dim: str, size: int) -> int:
        """Return the size of a dim for a microbatch."""
        return size * self.microbatch if dim == BATCH else size

    def _ways(self, axes: tuple[str, ...]) -> int:
        """Return the number of shards that some axes cut a dim into."""
        return prod(self.mesh.size(axis) for axis in axes)


def block_steps(
    layout: BlockLayout, accelerator: Accelerator, groups: Mapping[str, Communicator], *, keeps_gathered: bool = True
) -> BlockSteps:
    """Return forward and backward of a block: compute, and collectives over its ``groups`` by axis, in order.

    Where a product keeps only its shard of an input that it gathers along the tensor axis, backward gathers the input
    again beside the product, for the gradient of the weight (Korthikanti et al. 2022, section 4.2.2). Products of
    experts keep what they read: their dispatcher gathers it (Megatron-LM, ``moe/token_dispatcher.py``).
    """
    forward: list[Step] = []
    backward: list[list[Step]] = []
    available: dict[tuple[str, ShardingSpec], None] = {}
    again = gathered_again(layout)
    for operator in layout.block.operators:
        returning: list[Step] = []
        regathered: list[Step] = []
        shards = gathers_in_backward(layout, operator, keeps_gathered=keeps_gathered)
        for name in operator.inputs:
            wanted = layout.wanted(operator, name)
            # A tensor is moved once into each layout; later readers of the same layout find it there.
            if (name, wanted) not in available:
                available[name, wanted] = None
                have = layout.produced[name]
                arriving = arriving_steps(layout, groups, name, have, wanted, whole=layout.adds_before_cut(operator))
                arriving = sorted_tokens(layout, accelerator, TaskKind.FORWARD, arriving)
                forward += arriving
                if shards:
                    regathered += [step._replace(beside=True) for step in arriving if gathers(step)]
                if any(layout.gives_gradient(reader) for reader in layout.readers(name, wanted)):
                    moved = returning_steps(layout, groups, name, summed_gradient(layout, name, wanted), have)
                    returning += sorted_tokens(layout, accelerator, TaskKind.BACKWARD, moved)
        own = operator_steps(layout, accelerator, groups, operator, again.get(operator.name, ()))
        returning = [*own.after, *returning]
        if layout.rings(operator) and CONTEXT in groups:
            turns, size = layout.mesh.size(CONTEXT), layout.passed_on(operator)
            forward += [*own.gathers, *ring_forward(own.forward, turns, size, groups[CONTEXT])]
            backward.append([*own.before, *ring_backward(own.backward, turns, size, groups[CONTEXT]), *returning])
        else:
            forward += [*own.gathers, own.forward]
            backward.append([*own.before, *regathered, own.backward, *returning])
    # The operators of a loss are the last ones of forward, and so the first ones of backward.
    loss = sum(map(len, backward[len(backward) - len(layout.block.loss) :]))
    return BlockSteps(tuple(forward), tuple(step for steps in reversed(backward) for step in steps), loss)


class OperatorSteps(NamedTuple):
    """The segments of one operator on one rank: its gathers, its passes, and the collectives around its backward."""

    gathers: list[Step]
    forward: Step
    before: list[Step]
    backward: Step
    after: list[Step]


def operator_steps(
    layout: BlockLayout, accelerator: Accelerator, groups: Groups, operator: Operator, again: tuple[str, ...] = ()
) -> OperatorSteps:
    """Return an operator and its own collectives; ``regathered_inputs`` are gathered for its gradients of weights."""
    around = kept_cut(layout, groups, operator, again)
    forward, backward = (_compute(accelerator, layout, operator, direction) for direction in Pass)
    return OperatorSteps(around.forward, forward, around.backward, backward, around.after)


def gathers_in_backward(layout: BlockLayout, operator: Operator, *, keeps_gathered: bool) -> bool:
    """Return whether an operator keeps its shard of an input gathered along the tensor axis, and gathers it again."""
    return operator.kind is OperatorKind.MATMUL and not (keeps_gathered or layout.shardings[operator.name].kept)


def adds_before_cut(operator: Operator, have: ShardingSpec, wanted: ShardingSpec) -> bool:
    """Return whether an operator adds parameters to an input summed over tensor ranks before it is cut along tokens."""
    adds = operator.kind in _ADDS and bool(operator.parameters)
    return adds and TENSOR in have.partial and TENSOR in wanted.axes(SEQUENCE)


def arriving_steps(
    layout: BlockLayout, groups: Groups, name: str, have: ShardingSpec, wanted: ShardingSpec, *, whole: bool
) -> list[Step]:
    """Return the collectives that bring a tensor from the layout in which it is made to that in which it is read.

    ``sums_first`` says that partial sums are completed before any dim is cut.
    """
    if not whole:
        return collectives(layout, groups, name, have, wanted)
    between = have.complete
    return [*collectives(layout, groups, name, have, between), *collectives(layout, groups, name, between, wanted)]


def sorted_tokens(layout: BlockLayout, accelerator: Accelerator, kind: TaskKind, steps: list[Step]) -> list[Step]:
    """Return segments with a copy after every exchange of routed tokens between experts' ranks.

    Tokens arrive rank by rank, are read expert by expert, and go back the other way: they are sorted where a rank has
    several experts (Megatron-LM, ``moe/token_dispatcher.py``: ``sort_chunks_by_idxs`` after each all-to-all).
    """
    result: list[Step] = []
    for step in steps:
        result.append(step)
        if step.collective is not Collective.ALL_TO_ALL or step.axis != EXPERT:
            continue
        tensor = layout.block.tensor[step.tensor]
        if dict(zip(tensor.dims, tensor.shape, strict=True))[EXPERTS] > layout.mesh.size(EXPERT):
            seconds = streaming_time(2 * step.size, accelerator.bandwidth(OperatorKind.PERMUTE), accelerator.launch)
            result.append(Step(kind, to_ticks(seconds), f"sort of {step.tensor}", tensor=step.tensor))
    return result


def returning_steps(
    layout: BlockLayout, groups: Groups, name: str, gradient: ShardingSpec, have: ShardingSpec
) -> list[Step]:
    """Return the collectives that bring the gradient of a tensor, if it has one, back to the tensor's layout."""
    if not layout.has_gradient(name):
        return []
    return collectives(layout, groups, name, gradient, have.complete, "gradient of ")


def gathers(step: Step) -> bool:
    """Return whether a segment is a gather along the tensor axis."""
    return step.collective is Collective.ALL_GATHER and step.axis == TENSOR


def summed_gradient(layout: BlockLayout, name: str, wanted: ShardingSpec) -> ShardingSpec:
    """Return the layout of a gradient to which all readers of ``(name, target)`` have added."""
    partial: dict[str, None] = {}
    for operator in layout.readers(name, wanted):
        spec = layout.shardings[operator.name].of_gradient(layout.block.tensor[name])
        partial |= dict.fromkeys(spec.partial)
    return ShardingSpec(wanted.cuts, tuple(partial))


def _compute(accelerator: Accelerator, layout: BlockLayout, operator: Operator, direction: Pass) -> Step:
    """Return the segment of an operator's own kernels in one direction."""
    quantised = layout.quantises(operator)
    sizes, summed = layout.sizes(operator), layout.gradient_bytes
    seconds = operator_time(
        accelerator, layout.block, operator, sizes, direction, quantised=quantised, gradient_bytes=summed
    )
    if layout.frozen and direction is Pass.BACKWARD and (saved := layout.frozen_time(accelerator, operator)):
        seconds -= saved
    if operator.kind in _DISTRIBUTED and _cut_along_operator_axes(layout.shardings[operator.name]):
        seconds += operator_launches(operator, direction, quantised=quantised) * accelerator.sharded_launch
    kind = TaskKind.FORWARD if direction is Pass.FORWARD else TaskKind.BACKWARD
    return Step(kind, to_ticks(seconds), operator.name, _launches(layout, operator) + quantised)


def _cut_along_operator_axes(sharding: OperatorSharding) -> bool:
    """Return whether an operator axis cuts an operator."""
    return any(axis in OPERATOR_AXES for _, axes in sharding.cuts for axis in axes)


def _launches(layout: BlockLayout, operator: Operator) -> int:
    """Return how often the host starts kernels for an operator, or for its backward."""
    if operator.kind is not OperatorKind.SOFTMAX:
        return 1
    tokens = (SEQUENCE, operator.dims[-1][0])
    squares = prod(size for dim, size in layout.sizes(operator).items() if dim not in tokens)
    return 1 if squares % FUSED_SQUARES == 0 else EAGER_SOFTMAX
