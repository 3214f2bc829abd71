"""What tests of several rooms of scenarios share."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWISE_DEBUG", raising=False)
    return tmp_path
