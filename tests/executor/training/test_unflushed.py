"""PipeDream's weight versions: those that the papers write down, and a reference that sees any other."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiny_jobs import TINY, job  # noqa: E402

from meshwise.executor.check import reference  # noqa: E402
from meshwise.executor.check.reference import train, version_of  # noqa: E402
from meshwise.executor.model.network import Network  # noqa: E402
from meshwise.executor.training.unflushed import Weights  # noqa: E402

PIPEDREAM = job(pipeline=4, schedule="pipedream", steps=2)
TWO_VERSIONS = job(pipeline=4, schedule="pipedream_2bw", steps=2)


def test_versions_are_those_of_the_papers() -> None:
    # of 4 stages the last runs microbatch t on w(t), the first on w(t - 3); nothing is older than w(0)
    assert [[version_of(PIPEDREAM.plan, stage, t) for t in range(6)] for stage in (0, 1, 3)] == [
        [0, 0, 0, 0, 1, 2],
        [0, 0, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5],
    ]
    # 8 microbatches a step: the first two steps on W(0), the third on W(1), on all stages
    assert [version_of(TWO_VERSIONS.plan, stage, t) for t in (0, 7, 8, 15, 16, 24) for stage in (0, 3)] == [
        0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2
    ]  # fmt: skip


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


def test_versions_are_copied_only_where_passes_need_them() -> None:
    network = Network(TINY, 8, ["layers.0"])
    weights = Weights(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    first = weights.versions[0]
    assert weights.renew(optimizer, in_use=False, kept=0) is first
    second = weights.renew(optimizer, in_use=True, kept=0)
    assert second is not first and list(weights.versions) == [2]
    assert [id(p) for p in network.parameters()] == [id(p) for p in second]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in second]
    for parameter in second:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(new, old - 1) for new, old in zip(second, first, strict=True))
