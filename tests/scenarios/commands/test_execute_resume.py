"""``meshwise execute`` over a user's text, with checkpoints, interrupted and resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwise.executor.training.checkpoint import find_last_good
from meshwise.scenarios.commands.main import run

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
TEXT = "the quick brown fox jumps over the lazy dog; größer als ein Byte. " * 400
RATE = ["--learning-rate", "0.002", "--warmup-steps", "2", "--decay-steps", "6"]


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Return the folder of a run of four steps with seed 5, under data parallelism."""
    out = tmp_path_factory.mktemp("run") / "out"
    arguments = ["--steps", "4", "--seed", "5", "--data", str(text), "--checkpoint-every", "3", *RATE]
    assert run(["execute", "local/dp2", *arguments, "--out", str(out)]) == 0
    return out


def test_another_plan_goes_on_in_the_same_folder(first: Path, text: Path, tmp_path: Path, capsys) -> None:
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    out = shutil.copytree(first, tmp_path / "out")
    flipped = out / "checkpoints" / "step-00000004" / "rank-0.bin"
    content = bytearray(flipped.read_bytes())
    content[1000] ^= 1
    flipped.write_bytes(content)
    capsys.readouterr()
    arguments = ["--steps", "6", "--data", str(text), "--resume", "--out", str(out), "--json"]
    assert run(["execute", "local/tp2", *arguments]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["first_step"], document["steps"], len(document["loss"])) == (3, 3, 3)
    assert "passed over: " in captured.err and "step-00000004/rank-0.bin has the SHA-256 that" in captured.err
    before, after = rows(first), rows(out)
    assert [row["step"] for row in after] == list(range(6))
    assert after[:3] == before[:3]
    assert after[3]["loss"] == pytest.approx(before[3]["loss"], rel=1e-5)  # fp32
    rates = [0.001, 0.002, 0.002, 0.002 * 0.8535533905932737, 0.001, 0.002 * 0.14644660940672627]
    assert [row["learning_rate"] for row in after] == pytest.approx(rates)  # (1 + cos(pi * [0, 1, 2, 3] / 4)) / 2
    assert after[-1]["loss"] < after[0]["loss"]


def written(folder: Path) -> dict[Path, int]:
    """Return when every file of a run was written, but for the lock that each attempt takes."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix != ".lock"}


def test_what_is_not_the_same_run_is_refused_before_anything_starts(first: Path, text: Path, tmp_path: Path, capsys):
    before = written(first)
    other = tmp_path / "other.txt"
    other.write_text(TEXT.upper())
    bad = tmp_path / "bad.txt"
    bad.write_bytes(TEXT.encode()[:5000] + b"\xff\xfe")
    short = tmp_path / "short.txt"
    short.write_text("short")
    deeper = tmp_path / "deeper.yaml"
    (shipped,) = ROOT.glob("scenarios/**/dp2.yaml")
    deeper.write_text(shipped.read_text().replace("layers: 4", "layers: 6"))
    resume, same = ["--resume", "--out", str(first)], ["--data", str(text)]
    cases = [
        ("local/dp2", ["--steps", "4", *same, *resume], "was made after 4 steps; a run that resumes has more of them"),
        ("local/dp2", ["--steps", "9", *same, *resume, "--seed", "6"], "its seed is 5, this run's 6"),
        (
            "local/dp2",
            ["--steps", "9", *same, *resume, "--learning-rate", "1"],
            "its learning_rate has peak 0.002, this",
        ),
        (
            "local/dp2",
            ["--steps", "9", *resume],
            "its data is 'text.txt' of 27200 bytes, this run's 'pydoc_data.topics'",
        ),
        ("local/dp2", ["--steps", "9", "--data", str(other), *resume], "which are not the same text; --data names it"),
        (str(deeper), ["--steps", "9", *same, *resume], "its model has layers 4, this run's 6"),
        ("local/dp2", ["--steps", "9", *same, "--out", str(first)], "has checkpoints already; --resume goes on"),
        ("local/dp2", ["--steps", "9", "--resume"], "need a folder that stays: --out DIR"),
        ("local/dp2", ["--resume", "--out", str(tmp_path / "none")], "needs the folder of a run, met none"),
        ("local/dp2", ["--resume", "--out", str(tmp_path)], "resuming needs a checkpoint, met none"),
        ("local/dp2", ["--data", str(bad)], "bad.txt: data is text in UTF-8, met invalid start byte near byte 5000"),
        ("local/dp2", ["--data", str(short)], "data has at least the 65 bytes of a sequence(64) and its last target"),
        ("local/dp2", ["--data", str(tmp_path / "gone")], "data is a text file or a folder of them: No such file"),
        ("local/dp2", ["--learning-rate", "nan"], "learning_rate is above 0 and finite, met nan"),
        ("local/dp2", ["--warmup-steps", "5", "--decay-steps", "5"], "above warmup_steps(5), met 5; nearest: 6"),
        ("local/dp2", ["--min-learning-rate", "0.1"], "what a decay ends at, met 0.1 without decay_steps"),
    ]
    for name, arguments, words in cases:
        assert run(["execute", name, *arguments]) == 2, arguments
        assert words in capsys.readouterr().err, words
    assert written(first) == before
    assert not (tmp_path / "none").exists()


def test_an_interrupted_run_leaves_what_it_did(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["execute", "local/dp2", "--steps", "100000", "--checkpoint-every", "2", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "meshwise", *arguments], stderr=subprocess.PIPE, env=environment)
    end = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-????????")) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    checkpoint, damaged = find_last_good(out / "checkpoints")
    assert damaged == () and not list(out.glob("checkpoints/*.partial"))
    assert len(rows(out)) >= checkpoint.step
    assert f"--resume goes on from {checkpoint.folder}" in error.decode()
