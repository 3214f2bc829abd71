"""The study of recipes: one rule for all plans, rows that are kept and made again, and a page that says what is so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.scenarios.console import BAD_INPUT
from meshwise.scenarios.interchange.targets import list_trainers
from meshwise.scenarios.loader import load
from meshwise.scenarios.recipes import load_recipes
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.search.starts import engineer_layouts

from . import recipe_comparison as recipe_runs
from . import recipe_comparison as study
from .recipe_comparison import (
    Comparison,
    Outcome,
    SayablePlan,
    SearchOutcome,
    compare_case,
    evaluate_plan,
    find_fastest,
    format_page,
    list_cases,
    main,
    read_comparisons,
    select_cases,
    to_line,
)

SMALL = "techniques/pipeline-1f1b"


def row(**changes: object) -> Comparison:
    own = Outcome("its own plan", "plan a", 2.0, 10.0)
    found = SearchOutcome("plan b", 1.5, 10.0, None, 7)
    stated = Comparison("a problem", "0", 1.0, 100.0, True, 2.5, found, own, None, None, ("megatron",), None)
    return replace(stated, **changes)  # type: ignore[arg-type]


def test_the_fastest_is_the_fastest_of_all_that_are_simulated() -> None:
    problem = load("llama3-8b-8-h100").problem
    costs = SimulatedCost(problem)
    named = engineer_layouts(problem)
    met = find_fastest(problem, named, costs)
    times = {name: evaluate_plan(name, complete(problem, layout), costs) for name, layout in named}
    assert met is not None
    assert met.step_time == min(each.step_time for each in times.values() if each.step_time is not None)
    assert times[met.name] == met


def test_where_none_fits_there_is_no_fastest() -> None:
    problem = load("gpt3-175b-1024-a100").problem
    # 175e9 parameters over 8 devices, in bf16 with fp32 gradients and 12 bytes of states each, are 394 GB of 80
    assert find_fastest(problem, [("DDP", Layout(data=128, tensor=8))], SimulatedCost(problem)) is None


def test_the_ratio_is_over_the_fastest_plan_that_fits() -> None:
    slow, unfit = Outcome("slow", "", 4.0, 1.0), Outcome("unfit", "", None, 1.0)
    # 1.5 s of the search over 2 s of its own plan
    assert row(dozen=slow, carried=unfit).ratio == 0.75
    assert not row().is_slower
    assert row(carried=Outcome("fast", "", 1.0, 1.0)).is_slower
    assert row(found=None).is_slower  # something fits, and the search has found nothing
    assert not row(found=None, own=unfit).is_slower


def test_a_row_is_read_back_as_it_was_written_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "recipes.jsonl"
    said = SayablePlan("megatron", "plan c", 3.0, 9.0)
    rows = [row(), row(name="another", found=None, own=None, ran=None, published=None), row(trainers=(), sayable=said)]
    file.write_text("".join(map(to_line, rows)) + to_line(rows[0])[:40] + "\n{}\n")
    assert list(read_comparisons(file)) == rows


def test_the_page_names_what_is_slower_and_what_is_refused() -> None:
    refused = next(recipe for recipe in load_recipes() if recipe.ran)
    rows = (
        row(carried=Outcome("fast", "", 1.0, 1.0)),
        row(name=refused.name, own=Outcome("its own plan", "", None, 2.0**37), capacity=2.0**36),
    )
    text = format_page(rows).replace("\\", "")
    assert "above 1.001 in 1 problems: a problem." in text
    assert f"1 of 2 recipes that ran are refused for memory (at most 2 is the aim): {refused.name}." in text
    assert "128.0 of 64.0" in text  # GiB


def test_the_page_says_what_runs_where_the_plan_of_the_search_does_not() -> None:
    text = format_page((row(trainers=(), sayable=SayablePlan("megatron", "plan c", 3.0, 9.0)),)).replace("\\", "")
    assert "| none | megatron: plan c: 3 s, 2.00 of the search's |" in text  # 3 s over 1.5 s


def test_a_plan_that_fits_in_no_trainer_is_told_with_one_that_does() -> None:
    # Megatron-LM's kernels keep less of a layer than torch's own, and it cannot say the plan
    scenario = load("llama3-8b-8-h100")
    roomy = scenario.problem.cluster.with_accelerators(lambda device: replace(device, memory=1.03 * device.memory))
    scenario = replace(scenario, problem=replace(scenario.problem, cluster=roomy))
    plan = complete(scenario.problem, Layout(data=8, zero=3, reshard_after_forward=False))
    told = recipe_runs._find_sayable(scenario, plan, 4.0)
    assert told is not None
    priced = scenario.for_target(told.trainer).problem
    assert told.peak_memory <= priced.usable_memory(priced.cluster.accelerator)
    # a scenario that names its framework has all plans priced by it, whichever trainer says them
    named = replace(scenario, framework="megatron")
    assert (
        recipe_runs._find_sayable(named, plan, 4.0) is None
    )  # torchtitan can say the plan, and by these prices it fits
    unsaid = complete(scenario.problem, Layout(data=2, tensor=2, tensor_rows=2, microbatch=2))  # 2-D tensor parallelism
    assert recipe_runs._find_sayable(named, unsaid, 4.0) is not None


def test_problems_are_chosen_by_name_or_a_part_of_it() -> None:
    assert [case.name for case in select_cases("BLOOM")] == ["BLOOM 176B on 384 A100, TP 4 x PP 12"]
    assert len(select_cases("llama3-8b-8-h100,BLOOM")) == 2
    assert len(select_cases("BLOOM 176B on 384 A100, TP 4 x PP 12")) == 1  # a whole name, with its comma
    with pytest.raises(ValueError, match="--only: no problem has nothing like it"):
        select_cases("nothing like it")
    assert not any(case.name.startswith("local/") for case in list_cases())


def test_the_study_goes_on_where_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def count(case: recipe_runs.Case, seconds: float) -> Comparison:
        made.append(case.name)
        if len(made) == 2:
            raise KeyboardInterrupt
        return row(name=case.name, digest=case.digest(), seconds=seconds)

    monkeypatch.setattr(study, "compare_case", count)
    arguments = ["--only", "MPT-70B", "--out", str(tmp_path), "--seconds", "2"]
    both = [case.name for case in select_cases("MPT-70B")]
    assert main(arguments) == INTERRUPTED
    assert [each.name for each in read_comparisons(tmp_path / "recipes.jsonl")] == both[:1]
    assert main(arguments) == 0
    assert made == [both[0], both[1], both[1]]
    assert main([*arguments[:-1], "3"]) == 0  # other seconds: both again
    assert made[3:] == both
    assert "MPT-70B" in (tmp_path / "recipes.md").read_text()


def test_what_is_no_number_of_seconds_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "0", "--out", str(tmp_path)]) == BAD_INPUT
    assert "--seconds is more than 0" in capsys.readouterr().err


def test_a_problem_is_compared_under_one_rule() -> None:
    case = next(case for case in list_cases() if case.name.endswith(SMALL))
    met = compare_case(case, 600.0)  # it ends long before, with its proof
    scenario = case.scenario()
    assert scenario.plan is not None and met.own is not None and met.found is not None
    assert met.own.step_time == scenario.simulate().step_time
    assert json.loads(to_line(met))["name"] == case.name


def test_trainers_are_those_that_do_not_refuse() -> None:
    scenario = load("llama3-8b-8-h100")
    assert scenario.plan is not None
    looped = complete(scenario.problem, Layout(data=4, pipeline=2, schedule="interleaved", chunks=2, zero=1))
    sharded = complete(scenario.problem, Layout(data=8, zero=3))
    # DeepSpeed's pipelines are not interleaved, and Megatron-LM's ZeRO has no level 3
    assert "megatron" in list_trainers(scenario.spec, scenario.problem, looped) and "deepspeed" not in list_trainers(
        scenario.spec, scenario.problem, looped
    )
    assert "torchtitan" in list_trainers(scenario.spec, scenario.problem, sharded)
