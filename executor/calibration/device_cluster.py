"""Turns the rows of a machine into a `Cluster`; its accelerator is fitted as it is to published rows."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from meshwise.executor.calibration.cores import build_curves, build_link, fit_link
from meshwise.executor.calibration.figures import PUBLISHER, TINY_MODEL
from meshwise.simulator.calibration.evidence import DataSheets
from meshwise.simulator.calibration.kernel_rows import DEVICES, MAX_ROW_BYTES, Row, read_rows
from meshwise.simulator.calibration.kernels import CACHE, Product
from meshwise.simulator.catalog import data_sheet_accelerator
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, build_homogeneous
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.models.model import build

_CURVES = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")} | {"p2p": "send"}
"""Name of a collective in rows -> its name in a cluster file."""


def is_measured(first_line: bytes) -> bool:
    """Return whether a file's first line is a row of `meshwise.executor.calibration.device_calibration`."""
    try:
        row = json.loads(first_line[:MAX_ROW_BYTES])
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.get("source_repo") == PUBLISHER


def build_cluster(lines: Iterable[bytes]) -> Cluster:
    """Return the machine that rows were measured on, as a cluster.

    ``ValueError`` where rows are of several machines, of an accelerator without a data sheet, or no kernel's row can be
    used.
    """
    lines = list(lines)
    used_rows, skipped_rows = read_rows(lines)
    rows = [json.loads(line) for line in lines if line.strip()]
    machines = sorted({(str(row.get("machine")), str(row.get("accelerator"))) for row in rows})
    if len(machines) != 1:
        raise ValueError(f"a cluster file is of the rows of one machine, met {len(machines)}")
    host, name = machines[0]
    if name not in DEVICES:
        raise ValueError(
            f"accelerator {name} has no data sheet here; known: {', '.join(sorted(DEVICES))}; its rows stay as data"
        )
    if not used_rows:
        reason = skipped_rows[0].reason if skipped_rows else "none"
        raise ValueError(f"a cluster file needs rows of kernels, met none that can be used: {reason}")
    accelerator = replace(fit_accelerator(name, used_rows), memory=_read_figure(rows, "accel_mem_gb") * 1e9)
    collective_curves = build_curves(_list_collectives(rows))
    node = Host(
        name=host,
        memory=_read_figure(rows, "host_mem_GiB") * 2**30,
        cores=int(_read_figure(rows, "cores")),
        launch=_fit_host_launch(rows),
        pcie=_fit_pcie(rows),
    )
    num_devices = max((curve.ranks for curve in collective_curves), default=1)
    device_link = build_link(collective_curves)
    machine = build_homogeneous(
        f"{host}: {num_devices} x {name}", accelerator, node, 1, num_devices, device_link, device_link
    )
    return replace(machine, collectives=collective_curves)


def fit_accelerator(name: str, rows: Sequence[Row]) -> Accelerator:
    """Return the accelerator of a name in rows, fitted by `meshwise.simulator.calibration` to rows of its dtypes."""
    preset, bandwidth = DEVICES[name]
    sheet = data_sheet_accelerator(preset)
    known_dtypes = {dtype for dtype, _ in sheet.peak_flops}
    usable_rows = [row for row in rows if not isinstance(row.kernel, Product) or row.kernel.dtype in known_dtypes]
    device = DataSheets({preset: sheet}).calibrate(preset, usable_rows).device
    kinds = tuple((kind, share) for kind, share in device.kernel_bandwidth if kind != CACHE)
    return replace(device, memory_bandwidth=bandwidth or device.memory_bandwidth, kernel_bandwidth=kinds)


def _read_figure(rows: Sequence[Mapping[str, Any]], name: str, minimum: float = 1.0) -> float:
    value = rows[0].get(name)
    if not isinstance(value, int | float) or not minimum <= value < math.inf:
        raise ValueError(f"{name} is a number from {minimum:g} on in rows of {PUBLISHER}, met {value!r:.40}")
    return float(value)


def _read_seconds(row: Mapping[str, Any]) -> float:
    return _read_figure([row], "time_us", 1e-3) * 1e-6  # no clock tells less than a nanosecond


def _list_collectives(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, int, int, float]]:
    for row in rows:
        if "collective" in row:
            if not isinstance(row["collective"], str) or row["collective"] not in _CURVES:
                raise ValueError(f"collective is one of {', '.join(_CURVES)}, met {row['collective']!r:.40}")
            sizes = int(_read_figure([row], "n_ranks")), int(_read_figure([row], "size_bytes"))
            yield (_CURVES[row["collective"]], *sizes, _read_seconds(row))


def _fit_pcie(rows: Iterable[Mapping[str, Any]]) -> Pcie | None:
    """Return the link from pinned host memory to the device; ``None`` where no copy was measured."""
    copies = [row for row in rows if row.get("kernel") == "copy_h2d" and row.get("impl") == "pinned"]
    points = sorted((_read_figure([row], "bytes"), _read_seconds(row)) for row in copies)
    return Pcie(fit_link(points)) if points else None


def _fit_host_launch(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds that the host takes to launch an operator, from a layer whose time is launches only.

    The simulator counts one launch for an operator and one for its backward. It is 0 where no such layer was measured.
    """
    times = [
        _read_seconds(row)
        for row in rows
        if row.get("kernel") == "layer_fwd_bwd" and row.get("hidden") == TINY_MODEL.hidden
    ]
    layer = next(block for block in build(TINY_MODEL, 2, "bf16").blocks if block.layer)
    return median(times) / (2 * len(layer.operators)) if times else 0.0
