"""A machine's rows become its cluster file: what is fitted predicts the times that the rows were made of."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.calibration import device_calibration
from meshwise.executor.calibration.cores import build_curves
from meshwise.executor.calibration.device_cluster import build_cluster, fit_accelerator, is_measured
from meshwise.executor.calibration.device_machine import Machine
from meshwise.executor.calibration.device_measures import GPU_SIZES, list_kernels, list_repeated_kernels
from meshwise.executor.calibration.device_transfers import TOOL
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.simulator.calibration.collective_rows import Timing
from meshwise.simulator.calibration.collective_rows import read_rows as read_collectives
from meshwise.simulator.calibration.kernel_rows import BURST_SECONDS, read_rows
from meshwise.simulator.catalog import accelerator, data_sheet_accelerator
from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.accelerator import Accelerator

BOX = Machine("H200 SXM", "NVLink4/NVSwitch", 8, 1.5e11, "box", 2.0**40, 64, "torch 2.13", "2026-01-02")
TRUTH = accelerator("h200-141gb")


def kernel_row(kernel: Any, runs: int, device: Accelerator) -> dict[str, Any]:
    """Return the row of a machine whose kernels take as long as ``device`` says, 5 us where it says nothing."""
    row = {**BOX.fields(), **kernel.fields, "time_us": 5.0, "in_a_row": runs}
    used, _ = read_rows([json.dumps(row).encode()])
    if used:
        burst = used[0].kernel.seconds(replace(device, sustained=1.0))
        sunk = runs * burst >= BURST_SECONDS
        row["time_us"] = 1e6 * (used[0].kernel.seconds(device) if sunk else burst)
    return row


def copy_row(nbytes: int, seconds: float, impl: str = "pinned") -> dict[str, Any]:
    return {**BOX.fields(), "kernel": "copy_h2d", "bytes": nbytes, "impl": impl, "time_us": seconds * 1e6}


def collective_row(name: str, ranks: int, nbytes: int, seconds: float) -> dict[str, Any]:
    return {
        **BOX.fields(),
        "collective": name,
        "n_ranks": ranks,
        "n_nodes": 1,
        "intra_node_link": BOX.link,
        "size_bytes": nbytes,
        "time_us": seconds * 1e6,
        "tool": TOOL,
    }


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    every = [
        *((kernel, 1) for kernel in list_kernels(GPU_SIZES, "cpu")),
        *((kernel, 10_000) for kernel in list_repeated_kernels(GPU_SIZES)),
    ]
    found = [kernel_row(kernel, runs, TRUTH) for kernel, runs in every if "copy" not in kernel.fields["kernel"]]
    found += [copy_row(4096, 1e-5), copy_row(2**30, 1e-5 + 2**30 / 50e9), copy_row(2**30, 0.5, "pageable")]
    for size in (2**10, 2**20, 2**30):
        found += [
            collective_row("p2p", 2, size, 2e-6 + size / 4e11),
            collective_row("all_reduce", 8, size, size / 2e11),
        ]
    return found


def lines(rows: Iterable[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def test_the_fit_predicts_the_times_that_rows_were_made_of(rows: list[dict[str, Any]]) -> None:
    used, _ = read_rows(lines(rows))
    found = fit_accelerator("H200 SXM", used)
    assert found.sustained == pytest.approx(TRUTH.sustained, rel=0.01)
    for row in used:
        predicted = row.kernel.seconds(replace(found, sustained=1.0) if row.burst else found)
        assert predicted == pytest.approx(row.seconds, rel=0.15), row
    assert found.matmul.fraction == pytest.approx(TRUTH.matmul.fraction, rel=0.02)
    slow = [replace(row, seconds=2 * row.seconds) for row in used]
    assert fit_accelerator("H200 SXM", slow).matmul.fraction < 0.6 * found.matmul.fraction


def test_a_machines_cluster(rows: list[dict[str, Any]]) -> None:
    found = build_cluster(lines(rows))
    assert (found.num_devices, found.accelerator.memory) == (8, 1.5e11)
    assert found.accelerator.peak_flops == data_sheet_accelerator("h200-141gb").peak_flops
    host = found.first_node.host
    assert (host.name, host.memory, host.cores) == ("box", 2.0**40, 64)
    assert host.pcie is not None
    assert host.pcie.link.bandwidth == pytest.approx(50e9)  # 2^30 bytes take 10 us more than at 50 GB/s
    assert host.pcie.link.latency == pytest.approx(1e-5)
    # a layer of hidden 8: norms, qkv, attention, projection, residuals, up, activation and down, there and back
    assert host.launch == pytest.approx(5e-6 / (2 * 10))
    network = found.first_node.network.link
    assert network.bandwidth == pytest.approx(4e11, rel=1e-3)
    times = {(curve.collective, curve.ranks): curve for curve in found.collectives}
    assert times[Collective.ALL_REDUCE, 8].time(2.0**30) == pytest.approx(2**30 / 2e11)
    assert set(times) == {(Collective.SEND, 2), (Collective.ALL_REDUCE, 8)}


def test_one_gpu_has_no_collectives(rows: list[dict[str, Any]]) -> None:
    found = build_cluster(lines(row for row in rows if "collective" not in row))
    assert (found.num_devices, found.collectives) == (1, ())


def test_collective_rows_are_read_as_timed_by_the_device(rows: list[dict[str, Any]]) -> None:
    used, skipped = read_collectives(json.dumps(row) for row in rows if "collective" in row)
    assert not skipped and len(used) == 6
    assert {(row.machine, row.timing) for row in used} == {("dgx-h200", Timing.DEVICE)}
    assert used[0].seconds == pytest.approx(2e-6 + 2**10 / 4e11)


def test_curves_take_the_median_of_equal_points() -> None:
    (found,) = build_curves([("send", 2, 8, 1.0), ("send", 2, 4, 0.9), ("send", 2, 8, 3.0), ("send", 2, 8, 2.0)])
    assert found.points == ((4.0, 0.9), (8.0, 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "other"}, "of the rows of one machine, met 2"),
        ({"accel_mem_gb": "many"}, "accel_mem_gb is a number from 1 on"),
        ({"cores": 0}, "cores is a number from 1 on"),
    ],
)
def test_rows_of_no_one_machine_are_refused(change: dict[str, Any], message: str, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=message):
        build_cluster(lines([{**rows[0], **change}, *rows[1:]]))


def test_unknown_accelerators_and_files_without_kernels_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"accelerator NVIDIA T4 has no data sheet here; known: .*H200 SXM"):
        build_cluster(lines({**row, "accelerator": "NVIDIA T4"} for row in rows))
    with pytest.raises(ValueError, match="needs rows of kernels, met none that can be used: no kernel is stated"):
        build_cluster(lines(row for row in rows if "collective" in row))
    with pytest.raises(ValueError, match=r"collective is one of all_reduce, .*, met 'gossip'"):
        build_cluster(lines([*rows, collective_row("gossip", 2, 8, 1.0)]))


def test_dtypes_that_a_data_sheet_has_not_are_left_out() -> None:
    every = [kernel for kernel in list_kernels(GPU_SIZES, "cpu") if kernel.fields["kernel"] == "gemm"][:80]
    rows = [kernel_row(kernel, 1, TRUTH) | {"accelerator": "V100 SXM2"} for kernel in every]
    used, _ = read_rows(lines(rows))
    assert {row.kernel.dtype for row in used} >= {"bf16", "fp16"}  # a V100 has no bf16
    assert fit_accelerator("V100 SXM2", used).matmul.fraction > 0


def test_rows_of_this_command_are_known_by_their_publisher(rows: list[dict[str, Any]]) -> None:
    assert is_measured(lines(rows)[0])
    for other in (b"", b"[]", b"{", b"[" * 100_000, b'{"source_repo": "a/b"}'):
        assert not is_measured(other)


def test_rows_become_a_cluster_file_that_reads_back_equal(rows: list[dict[str, Any]], tmp_path: Path, capsys) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "box.yaml"
    path.write_bytes(b"\n".join(lines(rows)))
    assert run(["calibrate", "--from", str(path), "--out", str(out)]) == 0
    assert load_cluster(out) == build_cluster(lines(rows))
    assert "box.yaml is written" in capsys.readouterr().out
    assert run(["calibrate", "--from", str(path), "--json"]) == 0  # without a cluster file: as published rows
    assert json.loads(capsys.readouterr().out)["accelerator"] == "h200-141gb"
    assert run(["calibrate", "--from", str(path), "--out", str(out), "--leave-out", "a"]) == 2
    assert "--leave-out goes with --out FITTED.json, met a cluster file" in capsys.readouterr().err


def test_a_line_that_is_no_row_is_named(rows: list[dict[str, Any]], tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*lines(rows[:3]), b"{nonsense"]))
    assert run(["calibrate", "--from", str(path), "--out", str(tmp_path / "box.yaml")]) == 2
    assert f"{path}:4:1: a row is a JSON object" in capsys.readouterr().err


def test_gpus_are_measured_into_rows_and_a_cluster_file(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    asked: list[tuple[str, int, float]] = []

    def measured(out: Path, device: str, num_ranks: int, seconds: float, **_: Any) -> list[str]:
        asked.append((device, num_ranks, seconds))
        out.write_bytes(b"\n".join(lines(rows)))
        return ["gemm bf16 m=1: out of memory"]

    monkeypatch.setattr(device_calibration, "choose_device", lambda requested_device: "cuda")
    monkeypatch.setattr(device_calibration, "choose_num_ranks", lambda device, requested_ranks: 8)
    monkeypatch.setattr(device_calibration, "measure_devices", measured)
    assert run(["calibrate", "--out", str(tmp_path / "box.yaml"), "--seconds", "9"]) == 0
    printed = capsys.readouterr()
    assert asked == [("cuda", 8, 9.0)]
    assert load_cluster(tmp_path / "box.yaml") == build_cluster(lines(rows))
    assert f"box.jsonl has {len(rows)} rows" in printed.err
    assert "left out: gemm bf16 m=1: out of memory" in printed.err


def test_the_layer_of_launches_is_timed_in_a_row() -> None:
    assert any(kernel.fields["kernel"] == "layer_fwd_bwd" for kernel in list_repeated_kernels(GPU_SIZES))
