"""``meshwise execute``: where processes go, what is refused before any starts, and how a run is interrupted."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwise.executor.launch.processes import lock_folder
from meshwise.scenarios.commands.main import run
from tests.host_processes import is_alive, list_children

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--processes", "5"], "met 5 processes of 4 ranks; nearest: 4"),
        (["--processes", "3"], "met 3 processes of 4 ranks; nearest: 2"),
        (["--processes", "2"], "nearest: 4, or --rendezvous HOST:PORT for 2 hosts of 2"),
        (["--rendezvous", "a:29500"], "go with --out, a folder of all hosts, and no --module; met no --out"),
        (["--collect"], "met no --out"),
        (["--rendezvous", "a;b:1", "--out", "OUT"], "rendezvous: HOST:PORT"),
        (["--rendezvous", "a", "--collect", "--out", "OUT"], "met both"),
        (["--rendezvous", "a", "--processes", "8", "--out", "OUT"], "met 8 processes of 4 ranks; nearest: 4"),
        (["--collect", "--out", "OUT"], "the folder of a run has a job.json"),
        (["--device", "tpu"], "--device: cpu or cuda, met 'tpu'; nearest: cpu"),
        (["--timeout", "0"], "greater than or equal to 1"),
        (["--timeout", "inf"], "less than or equal to 1000000"),
    ],
)
def test_one_message_before_any_process(options: list[str], words: str, tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "run")
    assert run(["execute", "local/dp2-tp2", *(out if option == "OUT" else option for option in options)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_microbatches_that_do_not_divide_the_batch(tmp_path: Path, capsys) -> None:
    text = (ROOT / "scenarios" / "local" / "dp2-tp2.yaml").read_text()
    (tmp_path / "uneven.yaml").write_text(text.replace("microbatch: 8", "microbatch: 3"))
    assert run(["execute", str(tmp_path / "uneven.yaml")]) == 2
    assert "microbatch(3) * data(2) = 6 divides global_batch(16); nearest microbatch: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (0, "--device: cuda needs 4 GPUs, one for each rank of a host, met 0; nearest: --device cpu"),
        (1, "met 1; nearest: a plan of 1 rank, or --device cpu"),
        (3, "met 3; nearest: a plan of 3 ranks, or --device cpu"),
    ],
)
def test_nccl_without_gpus(gpus: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert run(["execute", "local/dp2-tp2", "--device", "cuda"]) == 2
    assert words in capsys.readouterr().err


def test_port_folder_and_lock(tmp_path: Path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
        assert run(["execute", "local/dp2", "--rendezvous", rendezvous, "--out", str(tmp_path / "run")]) == 2
    assert "which is busy; nearest: " in capsys.readouterr().err
    with lock_folder(tmp_path):
        assert run(["execute", "local/dp2", "--out", str(tmp_path)]) == 2
    assert f"a run is in progress in this folder, met process {os.getpid()}" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(["execute", "local/dp2", "--out", str(tmp_path / "file" / "run")]) == 2
    assert "the folder cannot be written" in capsys.readouterr().err


def test_hosts_are_told_what_to_run(tmp_path: Path, capsys) -> None:
    out = tmp_path / "a run"
    options = ["--processes", "1", "--rendezvous", "node0:1234", "--verify", "--out", str(out)]
    assert run(["execute", "local/dp2-tp2", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["nodes"], document["processes"]) == (4, 1)
    assert document["commands"] == [f"sh '{out}/host.sh' {index}" for index in range(4)]
    words = (
        'torchrun --nnodes 4 --node-rank "$1" --nproc-per-node 1 --master-addr node0 --master-port 1234 '
        f"-m meshwise.executor.launch.worker '{out}/job.json' '{out}/verify/job.json'"
    )
    assert words in (out / "host.sh").read_text()
    assert run(["execute", "local/dp2", "--out", str(out), "--collect"]) == 1
    [message] = capsys.readouterr().err.splitlines()
    assert message == f"{out}: no rank has begun; run `sh '{out}/host.sh' NUMBER` on each host, then collect"


def test_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwise", "execute", "local/dp2", "--steps", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        metrics = [tmp_path / f"rank-{rank}.jsonl" for rank in range(2)]
        while not all(path.exists() and path.read_text().count("\n") >= 2 for path in metrics):
            assert process.poll() is None
            time.sleep(0.05)
        ranks = list_children(process.pid)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
        assert time.monotonic() - sent < 5
    finally:
        process.kill()
    assert process.returncode == 130
    assert error.endswith("interrupted\n")
    for path in metrics:
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        assert [json.loads(line)["step"] for line in whole] == list(range(len(whole))) and len(whole) >= 2
    assert len(ranks) == 2 and not [pid for pid in ranks if is_alive(pid)]
