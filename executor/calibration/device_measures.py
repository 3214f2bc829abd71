"""Measures rows of kernels: each kernel is prepared, timed and released, or left out with a reason.

The sizes are either those for a GPU, or small ones to try every kernel on a CPU.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any

import torch

from meshwise.executor.calibration import device_kernels as kernels
from meshwise.executor.calibration.device_kernels import AttentionSizes, DeviceKernel
from meshwise.executor.calibration.figures import describe_row
from meshwise.executor.recording.timer import Run, Timer

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the kernels and messages that are measured.

    Parameters
    ----------
    shapes
        (m, n, k) of products that are timed forward, in every dtype.
    layers
        (m, n, k) of linear layers that are timed forward and for both gradients, in 16 bits.
    sustained
        (m, n, k) of products that are also timed run after run, for so long that clocks sink.
    attention
        (batch, heads, heads of keys, sequence, head dim) of fused attention.
    unfused
        The same sizes of attention by products and softmax.
    tables
        (rows, hidden, vocabulary) of embeddings and losses.
    copies, messages
        Bytes of copies and of collectives.
    """

    shapes: tuple[tuple[int, int, int], ...]
    layers: tuple[tuple[int, int, int], ...]
    sustained: tuple[tuple[int, int, int], ...]
    attention: tuple[AttentionSizes, ...]
    unfused: tuple[AttentionSizes, ...]
    elements: tuple[int, ...]
    tables: tuple[tuple[int, int, int], ...]
    params: tuple[int, ...]
    copies: tuple[int, ...]
    messages: tuple[int, ...]


