"""What a publisher leaves open is chosen once for a sweep, by the fact that its runs ran."""

import json
from typing import Any

from meshwise.scenarios.intervals import FIRST_THAT_FITS
from meshwise.scenarios.published.estimates import fits
from meshwise.scenarios.published.runs import Run, build_run, parse_runs
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import Recompute

from .test_scenario import ROW

BIG: dict[str, Any] = ROW | {
    "n_layers": 48, "hidden": 8192, "n_heads": 64, "ffn_hidden": 32768, "tp": 8, "dp": 1, "recompute": None,
}  # fmt: skip
"""39 G parameters, of which each of 8 ranks has an eighth."""


def read(*rows: dict[str, Any]) -> tuple[Run, ...]:
    return parse_runs([json.dumps(row).encode() for row in rows], "rows.jsonl")


def plan_of(run: Run) -> Plan:
    assert run.scenario is not None, run.skipped
    return run.scenario.choose_plan()


LITTLE: dict[str, Any] = {"seq_len": 1024, "micro_batch": 1}
MUCH: dict[str, Any] = {"seq_len": 4096, "micro_batch": 4}


def test_every_run_of_a_sweep_recomputes_what_the_fullest_needs() -> None:
    small, large = BIG | LITTLE, BIG | MUCH
    alone = [plan_of(build_run(row)).recompute for row in (small, large)]
    assert alone[0] is Recompute.NONE and alone[1] is not Recompute.NONE
    together = read(small, large, small)
    assert {plan_of(run).recompute for run in together} == {alone[1]}
    assert [run.group for run in together] == [build_run(row).group for row in (small, large, small)]  # in order
    assert any(FIRST_THAT_FITS in line and "all 3 runs of its sweep" in line for line in together[0].assumed)


def test_runs_of_another_source_model_accelerator_precision_or_task_have_a_sweep_of_their_own() -> None:
    large = BIG | MUCH
    for change in (
        {"source_id": "theirs"},
        {"model": "other"},
        {"accelerator": "H200"},
        {"precision": "fp8"},
        {"plan_note": "SFT"},
        {"zero_stage": 3},
    ):
        assert plan_of(read(BIG | LITTLE | change, large)[0]).recompute is Recompute.NONE, change


def test_a_run_that_lacked_memory_proves_nothing_and_takes_the_choice() -> None:
    small, large = BIG | LITTLE, BIG | MUCH | {"status": "oom", "step_time_s": None}
    runs = read(small, large)
    assert [plan_of(run).recompute for run in runs] == [Recompute.NONE, Recompute.NONE]
    scenario = runs[1].scenario
    assert scenario is not None and not fits(scenario.problem, scenario.choose_plan())


def test_a_stated_choice_is_kept() -> None:
    stated = BIG | LITTLE | {"recompute": "selective"}
    assert plan_of(read(stated, BIG | MUCH)[0]).recompute is Recompute.SELECTIVE


def test_states_that_do_not_fit_are_sharded_where_the_run_ran() -> None:
    # 12 * 40 * 5120^2 = 12.6 G parameters: 16 bytes each are 201 GB; with the optimizer's 12 shared by 8 ranks
    # 2 + 4 + 12/8 = 7.5 bytes or 94 GB; with the gradients' 4 as well 2 + 16/8 = 4 bytes or 50 GB
    change = {"n_layers": 40, "hidden": 5120, "n_heads": 40, "ffn_hidden": 20480, "tp": 1, "dp": 8, "framework": "ours"}
    row = ROW | change | {"zero_stage": None, "recompute": "full"}
    run = build_run(row)
    assert plan_of(run).zero == 2 and any(line.startswith("zero_stage 2, for with 0") for line in run.assumed)
    assert plan_of(build_run(row | {"zero_stage": 0})).zero == 0  # stated
    assert plan_of(build_run(row | {"status": "oom"})).zero == 0  # it proves nothing
    assert [plan_of(run).zero for run in read(row | {"n_layers": 2}, row)] == [2, 2]


def test_a_microbatch_that_is_open_is_the_largest_with_which_all_fit() -> None:
    change = {"micro_batch": None, "tp": 1, "dp": 8, "recompute": "none", "global_batch": 128, "zero_stage": 0}
    short, long = (ROW | change | {"seq_len": length} for length in (1024, 16384))
    alone = [plan_of(build_run(row)).microbatch for row in (short, long)]
    assert alone[0] == 16 > alone[1]
    assert [plan_of(run).microbatch for run in read(short, long)] == [alone[1]] * 2
