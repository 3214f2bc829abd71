"""Published training runs, one JSON object a line, as scenarios.

A row names its model, hardware, plan and measured step in flat fields: ``n_layers``, ``hidden``,
``dp``, ``tp``, ``pp``, ``micro_batch``, ``step_time_s`` and so on. What a row does not state is
assumed in one place, here, and kept with the prediction; what this version cannot express is a
reason to skip the row.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scenarios.errors import Fault, ScenarioError, shown
from scenarios.loader import scenario_in
from scenarios.reader import Document
from scenarios.scenario import Scenario

MAX_ROWS = 100_000
MAX_ROW_BYTES = 2**20
GIB = 2.0**30

_MACHINES = {
    ("A100 SXM", 80): "dgx-a100-80gb",
    ("A100 SXM", 40): "dgx-a100-40gb",
    ("A100", None): "dgx-a100-80gb",
    ("A100", 80): "dgx-a100-80gb",
    ("H100 SXM", 80): "dgx-h100",
}
_PRECISIONS = {
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "amp_bf16": "bf16",
    "bf16 (not stated)": "bf16",
    "fp32": "fp32",
}
_SCHEDULES = {"1f1b": "1f1b", "interleaved 1f1b": "interleaved", "gpipe": "gpipe", "none": "1f1b"}
MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor degree (--make-vocab-size-divisible-by)."""


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run: what was measured, and the scenario, or why there is none."""

    row_id: str
    source: str
    group: str
    step_time: float | None
    peak_memory: float | None
    status: str
    scenario: Scenario | None = None
    skipped: str = ""
    assumed: tuple[str, ...] = ()


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """Return every row of a file of JSON lines; `ScenarioError` names the lines that are none."""
    faults: list[Fault] = []
    runs: list[Run] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
                if line.strip():
                    _append(runs, faults, str(path), number, line)
                if len(faults) >= 100 or number > MAX_ROWS:
                    break
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        faults.append(Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"))
    if not runs and not faults:
        faults.append(Fault(str(path), 1, 1, "", "a file of runs has one JSON object a line, met none"))
    if faults:
        raise ScenarioError(tuple(faults))
    return tuple(runs)


def _append(runs: list[Run], faults: list[Fault], file: str, number: int, line: bytes) -> None:
    if len(line) > MAX_ROW_BYTES:
        faults.append(Fault(file, number, 1, "", f"a row has at most {MAX_ROW_BYTES} bytes, met more"))
        return
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        faults.append(Fault(file, number, 1, "", f"a row is a JSON object: {str(error).splitlines()[0]}"))
        return
    if not isinstance(row, dict):
        faults.append(Fault(file, number, 1, "", f"a row is a JSON object, met {shown(row)}"))
        return
    runs.append(run_of(row, f"{file}:{number}"))


def run_of(row: dict[str, Any], place: str = "row") -> Run:
    """Return the run that a row states."""
    peak = _number(row.get("peak_mem_gib"))
    run = Run(
        row_id=str(row.get("row_id", place)),
        source=str(row.get("source_id", "unknown")),
        group=", ".join(str(row.get(key)) for key in ("model", "n_devices", "global_batch", "seq_len")),
        step_time=_number(row.get("step_time_s")),
        peak_memory=GIB * peak if peak else None,
        status=str(row.get("status", "ok")),
    )
    assumed: list[str] = []
    try:
        scenario = scenario_in(Document(place, _document(row, assumed)))
    except Skip as skip:
        return replace(run, skipped=str(skip))
    except ScenarioError as error:
        fault = error.faults[0]
        return replace(run, skipped=f"{fault.field}: {fault.message}")
    return replace(run, scenario=scenario, assumed=tuple(assumed))


def _number(value: Any) -> float | None:
    real = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18
    return float(value) if real else None


def _document(row: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Return a row as the data of a scenario file; raises `Skip`."""
    _refuse_what_is_not_supported(row)
    preset = _machine(row, assumed)
    nodes, a_node = _nodes(row, assumed)
    return {
        "name": str(row.get("row_id", "row"))[:100],
        "model": {"transformer": _transformer(row, assumed)},
        "training": {
            "global_batch": _needed(row, "global_batch"),
            "sequence": _needed(row, "seq_len"),
            "precision": _of(row, "precision", _PRECISIONS),
            "optimizer": "adamw",
        },
        "cluster": {"preset": preset, "nodes": nodes, "devices_per_node": a_node},
        "plan": _plan(row, assumed),
    }


def _nodes(row: dict[str, Any], assumed: list[str]) -> tuple[int, int]:
    """Return how many nodes there are and how many devices of each are used."""
    devices, a_node = _needed(row, "n_devices"), _stated(row, "devices_per_node", 8, assumed)
    if not (type(devices) is int and type(a_node) is int and min(devices, a_node) >= 1):
        raise Skip(f"n_devices and devices_per_node are at least 1, met {shown(devices)} and {shown(a_node)}")
    if devices > a_node and devices % a_node:
        raise Skip(f"devices fill whole nodes, met {devices} of {a_node} a node")
    return max(devices // a_node, 1), min(devices, a_node)


def _refuse_what_is_not_supported(row: dict[str, Any]) -> None:
    refused: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("moe_experts", lambda value: value is not None),
        ("cp", lambda value: value not in (None, 1)),
        ("ep", lambda value: value not in (None, 1)),
        ("fsdp_shards", lambda value: value not in (None, 1)),
        ("zero_stage", lambda value: value not in (None, 0, 1)),
        ("offload", lambda value: value not in (None, "none")),
    )
    for name, refuses in refused:
        if refuses(row.get(name)):
            raise Skip(f"{name} {shown(row[name])} is not supported yet")
    architecture = str(row.get("arch"))
    if not architecture.startswith(("gpt", "llama")):
        raise Skip(f"arch is a dense gpt or llama, met {shown(row.get('arch'))}")


