"""Who published the runs of a source, and what their runs may be used for.

A publisher is an organisation, whatever the number of its tables. Runs of ``fit`` may have figures fitted to them, runs
of ``choose`` may steer what is modelled, and runs of ``judge`` are looked at by ``meshwise accuracy --judge`` alone:
errors on runs that had a part in anything say what the simulator can be brought to, not what to expect of it.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple


class Split(StrEnum):
    """What the runs of a publisher may be used for."""

    FIT = "fit"
    CHOOSE = "choose"
    JUDGE = "judge"
    NEW = "new"
    """Not listed: its runs had no part in anything."""


class Publisher(NamedTuple):
    """An organisation, and the use of its runs.

    Step times of models narrower than ``timed_from_width`` are not judged: tests of Megatron Core run models 512 wide
    in a deterministic mode, whose steps tell the speed of hosts alone; the memory that they log is exact.
    """

    name: str
    split: Split
    timed_from_width: int = 0


def find_publisher(source: str) -> Publisher:
    """Return the publisher of a source; a source that is not listed is its own publisher.

    >>> find_publisher("megatron_sc21").name, find_publisher("mine")
    ('NVIDIA', Publisher(name='mine', split=<Split.NEW: 'new'>, timed_from_width=0))
    """
    return list_publishers().get(source, Publisher(source, Split.NEW))


@lru_cache(maxsize=1)
def list_publishers() -> Mapping[str, Publisher]:
    """Return the publishers of all listed sources, by source."""
    table = json.loads(files(__package__).joinpath("publishers.json").read_text("utf-8"))
    return {
        source: Publisher(entry["publisher"], Split(entry["split"]), entry.get("timed_from_width", 0))
        for source, entry in table.items()
    }
