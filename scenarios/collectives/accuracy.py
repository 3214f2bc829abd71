"""Predicted against measured collectives: times with intervals, errors by group, and a CSV line a message."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from statistics import fmean, median
from typing import Any

from meshwise.scenarios.collectives.rows import MeasuredMessage
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.calibration.collective_rows import Skipped
from meshwise.simulator.calibration.machine_links import predict_message

LARGE = 16 * 2**20
"""Bytes from which a message counts as large: bandwidth decides, not latency."""
COLUMNS = (
    "collective",
    "n_ranks",
    "n_nodes",
    "size_bytes",
    "predicted_time_us",
    "measured_time_us",
    "time_low_us",
    "time_high_us",
    "assumptions",
)
_UNKNOWN_FACTOR = 1.5
"""Factor on both ends of an interval, in logarithms, where an accelerator or operation was not known."""


@dataclass(frozen=True, slots=True)
class CollectivePrediction:
    """A measured message with its predicted seconds, and the ends of the 90 % interval around them."""

    message: MeasuredMessage
    seconds: float
    low: float
    high: float

    __repr__ = brief_repr()

    @property
    def error(self) -> float:
        """Predicted over measured time, minus 1."""
        return self.seconds / self.message.seconds - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low <= self.message.seconds <= self.high


def predict_messages(
    messages: Sequence[MeasuredMessage], progress: Callable[[int, int], None] | None = None
) -> tuple[CollectivePrediction, ...]:
    """Return the prediction of every message, in order; ``progress`` gets the number done and that of all."""
    predictions = []
    for index, message in enumerate(messages, start=1):
        seconds = message.overhead + predict_message(
            message.machine,
            message.collective,
            tuple(range(message.machine.num_devices)),
            message.size,
            message.algorithm,
        )
        low, high = find_factors(message)
        predictions.append(CollectivePrediction(message, seconds, seconds * low, seconds * high))
        if progress is not None and index % 100 == 0:
            progress(index, len(messages))
    return tuple(predictions)


def find_category(message: MeasuredMessage) -> str:
    """Return what decides how far a prediction may be off: place, clock and size of a message."""
    size = "large" if message.size >= LARGE else "small"
    if message.nodes > 1:
        return f"{'between nodes' if message.fabric_stated else 'between nodes, fabric not stated'}, {size}"
    if message.overhead:
        return f"inside a node, host's clock, {size}"
    on_pcie = any("PCIe" in line for line in message.assumptions)
    return f"inside a node{', PCIe' if on_pcie else ''}, {size}"


def find_factors(message: MeasuredMessage) -> tuple[float, float]:
    """Return the ends of the 90 % interval of measured over predicted time.

    Both are quantiles of the errors on publishers that the figures were not fitted to, publishers weigh alike
    (`collective_intervals.json`); an unknown accelerator or operation widens them.
    """
    entry = _load_intervals()[find_category(message)]
    low, high = float(entry["low"]), float(entry["high"])
    return (low, high) if message.known else (low**_UNKNOWN_FACTOR, high**_UNKNOWN_FACTOR)


@lru_cache(maxsize=1)
def _load_intervals() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files(__package__).joinpath("collective_intervals.json").read_text("utf-8"))
    intervals: dict[str, Any] = document["categories"]
    return intervals


def summarize_collectives(
    predictions: Sequence[CollectivePrediction], skipped: Sequence[Skipped] = ()
) -> dict[str, Any]:
    """Return the errors by place (inside a node, between nodes) and size, by source and in all."""
    places = {
        "inside a node": [row for row in predictions if row.message.nodes == 1],
        "between nodes": [row for row in predictions if row.message.nodes > 1],
    }
    groups = {}
    for place, rows in places.items():
        groups[f"{place}, >= 16 MiB"] = _summarize(row for row in rows if row.message.size >= LARGE)
        groups[f"{place}, all sizes"] = _summarize(rows)
    names = dict.fromkeys(row.message.source for row in predictions)
    sources = {name: _summarize(row for row in predictions if row.message.source == name) for name in names}
    counts = Counter(line for row in predictions for line in dict.fromkeys(row.message.assumptions))
    return {
        "groups": groups,
        "sources": sources,
        "all": _summarize(predictions),
        "skipped": [{"line": line, "reason": reason} for line, reason in skipped],
        "assumptions": [{"assumption": line, "rows": count} for line, count in counts.most_common()],
    }


def _summarize(rows: Iterable[CollectivePrediction]) -> dict[str, float | int | None]:
    predictions = list(rows)
    if not predictions:
        return {"count": 0, "mape": None, "median": None, "bias": None, "inside": None}
    errors = [row.error for row in predictions]
    numbers = {
        "mape": fmean(map(abs, errors)),
        "median": median(map(abs, errors)),
        "bias": median(errors),
        "inside": fmean(row.is_inside for row in predictions),
    }
    return {"count": len(predictions)} | {name: round(value, 12) for name, value in numbers.items()}


def format_collectives_csv(predictions: Sequence[CollectivePrediction]) -> str:
    """Return a CSV line per message, with the columns `COLUMNS`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in predictions:
        message = row.message
        times = (row.seconds, message.seconds, row.low, row.high)
        writer.writerow(
            [
                message.name,
                message.ranks,
                message.nodes,
                f"{message.size:.15g}",
                *(f"{seconds * 1e6:.6g}" for seconds in times),
                "; ".join(dict.fromkeys(message.assumptions)),
            ]
        )
    return text.getvalue()
