"""Live tensors of a block, operator by operator: the bytes of the fullest moment of each pass.

In forward a tensor lives from the operator that makes it to the last one that reads it, or to backward where an
operator keeps it. In backward the gradient of a tensor lives from the last operator that reads the tensor to the one
that makes it; a sum hands on the gradient of its output, so that all its terms share one.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import RMS_NORM
from meshwise.simulator.machine.compute import PRODUCTS, read_again, streaming_kind
from meshwise.simulator.operator_graph import GATES, ITEMSIZE, Operator, OperatorKind
from meshwise.strategies.lowering.costs.operator import BlockLayout
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.sharding import ShardingSpec, redistribute

_ROUTED = "capacity"
"""The dim that only tokens routed to experts have."""


class Held(NamedTuple):
    """A tensor kept from forward to backward: its bytes, and the first operator that reads it in backward."""

    size: int
    first: int


class Liveness:
    """The tensors of one microbatch of a block on one rank, under the conventions of a framework."""

    def __init__(self, layout: BlockLayout, framework: Framework) -> None:
        self.layout, self.framework = layout, framework
        self.block, self.operators = layout.block, layout.block.operators
        self._read: dict[tuple[str, str], int] = {}
        self._made: dict[str, int] = {}

    # tensors

    def size(self, name: str, spec: ShardingSpec) -> int:
        """Return the bytes of a tensor in a layout, in the dtype in which the framework keeps it."""
        size = self.layout.tensor_bytes(name, spec)
        return self._in_precision(name, size) if self.framework.logits_in_precision else size

    def _in_precision(self, name: str, size: int) -> int:
        """Return the bytes of a tensor of ``size`` in the dtype of its producer, where logits are not widened."""
        return size * self._logits[name] // ITEMSIZE[self.block.tensor[name].dtype] if name in self._logits else size

    def read(self, operator: Operator, name: str) -> int:
        """Return the bytes of a tensor as an operator reads it."""
        key = (operator.name, name)
        if key not in self._read:
            self._read[key] = self.size(name, self.layout.wanted(operator, name))
        return self._read[key]

    def made(self, name: str) -> int:
        """Return the bytes of a tensor as its producer makes it, with partial results of each rank whole."""
        if name not in self._made:
            self._made[name] = self.size(name, self.layout.produced[name].complete)
        return self._made[name]

    def gradient(self, name: str) -> int:
        """Return the bytes of a tensor's gradient as the tensor's producer reads it: of logits not widened."""
        return self.made(name) if self.framework.logits_in_precision else self._in_precision(name, self.made(name))

    def share(self, operator: Operator, name: str) -> int:
        """Return the bytes of a tensor between the collectives that bring it to a reader: still cut if gathered."""
        wanted = self.read(operator, name)
        return min(wanted, self.made(name)) if name in self.layout.produced else wanted

    def kept(self, operator: Operator, name: str) -> tuple[str, int]:
        """Return the memory in which an operator keeps a tensor: a name, equal for the same memory, and bytes.

        What an all-to-all brings is a copy. A product in fp8 keeps its input as it was cast, in one byte, and another
        operator may keep the same tensor unchanged. NVIDIA/TransformerEngine issue 1764: the fp8 data is kept, or on
        Hopper its transpose.
        """
        size = self.read(operator, name) if self._keeps_gathered(operator, name) else self.share(operator, name)
        known = f"{name} exchanged" if self._exchanged(operator, name) else name
        if not self.layout.quantises(operator):
            return known, size
        return f"{known} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]

    def _keeps_gathered(self, operator: Operator, name: str) -> bool:
        """Return whether an operator keeps a tensor gathered."""
        return self.framework.keeps_gathered and not self.layout.gathers_again(operator, name)

    def saved(self, operator: Operator) -> tuple[str, ...]:
        """Return the tensors that an operator keeps."""
        if self._composed(operator):
            return ()
        if self.framework.keeps_results or operator.kind is not OperatorKind.PERMUTE:
            return operator.saved
        return tuple(name for name in operator.saved if _ROUTED not in self.block.tensor[name].dims)

    def unnamed(self, operator: Operator) -> dict[str, int]:
        """Return the bytes that an operator keeps beside the graph's tensors, by a name."""
        if self._composed(operator):
            (output,) = operator.outputs
            size = self.made(output)
            # It keeps the fp32 cast that it squares and multiplies, and the result in the dtype of its weight.
            wide = size * ITEMSIZE["fp32"] // ITEMSIZE[self.block.tensor[output].dtype]
            return {f"{operator.name} in fp32": wide, f"{operator.name} scaled": size}
        if self.framework.keeps_gates and any(GATES in self.block.tensor[name].dims for name in operator.inputs):
            return {f"{operator.name} gate": self.made(operator.outputs[0])}
        each = self.framework.routing_bytes
        if not each or operator.kind is not OperatorKind.TOP_K:
            return {}
        pairs = 1
        for size in self.layout.sizes(operator).values():
            pairs *= size
        return {f"{operator.name} maps": each * pairs}

    def _composed(self, operator: Operator) -> bool:
        """Return whether an operator is a norm of root mean squares that is composed of torch's operators."""
        return self.framework.composes_norms and streaming_kind(operator) == RMS_NORM

    def _exchanged(self, operator: Operator, name: str) -> bool:
        """Return whether a tensor reaches an operator by an all-to-all: as a copy, cut along another dim."""
        have, wanted = self.layout.produced.get(name), self.layout.wanted(operator, name)
        if have is None or have.cuts == wanted.cuts:
            return False
        return any(move.collective is Collective.ALL_TO_ALL for move in redistribute(have, wanted))

    @cached_property
    def _logits(self) -> dict[str, int]:
        """The bytes of one element of the logits in the dtype of the product before the loss."""
        found = {}
        for operator in self.operators:
            if operator.kind in PRODUCTS and operator.outputs[0] in self._classified:
                found[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]
        return found

    @cached_property
    def _classified(self) -> frozenset[str]:
        """The inputs of losses over classes."""
        losses = (each for each in self.operators if each.kind is OperatorKind.CROSS_ENTROPY)
        return frozenset(name for loss in losses for name in loss.inputs)

    # forward

    def forward(self, held: Mapping[str, Held]) -> int:
        """Return the bytes of the fullest moment of forward, ``kept_tensors`` included."""
        last: dict[str, int] = {}
        size: dict[str, int] = {}
        born = dict.fromkeys(self.block.inputs, 0)
        for index, operator in enumerate(self.operators):
            for name in operator.inputs:
                last[name] = index
                size[name] = max(size.get(name, 0), self.share(operator, name))
            for name in operator.outputs:
                born[name] = index
        return max((self._running(index, held, born, last, size) for index in range(len(self.operators))), default=0)

    def _running(
        self,
        index: int,
        held: Mapping[str, Held],
        born: Mapping[str, int],
        last: Mapping[str, int],
        size: Mapping[str, int],
    ) -> int:
        """Return the bytes that are live while an operator's forward runs."""
        operator = self.operators[index]
        live = {name: each.size for name, each in held.items() if each.first <= index}
        for name, start in born.items():
            if start <= index <= last.get(name, start) and name not in live:
                live[name] = size.get(name) or self.made(name)
        partial = (self.made(name) for name in operator.outputs if self.made(name) > size.get(name, self.made(name)))
        besides = self._loss_copies(operator) + self._routed_copies(operator)
        besides += self.whole_parameters(operator, operator.parameters)
        return sum(live.values()) + self.gathered(operator) + sum(partial) + besides

    def _gathers(self, operator: Operator, name: str) -> bool:
        """Return whether an operator gathers a tensor that is kept cut."""
        return not self._keeps_gathered(operator, name) and self.read(operator, name) > self.share(operator, name)

    def _loss_copies(self, operator: Operator) -> int:
        """Return the bytes of the copies of its inputs that a loss makes."""
        copies = self.framework.loss_copies
        if copies is None or operator.kind is not OperatorKind.CROSS_ENTROPY:
            return 0
        cut = any(dim in operator.reduced and axes for dim, axes in self.layout.shardings[operator.name].cuts)
        return copies[cut] * sum(self.read(operator, name) for name in operator.inputs)

    def _routed_copies(self, operator: Operator) -> int:
        """Return the bytes of further copies of routed tokens that a permutation makes."""
        if operator.kind is not OperatorKind.PERMUTE:
            return 0
        routed = (self.read(operator, n) for n in operator.inputs if _ROUTED in self.block.tensor[n].dims)
        return (self.framework.routed_copies - 1) * sum(routed)

    # backward

    def backward(self, held: Mapping[str, Held], again: Mapping[str, Held], where: range) -> list[int]:
        """Return, for every operator, the bytes that are live as its backward runs, without gradients of weights.

        Parameters
        ----------
        remade_tensors
            Tensors that recomputed operators make a second time.
        remade_range
            Operators during whose backward these are live.
        """
        result = []
        for index, operator in enumerate(self.operators):
            live = sum(each.size for each in held.values() if each.first <= index)
            if index in where:
                live += sum(each.size for each in again.values() if each.first <= index)
            result.append(live + self._waiting[index] + self._making[operator.name])
        return result

    def captured(self) -> list[int]:
        """Return, for every operator, the bytes beside kept tensors as its backward makes the gradient of its input.

        This is for frameworks that keep the whole graph until the gradients of weights are made. Gradients of outputs
        of operators with parameters then stay; they count from the start of backward on, and so are subtracted here.
        """
        found = {each.name: sum(map(self.gradient, each.outputs)) for each in self.operators if each.parameters}
        left, result = sum(found.values()), []
        for index, operator in enumerate(self.operators):  # at the first one all are there
            own = found.get(operator.name, 0)
            shared = self._shared(index)
            result.append(self._waiting[index] + self._making[operator.name] - shared - (sum(found.values()) - left))
            left -= own
        return result

    def _shared(self, index: int) -> int:
        """Return the bytes of waiting gradients that are also gradients of outputs of operators with parameters."""
        groups = {self._sums[name] for each in self.operators[index:] if each.parameters for name in each.outputs}
        return sum(size for name, size in self._waiting_at(index) if name in groups)

    @cached_property
    def _making(self) -> dict[str, int]:
        """The bytes that the backward of every operator makes."""
        return {operator.name: self._made_backward(operator) for operator in self.operators}

    @cached_property
    def _waiting(self) -> list[int]:
        """The bytes of gradients that are live as each operator's backward begins."""
        return [sum(size for _, size in self._waiting_at(index)) for index in range(len(self.operators))]

    def _waiting_at(self, index: int) -> list[tuple[str, int]]:
        """Return the gradients that are live as an operator's backward begins: their tensors, and bytes."""
        return [(name, size) for name, size, first, last in self._intervals if first <= index <= last]

    @cached_property
    def _intervals(self) -> list[tuple[str, int, int, int]]:
        """The gradients of tensors: bytes, and the first and last operator at the start of whose backward they live."""
        group = self._sums
        size: dict[str, int] = {}
        begin: dict[str, int] = {}
        end = dict.fromkeys((group[name] for name in self.block.inputs if name in group), 0)
        for index, operator in enumerate(self.operators):
            for name in filter(self._flows, operator.inputs):
                begin[group[name]] = index - 1
                size[group[name]] = max(size.get(group[name], 0), self.share(operator, name))
            for name in operator.outputs:
                end[group[name]] = min(end.get(group[name], index), index)
        for name in filter(self._flows, self.block.outputs):
            begin[group[name]] = len(self.operators)
            size.setdefault(group[name], self.made(name))
        return [(name, most, end.get(name, 0), begin[name]) for name, most in size.items()]

    @cached_property
    def _sums(self) -> dict[str, str]:
        """For every tensor, the tensor whose gradient it shares: all terms of a sum share the gradient of the sum."""
        group: dict[str, str] = {name: name for name in (*self.layout.produced, *self.block.outputs)}
        for operator in reversed(self.operators):
            if _is_sum(operator):
                for name in operator.inputs:
                    other, one = group[name], group[operator.outputs[0]]
                    group = {each: one if root == other else root for each, root in group.items()}
        return group

    def _flows(self, name: str) -> bool:
        """Return whether a tensor has a gradient."""
        return self.block.tensor[name].has_gradient

    def _made_backward(self, operator: Operator) -> int:
        """Return the bytes that an operator's backward makes: gradients of its inputs, and what it gathers for them."""
        total = sum(self.made(name) for name in operator.outputs if self._reduced(name))
        total += self.whole_parameters(operator, read_again(operator))
        if _is_sum(operator):
            return total
        for name in filter(self._flows, operator.inputs):
            wanted, share = self.read(operator, name), self.share(operator, name)
            total += wanted + (share if share < wanted else 0)
            if share < wanted and not self._keeps_gathered(operator, name) and not self._buffered(operator):
                total += wanted
        if operator.kind is OperatorKind.CROSS_ENTROPY and self.framework.loss_copies is None:
            return 0  # the gradient of the logits takes their place
        return total + self._loss_copies(operator)

    def _reduced(self, name: str) -> bool:
        """Return whether the gradient of a tensor is gathered for its producer, because its readers have it cut."""
        readers = [operator for operator in self.operators if name in operator.inputs]
        return self._flows(name) and any(self.read(operator, name) < self.made(name) for operator in readers)

    def _buffered(self, operator: Operator) -> bool:
        """Return whether an operator gathers its input into the framework's permanent buffer."""
        return self.framework.gather_buffer and self.is_last_product(operator)

    def is_last_product(self, operator: Operator) -> bool:
        """Return whether an operator makes the logits."""
        return operator.outputs[0] in self._logits

    def weight_gradient(self, operator: Operator) -> int:
        """Return the bytes of new gradients of weights while an operator's backward runs, whole ones before a sum."""
        whole = self.whole_parameters(operator, operator.parameters)
        if self.framework.fused_gradients and operator.kind in PRODUCTS:
            return whole
        tensors = [self.block.tensor[name] for name in operator.parameters]
        if operator.kind is OperatorKind.EMBEDDING and self.framework.whole_table:
            return sum(tensor.nbytes for tensor in tensors)
        return whole + sum(self.layout.parameter_share(tensor) * ITEMSIZE[tensor.dtype] for tensor in tensors)

    def whole_parameters(self, operator: Operator, names: tuple[str, ...]) -> int:
        """Return the bytes of an operator's parameters that are kept cut, as it reads them."""
        return sum(self.read(operator, name) for name in names if self.layout.gathers_again(operator, name))

    def gathered(self, operator: Operator) -> int:
        """Return the bytes of the inputs that an operator gathers in each pass."""
        return sum(self.read(operator, name) for name in operator.inputs if self._gathers(operator, name))

    def gathered_apart(self, operator: Operator) -> int:
        """Return the bytes of inputs that are gathered again while gradients of weights are computed."""
        return 0 if self._buffered(operator) else self.gathered(operator)


def _is_sum(operator: Operator) -> bool:
    """Return whether an operator only adds: its gradient is the gradient of every term."""
    terms = len(operator.inputs) + len(operator.parameters)
    return operator.kind is OperatorKind.ELEMENTWISE and not operator.saved and terms > 1 and len(operator.outputs) == 1
