"""Loops are compiled once Python has worked as long as that takes."""

from pathlib import Path

import numpy as np
import pytest

from meshwise.simulator.engine import compiled, longest_path


def test_numba_is_loaded_when_python_has_worked_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_walked", 0)
    monkeypatch.setattr(compiled, "installed", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert not compiled.pays(compiled.LOAD_TASKS - 1)
    assert not compiled.pays(1)
    assert compiled.pays(compiled.CALL_TASKS)


def test_machine_code_is_not_left_beside_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(longest_path.__file__).parent
    before = set(source.rglob("*.nb?"))
    loop = compiled.compile_loop.__wrapped__(add_one)
    assert loop(np.array([1, 2])) == 2
    assert list((tmp_path / "meshwise").rglob("*.nbi"))
    assert set(source.rglob("*.nb?")) == before and not list(Path(__file__).parent.rglob("*.nb?"))


def add_one(values: np.ndarray) -> int:
    return values[0] + 1
