"""A run ends with one message and without orphans, whatever happens to its ranks or its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from meshwise.executor.launch.launcher import ExecutionError, launch_ranks, require_torch
from meshwise.executor.launch.processes import is_stopped
from tests.host_processes import is_alive

pytestmark = pytest.mark.fresh_ranks
RANKS = 2


@pytest.fixture
def rank_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a module of ranks that beat, note their process id and then do as they are told."""
    source = """
        import os, sys, time
        from pathlib import Path
        from meshwise.executor.launch import worker
        from meshwise.executor.recording.rank_files import Heartbeat

        def run(paths, rank):
            heart = Heartbeat(paths[0].parent, rank)
            heart.step = 3
            heart.beat("forward 0F1")
            (paths[0].parent / f"pid-{rank}").write_text(str(os.getpid()))
            while rank == 1 and not (paths[0].parent / "pid-0").exists():
                time.sleep(0.01)
            if sys.argv[2] == "raise" and rank == 1:
                raise ArithmeticError("the answer is 41")
            if sys.argv[2] == "exit" and rank == 1:
                os._exit(7)
            if sys.argv[2] != "end":
                time.sleep(60)

        worker._run_jobs = run
        code = worker.main([Path(sys.argv[1])])
        sys.stderr.flush()
        os._exit(code)
    """
    (tmp_path / "told_rank.py").write_text(dedent(source))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "told_rank"


def _pids(folder: Path) -> list[int]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        texts = [path.read_text() for path in sorted(folder.glob("pid-*"))]
        if len(texts) == RANKS and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end and any(is_alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


def _launch(module: str, what: str, folder: Path, **options: float) -> None:
    launch_ranks(module, [str(folder / "job.json"), what], folder, RANKS, **options)  # type: ignore[arg-type]


def test_ranks_that_end_well(rank_module: str, tmp_path: Path) -> None:
    _launch(rank_module, "end", tmp_path / "run")
    _assert_gone(_pids(tmp_path / "run"))


def test_exception_of_a_rank_is_one_message(rank_module: str, tmp_path: Path) -> None:
    with pytest.raises(ExecutionError) as caught:
        _launch(rank_module, "raise", tmp_path / "run")
    message = str(caught.value)
    assert message.startswith(
        "rank 1 failed: ArithmeticError: the answer is 41 (at step 3, forward 0F1; rank 0 at step 3, forward 0F1)"
    )
    assert message.count("rank 1 failed") == 1
    _assert_gone(_pids(tmp_path / "run"))


def test_exit_code_of_a_rank(rank_module: str, tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="rank 1 ended with exit code 7"):
        _launch(rank_module, "exit", tmp_path / "run")


def test_killed_rank(rank_module: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed: list[int] = []

    def kill_one() -> None:
        if not killed and len(list(folder.glob("pid-*"))) == RANKS:
            killed.extend(_pids(folder))
            os.kill(int((folder / "pid-0").read_text()), signal.SIGKILL)

    with pytest.raises(ExecutionError, match="rank 0 was killed by SIGKILL"):
        launch_ranks(rank_module, [str(folder / "job.json"), "sleep"], folder, RANKS, poll=kill_one)
    _assert_gone(killed)


def test_silence_is_bounded(rank_module: str, tmp_path: Path) -> None:
    with pytest.raises(
        ExecutionError, match=r"rank (\d) has not moved for 3 s \(at step 3, forward 0F1; rank (?!\1)\d at step 3, f"
    ):
        _launch(rank_module, "sleep", tmp_path / "run", timeout=3.0)
    _assert_gone(_pids(tmp_path / "run"))


def test_interrupt_stops_the_ranks(rank_module: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        if len(list((tmp_path / "run").glob("pid-*"))) == RANKS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch_ranks(
            rank_module, [str(tmp_path / "run" / "job.json"), "sleep"], tmp_path / "run", RANKS, poll=interrupt
        )
    _assert_gone(_pids(tmp_path / "run"))


def test_stopped_rank_is_told_from_those_that_wait_for_it(rank_module: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped: list[int] = []

    def stop_one() -> None:
        if not stopped and len(list(folder.glob("pid-*"))) == RANKS:
            stopped.extend(_pids(folder))
            os.kill(stopped[1], signal.SIGSTOP)

    with pytest.raises(ExecutionError, match=r"rank 1 was stopped by a signal and has not moved for \d s \(at step 3"):
        launch_ranks(rank_module, [str(folder / "job.json"), "sleep"], folder, RANKS, timeout=4.0, poll=stop_one)
    _assert_gone(stopped)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_killed_parent_leaves_no_ranks(stopped: bool, rank_module: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        f"from pathlib import Path; from meshwise.executor.launch.launcher import launch_ranks; "
        f"launch_ranks({rank_module!r}, [{str(folder / 'job.json')!r}, 'sleep'], Path({str(folder)!r}), {RANKS})"
    )
    root = Path(__file__).parents[3]
    search_path = os.pathsep.join([str(root), str(tmp_path)])
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": search_path})
    try:
        pids = _pids(folder)
        assert all(is_alive(pid) for pid in pids)
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
            while not is_stopped(pids[0]):
                time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    _assert_gone(pids)


def test_killed_torchrun_leaves_no_ranks(rank_module: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder, root = tmp_path / "run", Path(__file__).parents[3]
    folder.mkdir()
    search_path = os.pathsep.join([str(root), str(tmp_path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    parent = subprocess.Popen(
        [*command, "-m", rank_module, str(folder / "job.json"), "sleep"],
        env=os.environ | {"PYTHONPATH": search_path},
        stderr=subprocess.DEVNULL,
    )
    try:
        pids = _pids(folder)
        assert all(is_alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    _assert_gone(pids)


def test_missing_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="needs torch") as error:
        require_torch()
    assert error.value.name == "torch"
