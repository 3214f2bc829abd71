"""The reference for pipelines without a flush sees any other version of the weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tiny_jobs import job  # noqa: E402

from meshwise.executor.check import reference  # noqa: E402
from meshwise.executor.check.reference import train, version_of  # noqa: E402


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_reference_with_other_versions_is_another_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(pipeline=2, microbatch=4, schedule=name, steps=3)
    _, due = train(made)
    right = version_of
    monkeypatch.setattr(reference, "version_of", lambda plan, stage, t: max(right(plan, stage, t) - (stage == 1), 0))
    _, other = train(made)
    errors = [float(np.abs(due[name] - other[name]).max()) for name in due if name.startswith("gradient")]
    assert max(errors) > 1e-6


def test_one_stage_of_pipedream_is_plain_training() -> None:
    # one stage updates after every microbatch on the newest weights: as steps of one microbatch do
    pipe = job(schedule="pipedream", global_batch=4, microbatch=2, steps=1)
    plain = job(global_batch=2, microbatch=2, steps=2)
    (loss,), arrays = train(pipe)
    losses, expected = train(plain)
    assert loss == pytest.approx(sum(losses) / 2, abs=1e-12)
    assert all(np.abs(arrays[name] - expected[name]).max() < 1e-12 for name in expected)
