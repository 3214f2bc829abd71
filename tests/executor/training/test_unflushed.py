"""PipeDream's weight versions: those that the papers write down, and a reference that sees any other."""

import pytest

torch = pytest.importorskip("torch")
from tiny_jobs import TINY, job  # noqa: E402

from meshwise.executor.check.reference import version_of  # noqa: E402
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


def test_versions_are_copied_only_where_passes_need_them() -> None:
    network = Network(TINY, 8, ["layers.0"])
    weights = Weights(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    first = weights.versions[0]
    assert weights.make_version(optimizer, in_use=False, num_older=0) is first
    second = weights.make_version(optimizer, in_use=True, num_older=0)
    assert second is not first and list(weights.versions) == [2]
    assert [id(p) for p in network.parameters()] == [id(p) for p in second]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in second]
    for parameter in second:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(new, old - 1) for new, old in zip(second, first, strict=True))
