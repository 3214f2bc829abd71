"""Loops are compiled once Python has worked as long as that takes."""

import pytest

from meshwise.simulator.engine import compiled


def test_numba_is_loaded_when_python_has_worked_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_walked", 0)
    monkeypatch.setattr(compiled, "installed", lambda: True)
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert not compiled.pays(compiled.LOAD_TASKS - 1)
    assert not compiled.pays(1)
    assert compiled.pays(compiled.CALL_TASKS)
