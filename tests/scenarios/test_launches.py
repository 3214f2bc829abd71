"""Where a plan runs is said with the memory that it needs there, by the conventions of what runs it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.interchange.targets import list_trainers
from meshwise.scenarios.launches import (
    CAPTURED,
    TRAIN,
    Launch,
    Runnable,
    describe_launches,
    fastest_runnable,
    list_launches,
    needs_runnable,
    reserve_seconds,
)
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout


def test_every_trainer_that_can_say_a_plan_is_there_with_its_own_memory() -> None:
    scenario = load("llama3-8b-8-h100")
    plan = complete(scenario.problem, Layout(data=8, zero=3))
    found = list_launches(scenario, plan)
    assert [launch.trainer for launch in found] == list(list_trainers(scenario.spec, scenario.problem, plan))
    by_name = {launch.trainer: launch for launch in found}
    for trainer in ("torchtitan", "megatron"):
        own = scenario.for_target(trainer).simulate(plan)
        assert (by_name[trainer].peak_memory, by_name[trainer].fits) == (own.peak_memory, own.fits)
    assert by_name["deepspeed"].fits is None  # its conventions are not known
    assert "deepspeed (how it keeps memory is not known)" in describe_launches(found)


def test_a_plan_that_fits_by_the_assumed_conventions_alone_is_said_not_to_fit_where_it_runs() -> None:
    # Megatron-LM's kernels keep less of a layer than torch's own, whose norms and gates are kernels one by one
    scenario = load("llama3-8b-8-h100")
    roomy = scenario.problem.cluster.with_accelerators(lambda device: replace(device, memory=1.03 * device.memory))
    scenario = replace(scenario, problem=replace(scenario.problem, cluster=roomy))
    plan = complete(scenario.problem, Layout(data=8, zero=3, reshard_after_forward=False))
    assert scenario.simulate(plan).fits
    found = list_launches(scenario, plan)
    assert found and not any(launch.fits for launch in found)
    words = describe_launches(found)
    assert "torchtitan (does not fit: 91.9 GiB by its conventions, out of memory with probability " in words
    assert needs_runnable(scenario, found)
    runs = fastest_runnable(scenario, lambda: 60.0)
    assert runs is not None
    assert scenario.for_target(runs.trainer).simulate(runs.plan).fits
    assert "(--for " in runs.describe()


def test_a_framework_that_the_scenario_names_prices_all() -> None:
    scenario = replace(load("llama3-8b-8-h100"), framework="megatron")
    plan = complete(scenario.problem, Layout(data=8, zero=3))
    assert {launch.peak_memory for launch in list_launches(scenario, plan)} == {scenario.simulate(plan).peak_memory}


def test_a_plan_that_nobody_can_say_is_told_with_what_to_do() -> None:
    scenario = load("llama3-8b-8-h100")
    plan = complete(scenario.problem, Layout(data=2, tensor=2, tensor_rows=2, microbatch=2))  # 2-D tensor parallelism
    assert list_launches(scenario, plan) == ()
    assert describe_launches(()).startswith("no trainer as it is; --for torchtitan|megatron")


class Clock:
    """Seconds that pass while a search takes what it is given."""

    def __init__(self, left: float) -> None:
        self.left = left
        self.asked = list[tuple[str, float]]()

    def search(self, target: str, *, interrupted: bool, seconds: float, budget: int | None) -> SimpleNamespace:
        self.asked.append((target, seconds))
        self.left -= seconds
        return SimpleNamespace(best=None, interrupted=interrupted)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of searches for trainers, none of which finds a plan."""
    clock = Clock(16.0)

    def aim(_: Scenario, target: str) -> SimpleNamespace:
        return SimpleNamespace(search_plan=partial(clock.search, target, interrupted=clock.left <= 0))

    monkeypatch.setattr(Scenario, "for_target", aim)
    return clock


def test_the_trainer_by_whose_conventions_plans_were_priced_is_asked_first_and_longest(clock: Clock) -> None:
    assert fastest_runnable(load("llama3-8b-8-h100"), lambda: clock.left) is None
    assert clock.asked[0] == ("megatron", 8.0)  # half of 16 s, then half of the rest, and all of it to the last
    assert [seconds for _, seconds in clock.asked[1:]] == [4.0, 2.0, 2.0]
    assert clock.left == 0.0


