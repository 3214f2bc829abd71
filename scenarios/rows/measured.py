"""What was measured in a row."""

import re
from typing import NamedTuple

from scenarios.rows.row import Row, Skip

GIB = 2.0**30
GB = 1e9


class Measured(NamedTuple):
    """What a row states of a run: seconds a step, bytes of the fullest device, and how it ended.

    ``with_context`` says that the memory counts what the driver and communicators take.
    """

    step_time: float | None
    peak_memory: float | None
    status: str
    with_context: bool


_OUT_OF_MEMORY = re.compile(r"oom|out[-_ ]of[-_ ]memory|cuda error: out|exceed\w* memory")
_OUTSIDE = re.compile(r"nvidia-smi|rocm-smi|nvml|dcgm|gpu memory used|device memory used|total gpu memory")


def measured(row: Row) -> Measured:
    """Return what was measured; a figure that is none is taken for missing and noted."""
    memory, outside = _memory(row)
    status = row.text("status")
    status = "oom" if _OUT_OF_MEMORY.search(status) else "ok" if status in ("", "ok", "success", "pass") else status
    return Measured(_step_time(row), memory, status[:40], outside)


def _figure(row: Row, name: str) -> float | None:
    try:
        return row.number(name)
    except Skip as skip:
        row.assume(f"not measured: {skip}")
        return None


def _step_time(row: Row) -> float | None:
    stated = _figure(row, "step_time_s")
    if stated is not None:
        return stated
    total, devices = _figure(row, "global_batch"), _figure(row, "n_devices")
    samples, tokens = _figure(row, "samples_per_s_per_device"), _figure(row, "tokens_per_s_per_device")
    length = _figure(row, "seq_len")
    if samples is None and tokens is not None and length is not None:
        samples = tokens / length
    if samples is None or total is None or devices is None:
        return None
    row.assume("measured step time from the samples or tokens a second that were measured")
    return total / (samples * devices)


def _memory(row: Row) -> tuple[float | None, bool]:
    note = row.text("mem_note")
    outside = bool(_OUTSIDE.search(note))
    for name in ("peak_mem_gib", "peak_mem_reserved_gib"):
        found = _figure(row, name)
        if found is not None:
            if name != "peak_mem_gib":
                row.assume("measured peak memory is what the allocator reserved, not what was allocated")
            return GIB * found, outside
    figures = re.findall(r"(\d+(?:\.\d+)?)\s*(gib|gb)\b", note)
    if len(figures) != 1 or not re.search(r"peak|max|alloc|reserv|used|usage|memory", note):
        return None, outside
    row.assume(f"measured peak memory of {figures[0][0]} {figures[0][1]} from mem_note")
    return float(figures[0][0]) * (GIB if figures[0][1] == "gib" else GB), outside