_SQUARES = tuple((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192, 16384))
_DEPTHS = tuple((8192, 8192, k) for k in (64, 128, 256, 512, 1024, 2048))
_ROWS = tuple((m, 4096, 4096) for m in (16, 64, 128, 256, 512, 768, 784, 1536, 2560, 2576))
_LAYERS = tuple(
    (m, n * hidden, k * hidden)
    for hidden in (1024, 2048, 4096, 8192)
    for m in (1024, 4096, 16384)
    for n, k in ((3, 1), (1, 1), (4, 1), (1, 4))
)
_TOKENS = 16384
_FUSED = tuple(
    (_TOKENS // sequence, 2048 // width, 2048 // width, sequence, width)
    for sequence in (512, 1024, 2048, 4096, 8192, 16384)
    for width in (64, 128)
)
_GROUPED = tuple((8192 // sequence, 32, 8, sequence, 128) for sequence in (1024, 2048, 4096, 8192))

GPU_SIZES = Sizes(
    shapes=(*_SQUARES, *_DEPTHS, *_ROWS),
    layers=_LAYERS,
    sustained=tuple(shape for shape in _LAYERS if 2 * shape[0] * shape[1] * shape[2] >= 5e11),
    attention=(*_FUSED, *_GROUPED),
    unfused=tuple((4096 // sequence * 2, 16, 16, sequence, 128) for sequence in (512, 1024, 2048, 4096)),
    elements=(2**22, 2**24, 2**26, 2**28),
    tables=((8192, 4096, 32000), (8192, 4096, 51200), (8192, 4096, 128256)),
    params=(2**24, 2**27, 2**29),
    copies=(4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB),
    messages=tuple(4**exponent * KIB for exponent in range(11)),
)
"""Sizes for a GPU; messages are from 1 KiB to 1 GiB."""

CPU_SIZES = Sizes(
    shapes=((32, 32, 32),),
    layers=((32, 64, 32),),
    sustained=((32, 64, 32),),
    attention=((1, 4, 2, 16, 8),),
    unfused=((1, 2, 2, 16, 8),),
    elements=(8192,),
    tables=((16, 32, 64),),
    params=(1024,),
    copies=(4 * KIB,),
    messages=(KIB, 4 * KIB),
)
"""Small sizes to try every kernel on a CPU."""


def list_kernels(sizes: Sizes, device: str) -> Iterator[DeviceKernel]:
    """Yield the kernels that are timed run by run, from cold caches."""
    passes = False, True
    yield from _list_products(sizes, device)
    for shape, causal, backward in product(sizes.attention, (True, False), passes):
        yield kernels.build_attention("bf16", shape, causal=causal, backward=backward)
    for shape, backward in product(sizes.unfused, passes):
        yield kernels.build_attention("bf16", shape, backward=backward, fused=False)
    for name, elements, backward in product(kernels.STREAMS, sizes.elements, passes):
        yield kernels.build_stream(name, "bf16", elements, backward=backward)
    for elements in sizes.elements:
        yield kernels.build_addition("bf16", elements)
    for (rows, hidden, vocab), backward in product(sizes.tables, passes):
        yield kernels.build_embedding("bf16", rows, hidden, vocab, backward=backward)
        yield kernels.build_cross_entropy("fp32", rows, vocab, backward=backward)
    for params, fused in product(sizes.params, (True, False)):
        yield kernels.build_optimizer_step(params, fused=fused)
    for nbytes in sizes.copies:
        yield kernels.build_device_copy(nbytes)
        for to_device, pinned in product((True, False), (True, False)):
            yield kernels.build_host_copy(nbytes, to_device=to_device, pinned=pinned)


def list_repeated_kernels(sizes: Sizes) -> Iterator[DeviceKernel]:
    """Yield the kernels that are timed run after run: those bound by the host's launches, and sustained products."""
    yield kernels.build_launch()
    yield kernels.build_tiny_layer()
    for shape in sizes.sustained:
        yield kernels.build_product("bf16", *shape)


def _list_products(sizes: Sizes, device: str) -> Iterator[DeviceKernel]:
    dtypes = ("bf16", "fp16", "tf32", "fp32", *(("fp8",) if kernels.has_fp8(device) else ()))
    for dtype, shape in product(dtypes, sizes.shapes):
        yield kernels.build_product(dtype, *shape)
    for dtype, shape in product(("bf16", "fp16"), (shape for shape in sizes.layers if shape not in sizes.shapes)):
        yield kernels.build_product(dtype, *shape)
    for shape, direction in product(sizes.layers, ("dgrad", "wgrad")):
        yield kernels.build_product("bf16", *shape, direction)
    for batch, heads, _, sequence, width in sizes.unfused:
        yield kernels.build_batched_product("bf16", batch * heads, sequence, sequence, width)
        yield kernels.build_batched_product("bf16", batch * heads, sequence, width, sequence)


REPEATED_SHARE = 0.01
"""Share of the whole time for one kernel run after run, and as much for its warm-up: 0.3 s of 30 s. Clocks sink within
about 0.01 s."""
MAX_REPEATS = 20_000

Note = Callable[[str], None]
Skip = Callable[[str, str], None]
"""Called with what is left out and the reason, as a shape that is out of memory or a kernel that a device lacks."""


def measure_kernels(
    sizes: Sizes, fields: Mapping[str, Any], timer: Timer, seconds: float, note: Note, skip: Skip
) -> Iterator[dict[str, Any]]:
    """Yield a row for every kernel that runs; all are timed equally long, together for about ``seconds``.

    ``fields`` of the machine are in every row; ``note`` is called with the kernel that is timed next.
    """
    cold_kernels, repeated_kernels = list(list_kernels(sizes, timer.device)), list(list_repeated_kernels(sizes))
    share = seconds / (len(cold_kernels) + len(repeated_kernels))

    def measure_median(run: Run) -> tuple[float, int]:
        return timer.measure_median(run, share), 1

    def measure_repeated(run: Run) -> tuple[float, int]:
        run()
        num_runs = min(max(ceil(REPEATED_SHARE * seconds / timer.measure_once(run)), 1), MAX_REPEATS)
        return timer.measure_row(run, num_runs), num_runs

    measurements = [
        *((kernel, measure_repeated) for kernel in repeated_kernels),
        *((kernel, measure_median) for kernel in cold_kernels),
    ]
    for number, (kernel, measure) in enumerate(measurements, start=1):
        description = describe_row(kernel.fields)
        note(f"{number} of {len(measurements)}: {description}")
        try:
            run_time, num_runs = measure(kernel.prepare(timer.device))
        except RuntimeError as error:  # all that torch raises, out of memory among them
            skip(description, describe_error(error))
        else:
            yield {**fields, **kernel.fields, "time_us": run_time * 1e6, "in_a_row": num_runs}
        release_memory(timer.device)


def describe_error(error: RuntimeError) -> str:
    """Return the reason why a kernel did not run, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def release_memory(device: str) -> None:
    """Release the memory that the allocator caches for freed tensors."""
    if device == "cuda":
        torch.cuda.empty_cache()
