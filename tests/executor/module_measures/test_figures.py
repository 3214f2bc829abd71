"""Figures are written and read back equal."""

from pathlib import Path

from meshwise.executor.module_measures.figures import ModuleFigures
from tests.scenarios.module_plans.modules import build_figures


def test_figures_read_back_equal(tmp_path: Path) -> None:
    figures = build_figures()
    figures.write(tmp_path / "figures")
    assert ModuleFigures.read(tmp_path / "figures") == figures
