"""A calibration as the JSON file that the catalogue reads, and as a table for people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from simulator.accelerator import Accelerator
from simulator.calibration.calibrate import Errors
from simulator.calibration.evidence import Evidence
from simulator.calibration.rows import Row, Skipped

Data = dict[str, Any]
DIGITS = 4


def to_document(found: Evidence, skipped: Sequence[Skipped], date: str) -> Data:
    """Return a calibration as JSON-ready data.

    ``figures`` and ``source`` are what the catalogue takes; the rest says where they come from: ``rows`` used and
    skipped by source, ``ranges`` of the parameters among fits that leave a publisher out, and ``errors``.
    """
    calibration = found.calibration
    return {
        "accelerator": found.name,
        "date": date,
        "source": _source(found),
        "figures": _figures(calibration.device, calibration.kinds),
        "sustained": {key: _round(value) for key, value in asdict(calibration.sustained).items()},
        "ranges": {name: [_round(low), _round(high)] for name, (low, high) in found.ranges.items()},
        "rows": _used(found.rows, [row for row in skipped if row.device == found.name]),
        "errors": [
            {
                "publisher": held.publisher,
                "family": held.family,
                **({"fitted": _errors(held.fitted)} if held.fitted else {}),
                **({"left_out": _errors(held.left_out)} if held.left_out else {}),
            }
            for held in found.held
        ],
    }


def _source(found: Evidence) -> str:
    publishers = Counter(row.publisher for row in found.rows)
    named = ", ".join(f"{publisher} {count}" for publisher, count in publishers.most_common())
    sustained = found.calibration.sustained
    pairs = f"{sustained.pairs} shapes timed both ways" if sustained.pairs else "the nearest accelerator's"
    return f"fit to published kernel timings ({named}); sustained over burst time from {pairs}"


def _figures(device: Accelerator, kinds: Mapping[str, float]) -> Data:
    matmul, attention = device.matmul, device.attention
    rates = ("fraction", "half_k", "edge", "units", "waves", "sharpness", "data_gradient", "weight_gradient", "batched")
    ramps = ("forward", "backward", "half_sequence", "half_head", "tail", "backward_tail", "block")
    kernel_bandwidth = {"matmul": dict(device.kernel_bandwidth)["matmul"], **kinds}
    return {
        "launch": _time(device.launch),
        "matmul": {
            **{name: _round(getattr(matmul, name)) for name in rates},
            "tiles": [list(tile) for tile in matmul.tiles],
            "product_launch": _time(matmul.product_launch),
            "fractions": {dtype: _round(share) for dtype, share in matmul.fractions},
        },
        "attention": {
            **{name: _round(getattr(attention, name)) for name in ramps},
            "launch": _time(attention.launch),
        },
        "sustained": _round(device.sustained),
        "kernel_bandwidth": {kind: _round(share) for kind, share in kernel_bandwidth.items()},
    }


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.{DIGITS}g} us"


def _round(value: float) -> float:
    return value if isinstance(value, int) or not isfinite(value) else float(f"{value:.{DIGITS}g}")


def _errors(found: Errors) -> Data:
    return {name: _round(value) for name, value in asdict(found).items()}


def _used(rows: Iterable[Row], skipped: Iterable[Skipped]) -> Data:
    used = Counter(row.source for row in rows)
    reasons: dict[str, Counter[str]] = {}
    for row in skipped:
        reasons.setdefault(row.source, Counter())[row.reason] += 1
    return {
        source: {"used": used[source], "skipped": dict(sorted(reasons.get(source, Counter()).items()))}
        for source in sorted(used.keys() | reasons.keys())
    }
