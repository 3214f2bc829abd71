"""A device that computes: its peaks, its memory, and how near kernels come to both."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MatmulModel:
    """How near a matrix multiplication comes to the peak of an accelerator.

    ``time = launch + waves(m, n) * wave_work / (peak * fraction * k / (k + half_k))``: a
    tile of ``tile`` rows and columns runs on one of ``units`` processors, and the last
    wave of tiles costs as much as a full one where ``units`` is not 0. Where there are fewer
    tiles than processors, several of them share the reduction of a tile (split-k [1]_).

    Parameters
    ----------
    fraction
        Largest fraction of the data-sheet peak, for a large reduction dim.
    half_k
        Reduction length at which half of that fraction is reached.
    tile
        Rows and columns of the output tile of one processor.
    units
        Processors that work on tiles at once; 0 for no wave quantisation.
    gradient
        Rate of the two gradient products, bias gradient included, over that of forward.

    References
    ----------
    .. [1] Osama et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on
       the GPU", PPoPP 2023, section 3.2 (fixed-split).
    """

    fraction: float = 1.0
    half_k: float = 0.0
    tile: tuple[int, int] = (1, 1)
    units: int = 0
    gradient: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"matmul fraction lies in (0, 1], met {self.fraction}")
        if not 0 < self.gradient <= 2:
            raise ValueError(f"matmul gradient lies in (0, 2], met {self.gradient}")
        if self.half_k < 0 or self.units < 0 or min(self.tile) < 1:
            raise ValueError(f"matmul half_k, units and tile are not negative, met {self}")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that computes.

    Parameters
    ----------
    peak_flops
        Dense peak in FLOP/s by dtype, as ``(("bf16", 312e12), ...)``.
    memory
        Bytes of device memory.
    memory_bandwidth
        Bytes a second between the device and its memory.
    launch
        Seconds that the device is busy for one kernel besides its work.
    matmul
        How near matrix multiplications come to the peak.
    kernel_bandwidth
        Fraction of ``memory_bandwidth`` reached by a kind of operator, as
        ``(("norm", 0.4), ...)``; kinds that are not named reach ``kernel_bandwidth_default``.
    reserved
        Bytes of memory that the framework takes before the first tensor.
    sharded_launch
        Seconds that a kernel on tensors cut over ranks takes more, and the update of a cut
        parameter, where the framework's dispatch is not hidden (torch's DTensor on a CPU).
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
    kernel_bandwidth: tuple[tuple[str, float], ...] = ()
    kernel_bandwidth_default: float = 1.0
    reserved: float = 0.0
    sharded_launch: float = 0.0
    optimizer_launch: float = 0.0
    computes_collectives: bool = False

    def __post_init__(self) -> None:
        if not self.peak_flops or min(rate for _, rate in self.peak_flops) <= 0:
            raise ValueError(f"accelerator {self.name}: peak_flops are positive, met {self.peak_flops}")
        if min(self.memory, self.memory_bandwidth) <= 0:
            raise ValueError(f"accelerator {self.name}: memory and bandwidth are positive, met {self}")
        if min(self.launch, self.reserved, self.sharded_launch, self.optimizer_launch) < 0:
            raise ValueError(f"accelerator {self.name}: launch and reserved are not negative, met {self}")

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for ``dtype``; ``ValueError`` where it is not known."""
        for name, rate in self.peak_flops:
            if name == dtype:
                return rate
        known = ", ".join(name for name, _ in self.peak_flops)
        raise ValueError(f"accelerator {self.name} has no peak for {dtype}; known: {known}")

    def bandwidth(self, kind: str) -> float:
        """Return the memory bandwidth in byte/s that operators of ``kind`` reach."""
        fraction = dict(self.kernel_bandwidth).get(kind, self.kernel_bandwidth_default)
        return self.memory_bandwidth * fraction

    def at_speed(self, factor: float) -> "Accelerator":
        """Return this device where everything on it runs ``factor`` times as fast (a straggler: below 1)."""
        return replace(
            self,
            peak_flops=tuple((dtype, rate * factor) for dtype, rate in self.peak_flops),
            memory_bandwidth=self.memory_bandwidth * factor,
            launch=self.launch / factor,
            sharded_launch=self.sharded_launch / factor,
            optimizer_launch=self.optimizer_launch / factor,
        )
