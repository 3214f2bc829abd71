"""Where a plan runs is said with the memory that it needs there, by the conventions of what runs it."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scenarios import load
from scenarios.commands.search import _own_seconds
from scenarios.interchange.acceptance import trainers_of
from scenarios.launches import fastest_runnable, launches, launches_in_words, needs_runnable
from strategies.completion import complete
from strategies.layout import Layout


def test_every_trainer_that_can_say_a_plan_is_there_with_its_own_memory() -> None:
    scenario = load("llama3-8b-8-h100")
    plan = complete(scenario.problem, Layout(data=8, zero=3))
    found = launches(scenario, plan)
    assert [launch.trainer for launch in found] == list(trainers_of(scenario.spec, scenario.problem, plan))
    by_name = {launch.trainer: launch for launch in found}
    for trainer in ("torchtitan", "megatron"):
        own = scenario.for_target(trainer).simulate(plan)
        assert (by_name[trainer].peak_memory, by_name[trainer].fits) == (own.peak_memory, own.fits)
    assert by_name["deepspeed"].fits is None  # its conventions are not known
    assert "deepspeed (how it keeps memory is not known)" in launches_in_words(found)


def test_a_plan_that_fits_by_the_assumed_conventions_alone_is_said_not_to_fit_where_it_runs() -> None:
    # Megatron-LM's kernels keep less of a layer than torch's own: 72.3 GiB of 72.8 are 83.8 there
    scenario = load("llama3-8b-8-h100")
    plan = complete(scenario.problem, Layout(data=8, zero=3, reshard_after_forward=False))
    assert scenario.simulate(plan).fits
    found = launches(scenario, plan)
    assert found and not any(launch.fits for launch in found)
    words = launches_in_words(found)
    assert "torchtitan (does not fit: 83.8 GiB by its conventions, out of memory with probability " in words
    assert needs_runnable(scenario, found)
    runs = fastest_runnable(scenario, lambda: 60.0)
    assert runs is not None
    assert scenario.for_target(runs.trainer).simulate(runs.plan).fits
    assert "(--for " in runs.describe()


def test_a_framework_that_the_scenario_names_prices_all() -> None:
    scenario = replace(load("llama3-8b-8-h100"), framework="megatron")
    plan = complete(scenario.problem, Layout(data=8, zero=3))
    assert {launch.peak_memory for launch in launches(scenario, plan)} == {scenario.simulate(plan).peak_memory}


def test_a_plan_that_nobody_can_say_is_told_with_what_to_do() -> None:
    scenario = load("llama3-8b-8-h100")
    plan = complete(scenario.problem, Layout(data=2, tensor=2, tensor_rows=2, microbatch=2))  # 2-D tensor parallelism
    assert launches(scenario, plan) == ()
    assert launches_in_words(()).startswith("no trainer as it is; --for torchtitan|megatron")


def test_the_trainer_by_whose_conventions_plans_were_priced_is_asked_first_and_longest() -> None:
    scenario, asked = load("llama3-8b-8-h100"), list[tuple[str, float]]()

    class Asked(type(scenario)):  # type: ignore[misc]
        def search(self, target: str, seconds: float, budget: int | None) -> SimpleNamespace:
            asked.append((target, seconds))
            return SimpleNamespace(best=None)

    fields = {field.name: getattr(scenario, field.name) for field in dataclasses.fields(scenario)}
    assert fastest_runnable(Asked(**fields), lambda: 16.0) is None
    assert asked[0] == ("megatron", 8.0)
    assert [seconds for _, seconds in asked] == [8.0, 8.0, 8.0, 16.0]  # half of what is left, and all to the last


@pytest.mark.parametrize(
    ("budget", "seconds", "own"), [(None, None, 54.0), (None, 10.0, 9.0), (5, None, None), (5, 10.0, 9.0)]
)
def test_a_search_keeps_a_tenth_of_its_time_for_what_runs(
    budget: int | None, seconds: float | None, own: float | None
) -> None:
    assert _own_seconds(load("llama3-8b-8-h100"), budget, seconds) == own


def test_a_search_whose_trainer_is_named_has_all_its_time() -> None:
    assert _own_seconds(replace(load("llama3-8b-8-h100"), framework="megatron"), None, 10.0) == 10.0
