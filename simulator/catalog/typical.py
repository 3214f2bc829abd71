"""What kernels and links typically reach: medians over what the catalogue has timed.

An accelerator or a link that nobody timed is not ideal: a figure that its owner does not state is the median of those
that were fitted to published timings, figure by figure.
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
    """How near kernels come to what an accelerator's data sheet promises; the fields are those of `Accelerator`."""

    launch: float
    matmul: MatmulModel
    attention: AttentionModel
    sustained: float
    kernel_bandwidth: Shares

    def attention_beside(self, matmul: MatmulModel) -> AttentionModel:
        """Return the model of attention that reaches as much of the peak beside another model of products."""
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

    Attention is stated relative to products; its median is that of the part of the peak that it reaches.
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
    """Return the first of some models with the median of every number; of a count, the lower one of two."""
    first, found = models[0], {}
    for name in (field.name for field in fields(first)):
        values = [getattr(model, name) for model in models]
        if isinstance(values[0], int | float):
            found[name] = median_low(values) if isinstance(values[0], int) else median(values)
    return replace(first, **found)


def _medians_by_name(tables: Iterable[Shares]) -> Shares:
    """Return by name the median over the tables that have it."""
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table:
            values.setdefault(name, []).append(value)
    return tuple((name, median(found)) for name, found in values.items())


@lru_cache(maxsize=2)
def typical_link(*, inside: bool) -> Link:
    """Return a link with the median latency and launch of the links that were fitted, in nodes or between them.

    Its bandwidth means nothing: links of all rates are among them.
    """
    timed = fitted_links(inside=inside)
    return Link(median(link.latency for link in timed), 1.0, median(link.launch for link in timed))
