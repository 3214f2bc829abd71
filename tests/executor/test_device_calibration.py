"""Measuring a machine's devices: rows as they come, what is left out, and messages before anything starts."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.calibration import device_calibration, device_measures  # noqa: E402
from meshwise.executor.calibration.device_calibration import chosen_device, chosen_ranks, main, measure  # noqa: E402
from meshwise.executor.calibration.device_machine import known_name, this_machine  # noqa: E402
from meshwise.executor.calibration.device_measures import SMALL, in_a_row, kernel_rows, reason  # noqa: E402
from meshwise.executor.calibration.device_measures import kernels as timed_kernels  # noqa: E402
from meshwise.executor.calibration.device_transfers import group_sizes  # noqa: E402
from meshwise.executor.calibration.figures import append, count  # noqa: E402
from meshwise.executor.recording.timer import HostTimer  # noqa: E402
from meshwise.scenarios.commands.main import run  # noqa: E402
from meshwise.simulator.calibration.kernel_rows import DEVICES, read_rows  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


def test_kernels_and_collectives_are_measured_on_a_cpu(tmp_path: Path) -> None:
    out, told = tmp_path / "rows.jsonl", list[str]()
    assert measure(out, "cpu", 2, 0.2, ("kernels", "collectives"), told.append) == []
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    kernels = [row for row in rows if "kernel" in row]
    collectives = {row["collective"] for row in rows if "collective" in row}
    assert {"gemm", "bmm", "attention_fwd", "attention_bwd", "layernorm", "optimizer_step"} <= {
        row["kernel"] for row in kernels
    }
    assert collectives == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"}
    assert not any("model" in row for row in rows)
    for row in rows:
        assert (row["date"], row["machine"]) == (this_machine("cpu").date, this_machine("cpu").host)
        assert row["time_us"] > 0
    used, skipped = read_rows(out.read_bytes().splitlines())  # raises where a line is no row
    assert not used and len(skipped) == len(rows)  # for the catalogue has no such accelerator
    sizes = len([*timed_kernels(SMALL, "cpu"), *in_a_row(SMALL)])  # 42 with products in fp8, which not every torch has
    assert any(f" of {sizes}: " in text for text in told) and any("2 ranks" in text for text in told)


class Kernel:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error = name, error

    def fields(self) -> dict[str, Any]:
        return {"kernel": self.name}

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
    monkeypatch.setattr(device_measures, "kernels", lambda sizes, device: every)
    monkeypatch.setattr(device_measures, "in_a_row", lambda sizes: ())
    told, skipped = list[str](), list[tuple[str, str]]()
    rows = list(
        kernel_rows(SMALL, {"machine": "here"}, HostTimer(), 0.01, told.append, lambda *why: skipped.append(why))
    )
    assert [(row["kernel"], row["machine"], row["in_a_row"]) for row in rows] == [
        ("first", "here", 1),
        ("last", "here", 1),
    ]
    assert skipped == [("large", "out of memory"), ("foreign", "No available kernel.")]
    assert told == [f"{number} of 4: {kernel.name}" for number, kernel in enumerate(every, start=1)]
    assert reason(RuntimeError()) == "RuntimeError"


def test_rows_measured_so_far_outlive_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = tmp_path / "rows.jsonl"

    def interrupted(module: str, arguments: list[str], *_: Any, **__: Any) -> None:
        append(Path(arguments[1]), {"kernel": "gemm", "time_us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(device_calibration, "launch", interrupted)
    assert main(["--out", str(out), "--device", "cpu"]) == 130
    assert count(out) == 1
    assert f"interrupted: {out} has 1 rows" in capsys.readouterr().err


def test_an_interrupt_of_the_command_says_where_the_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def interrupted(module: str, arguments: list[str], *_: Any, **__: Any) -> None:
        append(Path(arguments[1]), {"kernel": "gemm", "time_us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(device_calibration, "launch", interrupted)
    monkeypatch.setattr(device_calibration, "chosen_device", lambda given: "cuda")
    monkeypatch.setattr(device_calibration, "chosen_ranks", lambda device, given: 1)
    assert run(["calibrate", "--out", str(tmp_path / "box.yaml")]) == 130
    assert count(tmp_path / "box.jsonl") == 1
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
        chosen_device("tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for available, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert (chosen_device(None), chosen_device("cpu")) == (found, "cpu")
    assert (chosen_ranks("cuda", None), chosen_ranks("cuda", 3), chosen_ranks("cpu", None)) == (4, 3, 2)
    with pytest.raises(ValueError, match="processes are 1 to 4 on 4 GPUs, met 5; nearest: 4"):
        chosen_ranks("cuda", 5)


@pytest.mark.parametrize(("ranks", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8])])
def test_groups_are_powers_of_two_and_all(ranks: int, sizes: list[int]) -> None:
    assert group_sizes(ranks) == sizes


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM"),
        ("NVIDIA GB200", "GB200 SXM"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA GH200 480GB", "GH200 SXM 96GB"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
    ],
)
def test_drivers_names_are_names_of_rows(driver: str, name: str) -> None:
    assert known_name(driver)[0] == name
    assert name in DEVICES
    assert known_name("Some GPU") == ("Some GPU", "PCIe")


def test_a_gpus_machine_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=15e10))
    found = this_machine("cuda")
    assert (found.accelerator, found.devices, found.memory, found.link) == ("H200 SXM", 8, 15e10, "PCIe")
    assert found.fields()["source_id"] == f"meshwise_h200_sxm_{found.date}"


def test_workers_need_torch_and_nothing_that_simulates() -> None:
    absent = ("simpy", "pandas", "numba", "pydantic", "yaml", "typer", "rich", "highspy", "matplotlib", "scipy")
    modules = (
        "meshwise.executor.calibration.device_calibration",
        "meshwise.executor.calibration.device_worker",
        "meshwise.executor.calibration.device_measures",
        "meshwise.executor.calibration.device_training",
        "meshwise.executor.calibration.device_transfers",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
