"""CPU time at the pace of a quiet machine, so that few tests fail because a core is shared.

A busy neighbour of a core, or a slower machine, takes a fixed loop as much longer as it takes the work of a test: the
time of the work is told as a multiple of that loop's, in the seconds of a machine on which the loop takes `LOOP`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time

LOOP = 0.05
"""Seconds of CPU that the loop takes on a quiet core of 2.5 GHz."""


class CpuTime:
    """What a block took; ``seconds`` is known after it."""

    seconds = float("inf")


@contextmanager
def measure_cpu() -> Iterator[CpuTime]:
    """Measure the CPU time of a block between two runs of the loop, of which the slower one counts."""
    spent, before = CpuTime(), loop_seconds()
    start = process_time()
    yield spent
    elapsed = process_time() - start
    spent.seconds = elapsed * LOOP / max(before, loop_seconds())


def least_cpu(work: Callable[[], object], enough: float, tries: int = 3) -> float:
    """Return the least CPU time of a few tries of some work; the first one that takes less than ``enough`` will do.

    What a busy host takes from a virtual core counts as CPU time of whatever runs there, and comes in bursts.
    """
    least = float("inf")
    for _ in range(tries):
        with measure_cpu() as spent:
            work()
        least = min(least, spent.seconds)
        if least < enough:
            break
    return least


def loop_seconds() -> float:
    """Return the seconds of CPU that the loop takes now: arithmetic and a dictionary, as most of what is tested."""
    start, sums = process_time(), dict[int, int]()
    for number in range(300_000):
        sums[number % 1000] = sums.get(number % 1000, 0) + number
    return process_time() - start
