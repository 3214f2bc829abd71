"""Writes a block down: tensors and operators by named dims."""

from collections.abc import Mapping

from simulator.operator_graph import BATCH, Block, Operator, OperatorKind, Tensor


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
        self.size = {BATCH: 1, **sizes}
        self._tensors: dict[str, Tensor] = {}
        self._operators: list[Operator] = []

    def tensor(self, name: str, dims: str, dtype: str | None = None) -> str:
        """Note a tensor with space-separated dims and return its name."""
        names = tuple(dims.split())
        shape = tuple(self.size[dim] for dim in names)
        self._tensors[name] = Tensor(name, names, shape, dtype or self.precision)
        return name

    def dims(self, name: str) -> str:
        """Return the space-separated dims of a tensor."""
        return " ".join(self._tensors[name].dims)

    def operator(
        self,
        name: str,
        kind: OperatorKind,
        dims: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        parameters: tuple[str, ...] = (),
        reduced: str = "",
        flops: float = 0.0,
        saved: tuple[str, ...] = (),
        selective: bool = False,
        executed: float = 1.0,
        imbalance: float = 1.0,
        statistics: tuple[tuple[str, int], ...] = (),
        kernel: str = "",
    ) -> None:
        """Note an operator with a space-separated iteration space."""
        space = tuple((dim, self.size[dim]) for dim in dims.split())
        summed = tuple(reduced.split())
        self._operators.append(
            Operator(
                name,
                kind,
                space,
                inputs,
                outputs,
                parameters,
                summed,
                flops,
                saved,
                selective,
                executed,
                imbalance,
                statistics,
                kernel,
            )
        )

    def elementwise(
        self, name: str, dims: str, inputs: tuple[str, ...], outputs: tuple[str, ...], saved: tuple[str, ...] = ()
    ) -> None:
        """Note an operator that works point by point."""
        self.operator(name, OperatorKind.ELEMENTWISE, dims, inputs, outputs, saved=saved)

    def block(
        self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], repeat: int = 1, layer: bool = False
    ) -> Block:
        """Return what was noted as a block."""
        return Block(name, tuple(self._operators), tuple(self._tensors.values()), inputs, outputs, repeat, layer)
