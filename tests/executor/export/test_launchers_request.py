"""What is said in another system's words: how many hosts, and one printable line whatever a name holds."""

import pytest
from tiny_requests import HOSTILE, request

from meshwise.executor.device import CPU, CUDA
from meshwise.executor.export.launchers import UnsupportedRequest


@pytest.mark.parametrize("name", HOSTILE)
def test_a_title_is_one_printable_line_that_ends_with_the_plan(name: str) -> None:
    title = request(name=name).title
    assert title.isprintable() and title.endswith(f": {request().job.plan.describe()}")
    assert len(title) == len(f"{name}: {request().job.plan.describe()}")


def test_hosts_are_ranks_over_processes() -> None:
    assert [request(ranks=4, processes=each).num_nodes for each in (1, 2, 4)] == [4, 2, 1]
    assert request(device=CUDA).uses_gpus and not request(device=CPU).uses_gpus


def test_all_reasons_are_in_one_message() -> None:
    assert str(UnsupportedRequest("slurm", ("no port", "no host"))) == "slurm cannot say this: no port; no host"
