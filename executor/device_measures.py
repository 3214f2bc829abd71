"""Rows of kernels: each of them prepared, timed and released, or left out with a reason."""

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import Any

import torch

from executor.device_rows import described
from executor.device_sizes import Sizes, in_a_row, kernels
from executor.device_timer import Run, Timer

IN_A_ROW = 0.01
"""Part of the whole time for one kernel in a row, and as much before it counts: in 30 s 0.3 s, and clocks sink in
about 0.01."""
MOST_IN_A_ROW = 20_000

Note = Callable[[str], None]
Skip = Callable[[str, str], None]
"""Told what is left out, and why: a shape for which there is no memory, a kernel that a device has not."""


def kernel_rows(
    sizes: Sizes, fields: Mapping[str, Any], timer: Timer, seconds: float, note: Note, skip: Skip
) -> Iterator[dict[str, Any]]:
    """Yield a row for every kernel that runs, all timed equally long, together for about ``seconds``.

    Parameters
    ----------
    fields
        What every row says of the machine.
    note
        Told what is timed now.
    """
    cold, hot = list(kernels(sizes, timer.device)), list(in_a_row(sizes))
    share = seconds / (len(cold) + len(hot))

    def median(run: Run) -> tuple[float, int]:
        return timer.median(run, share), 1

    def repeated(run: Run) -> tuple[float, int]:
        run()
        count = min(max(ceil(IN_A_ROW * seconds / timer.once(run)), 1), MOST_IN_A_ROW)
        return timer.in_a_row(run, count), count

    every = [*((kernel, repeated) for kernel in hot), *((kernel, median) for kernel in cold)]
    for number, (kernel, measure) in enumerate(every, start=1):
        what = described(kernel.fields())
        note(f"{number} of {len(every)}: {what}")
        try:
            taken, count = measure(kernel.prepare(timer.device))
        except RuntimeError as error:  # all that torch raises, out of memory among them
            skip(what, reason(error))
        else:
            yield {**fields, **kernel.fields(), "time_us": taken * 1e6, "in_a_row": count}
        release(timer.device)


def reason(error: RuntimeError) -> str:
    """Return why a kernel did not run, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def release(device: str) -> None:
    """Give back the memory that the allocator holds for tensors that are gone."""
    if device == "cuda":
        torch.cuda.empty_cache()
