"""A user's file: what it may define, and the line that every fault of it is told with."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.user_training.user_file import UserFileError, find_own_line, load_file

GOOD = """
import torch
BATCH = 4

def model():
    return torch.nn.Linear(2, 1)

def data(rank, world):
    return [torch.ones(4, 2) * (rank + world)]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_file_with_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("SIZE = 3\n")
    user_file = load_file(write(tmp_path, GOOD + "import neighbour\ndef optimizer(model): return neighbour.SIZE\n"))
    assert user_file.batch == 4 and user_file.call("optimizer", None) == 3 and user_file.loss is None
    data, is_own = user_file.open_data(1, 2)
    assert is_own and float(data[0][0, 0]) == 3
    first, again, other = (user_file.build_model(seed) for seed in (0, 0, 1))
    assert first.weight.tolist() == again.weight.tolist() != other.weight.tolist()


def test_what_a_file_initialises_is_drawn_from_the_seed_alone(tmp_path: Path) -> None:
    text = GOOD + "def initialize(module):\n    torch.nn.init.normal_(module.weight)\n"
    user_file = load_file(write(tmp_path, text))
    assert user_file.build_model(3).weight.tolist() == user_file.build_model(3).weight.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def model(): pass\n", "met no data()"),
        ("def models(): pass\ndef data(): pass\n", "met no model(); nearest: models"),
        ("def model(:\n", "mine.py:1: SyntaxError"),
        ("import nothing_of_this_name\n", "mine.py:1: ModuleNotFoundError"),
        ("def fail():\n    1 / 0\nfail()\n", "mine.py:2: ZeroDivisionError: division by zero"),
        (GOOD + "BATCH = 0\n", "BATCH is a number of samples of at least 1, met 0"),
        (GOOD + "def evaluate(model, batch): pass\n", "has evaluation_data() beside it"),
        (GOOD + "loss = 3\n", "loss is a function, met int"),
    ],
)
def test_a_file_that_does_not_serve_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserFileError) as caught:
        load_file(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "mine.py:5: model() returns a torch.nn.Module, met int"),
        ("return torch.nn.ReLU()", "mine.py:5: a module has parameters that are trained, met none"),
        ("return torch.nn.Linear('a', 1)", "mine.py:6: model(): TypeError"),
    ],
)
def test_a_model_that_does_not_serve_is_refused(body: str, message: str, tmp_path: Path) -> None:
    user_file = load_file(write(tmp_path, GOOD.replace("return torch.nn.Linear(2, 1)", body)))
    with pytest.raises(UserFileError) as caught:
        user_file.build_model(0)
    assert message in str(caught.value)


def test_an_error_in_model_comes_out_once(tmp_path: Path) -> None:
    fault = "open(__file__ + 'x', 'a').write('x')\n    return torch.nn.Sequential(torch.ones(3) + torch.ones(5))"
    user_file = load_file(write(tmp_path, GOOD.replace("return torch.nn.Linear(2, 1)", fault)))
    with pytest.raises(UserFileError, match=r"mine.py:7: model\(\): RuntimeError: The size of tensor a \(3\)"):
        user_file.build_model(0)
    assert (tmp_path / "mine.pyx").read_text() == "x"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("none.py", "model.txt"):
        with pytest.raises(UserFileError, match="met no such file"):
            load_file(tmp_path / name)


def test_an_error_in_a_package_of_the_user_is_told_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts").mkdir()
    (tmp_path / "own_parts" / "net.py").write_text("import torch\n\n\ndef forward():\n    return torch.cat([1])\n")
    monkeypatch.syspath_prepend(tmp_path)
    from own_parts.net import forward  # type: ignore[import-not-found]

    with pytest.raises(TypeError) as caught:
        forward()
    error = caught.value.with_traceback(caught.tb.tb_next if caught.tb else None)
    assert find_own_line(error, tmp_path / "mine.py").endswith("own_parts/net.py:5")
