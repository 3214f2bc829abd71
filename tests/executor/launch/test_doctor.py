"""The doctor says what is here and what is not."""

import json
import sys
from importlib.metadata import version

import pytest

from meshwise.executor.launch import doctor


def test_report_is_plain_data() -> None:
    found = doctor.build_report()
    assert json.loads(json.dumps(found)) == found
    assert found["installed"]["numpy"] == version("numpy")
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found["cores"] >= found["usable_cores"] >= 1


def test_missing_package_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", {"no-such-package": "tests"})
    assert doctor.build_report()["missing"] == {"no-such-package": "tests"}
