"""Mutated inputs of every parser give a value or the input error; and the fuzzer finds what it is there to find."""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from .fuzzing import watch
from .fuzzing.mutation import Mutator
from .fuzzing.parsers import PARSERS, Parser
from .fuzzing.run import fuzz, fuzz_apart, input_of, keep
from .fuzzing.tree import Mapping, Raw, copied, nodes, text_of, tree_of
from .fuzzing.watch import Failure, failure

ROOT = Path(__file__).parents[2]
INPUTS = 300
NEEDS_TORCH = {"machine"}


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_inputs_give_a_value_or_the_input_error(name: str, tmp_path: Path) -> None:
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    report = fuzz(name, PARSERS[name], INPUTS, 0, tmp_path)
    assert list(report.failures.values()) == []
    assert report.accepted >= INPUTS // 100, "inputs are near enough to valid ones to be read to the end"


FOUND: list[tuple[str, bytes]] = [
    ("rows", b'{"n_layers": 8, "hidden": 200, "seq_len": 24, "dp": 1, "micro_batch": 5e-324}'),
    (
        "machine",
        b'{"source_id": "e", "source_repo": "e", "accelerator": "H200 SXM", "accel_mem_gb": 1, "dtype": "bf16", '
        b'"collective": [], "time_us": 200, "kernel": "gemm", "m": 24, "n": 46, "k": 92}',
    ),
    (
        "machine",
        b'{"source_id": "e", "source_repo": "meshwise calibrate", "accelerator": "H200 SXM", "machine": "box", '
        b'"accel_mem_gb": 1, "host_mem_GiB": 1, "cores": 1, "dtype": "bf16", "time_us": 1e-320, "kernel": "gemm", '
        b'"m": 24, "n": 46, "k": 92}',
    ),
    (
        "cluster",
        b'{"name": "box", "nodes": 1, "devices_per_node": 2, "accelerator": {"name": "", '
        b'"peak": {"bf16": "1 TFLOP/s"}, "memory": "8 GiB", "memory_bandwidth": "1 TB/s"}, '
        b'"host": {"name": "host", "memory": "64 GiB"}, '
        b'"intra_node": {"bandwidth": "10 GB/s", "latency": "2 us"}, '
        b'"inter_node": {"bandwidth": "10 GB/s", "latency": "2 us"}}',
    ),
    ("plan", b'{"data": 400000, "microbatch": [1], "schedule": "interleaved", "chunks": 2, "recompute": {"full": 1}}'),
    ("schedule", b"\x17v"),
    ("question", b"tensor=\xb3"),
    ("graph", json.dumps({"version": 1, "name": "\x1b[31m"}).encode()),
    ("journal", b'{"journal": "meshwise search", "version": ' + b"9" * 4000 + b"}\n"),
    ("rows", b'{"row_id": "\\ud800", "source_id": "\\u001b[2J"}'),
]
"""Inputs that once were another error, or a message that moved the cursor."""


@pytest.mark.parametrize(("name", "content"), FOUND, ids=lambda value: value if isinstance(value, str) else "")
def test_what_was_found_stays_mended(name: str, content: bytes, tmp_path: Path) -> None:
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    parser = PARSERS[name]
    assert failure(parser.reader(tmp_path), content, parser.errors, tmp_path)[0] is None


def breaks(read: Callable[[bytes], object]) -> Parser:
    """Return a parser that does what ``read`` does with inputs that hold a 7."""
    return Parser(lambda _: lambda content: read(content) if b"7" in content else None, Numbers, (ValueError,))


Numbers = partial(Mutator, [json.dumps({"a": 1, "b": [2, 3]})], [tree_of({"a": 1, "b": [2, 3]})])


def fail(error: Exception) -> None:
    raise error


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def write(folder: Path) -> None:
    (folder / "canary").write_text("x")


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda content: fail(KeyError("x")), "KeyError"),
        (lambda content: fail(ValueError("")), "message"),
        (lambda content: fail(ValueError("\x1b[31m")), "message"),
        (lambda content: warnings.warn("x", stacklevel=1), "UserWarning"),
        (lambda content: open("/etc/hostname").close(), "effect"),
        (lambda content: os.system("true"), "effect"),
    ],
    ids=["another error", "empty message", "escape in message", "a warning", "opens a file", "runs a command"],
)
def test_the_fuzzer_sees(read: Callable[[bytes], object], kind: str, tmp_path: Path) -> None:
    report = fuzz("numbers", breaks(read), 200, 0, tmp_path)
    (found, content), *_ = report.failures.values()
    assert found.kind == kind
    assert content == b"7", "what fails is made as small as it can be"


