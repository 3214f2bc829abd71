"""What tests of several rooms of scenarios share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))  # modules that are captured there


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWISE_DEBUG", raising=False)
    return tmp_path
