"""Failures of a job: their kinds, their rates, and whether a host has to be replaced.

Published failure rates and durations, each with its source, come from `simulator/catalog/failures.json`; its other
figures are those that tests hold simulated runs against.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate
from math import inf, log1p
from typing import Any, NamedTuple

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.simulator.units import Dimension, parse

_DRAWS_AT_ONCE = 256  # failures drawn at once


class FailureKind(StrEnum):
    """Cause of an interruption."""

    DEVICE = "device"
    HOST = "host"
    NETWORK = "network"
    SOFTWARE = "software"
    PLANNED = "planned"


class Component(StrEnum):
    """Component that fails independently: each device, each host, or the job as a whole."""

    DEVICE = "device"
    HOST = "host"
    JOB = "job"


class Restart(StrEnum):
    """Where a job restarts after a failure."""

    IN_PLACE = "in place"
    REPLACE_HOST = "replace host"


class Failure(NamedTuple):
    """One failure; ``time`` is in seconds from the start of the run."""

    time: float
    kind: FailureKind
    restart: Restart


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The rate of one kind of failure of one component.

    Parameters
    ----------
    mtbf
        Mean time between failures of one component, s.
    """

    kind: FailureKind
    mtbf: float
    component: Component
    restart: Restart

    def __post_init__(self) -> None:
        if not 0 < self.mtbf < inf:
            raise ValueError(f"mtbf of {self.kind} failures is above 0 and finite, met {self.mtbf}")

    def rate(self, devices: int, hosts: int) -> float:
        """Return the rate of such failures in a job, per second."""
        count = {Component.DEVICE: devices, Component.HOST: hosts, Component.JOB: 1}[self.component]
        return count / self.mtbf


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Independent failures at constant rates: the time to the next is exponential, its kind a competing risk.

    >>> node = FailureRate(FailureKind.HOST, 1000 / 6.5 * 86400, Component.HOST, Restart.REPLACE_HOST)
    >>> round(FailureModel("RSC-1", (node,)).mtbf(devices=16384, hosts=2048) / 3600, 1)
    1.8
    """

    name: str
    rates: tuple[FailureRate, ...]

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError(f"failure model {self.name} has at least one rate, met none")

    def rate(self, devices: int, hosts: int) -> float:
        """Return the rate of all failures of a job, per second."""
        return sum(rate.rate(devices, hosts) for rate in self.rates)

    def mtbf(self, devices: int, hosts: int) -> float:
        """Return the mean time between failures of a job, s."""
        return 1 / self.rate(devices, hosts)

    def draw_failures(self, devices: int, hosts: int, seed: int, run: int = 0) -> Iterator[Failure]:
        """Yield the failures of a job in order of time, without end; equal arguments give equal failures.

        They strike at wall-clock times that do not depend on what the job does, so that runs with the same seed but
        other checkpoints meet the same failures (common random numbers).
        """
        total = self.rate(devices, hosts)
        bounds = [bound / total for bound in accumulate(rate.rate(devices, hosts) for rate in self.rates)][:-1]
        # two uniform numbers a failure, drawn in blocks: the gap by inversion of the exponential, then the kind
        generator = np.random.default_rng((seed, run))
        time = 0.0
        while True:
            for gap, share in generator.random((_DRAWS_AT_ONCE, 2)).tolist():
                time -= log1p(-gap) / total
                failure_rate = self.rates[bisect_right(bounds, share)]
                yield Failure(time, failure_rate.kind, failure_rate.restart)


@lru_cache(maxsize=1)
def _read_catalog() -> dict[str, Any]:
    path = files("meshwise.simulator").joinpath("catalog", "failures.json")
    catalog: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return catalog


def _read_failure_models() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = _read_catalog()["failure_models"]
    return table


def failure_model_names() -> tuple[str, ...]:
    """Return the names of the published failure models."""
    return tuple(_read_failure_models())


def failure_model(name: str) -> FailureModel:
    """Return a published failure model by name; ``ValueError`` names the known ones.

    The mtbf of a kind that was counted ``count`` times in ``period`` is ``components * period / count``.

    >>> round(failure_model("meta-llama3").mtbf(devices=16384, hosts=2048) / 3600, 2)  # 54 * 24 / 466
    2.78
    """
    record = _find_record(name)
    period = parse(record["period"], Dimension.TIME)
    sizes = {Component.DEVICE: record["devices"], Component.HOST: record["hosts"], Component.JOB: 1}
    rates = []
    for kind, row in record["kinds"].items():
        component = Component(row["component"])
        mtbf = sizes[component] * period / row["count"]
        rates.append(FailureRate(FailureKind(kind), mtbf, component, Restart(row["restart"])))
    return FailureModel(name, tuple(rates))


def failure_model_source(name: str) -> str:
    """Return the source of a published failure model."""
    source_text: str = _find_record(name)["source"]
    return source_text


def _find_record(name: str) -> dict[str, Any]:
    table = _read_failure_models()
    if name not in table:
        raise ValueError(f"failure model is one of {', '.join(table)}, met {name}")
    return table[name]


def published_figure(name: str) -> tuple[float, str]:
    """Return a published duration in s, such as that of a checkpoint, and its source.

    >>> published_figure("megascale.initialisation")[0]
    30.0
    """
    record = _read_catalog()["figures"][name]
    return parse(record["value"], Dimension.TIME), record["source"]
