"""Lines of the user's code: that of an error, of a forward, and of the assignment that changes an attribute."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.capture.source_lines import (  # noqa: E402
    find_assignment_line,
    find_error_line,
    find_forward_line,
    format_place,
)

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        if self.seen == 3:
            self.note()
        return torch.cat([x, "no tensor"])

    def note(self):
        self.seen += 1
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = tmp_path / "net.py"
    path.write_text(NET)
    spec = importlib.util.spec_from_file_location("net", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def number(text: str) -> int:
    return NET.splitlines().index(text) + 1


def test_an_error_inside_torch_is_told_of_the_line_that_calls_it(user: ModuleType) -> None:
    with pytest.raises(TypeError) as caught:
        user.Net()(torch.ones(1))
    line = number('        return torch.cat([x, "no tensor"])')
    assert find_error_line(caught.value) == f"net.py:{line}"
    try:
        torch.cat(["no tensor"])
    except TypeError as error:
        assert Path(find_error_line(error).rpartition(":")[0]).name == Path(__file__).name


def test_an_error_inside_a_package_is_told_of_its_line() -> None:
    file = Path(sysconfig.get_path("purelib")) / "package" / "model.py"
    code = compile("\n\nraise ValueError", str(file), "exec")
    with pytest.raises(ValueError) as caught:
        exec(code)
    assert caught.tb is not None
    without_test = caught.tb.tb_next
    assert find_error_line(caught.value.with_traceback(without_test)) == "package/model.py:3"


def test_a_forward_and_the_line_that_changes_an_attribute(user: ModuleType) -> None:
    assert find_forward_line(user.Net()) == f"net.py:{number('    def forward(self, x):')}"
    assert find_assignment_line(user.Net(), "seen") == f"net.py:{number('        self.seen += 1')}"
    # a comparison changes nothing, and what is set where the module is made does not count
    assert find_assignment_line(user.Net(), "other") == find_forward_line(user.Net())
    assert find_forward_line(torch.nn.Linear(1, 1)) == ""


def test_a_file_outside_the_folder_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    assert format_place(str(inside / "a.py"), 3) == "a.py:3"
    assert format_place(str(tmp_path / "a.py"), 3) == f"{tmp_path.resolve() / 'a.py'}:3"
