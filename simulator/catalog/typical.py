"""Typical efficiency of kernels and links: medians over the accelerators and links that were fitted to timings.

An accelerator or link without timings is not assumed to be ideal: every figure that the user does not state is the
median of the fitted ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from statistics import median, median_low, mode
from typing import NamedTuple, TypeVar

from meshwise.simulator.catalog import accelerator
from meshwise.simulator.catalog.records import fitted_links, is_calibrated, names
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.kernels import AttentionModel, MatmulModel
from meshwise.simulator.machine.topology import Link

M = TypeVar("M", MatmulModel, AttentionModel)
Shares = tuple[tuple[str, float], ...]


class Efficiency(NamedTuple):
    """Efficiency of an accelerator's kernels relative to its data sheet; the fields are those of `Accelerator`."""

    launch: float
    matmul: MatmulModel
    attention: AttentionModel
    sustained: float
    kernel_bandwidth: Shares

    def attention_beside(self, matmul: MatmulModel) -> AttentionModel:
        """Return the attention model rescaled to another model of products: it reaches the same share of the peak."""
        scale = self.matmul.fraction / matmul.fraction
        return replace(self.attention, forward=self.attention.forward * scale, backward=self.attention.backward * scale)


def efficiency_of(device: Accelerator) -> Efficiency:
    """Return the efficiency of an accelerator."""
    return Efficiency(*(getattr(device, name) for name in Efficiency._fields))


def timed_accelerators() -> tuple[str, ...]:
    """Return the names of the accelerators whose own kernels were timed."""
    return tuple(filter(is_calibrated, names("accelerators")))


@lru_cache(maxsize=1)
def typical_efficiency() -> Efficiency:
    """Return the median of every figure over the accelerators whose own kernels were timed.

    Attention is stated relative to products; its median is taken over the fractions of the peak that it reaches.
    """
    timed = [efficiency_of(accelerator(name)) for name in timed_accelerators()]
    matmul = replace(
        _medians([each.matmul for each in timed]),
        tiles=mode(each.matmul.tiles for each in timed),
        fractions=_medians_by_name(each.matmul.fractions for each in timed),
    )
    attention = _medians([each.attention_beside(matmul) for each in timed])
    launch, sustained = median(each.launch for each in timed), median(each.sustained for each in timed)
    shares = _medians_by_name(each.kernel_bandwidth for each in timed)
    return Efficiency(launch, matmul, attention, sustained, shares)


def _medians(models: Sequence[M]) -> M:
    """Return a model with the median of every number; the low median for counts, which stay whole."""
    first, found = models[0], {}
    for name in (field.name for field in fields(first)):
        values = [getattr(model, name) for model in models]
        if isinstance(values[0], int | float):
            found[name] = median_low(values) if isinstance(values[0], int) else median(values)
    return replace(first, **found)


def _medians_by_name(tables: Iterable[Shares]) -> Shares:
    """Return the median of every name over the tables that have it."""
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table:
            values.setdefault(name, []).append(value)
    return tuple((name, median(found)) for name, found in values.items())


@lru_cache(maxsize=2)
def typical_link(*, inside: bool) -> Link:
    """Return a link with the median latency and launch of the fitted links, inside nodes or between them.

    Its bandwidth has no meaning, as the fitted links have different rates.
    """
    timed = fitted_links(inside=inside)
    return Link(median(link.latency for link in timed), 1.0, median(link.launch for link in timed))
