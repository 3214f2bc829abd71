"""The examples in the docstrings of the executor: its modules are collected only where torch is installed."""

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest

pytest.importorskip("torch")

import executor


@pytest.mark.parametrize("name", [module.name for module in iter_modules(executor.__path__)])
def test_examples_hold(name: str) -> None:
    found = doctest.testmod(import_module(f"executor.{name}"))
    assert found.failed == 0