def test_the_fuzzer_sees_what_is_written_what_is_slow_and_what_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.02)
    found, _, _ = failure(lambda content: compute(0.03), b"", (), tmp_path)
    assert found is not None and found.kind == "slow"
    found, _, _ = failure(lambda content: write(tmp_path), b"", (), tmp_path)
    assert found is not None and found.kind == "effect" and "canary" in found.detail
    script = (
        "from pathlib import Path; from tests.endurance.fuzzing import watch; watch.MEGABYTES = 40; "
        "most = int(watch._peak() + 80) * 2**20; "  # a process begins with the peak of the one that started it
        "print(watch.failure(lambda content: len(b'x' * most), b'', (), Path('.'))[0].kind)"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert made.stdout == "memory\n"


@pytest.mark.parametrize(("seconds", "kinds"), [((0.04, 0.0), []), ((0.04, 0.04), ["slow"])])
def test_an_input_is_slow_where_it_is_slow_again(
    seconds: tuple[float, float], kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports and a busy machine make one reading slow."""
    monkeypatch.setattr(watch, "SECONDS", 0.02)
    remaining = list(seconds)
    parser = Parser(lambda _: lambda content: compute(remaining.pop(0)), Numbers, (ValueError,))
    report = fuzz("numbers", parser, 1, 0, tmp_path)
    assert [found.kind for found, _ in report.failures.values()] == kinds


def test_an_input_is_that_of_its_seed_and_number() -> None:
    first, again = (input_of("plan", PARSERS["plan"], 7) for _ in range(2))
    assert [first(index) for index in range(20)] == [again(index) for index in reversed(range(20))][::-1]
    assert input_of("plan", PARSERS["plan"], 8)(3) != first(3)


def test_a_tree_is_written_as_it_is() -> None:
    tree = tree_of({"a": [1, {"b": "x"}], "c": None})
    assert json.loads(text_of(tree)) == {"a": [1, {"b": "x"}], "c": None}
    assert len(list(nodes(tree))) == 5  # a, c, 1, the mapping, b
    other = copied(tree)
    other[0][1].append(Raw("*x"))
    assert text_of(other) != text_of(tree)
    assert text_of(Mapping([["a", 1], ["a", 2]])) == '{"a": 1, "a": 2}'


def test_mutations_reach_most_of_what_they_may(tmp_path: Path) -> None:
    """Of many inputs most differ, and some are still whole JSON."""
    mutator, random = PARSERS["plan"].mutator(), Random(0)
    made = {mutator.input(random) for _ in range(300)}
    assert len(made) > 280


def test_a_failing_input_is_kept_as_a_file(tmp_path: Path) -> None:
    path = keep(tmp_path / "out", "yaml", Failure("KeyError", "folder/module.py:1", ""), b"a: 7")
    assert path.read_bytes() == b"a: 7"
    assert path.name.startswith("yaml-KeyError-folder-module-py-1-")


def test_the_command_runs_a_parser(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.endurance.fuzzing", "quantity", "--inputs", "50", "--out", str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    assert "quantity" in made.stdout and "50 inputs" in made.stdout and "0 failures" in made.stdout
    wrong = subprocess.run([*command[:3], "\x1b[31m"], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert wrong.returncode == 2 and "\x1b[31m" not in wrong.stderr


def test_a_parser_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The process of a parser may be killed: the input that it read then is kept."""
    parser = breaks(lambda content: os.kill(os.getpid(), 9))
    start = time.monotonic()
    assert not fuzz_apart("numbers", parser, 300, 0, tmp_path, tmp_path / "out")
    assert time.monotonic() - start < 30
    (path,) = (tmp_path / "out").iterdir()
    assert b"7" in path.read_bytes()
    assert "killed by signal 9" in capfd.readouterr().out
