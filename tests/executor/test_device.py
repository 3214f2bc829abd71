"""A processor that traps on the matrix tiles that it announces computes without them; others are left alone."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshwise.executor import device
from meshwise.executor.device import avoid_broken_tiles

LIMIT = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture(autouse=True)
def without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "")  # so that what a test sets is undone
    monkeypatch.delenv(LIMIT)
    device._tiles_trap.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch, flags: str, code: int) -> list[int]:
    """Announce ``flags`` and let products end with ``code``; return what grows by each product."""
    products: list[int] = []

    def run(*_: object, **__: object) -> SimpleNamespace:
        products.append(code)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(device, "_announces_tiles", lambda: device._has_tiles(flags))
    monkeypatch.setattr(subprocess, "run", run)
    return products


def test_tiles_that_trap_are_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    products = _pretend(monkeypatch, "flags : avx512f amx_bf16 amx_tile", -signal.SIGILL)
    avoid_broken_tiles()
    avoid_broken_tiles()
    assert os.environ[LIMIT] == "AVX512_CORE_FP16"
    assert len(products) == 1


@pytest.mark.parametrize(("flags", "code", "products"), [("avx512f amx_tile", 0, 1), ("avx512f", -signal.SIGILL, 0)])
def test_other_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch, flags: str, code: int, products: int) -> None:
    computed = _pretend(monkeypatch, flags, code)
    avoid_broken_tiles()
    assert LIMIT not in os.environ
    assert len(computed) == products


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "AVX2")
    products = _pretend(monkeypatch, "amx_tile", -signal.SIGILL)
    avoid_broken_tiles()
    assert os.environ[LIMIT] == "AVX2"
    assert not products


def test_a_product_of_bf16_ends_well_here() -> None:
    # on a machine whose tiles trap this fails without the limit
    pytest.importorskip("torch")
    avoid_broken_tiles()
    assert subprocess.run([sys.executable, "-c", device._PRODUCT], check=False).returncode == 0
