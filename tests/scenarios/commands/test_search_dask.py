"""``meshwise search --scheduler`` on a Dask cluster of this machine: its worker is another process, over TCP."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from meshwise.scenarios.commands.main import run

distributed = pytest.importorskip("distributed")

SEARCH = ["search", "starter", "--algorithm", "random", "--seed", "3", "--budget", "12", "--json"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
    ) as found:
        yield found


def without_clock(document: dict[str, Any]) -> dict[str, Any]:
    trial = {key: value for key, value in document["best"].items() if key != "elapsed"}
    history = [(row["evaluations"], row["best"]) for row in document["history"]]
    return {"evaluations": document["evaluations"], "best": trial, "history": history}


def test_the_command_finds_on_a_cluster_what_it_finds_alone(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SEARCH) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["evaluations"] == 12
    assert run([*SEARCH, "--scheduler", cluster.scheduler_address]) == 0
    assert without_clock(json.loads(capsys.readouterr().out)) == without_clock(alone)
    with distributed.Client(cluster) as client:
        [done] = client.run(lambda dask_worker: dask_worker.state.executed_count).values()
    assert done >= 1  # plans that were known ahead; the worker has them, and not this process


def test_an_address_that_is_none_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SEARCH, "--scheduler", "nothing://here"]) == 2
    assert "--scheduler: the address of a Dask scheduler, met nothing://here" in capsys.readouterr().err
