"""The job of a captured module: a document that reads back, and a verdict on what its ranks leave."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tiny_jobs import job as tiny_job

from meshwise.executor.operators.job import OperatorJob, expect, is_done


@pytest.fixture
def made() -> OperatorJob:
    return OperatorJob("net.py:make", tiny_job(data=2, pipeline=2).plan, steps=3, seed=7, double=True, timeout=5.0)


def test_what_is_written_is_read(made: OperatorJob, tmp_path: Path) -> None:
    assert OperatorJob.read(made.write(tmp_path / "new" / "folder")) == made
    assert OperatorJob.read(replace(made, steps=4).write(tmp_path)) != made


@pytest.mark.parametrize("change", [{"version": 2}, {"more": 1}, {"plan": None}])
def test_what_is_no_job_is_refused_with_its_file(change: dict[str, object], made: OperatorJob, tmp_path: Path) -> None:
    path = made.write(tmp_path)
    document = json.loads(path.read_text()) | change
    if change.get("plan", 1) is None:
        del document["plan"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"job\.json: a job "):
        OperatorJob.read(path)


def test_a_verification_that_begins_anew_is_not_done(tmp_path: Path) -> None:
    folder = tmp_path / "verification"
    assert not is_done(folder)
    expect(folder, (1.0,), {}, 1e-9)
    (folder / "done").touch()
    assert is_done(folder)
    expect(folder, (1.0,), {}, 1e-9)
    assert not is_done(folder)
