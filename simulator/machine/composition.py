"""Operators that eager code composes of several kernels, where other software runs one.

Each kernel is one of torch's operators, which reads and writes whole tensors. The kernels are those that torch 2
dispatches for RMS norms as LlamaRMSNorm writes them (transformers, ``models/llama/modeling_llama.py``), for rotary
positions as ``apply_rotary_pos_emb`` does there, for ``silu(gate) * up``, and for a masked softmax in fp32 as
Megatron-LM's ``FusedScaleMaskSoftmax.forward_torch_softmax`` (``core/fusions/fused_softmax.py``) and Aleph Alpha's
``MaskedSoftmaxTorch`` (scaling, ``core/nn/masked_softmax/masked_softmax.py``) write it. Kernels on one number a row
and the reading of a mask that all heads share are left out. A test counts them.
"""

from typing import NamedTuple

from meshwise.simulator.machine.accelerator import GATED_ACTIVATION, RMS_NORM, ROTARY
from meshwise.simulator.operator_graph import OperatorKind


class Kernel(NamedTuple):
    """How often a kernel reads or writes each element, in the dtype of activations and in fp32.

    A kernel that does both once is a cast, which falls away where activations are in fp32.
    """

    narrow: float = 0.0
    wide: float = 0.0

    @property
    def is_cast(self) -> bool:
        """Whether the kernel only changes the dtype."""
        return self.narrow == self.wide == 1.0


class Composition(NamedTuple):
    """The kernels of an operator in forward and in backward."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


_CAST = Kernel(1, 1)

COMPOSITIONS = {
    RMS_NORM: Composition(
        # to fp32, square, mean, product with the inverse root, back, product with the weight
        forward=(_CAST, Kernel(wide=2), Kernel(wide=1), Kernel(wide=2), _CAST, Kernel(2)),
        backward=(
            # of the weight: product with the gradient, for the input and for the weight, and the sum of the latter
            *(Kernel(2), Kernel(3), Kernel(1)),
            _CAST,
            # of the inverse root: product with the input, and its sum; of the input: product with the inverse root
            *(Kernel(wide=3), Kernel(wide=2), Kernel(wide=1)),
            # of the mean: its gradient for every element; of the square: power, factor, product
            *(Kernel(wide=1), Kernel(wide=2), Kernel(wide=2), Kernel(wide=3)),
            # the sum of both gradients of the input
            Kernel(wide=3),
            _CAST,
        ),
    ),
    ROTARY: Composition(
        # product with the cosines; half negated, halves joined, product with the sines; sum
        forward=(Kernel(2), Kernel(1), Kernel(2), Kernel(2), Kernel(3)),
        # product with the sines, half negated, halves filled up with zeros and added; product with the cosines, sum
        backward=(Kernel(2), Kernel(1), Kernel(1.5), Kernel(1.5), Kernel(3), Kernel(2), Kernel(3)),
    ),
    GATED_ACTIVATION: Composition(forward=(Kernel(2), Kernel(3)), backward=(Kernel(3), Kernel(3), Kernel(3))),
    OperatorKind.SOFTMAX: Composition(
        # to fp32, masked in place, softmax, back
        forward=(_CAST, Kernel(wide=2), Kernel(wide=2), _CAST),
        # to fp32; of the softmax; copy, and masked in place (aten TensorAdvancedIndexing.cpp, masked_fill); back
        backward=(_CAST, Kernel(wide=3), Kernel(wide=2), Kernel(wide=2), _CAST),
    ),
}
"""The kernels by the kind of `meshwise.simulator.machine.compute.streaming_kind`, for each element of a result."""


def list_kernel_bytes(kind: str, itemsize: int, *, backward: bool) -> tuple[float, ...]:
    """Return the bytes that each kernel of a kind reads and writes for an element of ``itemsize`` bytes.

    >>> list_kernel_bytes("gated_activation", 2, backward=False)
    (4.0, 6.0)
    >>> sum(list_kernel_bytes("rms_norm", 2, backward=False)), sum(list_kernel_bytes("rms_norm", 2, backward=True))
    (36.0, 92.0)
    """
    composition = COMPOSITIONS[kind]
    kernels = composition.backward if backward else composition.forward
    return tuple(
        float(kernel.narrow * itemsize + kernel.wide * 4) for kernel in kernels if itemsize < 4 or not kernel.is_cast
    )