def _machine(row: dict[str, Any], assumed: list[str]) -> str:
    memory = row.get("accel_mem_gb")
    preset = _MACHINES.get((str(row.get("accelerator")), memory if isinstance(memory, int) else None))
    if preset is None:
        raise Skip(f"accelerator {shown(row.get('accelerator'))} with {shown(memory)} GB is not in the catalogue")
    if memory is None:
        assumed.append("80 GB of device memory (not stated)")
    if row.get("nic_gbps_per_device") is None:
        assumed.append(f"the network of {preset} (not stated)")
    return preset


def _transformer(row: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    llama = str(row.get("arch")).startswith("llama")
    flash = "flash" in str(row.get("attention_kernel")) or llama
    if not flash:
        assumed.append("unfused attention and dropout, as in Megatron-LM without flash attention (not stated)")
    vocab, tensor = _needed(row, "vocab"), row.get("tp")
    if isinstance(vocab, int) and isinstance(tensor, int) and tensor > 0 and vocab % tensor:
        multiple = MEGATRON_VOCAB_MULTIPLE * tensor
        assumed.append(f"vocabulary of {vocab} padded to a multiple of {multiple}, as Megatron-LM does")
        vocab = -(-vocab // multiple) * multiple
    return {
        "layers": _needed(row, "n_layers"),
        "hidden": _needed(row, "hidden"),
        "heads": _needed(row, "n_heads"),
        "kv_heads": row.get("n_kv_heads") or _needed(row, "n_heads"),
        "ffn": _needed(row, "ffn_hidden"),
        "ffn_kind": _stated(row, "ffn_type", "swiglu" if llama else "gelu", assumed),
        "vocab": vocab,
        "tied_embeddings": _stated(row, "tied_embeddings", not llama, assumed),
        "attention": "flash" if flash else "unfused",
        "dropout": not flash,
        "positions": "rotary" if llama else "learned",
    }


def _plan(row: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    chunks = _stated(row, "vpp", 1, assumed)
    schedule = "interleaved" if chunks != 1 else _SCHEDULES.get(str(row.get("schedule")).lower(), "")
    if not schedule:
        raise Skip(f"schedule {shown(row.get('schedule'))} is not supported yet")
    tensor = _needed(row, "tp")
    sequence_parallel = _stated(row, "sequence_parallel", False, assumed) and tensor != 1
    return {
        "data": _needed(row, "dp"),
        "tensor": tensor,
        "pipeline": _needed(row, "pp"),
        "sequence_parallel": sequence_parallel,
        "microbatch": _needed(row, "micro_batch"),
        "schedule": schedule if chunks == 1 or schedule == "interleaved" else "interleaved",
        "chunks": chunks,
        "zero": _stated(row, "zero_stage", 0, assumed),
        "recompute": _recompute(row),
        "overlap_gradients": "overlapped" in str(row.get("dp_overlap")),
        "overlap_tensor": sequence_parallel and "--tp-comm-overlap" in str(row.get("tp_overlap")),
        "scatter_gather": _scatter_gather(row, assumed),
        "stages": "even" if _divides(row, chunks) else "balanced",
    }


def _scatter_gather(row: dict[str, Any], assumed: list[str]) -> bool:
    if (
        not str(row.get("framework")).startswith("Megatron")
        or row.get("sequence_parallel")
        or 1 in (row["tp"], row["pp"])
    ):
        return False
    assumed.append("stage boundaries cross scattered and are gathered, Megatron-LM's default (not stated)")
    return True


def _divides(row: dict[str, Any], chunks: Any) -> bool:
    sizes = (row.get("n_layers"), row.get("pp"), chunks)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return True  # the schema says what is wrong with them
    return bool(sizes[0] % (sizes[1] * sizes[2]) == 0)


def _recompute(row: dict[str, Any]) -> str:
    words = str(_needed(row, "recompute"))
    if words in ("none", "full"):
        return words
    if words == "selective" or words.startswith("selective (attention core)"):
        return "selective"
    raise Skip(f"recompute {shown(words)} is not supported yet")


def _needed(row: dict[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise Skip(f"{name} is not stated")
    return row[name]


def _stated(row: dict[str, Any], name: str, default: Any, assumed: list[str]) -> Any:
    if row.get(name) is None:
        assumed.append(f"{name} {str(default).lower()} (not stated)")
        return default
    return row[name]


def _of(row: dict[str, Any], name: str, known: dict[str, str]) -> str:
    value = str(_needed(row, name))
    if value not in known:
        raise Skip(f"{name} {shown(value)} is not supported yet")
    return known[value]
