"""Models as values: the protocol of all families, and the builder of blocks with tensors and operators.

Tensors and operators have named dims, as a string separated by spaces.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from meshwise.simulator.operator_graph import BATCH, Block, Operator, OperatorGraph, OperatorKind, Tensor


class Model(Protocol):
    """The sizes of a network of one family, as a frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def summary(self) -> str:
        """The sizes in one line."""

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens."""


@lru_cache(maxsize=64)
def build(spec: Model, sequence: int, precision: str) -> OperatorGraph:
    """Return the operator graph of one sample of a model.

    Parameters
    ----------
    sequence
        Tokens of the sample; ignored by models whose samples have one size (images).
    precision
        Dtype of parameters and activations.

    Raises
    ------
    ValueError
        Where the model has no graph for such a sample.
    """
    return spec.graph(sequence, precision)


class BlockBuilder:
    """Collects the tensors and operators of one block.

    Parameters
    ----------
    precision
        Dtype of tensors that name none.
    sizes
        The size of every dim by name; the batch is one sample.
    """

    def __init__(self, precision: str, sizes: Mapping[str, int]) -> None:
        self.precision = precision
        self.dim_sizes = {BATCH: 1, **sizes}
        self._tensors: dict[str, Tensor] = {}
        self._operators: list[Operator] = []

    def add_tensor(self, name: str, dims: str, dtype: str | None = None) -> str:
        """Add a tensor with space-separated dims and return its name."""
        names = tuple(dims.split())
        shape = tuple(self.dim_sizes[dim] for dim in names)
        self._tensors[name] = Tensor(name, names, shape, dtype or self.precision)
        return name

    def tensor_dims(self, name: str) -> str:
        """Return the space-separated dims of a tensor."""
        return " ".join(self._tensors[name].dims)

    def add_operator(
        self,
        name: str,
        kind: OperatorKind,
        dims: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        reduced: str = "",
        parameters: Mapping[str, str] | tuple[str, ...] = (),
        **details: Any,
    ) -> str:
        """Add an operator with the iteration space ``dims`` and return its first output.

        Outputs without a tensor get one with the dims that are not ``reduced``, and ``parameters`` without one get
        theirs. ``details`` are further fields of `Operator`.
        """
        summed_dims = tuple(reduced.split())
        result_dims = " ".join(dim for dim in dims.split() if dim not in summed_dims)
        for tensor, tensor_dims in (
            *dict.fromkeys(outputs, result_dims).items(),
            *(parameters.items() if isinstance(parameters, Mapping) else ()),
        ):
            if tensor not in self._tensors:
                self.add_tensor(tensor, tensor_dims)
        space = tuple((dim, self.dim_sizes[dim]) for dim in dims.split())
        self._operators.append(Operator(name, kind, space, inputs, outputs, tuple(parameters), summed_dims, **details))
        return outputs[0]

    def add_elementwise(
        self, name: str, dims: str, inputs: tuple[str, ...], outputs: tuple[str, ...], saved: tuple[str, ...] = ()
    ) -> str:
        """Add an elementwise operator and return its first output."""
        return self.add_operator(name, OperatorKind.ELEMENTWISE, dims, inputs, outputs, saved=saved)

    def build_block(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], repeat: int = 1, layer: bool = False
    ) -> Block:
        """Return the tensors and operators added so far as a block."""
        return Block(name, tuple(self._operators), tuple(self._tensors.values()), inputs, outputs, repeat, layer)
