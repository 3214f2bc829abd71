"""Measured kernels in terms of the simulator's own: the functions that predict a step predict them too."""

from dataclasses import dataclass

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import Pass, attention_time, matmul_time
from meshwise.simulator.machine.kernels import AttentionShape, Matmul, streaming_time
from meshwise.simulator.operator_graph import ITEMSIZE

CACHE = "cache"
"""Kind of the copies of keys and values into a serving backend's cache: no kind of training's."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product, or a batch of them in one kernel.

    Parameters
    ----------
    gradient
        What it computes: ``""`` an output, ``"data"`` or ``"weight"`` a gradient.
    casts_input
        Whether the measured call first finds the input's largest value and casts the input: two more kernels,
        which read it twice and write it in the narrow dtype.
    result_bytes
        Bytes moved per element of the result; 0 for those of its dtype. A sum of gradients in fp32 is read and
        written: 8.
    copied_bytes
        Bytes that the measured call also copies, in one more kernel.
    """

    matmul: Matmul
    dtype: str
    gradient: str = ""
    grouped: bool = False
    casts_input: bool = False
    result_bytes: int = 0
    copied_bytes: float = 0.0

    def seconds(self, device: Accelerator) -> float:
        """Return the predicted seconds, launch included."""
        model = device.matmul
        relative_rate = {"": 1.0, "data": model.data_gradient, "weight": model.weight_gradient}[self.gradient]
        seconds = matmul_time(device, self.dtype, self.matmul, self._traffic(), grouped=self.grouped) / relative_rate
        seconds += device.launch
        if self.casts_input:
            traffic = self.matmul.count * self.matmul.m * self.matmul.k * (2 * 2 + ITEMSIZE[self.dtype])
            seconds += 2 * device.launch + traffic / device.bandwidth("elementwise")
        if self.copied_bytes:
            seconds += streaming_time(self.copied_bytes, device.bandwidth("elementwise"), device.launch)
        return seconds

    def _traffic(self) -> float:
        product, itemsize = self.matmul, ITEMSIZE[self.dtype]
        read_bytes = itemsize * (product.m * product.k + product.k * product.n)
        return float(product.count * (read_bytes + (self.result_bytes or itemsize) * product.m * product.n))


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Fused attention: forward, backward, or one after the other.

    Parameters
    ----------
    copied_bytes
        Bytes that the measured call also copies: a serving backend writes keys and values to its cache.
    """

    shape: AttentionShape
    dtype: str
    passes: tuple[Pass, ...]
    copied_bytes: float = 0.0

    def seconds(self, device: Accelerator) -> float:
        """Return the predicted seconds, launches included."""
        pass_times = (
            device.launch + attention_time(device, self.dtype, self.shape, attention_pass)
            for attention_pass in self.passes
        )
        return sum(pass_times) + self.copied_bytes / device.bandwidth(CACHE)


@dataclass(frozen=True, slots=True)
class Stream:
    """A memory-bound kernel."""

    kind: str
    traffic: float
    backward: bool = False

    @property
    def name(self) -> str:
        """Name of its fraction of the memory bandwidth."""
        return self.kind + "_backward" * self.backward

    def seconds(self, device: Accelerator) -> float:
        """Return the predicted seconds, launch included."""
        bandwidth = device.bandwidth(self.kind, backward=self.backward)
        return streaming_time(self.traffic, bandwidth, device.launch)


Kernel = Product | FusedAttention | Stream
"""A kernel whose time the simulator predicts."""
