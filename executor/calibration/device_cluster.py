"""Turns the rows of a machine into a `Cluster`; its accelerator is fitted as it is to published rows."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from meshwise.executor.calibration.cores import curves, link, link_of
from meshwise.executor.calibration.figures import PUBLISHER, TINY
from meshwise.simulator.calibration.evidence import Devices
from meshwise.simulator.calibration.kernel_rows import DEVICES, MAX_ROW_BYTES, Row, read_rows
from meshwise.simulator.calibration.kernels import CACHE, Product
from meshwise.simulator.catalog import data_sheet
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, homogeneous
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.models.model import build

_CURVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "p2p": "send",
}
"""Name of a collective in rows -> its name in a cluster file."""


def is_measured(first: bytes) -> bool:
    """Return whether a file's first line is a row of `meshwise.executor.calibration.device_calibration`."""
    try:
        row = json.loads(first[:MAX_ROW_BYTES])
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.get("source_repo") == PUBLISHER


def cluster_of(lines: Iterable[bytes]) -> Cluster:
    """Return the machine that rows were measured on, as a cluster.

    Raises
    ------
    ValueError
        Where rows are of several machines, of an accelerator without a data sheet, or no kernel's row can be used.
    """
    lines = list(lines)
    used, skipped = read_rows(lines)
    rows = [json.loads(line) for line in lines if line.strip()]
    machines = sorted({(str(row.get("machine")), str(row.get("accelerator"))) for row in rows})
    if len(machines) != 1:
        raise ValueError(f"a cluster file is of the rows of one machine, met {len(machines)}")
    host, name = machines[0]
    if name not in DEVICES:
        raise ValueError(
            f"accelerator {name} has no data sheet here; known: {', '.join(sorted(DEVICES))}; its rows stay as data"
        )
    if not used:
        why = skipped[0].reason if skipped else "none"
        raise ValueError(f"a cluster file needs rows of kernels, met none that can be used: {why}")
    accelerator = replace(fitted(name, used), memory=_figure(rows, "accel_mem_gb") * 1e9)
    measured = curves(_collectives(rows))
    node = Host(
        name=host,
        memory=_figure(rows, "host_mem_GiB") * 2**30,
        cores=int(_figure(rows, "cores")),
        launch=_host_launch(rows),
        pcie=_pcie(rows),
    )
    count = max((curve.ranks for curve in measured), default=1)
    between = link(measured)
    machine = homogeneous(f"{host}: {count} x {name}", accelerator, node, 1, count, between, between)
    return replace(machine, collectives=measured)


def fitted(name: str, rows: Sequence[Row]) -> Accelerator:
    """Return the accelerator of a name in rows, fitted by `meshwise.simulator.calibration` to rows of its dtypes."""
    preset, bandwidth = DEVICES[name]
    sheet = data_sheet(preset)
    known = {dtype for dtype, _ in sheet.peak_flops}
    able = [row for row in rows if not isinstance(row.kernel, Product) or row.kernel.dtype in known]
    device = Devices({preset: sheet}).calibrated(preset, able).device
    kinds = tuple((kind, share) for kind, share in device.kernel_bandwidth if kind != CACHE)
    return replace(device, memory_bandwidth=bandwidth or device.memory_bandwidth, kernel_bandwidth=kinds)


def _figure(rows: Sequence[Mapping[str, Any]], name: str, least: float = 1.0) -> float:
    value = rows[0].get(name)
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ValueError(f"{name} is a number from {least:g} on in rows of {PUBLISHER}, met {value!r:.40}")
    return float(value)


def _seconds(row: Mapping[str, Any]) -> float:
    return _figure([row], "time_us", 1e-3) * 1e-6  # no clock tells less than a nanosecond


def _collectives(rows: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, int, int, float]]:
    for row in rows:
        if "collective" in row:
            if not isinstance(row["collective"], str) or row["collective"] not in _CURVES:
                raise ValueError(f"collective is one of {', '.join(_CURVES)}, met {row['collective']!r:.40}")
            sizes = int(_figure([row], "n_ranks")), int(_figure([row], "size_bytes"))
            yield (_CURVES[row["collective"]], *sizes, _seconds(row))


def _pcie(rows: Iterable[Mapping[str, Any]]) -> Pcie | None:
    """Return the link from pinned host memory to the device; ``None`` where no copy was measured."""
    copies = [row for row in rows if row.get("kernel") == "copy_h2d" and row.get("impl") == "pinned"]
    points = sorted((_figure([row], "bytes"), _seconds(row)) for row in copies)
    return Pcie(link_of(points)) if points else None


def _host_launch(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds that the host takes to launch an operator, from a layer whose time is launches only.

    The simulator counts one launch for an operator and one for its backward. It is 0 where no such layer was measured.
    """
    times = [_seconds(row) for row in rows if row.get("kernel") == "layer_fwd_bwd" and row.get("hidden") == TINY.hidden]
    layer = next(block for block in build(TINY, 2, "bf16").blocks if block.layer)
    return median(times) / (2 * len(layer.operators)) if times else 0.0
