"""The most power that accelerators draw, in watt: ``power.json``, where every figure has a source.

A figure is not taken from a relative, as others of the catalog are: modules of one chip differ by it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from meshwise.simulator.catalog import accelerator


@lru_cache(maxsize=1)
def list_powers() -> Mapping[str, float]:
    """Return the power in watt of every accelerator that has a figure, by the accelerator's name."""
    return MappingProxyType({accelerator(name).name: float(entry["watt"]) for name, entry in read_table().items()})


def read_table() -> dict[str, dict[str, Any]]:
    """Return the file: ``watt``, ``status`` and ``source`` by the name in the catalog."""
    table: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("power.json").read_text("utf-8"))
    return table
