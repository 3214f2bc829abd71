"""Whatever goes wrong in the ranks of a plan, a verification finds it; where nothing does, it passes."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.user_training import plain_training, run
from meshwise.executor.user_training.job import CHECKPOINTS, TrainJob
from meshwise.executor.user_training.log import StepReader, StepRow
from meshwise.executor.user_training.verification import DifferenceError
from tests.executor.user_training.faults import FAULTS

FILE = Path(__file__).with_name("scheduled.py")
OTHERS = {
    ("residual", "data=2,zero=3", True, None),
    ("recurrent", "pipeline=2,num_microbatches=2", True, None),
    ("woven", "pipeline=2,num_microbatches=2", True, 0.5),
    ("weighted", "data=2,zero=2,num_microbatches=2", True, None),
    ("spectral", "data=2", True, None),
}
"""Kinds of modules whose gradients are rounding in part, or whose operators have other dtypes under autocast."""
NUM_RANKS, PATIENCE = 2, 120.0


class Ranks:
    """Two ranks that run trial after trial, and what they have run without a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_starts = folder, 0
        self.kind = self.fault = ""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._known: dict[str, tuple[Path, list[StepRow]]] = {}

    def start(self) -> None:
        """Start the ranks; anew where a trial has failed."""
        self.num_starts, self.num_requests = self.num_starts + 1, 0
        self.requests = self.folder / f"requests-{self.num_starts}"
        self.requests.mkdir()
        command = [sys.executable, "-m", "tests.executor.user_training.faulty_ranks", str(self.requests)]
        with (self.requests / "output").open("w") as output:
            self.processes = [
                subprocess.Popen([*command, str(rank), str(NUM_RANKS)], stdout=output, stderr=output)
                for rank in range(NUM_RANKS)
            ]

    def launch(self, job: TrainJob, folder: Path, *args: Any, **options: Any) -> list[StepRow]:
        """Run a job, in place of `run._launch`."""
        fault = self.fault if self.fault and FAULTS[self.fault].is_active(job) else ""
        text = self.kind + job.write(folder).read_text()
        if fault or text not in self._known:
            rows = self._run(folder, fault, job)
            if not fault:
                kept = self.folder / f"known-{len(self._known)}"
                shutil.copytree(folder, kept)
                self._known[text] = kept, rows
            return rows
        kept, rows = self._known[text]
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return rows

    def _run(self, folder: Path, fault: str, job: TrainJob) -> list[StepRow]:
        if not self.processes:
            self.start()
        number = self._request(str(folder), fault)
        end = time.monotonic() + PATIENCE
        answers = [self.requests / f"answer-{number}-{rank}" for rank in range(NUM_RANKS)]
        while not all(path.exists() for path in answers) and time.monotonic() < end:
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.01)
        texts = [path.read_text() if path.exists() else "no answer" for path in answers]
        if any(texts):
            self.close()
            pytest.fail(f"{fault or 'no fault'}: {texts}")
        reader = StepReader(folder, NUM_RANKS, job.layout.data_ranks)
        reader.read_on()
        return reader.rows

    def _request(self, folder: str, fault: str) -> int:
        partial_path = self.requests / "request.partial"
        partial_path.write_text(json.dumps({"folder": folder, "kind": self.kind, "fault": fault}))
        partial_path.rename(self.requests / f"request-{self.num_requests}.json")
        self.num_requests += 1
        return self.num_requests - 1

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        patch.setenv("OMP_NUM_THREADS", "1")
        server = Ranks(tmp_path_factory.mktemp("ranks"))
        yield server
        server.close()


@pytest.fixture(scope="module")
def plain_runs() -> Any:
    return cache(partial(_train_plainly, plain_training.train_plainly))


def _train_plainly(function: Any, job: TrainJob, kind: str, **options: Any) -> Any:
    return function(job, **options)


@pytest.fixture
def verify(ranks: Ranks, plain_runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def verify_with(kind: str, words: str, precision: str, max_norm: float | None, fault: str = "") -> Any:
        ranks.kind, ranks.fault = kind, fault
        monkeypatch.setenv("KIND", kind)
        monkeypatch.setattr("meshwise.executor.user_training.run._launch", ranks.launch)
        monkeypatch.setattr(plain_training, "train_plainly", lambda job, **options: plain_runs(job, kind, **options))
        layout = parse_layout(words, ModuleLayout())
        job = TrainJob(str(FILE), layout, 3, precision=precision, max_norm=max_norm)
        return run.verify_job(job, tmp_path / CHECKPOINTS)

    yield verify_with


def choose_precision(is_narrow: bool) -> str:
    return "bf16" if is_narrow else "fp32"


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(name: str, verify: Any) -> None:
    fault = FAULTS[name]
    try:
        difference = verify(fault.kind, fault.words, choose_precision(fault.is_narrow), fault.max_norm, name)
    except DifferenceError:
        return
    assert not difference.is_equal, difference
    assert difference.is_exact is fault.is_narrow


@pytest.mark.parametrize(
    ("kind", "words", "is_narrow", "max_norm"),
    sorted({(fault.kind, fault.words, fault.is_narrow, fault.max_norm) for fault in FAULTS.values()} | OTHERS, key=str),
)
def test_without_faults_nothing_is_found(
    kind: str, words: str, is_narrow: bool, max_norm: float | None, verify: Any
) -> None:
    difference = verify(kind, words, choose_precision(is_narrow), max_norm)
    assert difference.is_equal, difference


def test_a_run_with_a_fault_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainJob(str(FILE.with_name("stuck.py")), ModuleLayout(2, zero=1), 3, precision="bf16")
    result = run.train(job, tmp_path / "right", verify=True)
    assert result.difference is not None and result.difference.update is not None
    assert 0 < result.difference.update.error < result.difference.update.bound < 1
    monkeypatch.setenv("FAULT", "stuck")
    with pytest.raises(DifferenceError, match=r"in the low precision .* of its size away from fp32"):
        run.train(job, tmp_path / "wrong", verify=True)
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists()
