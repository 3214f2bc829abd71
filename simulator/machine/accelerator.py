"""Accelerators: their peak rates, their memory, and the fraction of both that kernels reach."""

from dataclasses import dataclass, replace

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel

NARROW_DTYPES = ("fp8",)
"""Dtypes whose matrix products sustained power does not slow further than in the timings that they were fitted to: no
publisher times them both in a burst and under load."""

ACTIVATION = "activation"
"""Kind of elementwise operators that compute: of the memory bandwidth GELU reaches 0.74 and additions 0.89 on the A100,
0.51 and 0.97 on Hopper (published kernels, ``docs/kernel_accuracy.md``)."""
GATED_ACTIVATION = "gated_activation"
"""Kind of activations that multiply one half of their input by a function of the other half."""
ROTARY = "rotary"
"""Kind of elementwise operators that map several tensors to as many: rotary positions of queries and keys."""
RMS_NORM = "rms_norm"
"""Kind of norms that take one statistic."""
REFINED_KINDS = (ACTIVATION, GATED_ACTIVATION, ROTARY, RMS_NORM)
"""Kinds of memory-bound kernels besides the kinds of operators. A framework without fused kernels composes each of
several kernels, and so reaches another bandwidth; `meshwise.simulator.machine.compute.streaming_kind` maps operators to
kinds."""

_RELATIVES = {
    ACTIVATION: ("elementwise",),
    GATED_ACTIVATION: (ACTIVATION, "elementwise"),
    ROTARY: ("elementwise", ACTIVATION),
    RMS_NORM: ("norm",),
    "elementwise": (ACTIVATION,),
}
"""Kinds whose bandwidth stands in for a kind that is not named, the closest first."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator.

    Parameters
    ----------
    peak_flops
        Dense peak in FLOP/s by dtype, as ``(("bf16", 312e12), ...)``.
    memory
        Bytes of device memory as the framework reports them: less than the nominal size, as the driver reserves some.
    memory_bandwidth
        Byte/s between the device and its memory.
    launch
        Seconds that one kernel occupies the device besides its work.
    matmul
        Fraction of the peak that matrix products reach.
    attention
        Rate of fused attention over that of the best matrix product.
    sustained
        Time of matrix products and attention in training over their time in a short burst, for which ``matmul`` and
        ``attention`` hold: clocks sink under sustained power. At least 1. In a loop of its own attention draws less
        power and is not slowed (two publishers of B200 timings differ by 1.3 in products and by less than 0.04 in
        attention of the same shape); in a step it has the clock of the products around it.
    kernel_bandwidth
        Fraction of ``memory_bandwidth`` that a kind of operator reaches, as ``(("norm", 0.4), ...)``; other kinds
        reach ``kernel_bandwidth_default``. ``"norm_backward"`` is for the backward pass of norms, if that differs.
        ``"activation"`` is for elementwise operators whose backward reads tensors that forward saved; if only one of
        it and ``"elementwise"`` is named, it holds for both. ``"gated_activation"``, ``"rotary"`` and ``"rms_norm"``
        default to activations, elementwise operators and norms.
    reserved
        Bytes of memory that the framework takes before the first tensor.
    sharded_launch
        Extra seconds of a kernel on tensors that are cut over ranks, and of the update of a cut parameter, if the
        framework's dispatch is not hidden (torch's DTensor on a CPU).
    unit_launch
        Extra seconds to gather a unit of fully sharded parameters, and to reduce its gradients, besides the message,
        if the framework's work is not hidden (torch's ``fully_shard`` on a CPU). Each is then a message of its own.
    recompute_launch
        Extra seconds, besides kernels, to run a layer or a part of one again in backward, if the framework's work is
        not hidden (torch's ``checkpoint`` on a CPU); the tensors that its operators save take launches besides.
    optimizer_launch
        Seconds that the optimizer takes for one parameter tensor besides its memory traffic; 0 for fused optimizers.
    computes_collectives
        Whether collectives run on the same cores as computing (gloo on a CPU), so that computing hides none of them.
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

    __repr__ = brief_repr()

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
        """Return the dense peak in FLOP/s for ``dtype``; raise ``ValueError`` if it is not known."""
        for name, rate in self.peak_flops:
            if name == dtype:
                return rate
        names = ", ".join(name for name, _ in self.peak_flops)
        raise ValueError(f"accelerator {self.name} has no peak for {dtype}; known: {names}")

    def slowdown(self, dtype: str) -> float:
        """Return the time of products of ``dtype`` in training over their time in a short burst."""
        return 1.0 if dtype in NARROW_DTYPES else self.sustained

    def bandwidth(self, kind: str, *, backward: bool = False) -> float:
        """Return the memory bandwidth in byte/s that operators of ``kind`` reach."""
        fractions = dict(self.kernel_bandwidth)
        kind = next((relative for relative in (kind, *_RELATIVES.get(kind, ())) if relative in fractions), kind)
        fraction = fractions.get(kind, self.kernel_bandwidth_default)
        if backward:
            fraction = fractions.get(f"{kind}_backward", fraction)
        return self.memory_bandwidth * fraction

    def at_speed(self, factor: float) -> "Accelerator":
        """Return this device with everything on it ``factor`` times as fast (below 1 for a straggler)."""
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