def test_no_search_begins_for_a_moment(clock: Clock) -> None:
    clock.left = 0.6  # of which the first trainer is given 0.3 s
    assert fastest_runnable(load("llama3-8b-8-h100"), lambda: clock.left) is None
    assert [target for target, _ in clock.asked] == ["megatron"]


def test_the_end_that_a_user_makes_is_none_of_a_search_alone(clock: Clock) -> None:
    clock.left = 0.0
    with pytest.raises(KeyboardInterrupt):
        fastest_runnable(load("llama3-8b-8-h100"), lambda: 16.0)
    assert len(clock.asked) == 1


@pytest.mark.parametrize(("limit", "own"), [(60.0, 54.0), (10.0, 8.0), (2.0, 1.0), (None, None), (-1.0, -1.0)])
def test_a_search_keeps_time_for_what_runs(limit: float | None, own: float | None) -> None:
    assert reserve_seconds(load("llama3-8b-8-h100"), limit) == own


def test_a_search_whose_trainer_is_named_has_all_its_time_but_what_its_end_takes() -> None:
    assert reserve_seconds(replace(load("llama3-8b-8-h100"), framework="megatron"), 10.0) == 9.5


def test_the_time_for_what_runs_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwise.scenarios.commands.search.needs_runnable", lambda scenario, trainer_launches: True)
    monkeypatch.setattr(
        "meshwise.scenarios.commands.search.fastest_runnable", lambda scenario, time_left, budget: sleep(0.05)
    )
    assert run(["search", "local/dp2", "--json", "--budget", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runnable"] is None and 0.05 <= document["runnable_wall_time"] < 5
    assert run(["search", "local/dp2", "--budget", "2"]) == 0
    assert " for what is fastest to run" in capsys.readouterr().out


def test_the_plan_that_is_fastest_to_run_is_written_beside_the_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = load("local/dp2")
    runs = Runnable("torchtitan", complete(scenario.problem, Layout(data=2, zero=3)), 1.0, 2.0**30, 0.0)
    monkeypatch.setattr("meshwise.scenarios.commands.search.needs_runnable", lambda scenario, trainer_launches: True)
    monkeypatch.setattr("meshwise.scenarios.commands.search.fastest_runnable", lambda scenario, time_left, budget: runs)
    assert run(["search", "local/dp2", "--budget", "2", "--out", str(tmp_path / "best.json")]) == 0
    written = (tmp_path / "best-torchtitan.json").read_text()
    assert written == json.dumps(runs.plan.to_json(), indent=2) + "\n"
    assert "best-torchtitan.json" in capsys.readouterr().err


def test_a_framework_that_a_target_brings_is_not_told_as_the_assumed_one() -> None:
    scenario = load("llama3-8b-8-h100")
    assert "training.framework is megatron (default)" in scenario.assumptions
    told = scenario.for_target("torchtitan").simulate().assumptions
    assert not any(line.startswith("training.framework is ") for line in told)
    assert "training.framework is megatron (default)" in scenario.for_target("megatron").assumptions


def test_where_a_plan_runs_is_told_first() -> None:
    found = (Launch("torchtitan", 2.0**37, False, 1.0), Launch("megatron", 2.0**36, True, 0.0))
    assert describe_launches(found).startswith("megatron, torchtitan (does not fit")


def test_a_captured_graph_is_sent_to_a_run_of_its_module_where_that_follows_the_plan() -> None:
    scenario = load("operators/mlp")
    assert describe_launches((), scenario.spec) == CAPTURED
    graph = scenario.problem
    whole = complete(graph, Layout(data=8, microbatch=1))
    asynchronous = complete(graph, Layout(data=4, pipeline=2, microbatch=1, schedule="pipedream"))
    assert [launch.describe() for launch in list_launches(scenario, whole)] == [TRAIN]
    assert list_launches(scenario, asynchronous) == ()
