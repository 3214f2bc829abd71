"""The examples in the docstrings of every module hold; those of the executor where torch is installed."""

import doctest
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("simulator", "strategies", "executor", "reports", "scenarios")
PATHS = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if ">>>" in path.read_text("utf-8")]
TORCH = ("executor", "strategies/search/algorithms/policy.py", "scenarios/operators")


def module_name(path: Path) -> str:
    """Return the name by which a module is imported."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return "meshwise" if dotted == "scenarios.api" else f"meshwise.{dotted}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_hold(path: Path) -> None:
    if path.relative_to(ROOT).as_posix().startswith(TORCH) and not find_spec("torch"):
        pytest.skip("torch is not installed")
    assert doctest.testmod(import_module(module_name(path))).failed == 0
