"""Published failure rates and recovery times, each with its source, from `simulator/catalog/failures.json`."""

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from simulator.reliability.failure import Component, FailureKind, FailureModel, FailureRate, Restart
from simulator.units import Dimension, parse


class Figure(NamedTuple):
    """A published number, s where it is a time.

    ``status`` is ``read`` in the source itself, ``secondary`` where the source was quoted by
    another, or ``derived`` from read ones.
    """

    value: float
    status: str
    source: str


@lru_cache(maxsize=1)
def _catalog() -> dict[str, dict[str, Any]]:
    path = files("simulator").joinpath("catalog", "failures.json")
    table: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return table


def failure_model_names() -> tuple[str, ...]:
    """Return the names of the published failure models."""
    return tuple(_catalog()["failure_models"])


def failure_model(name: str) -> FailureModel:
    """Return a published failure model by name; ``ValueError`` names the known ones.

    A kind that was counted ``count`` times in ``period`` on so many components has
    ``mtbf = components * period / count``.

    >>> round(failure_model("meta-llama3").mtbf(devices=16384, hosts=2048) / 3600, 2)  # 54 * 24 / 466
    2.78
    """
    record = _lookup("failure_models", name)
    period = parse(record["period"], Dimension.TIME)
    sizes = {Component.DEVICE: record["devices"], Component.HOST: record["hosts"], Component.JOB: 1}
    rates = []
    for kind, row in record["kinds"].items():
        component = Component(row["component"])
        mtbf = sizes[component] * period / row["count"]
        rates.append(FailureRate(FailureKind(kind), mtbf, component, Restart(row["restart"])))
    return FailureModel(name, tuple(rates))


def figure(name: str) -> Figure:
    """Return a published figure by name; ``ValueError`` names the known ones.

    >>> figure("bytecheckpoint-405b.load").value
    129.49
    """
    record = _lookup("figures", name)
    value = record["value"]
    number = parse(value, Dimension.TIME) if isinstance(value, str) else float(value)
    return Figure(number, record["status"], record["source"])


def source(name: str) -> str:
    """Return where a published failure model comes from."""
    found: str = _lookup("failure_models", name)["source"]
    return found


def _lookup(section: str, name: str) -> dict[str, Any]:
    table = _catalog()[section]
    if name not in table:
        raise ValueError(f"{section[:-1].replace('_', ' ')} is one of {', '.join(table)}, met {name}")
    record: dict[str, Any] = table[name]
    return record
