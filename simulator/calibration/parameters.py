"""Parameters of an accelerator to fit, with their bounds and their prior guesses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshwise.simulator.calibration.kernels import CACHE
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.kernels import BACKWARD_PRODUCTS, MatmulModel

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Typical tiles of cuBLAS (NVIDIA, "Matrix multiplication background user's guide", section 3.2)."""

SHARPNESS = 4.0
"""Sharpness of the soft roofline: free fits to A100, H100 and B200 give 3.4 to 5.2, and lose nothing at 4."""

QUERY_BLOCK = 128
"""Queries of a block of flash attention (Dao 2023, "FlashAttention-2", section 3.3)."""

COMMON_HEAD = 128

PROCESSORS = {"v100": 80, "a100": 108, "l40s": 142, "h100": 132, "h200": 132, "b200": 148, "gb200": 148}
"""Streaming multiprocessors, by the first word of a catalogue name (NVIDIA architecture white papers)."""

TENSOR_CORES = {"v100": 1024, "a100": 2048, "l40s": 1024, "h100": 4096, "h200": 4096, "b200": 8192, "gb200": 8192}
"""Dense 16-bit FLOP of a streaming multiprocessor per clock (NVIDIA architecture white papers)."""

EXPONENTIALS = 16
"""Exponentials of a streaming multiprocessor per clock (NVIDIA, "CUDA C++ programming guide", native arithmetic)."""

WAVES = ("a100",)
"""Accelerators whose products take visible steps; later ones spread the last round (see `MatmulModel.waves`)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter to fit.

    Parameters
    ----------
    low, high
        Bounds; rates are bounded by the data sheet's.
    guess
        Prior value.
    spread
        Width of the prior around ``guess``, as a fraction of ``high - low``.
    """

    name: str
    low: float
    high: float
    guess: float
    spread: float = 0.5


def matmul_parameters(*, waves: bool) -> tuple[Parameter, ...]:
    """Return the parameters of matrix products of 16 bits."""
    return (
        Parameter("fraction", 0.3, 1.0, 0.8),
        Parameter("half_k", 0.0, 1000.0, 100.0),
        Parameter("edge", 0.0, 200.0, 30.0),
        *((Parameter("waves", 0.0, 1.0, 0.5),) if waves else ()),
        Parameter("bandwidth", 0.3, 1.0, 0.75),
        Parameter("launch", 0.5e-6, 10e-6, 3.5e-6),
        Parameter("data_gradient", 0.5, 1.2, 0.98, 0.1),
        Parameter("weight_gradient", 0.5, 1.2, 0.93, 0.1),
        Parameter("batched", 0.5, 1.2, 0.95, 0.3),
        Parameter("product_launch", 0.0, 20e-6, 3e-6, 0.1),
    )


def sustained_parameter(guess: float) -> Parameter:
    """Return the parameter of sustained over burst time, for an accelerator without shapes timed both ways."""
    return Parameter("sustained", 1.0, 1.8, guess)


def fraction_of(dtype: str) -> Parameter:
    """Return the parameter of the fraction of its peak that products of ``dtype`` reach."""
    return Parameter(f"fraction_{dtype}", 0.2, 1.0, 0.7)


def exponential_head(device: Accelerator) -> float:
    """Return the head dim at which the products of attention take as long as its exponentials.

    Forward does 4 FLOP for an exponential and element of the head dim: on the H100 4096 / (4 * 16) = 64 (Shah et al.
    2024, "FlashAttention-3", section 3.1: 989 TFLOP/s of products beside 3.9 of exponentials, 989 / (4 * 3.9) = 63).
    """
    return TENSOR_CORES[device.name.split()[0].lower()] / (4.0 * EXPONENTIALS)


def attention_parameters(fraction: float, half_head: float) -> tuple[Parameter, ...]:
    """Return the parameters of fused attention where matrix products reach ``fraction`` of the peak.

    Parameters
    ----------
    half_head
        Guess of `AttentionModel.half_head`: `exponential_head_dim`, as if nothing ran beside the exponentials.

    The guess of ``forward`` is 0.8 of the best product at a head dim of 128, where the fits to A100, H100, H200 and
    B200 lie from 0.75 to 0.83. ``backward_forward`` is the ratio of the rates at that head dim; the guess is that of
    0.63 and 0.73 of the A100's peak (Dao 2023, "FlashAttention-2", section 1).
    """
    most = _fastest(fraction)
    forward = 0.8 * (1.0 + half_head / COMMON_HEAD)
    return (
        Parameter("forward", 0.1, most, min(forward, most), 0.2),
        Parameter("backward_forward", 0.5, 1.1, 0.86, 0.15),
        Parameter("half_sequence", 0.0, 2000.0, 150.0, 0.2),
        Parameter("half_head", 0.0, 300.0, half_head, 0.05),
        Parameter("tail", 0.0, 1.5, 0.7, 0.2),
        Parameter("backward_tail", 0.0, 1.5, 0.3, 0.2),
        Parameter("attention_launch", 0.0, 30e-6, 6e-6, 0.3),
        Parameter(CACHE, 0.1, 1.0, 0.5),
    )


Values = Mapping[str, float]


def with_matmul(device: Accelerator, values: Values) -> Accelerator:
    """Return ``device`` with fitted matrix products."""
    own = {
        name: values[name]
        for name in ("fraction", "half_k", "edge", "data_gradient", "weight_gradient", "batched", "product_launch")
    }
    fractions = tuple((name.removeprefix("fraction_"), values[name]) for name in values if name.startswith("fraction_"))
    model = MatmulModel(
        **own,
        tiles=TILES,
        units=processors(device),
        waves=values.get("waves", 0.0),
        sharpness=SHARPNESS,
        fractions=fractions,
    )
    attention = replace(device.attention, forward=0.5, backward=0.5)  # within any bound, until it is fitted itself
    bandwidths = dict(device.kernel_bandwidth) | {"matmul": values["bandwidth"]}
    return replace(
        device,
        matmul=model,
        attention=attention,
        launch=values["launch"],
        sustained=values.get("sustained", device.sustained),
        kernel_bandwidth=tuple(bandwidths.items()),
    )


def with_attention(device: Accelerator, values: Values) -> Accelerator:
    """Return ``device`` with fitted attention."""
    forward = values["forward"]
    half = values["half_head"] / COMMON_HEAD
    ramps = (1.0 + half / BACKWARD_PRODUCTS) / (1.0 + half)
    backward = min(forward * values["backward_forward"] * ramps, _fastest(device.matmul.fraction))
    plain = {name: values[name] for name in ("half_sequence", "half_head", "tail", "backward_tail")}
    attention = replace(
        device.attention,
        forward=forward,
        backward=backward,
        block=QUERY_BLOCK,
        launch=values["attention_launch"],
        **plain,
    )
    bandwidths = dict(device.kernel_bandwidth) | {CACHE: values[CACHE]}
    return replace(device, attention=attention, kernel_bandwidth=tuple(bandwidths.items()))


def _fastest(fraction: float) -> float:
    """Return the largest rate of attention relative to products: the peak, with room for rounding to four digits."""
    return 0.999 / fraction


def processors(device: Accelerator) -> int:
    """Return the number of streaming multiprocessors of an accelerator."""
    return PROCESSORS[device.name.split()[0].lower()]


def has_waves(device: Accelerator) -> bool:
    """Return whether the time of products rises in visible waves on an accelerator."""
    return device.name.split()[0].lower() in WAVES


Apply = Callable[[Accelerator, Values], Accelerator]
