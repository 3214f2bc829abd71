"""Live tensors of a block, operator by operator: the bytes of the fullest moment of each pass.

A moment is what is live while one operator runs: bytes by tensor. Levels and peaks are sums of moments, and the same
moments are replayed as allocations (`meshwise.strategies.allocation`). A tensor has one name from moment to moment.

In forward a tensor lives from the operator that makes it to the last one that reads it, or to backward where an
operator keeps it. In backward the gradient of a tensor lives from the last operator that reads the tensor to the one
that makes it; a sum hands on the gradient of its output, so that all its terms share one.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import RMS_NORM
from meshwise.simulator.machine.compute import PRODUCTS, backward_parameters, streaming_kind
from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import GATES, ITEMSIZE, Operator, OperatorKind
from meshwise.strategies.lowering.costs.layout import BlockLayout
from meshwise.strategies.plan.framework import Framework
from meshwise.strategies.plan.sharding import ShardingSpec, redistribute

_ROUTED_DIM = "capacity"
"""The dim that only tokens routed to experts have."""


Moment = dict[str, int]
"""What is live while an operator runs: bytes by tensor."""


class KeptTensor(NamedTuple):
    """A tensor kept from forward to backward: its bytes, and the first operator that reads it in backward.

    Of one that ``is_half`` the other half is dropped once forward has read it.
    """

    size: int
    first_reader: int
    is_half: bool = False


class Liveness:
    """The tensors of one microbatch of a block on one rank, under the conventions of a framework."""

    def __init__(self, layout: BlockLayout, framework: Framework) -> None:
        self.layout, self.framework = layout, framework
        self.block, self.operators = layout.block, layout.block.operators

    # tensors

    def tensor_size(self, name: str, spec: ShardingSpec) -> int:
        """Return the bytes of a tensor in a layout, in the dtype in which the framework keeps it."""
        size = self.layout.tensor_bytes(name, spec)
        return self._narrow_size(name, size) if self.framework.logits_in_precision else size

    def _narrow_size(self, name: str, size: int) -> int:
        """Return the bytes of a tensor of ``size`` in the dtype of its producer, where logits are not widened."""
        return (
            size * self._logit_itemsizes[name] // ITEMSIZE[self.block.tensor[name].dtype]
            if name in self._logit_itemsizes
            else size
        )

    def read_size(self, operator: Operator, name: str) -> int:
        """Return the bytes of a tensor as an operator reads it."""
        return self._find_read_size(operator.name, name)

    @memoise
    def _find_read_size(self, operator: str, name: str) -> int:
        spec = self.layout.shardings[operator].find_input_spec(self.block.tensor[name])
        return self.tensor_size(name, spec)

    @memoise
    def produced_size(self, name: str) -> int:
        """Return the bytes of a tensor as its producer makes it, with partial results of each rank whole."""
        return self.tensor_size(name, self.layout.produced_layouts[name].without_partial)

    def gradient_size(self, name: str) -> int:
        """Return the bytes of a tensor's gradient as the tensor's producer reads it: of logits not widened."""
        return (
            self.produced_size(name)
            if self.framework.logits_in_precision
            else self._narrow_size(name, self.produced_size(name))
        )

    def shard_size(self, operator: Operator, name: str) -> int:
        """Return the bytes of a tensor between the collectives that bring it to a reader: still cut if gathered."""
        read_bytes = self.read_size(operator, name)
        return min(read_bytes, self.produced_size(name)) if name in self.layout.produced_layouts else read_bytes

    def describe_kept(self, operator: Operator, name: str) -> tuple[str, int]:
        """Return the memory in which an operator keeps a tensor: a name, equal for the same memory, and bytes.

        What an all-to-all brings is a copy. A product in fp8 keeps its input as it was cast, in one byte, and another
        operator may keep the same tensor unchanged. NVIDIA/TransformerEngine issue 1764: the fp8 data is kept, or on
        Hopper its transpose.
        """
        size = (
            self.read_size(operator, name) if self._keeps_gathered(operator, name) else self.shard_size(operator, name)
        )
        memory_name = f"{name} exchanged" if self._is_exchanged(operator, name) else name
        if not self.layout.quantises(operator):
            return memory_name, size
        return f"{memory_name} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]

    def _keeps_gathered(self, operator: Operator, name: str) -> bool:
        """Return whether an operator keeps a tensor gathered."""
        return self.framework.keeps_gathered and not self.layout.gathers_again(operator, name)

    def list_saved(self, operator: Operator) -> tuple[str, ...]:
        """Return the tensors that an operator keeps."""
        if self._is_composed(operator):
            return ()
        if self.framework.keeps_results or operator.kind is not OperatorKind.PERMUTE:
            return operator.saved
        return tuple(name for name in operator.saved if _ROUTED_DIM not in self.block.tensor[name].dims)

    def list_unnamed(self, operator: Operator) -> dict[str, int]:
        """Return the bytes that an operator keeps beside the graph's tensors, by a name."""
        if self._is_composed(operator):
            (output,) = operator.outputs
            size = self.produced_size(output)
            wide_size = size * ITEMSIZE["fp32"] // ITEMSIZE[self.block.tensor[output].dtype]
            wide_result = {f"{operator.name} in fp32": wide_size}
            # A softmax keeps its result in fp32; a norm the fp32 cast that it squares and multiplies, and the result in
            # the dtype of its weight.
            is_softmax = operator.kind is OperatorKind.SOFTMAX
            return wide_result if is_softmax else wide_result | {f"{operator.name} scaled": size}
        if self.framework.keeps_gates and any(GATES in self.block.tensor[name].dims for name in operator.inputs):
            return {f"{operator.name} gate": self.produced_size(operator.outputs[0])}
        pair_bytes = self.framework.routing_bytes
        if not pair_bytes or operator.kind is not OperatorKind.TOP_K:
            return {}
        num_pairs = 1
        for size in self.layout.local_sizes(operator).values():
            num_pairs *= size
        return {f"{operator.name} maps": pair_bytes * num_pairs}

    def _is_composed(self, operator: Operator) -> bool:
        """Return whether an operator is composed of torch's operators and keeps other tensors for it.

        That is a norm of root mean squares, and a softmax whose input is cast to fp32.
        """
        kind = streaming_kind(operator)
        if kind not in self.framework.composed:
            return False
        is_wide_softmax = kind == OperatorKind.SOFTMAX and ITEMSIZE[self.block.tensor[operator.outputs[0]].dtype] < 4
        return kind == RMS_NORM or is_wide_softmax

    def _is_exchanged(self, operator: Operator, name: str) -> bool:
        """Return whether a tensor reaches an operator by an all-to-all: as a copy, cut along another dim."""
        source, target = self.layout.produced_layouts.get(name), self.layout.input_layout(operator, name)
        if source is None or source.cuts == target.cuts:
            return False
        return any(move.collective is Collective.ALL_TO_ALL for move in redistribute(source, target))

    @cached_property
    def _logit_itemsizes(self) -> dict[str, int]:
        """The bytes of one element of the logits in the dtype of the product before the loss."""
        itemsizes = {}
        for operator in self.operators:
            if operator.kind in PRODUCTS and operator.outputs[0] in self._loss_inputs:
                itemsizes[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]
        return itemsizes

    @cached_property
    def _loss_inputs(self) -> frozenset[str]:
        """The inputs of losses over classes."""
        losses = (operator for operator in self.operators if operator.kind is OperatorKind.CROSS_ENTROPY)
        return frozenset(name for loss in losses for name in loss.inputs)

    # forward

    def find_forward_peak(self, kept_tensors: Mapping[str, KeptTensor]) -> int:
        """Return the bytes of the fullest moment of forward, ``kept_tensors`` included."""
        return max((sum(moment.values()) for moment in self.list_forward_moments(kept_tensors)), default=0)

    def list_forward_moments(self, kept_tensors: Mapping[str, KeptTensor]) -> list[Moment]:
        """Return what is live while the forward of every operator runs, ``kept_tensors`` included."""
        last_readers: dict[str, int] = {}
        sizes: dict[str, int] = {}
        producers = dict.fromkeys(self.block.inputs, 0)
        for index, operator in enumerate(self.operators):
            for name in operator.inputs:
                last_readers[name] = index
                sizes[name] = max(sizes.get(name, 0), self.shard_size(operator, name))
            for name in operator.outputs:
                producers[name] = index
        return [
            self._find_forward_moment(index, kept_tensors, producers, last_readers, sizes)
            for index in range(len(self.operators))
        ]

    def _find_forward_moment(
        self,
        index: int,
        kept_tensors: Mapping[str, KeptTensor],
        producers: Mapping[str, int],
        last_readers: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> Moment:
        """Return what is live while an operator's forward runs."""
        operator = self.operators[index]
        live_sizes = {name: tensor.size for name, tensor in kept_tensors.items() if tensor.first_reader <= index}
        for name, producer in producers.items():
            is_whole = name in live_sizes and not kept_tensors[name].is_half
            if producer <= index <= last_readers.get(name, producer) and not is_whole:
                live_sizes[name] = sizes.get(name) or self.produced_size(name)
        for name in operator.inputs:
            if self._reads_gathered(operator, name):
                live_sizes[f"{name} gathered"] = self.read_size(operator, name)
        for name in operator.outputs:
            if self.produced_size(name) > sizes.get(name, self.produced_size(name)):
                live_sizes[f"{name} partial"] = self.produced_size(name)
        live_sizes |= self._list_loss_copies(operator) | self._list_routed_copies(operator)
        return live_sizes | self._list_gathered_parameters(operator, operator.parameters)

    def _reads_gathered(self, operator: Operator, name: str) -> bool:
        """Return whether an operator gathers a tensor that is kept cut."""
        return not self._keeps_gathered(operator, name) and self.read_size(operator, name) > self.shard_size(
            operator, name
        )

    def _list_loss_copies(self, operator: Operator) -> Moment:
        """Return the copies of its inputs that a loss makes, and their casts."""
        copies = self.framework.loss_copies
        if operator.kind is not OperatorKind.CROSS_ENTROPY:
            return {}
        if copies is None:
            return {f"{name} cast": self._find_cast_size(operator, name) for name in self._list_cast(operator)}
        is_cut = any(dim in operator.reduced and axes for dim, axes in self.layout.shardings[operator.name].cuts)
        return {
            f"{name} copy {number}": self.read_size(operator, name)
            for number in range(copies[is_cut])
            for name in operator.inputs
        }

    def _list_probability_copies(self, operator: Operator) -> Moment:
        """Return the copies of the probabilities that backward of a loss makes; they have the size of the logits."""
        if not self.framework.copies_probabilities:
            return {}
        return {f"{name} probabilities": self.read_size(operator, name) for name in self._list_cast(operator)}

    def _list_cast(self, operator: Operator) -> list[str]:
        """Return the inputs of a loss that lie in memory in two dtypes."""
        return [name for name in operator.inputs if self.framework.casts_logits and name in self._logit_itemsizes]

    def _find_cast_size(self, operator: Operator, name: str) -> int:
        """Return the bytes of logits in the dtype of the product that makes them."""
        return self._narrow_size(name, self.read_size(operator, name))

    def _list_routed_copies(self, operator: Operator) -> Moment:
        """Return the further copies of routed tokens that a permutation makes."""
        if operator.kind is not OperatorKind.PERMUTE:
            return {}
        routed_names = [name for name in operator.inputs if _ROUTED_DIM in self.block.tensor[name].dims]
        return {
            f"{name} copy {number}": self.read_size(operator, name)
            for number in range(1, self.framework.routed_copies)
            for name in routed_names
        }

    # backward

    def list_backward_levels(
        self, kept_tensors: Mapping[str, KeptTensor], remade_tensors: Mapping[str, KeptTensor], remade_range: range
    ) -> list[int]:
        """Return, for every operator, the bytes that are live as its backward runs, without gradients of weights.

        Parameters
        ----------
        remade_tensors
            Tensors that recomputed operators make a second time.
        remade_range
            Operators during whose backward these are live.
        """
        moments = self.list_backward_moments(kept_tensors, remade_tensors, remade_range)
        return [sum(moment.values()) for moment in moments]

    def list_backward_moments(
        self, kept_tensors: Mapping[str, KeptTensor], remade_tensors: Mapping[str, KeptTensor], remade_range: range
    ) -> list[Moment]:
        """Return, for every operator, what is live as its backward runs; with the parameters of the levels."""
        result = []
        for index, operator in enumerate(self.operators):
            moment = {name: tensor.size for name, tensor in kept_tensors.items() if tensor.first_reader <= index}
            if index in remade_range:
                for name, tensor in remade_tensors.items():
                    if tensor.first_reader <= index:  # the half that is made again of a tensor whose other half is kept
                        moment[f"{name} remade" if name in kept_tensors else name] = tensor.size
            waiting_sizes = {f"{name} gradient": size for name, size in self._list_waiting(index)}
            moment |= waiting_sizes
            for name, size in self._list_backward_tensors(operator).items():
                # a second gradient of a tensor is added to the one that waits
                moment[f"{name} of {operator.name}" if name in waiting_sizes else name] = size
            result.append(moment)
        return result

    def list_captured_levels(self) -> list[int]:
        """Return, for every operator, the bytes beside kept tensors as its backward makes the gradient of its input.

        This is for frameworks that keep the whole graph until the gradients of weights are made. Gradients of outputs
        of operators with parameters then stay; they count from the start of backward on, and so are subtracted here.
        """
        gradients = {
            producer.name: sum(map(self.gradient_size, producer.outputs))
            for producer in self.operators
            if producer.parameters
        }
        remaining, result = sum(gradients.values()), []
        for index, operator in enumerate(self.operators):  # at the first one all are there
            operator_bytes = gradients.get(operator.name, 0)
            shared_bytes = self._count_shared_gradients(index)
            result.append(
                self._waiting_bytes[index]
                + self._backward_bytes[operator.name]
                - shared_bytes
                - (sum(gradients.values()) - remaining)
            )
            remaining -= operator_bytes
        return result

    def _count_shared_gradients(self, index: int) -> int:
        """Return the bytes of waiting gradients that are also gradients of outputs of operators with parameters."""
        owners = {
            self._gradient_owners[name]
            for operator in self.operators[index:]
            if operator.parameters
            for name in operator.outputs
        }
        return sum(size for name, size in self._list_waiting(index) if name in owners)

    @cached_property
    def _backward_bytes(self) -> dict[str, int]:
        """The bytes that the backward of every operator makes."""
        return {operator.name: sum(self._list_backward_tensors(operator).values()) for operator in self.operators}

    @cached_property
    def _waiting_bytes(self) -> list[int]:
        """The bytes of gradients that are live as each operator's backward begins."""
        return [sum(size for _, size in self._list_waiting(index)) for index in range(len(self.operators))]

    def _list_waiting(self, index: int) -> list[tuple[str, int]]:
        """Return the gradients that are live as an operator's backward begins: their tensors, and bytes."""
        return [
            (name, size)
            for name, size, first_operator, last_operator in self._gradient_intervals
            if first_operator <= index <= last_operator
        ]

    @cached_property
    def _gradient_intervals(self) -> list[tuple[str, int, int, int]]:
        """The gradients of tensors: bytes, and the first and last operator at the start of whose backward they live."""
        owners = self._gradient_owners
        sizes: dict[str, int] = {}
        first_operators: dict[str, int] = {}
        last_operators = dict.fromkeys((owners[name] for name in self.block.inputs if name in owners), 0)
        for index, operator in enumerate(self.operators):
            for name in filter(self._has_gradient, operator.inputs):
                first_operators[owners[name]] = index - 1
                sizes[owners[name]] = max(sizes.get(owners[name], 0), self.shard_size(operator, name))
            for name in operator.outputs:
                last_operators[owners[name]] = min(last_operators.get(owners[name], index), index)
        for name in filter(self._has_gradient, self.block.outputs):
            first_operators[owners[name]] = len(self.operators)
            sizes.setdefault(owners[name], self.produced_size(name))
        return [
            (name, owner_size, last_operators.get(name, 0), first_operators[name]) for name, owner_size in sizes.items()
        ]

    @cached_property
    def _gradient_owners(self) -> dict[str, str]:
        """For every tensor, the tensor whose gradient it shares: all terms of a sum share the gradient of the sum."""
        owners: dict[str, str] = {name: name for name in (*self.layout.produced_layouts, *self.block.outputs)}
        for operator in reversed(self.operators):
            if _is_sum(operator):
                for name in operator.inputs:
                    term_owner, sum_owner = owners[name], owners[operator.outputs[0]]
                    owners = {tensor: sum_owner if owner == term_owner else owner for tensor, owner in owners.items()}
        return owners

    def _has_gradient(self, name: str) -> bool:
        """Return whether a tensor has a gradient."""
        return self.block.tensor[name].has_gradient

    def _list_backward_tensors(self, operator: Operator) -> Moment:
        """Return what an operator's backward makes: gradients of its inputs, and what it gathers for them."""
        tensors = {
            f"{name} reduced gradient": self.produced_size(name) for name in operator.outputs if self._is_reduced(name)
        }
        tensors |= self._list_gathered_parameters(operator, backward_parameters(operator))
        if _is_sum(operator):
            return tensors
        if operator.kind is OperatorKind.CROSS_ENTROPY and self.framework.loss_copies is None:
            # the gradient of the logits takes their place
            return self._list_loss_copies(operator) | self._list_probability_copies(operator)
        for name in filter(self._has_gradient, operator.inputs):
            read_bytes, shard_bytes = self.read_size(operator, name), self.shard_size(operator, name)
            gradient = f"{self._gradient_owners.get(name, name)} gradient"
            while gradient in tensors:
                gradient += " again"
            tensors[gradient] = min(read_bytes, shard_bytes)
            if shard_bytes >= read_bytes:
                continue
            tensors[f"{gradient} whole"] = read_bytes
            if not self._keeps_gathered(operator, name) and not self._uses_gather_buffer(operator):
                tensors[f"{name} gathered"] = read_bytes
        return tensors | self._list_loss_copies(operator)

    def _is_reduced(self, name: str) -> bool:
        """Return whether the gradient of a tensor is gathered for its producer, because its readers have it cut."""
        readers = [operator for operator in self.operators if name in operator.inputs]
        return self._has_gradient(name) and any(
            self.read_size(operator, name) < self.produced_size(name) for operator in readers
        )

    def _uses_gather_buffer(self, operator: Operator) -> bool:
        """Return whether an operator gathers its input into the framework's permanent buffer."""
        return self.framework.gather_buffer and self.is_last_product(operator)

    def is_last_product(self, operator: Operator) -> bool:
        """Return whether an operator makes the logits."""
        return operator.outputs[0] in self._logit_itemsizes

    def weight_gradient_bytes(self, operator: Operator) -> int:
        """Return the bytes of new gradients of weights while an operator's backward runs, whole ones before a sum."""
        gathered_bytes = self.gathered_parameter_bytes(operator, operator.parameters)
        if self.framework.fused_gradients and operator.kind in PRODUCTS:
            return gathered_bytes
        tensors = [self.block.tensor[name] for name in operator.parameters]
        if operator.kind is OperatorKind.EMBEDDING and self.framework.whole_table:
            return sum(tensor.nbytes for tensor in tensors)
        return gathered_bytes + sum(self.layout.parameter_share(tensor) * ITEMSIZE[tensor.dtype] for tensor in tensors)

    def gathered_parameter_bytes(self, operator: Operator, names: tuple[str, ...]) -> int:
        """Return the bytes of an operator's parameters that are kept cut, as it reads them."""
        return sum(self._list_gathered_parameters(operator, names).values())

    def _list_gathered_parameters(self, operator: Operator, names: tuple[str, ...]) -> Moment:
        """Return an operator's parameters that are kept cut, as it reads them."""
        gathered_names = (name for name in names if self.layout.gathers_again(operator, name))
        return {f"{name} gathered": self.read_size(operator, name) for name in gathered_names}

    def gathered_input_bytes(self, operator: Operator) -> int:
        """Return the bytes of the inputs that an operator gathers in each pass."""
        return sum(self.read_size(operator, name) for name in operator.inputs if self._reads_gathered(operator, name))

    def regathered_bytes(self, operator: Operator) -> int:
        """Return the bytes of inputs that are gathered again while gradients of weights are computed."""
        return 0 if self._uses_gather_buffer(operator) else self.gathered_input_bytes(operator)


def _is_sum(operator: Operator) -> bool:
    """Return whether an operator only adds: its gradient is the gradient of every term."""
    terms = len(operator.inputs) + len(operator.parameters)
    return operator.kind is OperatorKind.ELEMENTWISE and not operator.saved and terms > 1 and len(operator.outputs) == 1
