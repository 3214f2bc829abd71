"""A device that computes: its peaks, its memory, and how near kernels come to both."""

from dataclasses import dataclass, replace

from meshwise.simulator.brief import brief
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel

NARROW = ("fp8",)
"""Dtypes of products that are not slowed under sustained power: no publisher times them both ways, and they draw
less of it for the same rate."""

ACTIVATION = "activation"
"""Kind of elementwise operators that compute: of the memory bandwidth GELU reaches 0.74 and additions 0.89 on the A100,
0.51 and 0.97 on Hopper (published kernels, ``docs/kernel_accuracy.md``)."""
GATED_ACTIVATION = "gated_activation"
"""Kind of activations of which half of the input gates the other half."""
ROTARY = "rotary"
"""Kind of elementwise operators that make several tensors of as many: rotary positions of queries and keys."""
RMS_NORM = "rms_norm"
"""Kind of norms that take one statistic."""
REFINED = (ACTIVATION, GATED_ACTIVATION, ROTARY, RMS_NORM)
"""Kinds of memory-bound kernels besides those of operators: a framework without fused kernels composes each of several,
and reaches a bandwidth of its own (`meshwise.simulator.machine.compute.streaming_kind` says which operators they are).
"""

_RELATIVES = {
    ACTIVATION: ("elementwise",),
    GATED_ACTIVATION: (ACTIVATION, "elementwise"),
    ROTARY: ("elementwise", ACTIVATION),
    RMS_NORM: ("norm",),
    "elementwise": (ACTIVATION,),
}
"""Whose bandwidth holds for a kind that is not named, the nearest first."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that computes.

    Parameters
    ----------
    peak_flops
        Dense peak in FLOP/s by dtype, as ``(("bf16", 312e12), ...)``.
    memory
        Bytes of device memory as the framework reports them: less than the nominal size, of which the driver keeps
        some.
    memory_bandwidth
        Bytes a second between the device and its memory.
    launch
        Seconds that the device is busy for one kernel besides its work.
    matmul
        How near matrix multiplications come to the peak.
    attention
        How near fused attention comes to the best matrix multiplication.
    sustained
        Time of matrix multiplications in training over their time in a short burst, for which ``matmul``
        holds: clocks sink under sustained power. At least 1. Attention draws less and is not slowed: two publishers
        of B200 timings differ by 1.3 in products and by less than 0.04 in attention of the same shape.
    kernel_bandwidth
        Fraction of ``memory_bandwidth`` reached by a kind of operator, as
        ``(("norm", 0.4), ...)``; kinds that are not named reach ``kernel_bandwidth_default``.
        ``"norm_backward"`` is that of a norm's backward pass where it differs. ``"activation"`` is that of elementwise
        operators whose backward reads what forward kept; where one of it and ``"elementwise"`` is named, it holds
        for both. ``"gated_activation"``, ``"rotary"`` and ``"rms_norm"`` are, where they are not named, those of
        activations, elementwise operators and norms.
    reserved
        Bytes of memory that the framework takes before the first tensor.
    sharded_launch
        Seconds that a kernel on tensors cut over ranks takes more, and the update of a cut
        parameter, where the framework's dispatch is not hidden (torch's DTensor on a CPU).
    unit_launch
        Seconds that the framework takes to gather a unit of fully sharded parameters, and to reduce its gradients,
        besides the message, where that is not hidden (torch's ``fully_shard`` on a CPU); each is a message of its own
        then.
    recompute_launch
        Seconds that the framework takes besides kernels to run a layer, or a part of one, again in backward, where
        that is not hidden (torch's ``checkpoint`` on a CPU); what its operators keep takes launches besides.
    optimizer_launch
        Seconds that the optimizer takes for one parameter tensor besides its memory traffic;
        0 for fused optimizers.
    computes_collectives
        Whether collectives run on the very cores that compute (gloo on a CPU): then nothing
        is hidden beneath compute.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory: float
    memory_bandwidth: float
    launch: float = 0.0
    matmul: MatmulModel = MatmulModel()
    attention: AttentionModel = AttentionModel()
    sustained: float = 1.0
    kernel_bandwidth: tuple[tuple[str, float], ...] = ()
    kernel_bandwidth_default: float = 1.0
    reserved: float = 0.0
    sharded_launch: float = 0.0
    unit_launch: float = 0.0
    recompute_launch: float = 0.0
    optimizer_launch: float = 0.0
    computes_collectives: bool = False

    __repr__ = brief()

    def __post_init__(self) -> None:
        if not self.peak_flops or min(rate for _, rate in self.peak_flops) <= 0:
            raise ValueError(f"accelerator {self.name}: peak_flops are positive, met {self.peak_flops}")
        if min(self.memory, self.memory_bandwidth) <= 0:
            raise ValueError(f"accelerator {self.name}: memory and bandwidth are positive, met {self}")
        launches = self.launch, self.sharded_launch, self.unit_launch, self.recompute_launch, self.optimizer_launch
        if min(*launches, self.reserved) < 0:
            raise ValueError(f"accelerator {self.name}: launch and reserved are not negative, met {self}")
        if self.sustained < 1:
            raise ValueError(f"accelerator {self.name}: sustained is at least 1, met {self.sustained}")
        if max(self.attention.forward, self.attention.backward) * self.matmul.fraction > 1 + 1e-9:
            raise ValueError(f"accelerator {self.name}: attention is at most as fast as the peak, met {self.attention}")

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for ``dtype``; ``ValueError`` where it is not known."""
        for name, rate in self.peak_flops:
            if name == dtype:
                return rate
        known = ", ".join(name for name, _ in self.peak_flops)
        raise ValueError(f"accelerator {self.name} has no peak for {dtype}; known: {known}")

    def slowdown(self, dtype: str) -> float:
        """Return how many times as long products of ``dtype`` take in training as in a short burst."""
        return 1.0 if dtype in NARROW else self.sustained

    def bandwidth(self, kind: str, *, backward: bool = False) -> float:
        """Return the memory bandwidth in byte/s that operators of ``kind`` reach."""
        known = dict(self.kernel_bandwidth)
        kind = next((each for each in (kind, *_RELATIVES.get(kind, ())) if each in known), kind)
        fraction = known.get(kind, self.kernel_bandwidth_default)
        if backward:
            fraction = known.get(f"{kind}_backward", fraction)
        return self.memory_bandwidth * fraction

    def at_speed(self, factor: float) -> "Accelerator":
        """Return this device where everything on it runs ``factor`` times as fast (a straggler: below 1)."""
        return replace(
            self,
            peak_flops=tuple((dtype, rate * factor) for dtype, rate in self.peak_flops),
            memory_bandwidth=self.memory_bandwidth * factor,
            launch=self.launch / factor,
            sharded_launch=self.sharded_launch / factor,
            unit_launch=self.unit_launch / factor,
            recompute_launch=self.recompute_launch / factor,
            optimizer_launch=self.optimizer_launch / factor,
            matmul=replace(self.matmul, product_launch=self.matmul.product_launch / factor),
            attention=replace(self.attention, launch=self.attention.launch / factor),
        )
