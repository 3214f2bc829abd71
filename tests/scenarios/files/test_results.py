"""Files appear whole, whatever comes between."""

import os
from pathlib import Path

import pytest

from meshwise.scenarios.files.results import write


def test_an_interrupt_after_the_file_has_its_name_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: str, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "plan.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
