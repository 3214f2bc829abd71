"""Measuring a machine's devices: rows as they come, what is left out, and messages before anything starts."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from meshwise.executor.calibration import device_calibration, device_measures  # noqa: E402
from meshwise.executor.calibration.device_calibration import choose_device, choose_num_ranks, main, measure_devices  # noqa: E402
from meshwise.executor.calibration.device_machine import describe_machine  # noqa: E402
from meshwise.executor.calibration.device_measures import (  # noqa: E402
    CPU_SIZES,
    describe_error,
    list_repeated_kernels,
    measure_kernels,
)
from meshwise.executor.calibration.device_measures import list_kernels as timed_kernels  # noqa: E402
from meshwise.executor.calibration.figures import append_row, count_rows  # noqa: E402
from meshwise.executor.recording.timer import Timer  # noqa: E402
from meshwise.scenarios.commands.main import run  # noqa: E402
from meshwise.simulator.calibration.kernel_rows import read_rows  # noqa: E402


def test_kernels_and_collectives_are_measured_on_a_cpu(tmp_path: Path) -> None:
    out, told = tmp_path / "rows.jsonl", list[str]()
    assert measure_devices(out, "cpu", 2, 0.2, ("kernels", "collectives"), told.append) == []
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kernels = [row for row in rows if "kernel" in row]
    collectives = {row["collective"] for row in rows if "collective" in row}
    assert {"gemm", "bmm", "attention_fwd", "attention_bwd", "layernorm", "optimizer_step"} <= {
        row["kernel"] for row in kernels
    }
    assert collectives == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"}
    assert not any("model" in row for row in rows)
    for row in rows:
        assert (row["date"], row["machine"]) == (describe_machine("cpu").date, describe_machine("cpu").host)
        assert row["time_us"] > 0
    used, skipped = read_rows(out.read_bytes().splitlines())  # raises where a line is no row
    assert not used and len(skipped) == len(rows)  # for the catalogue has no such accelerator
    sizes = len(
        [*timed_kernels(CPU_SIZES, "cpu"), *list_repeated_kernels(CPU_SIZES)]
    )  # 42 with products in fp8, which not every torch has
    assert any(f" of {sizes}: " in text for text in told) and any("2 ranks" in text for text in told)


class Kernel:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error
        self.fields = {"kernel": name}

    def prepare(self, device: str) -> Any:
        if self.error:
            raise self.error
        return lambda: None


def test_what_cannot_run_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (
        Kernel("first"),
        Kernel("large", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        Kernel("foreign", RuntimeError("No available kernel.\nAborting execution.")),
        Kernel("last"),
    )
    monkeypatch.setattr(device_measures, "list_kernels", lambda sizes, device: every)
    monkeypatch.setattr(device_measures, "list_repeated_kernels", lambda sizes: ())
    told, skipped = list[str](), list[tuple[str, str]]()
    rows = list(
        measure_kernels(CPU_SIZES, {"machine": "here"}, Timer(), 0.01, told.append, lambda *why: skipped.append(why))
    )
    assert [(row["kernel"], row["machine"], row["in_a_row"]) for row in rows] == [
        ("first", "here", 1),
        ("last", "here", 1),
    ]
    assert skipped == [("large", "out of memory"), ("foreign", "No available kernel.")]
    assert told == [f"{number} of 4: {kernel.name}" for number, kernel in enumerate(every, start=1)]
    assert describe_error(RuntimeError()) == "RuntimeError"


def test_rows_measured_so_far_outlive_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "rows.jsonl"

    def interrupted(module: str, arguments: list[str], *_: Any, **__: Any) -> None:
        append_row(Path(arguments[2]), {"kernel": "gemm", "time_us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(device_calibration, "launch_ranks", interrupted)
    assert main(["--out", str(out), "--device", "cpu"]) == 130
    assert count_rows(out) == 1
    assert f"interrupted: {out} has 1 rows" in capsys.readouterr().err


def test_an_interrupt_of_the_command_says_where_the_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def interrupted(module: str, arguments: list[str], *_: Any, **__: Any) -> None:
        append_row(Path(arguments[2]), {"kernel": "gemm", "time_us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(device_calibration, "launch_ranks", interrupted)
    monkeypatch.setattr(device_calibration, "choose_device", lambda requested_device: "cuda")
    monkeypatch.setattr(device_calibration, "choose_num_ranks", lambda device, requested_ranks: 1)
    assert run(["calibrate", "--out", str(tmp_path / "box.yaml")]) == 130
    assert count_rows(tmp_path / "box.jsonl") == 1
    assert "box.jsonl has 1 rows" in capsys.readouterr().err
    assert not (tmp_path / "box.yaml").exists()


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        patched.setattr(torch.cuda, "is_available", lambda: False)
        yield


def test_cuda_without_a_gpu_is_one_message_before_any_process(no_processes: None, tmp_path: Path, capsys) -> None:
    out = tmp_path / "cluster.yaml"
    for command in (
        lambda: run(["calibrate", "--device", "cuda", "--out", str(out)]),
        lambda: main(["--device", "cuda", "--out", str(out)]),
    ):
        assert command() == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and "sees no GPU on this machine; nearest: --device cpu" in printed
    assert not out.exists()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="device is one of cpu, cuda, met tpu"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for available, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert (choose_device(None), choose_device("cpu")) == (found, "cpu")
    assert (choose_num_ranks("cuda", None), choose_num_ranks("cuda", 3), choose_num_ranks("cpu", None)) == (4, 3, 2)
    with pytest.raises(ValueError, match="processes are 1 to 4 on 4 GPUs, met 5; nearest: 4"):
        choose_num_ranks("cuda", 5)
