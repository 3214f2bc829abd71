"""Where a plan runs is said with the memory that it needs there, by the conventions of what runs it."""

from dataclasses import replace

from scenarios import load
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
    assert "torchtitan (out of memory by its conventions: 83.8 GiB)" in words
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
