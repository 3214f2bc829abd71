"""What was said to fit against what ran: counts by hand, picks of jobs, and which threads are judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.runs import Run

from .memory_accuracy import (
    build_thread_run,
    explain_exclusion,
    format_page,
    judge_memory,
    judge_picks,
    judge_threads,
    main,
)

ROOT = Path(__file__).parents[2]


def predicted(name: str, job: str, seconds: float, *, fits: bool, ran: bool) -> Prediction:
    run = Run(name, "alephalpha_layouts", job, 1.0, None, "ok" if ran else "oom")
    return Prediction(run, seconds, 1.0, fits)


ROWS = (
    predicted("a1", "a", 1.0, fits=False, ran=False),  # the fastest, but said not to fit
    predicted("a2", "a", 2.0, fits=True, ran=True),  # the pick of a: it ran
    predicted("b1", "b", 1.0, fits=True, ran=False),  # the pick of b: out of memory
    predicted("b2", "b", 2.0, fits=True, ran=True),
    predicted("c1", "c", 1.0, fits=False, ran=True),  # nothing of c is said to fit
    predicted("c2", "c", 2.0, fits=False, ran=False),
    predicted("d1", "d", 1.0, fits=True, ran=True),  # of d all ran: any choice is right
    predicted("d2", "d", 2.0, fits=True, ran=True),
)

THREAD: dict[str, Any] = {
    "case_id": "t1", "repository": "somebody/else", "model": "llama2-7b", "accelerator": "A100 80GB", "n_devices": 8,
    "devices_per_node": 8, "framework": "Megatron-LM", "tier": "A", "kind": "oom", "outcome": {"status": "oom"},
    "plan": {"data": 8, "tensor": 1, "pipeline": 1, "microbatch": 64, "grad_accum": 1, "sequence": 4096, "zero": None,
             "recompute": "none", "precision": "bf16", "optimizer": "adamw"},
}  # fmt: skip


def test_a_pick_is_the_fastest_of_those_that_are_said_to_fit() -> None:
    found = judge_picks(ROWS)
    assert (found["jobs"], found["ran"], found["out_of_memory"], found["nothing_said_to_fit"]) == (3, 1, 1, 1)
    assert [each["row"] for each in found["failed"]] == ["b1"]


def test_the_page_counts_what_was_said_and_what_happened() -> None:
    result = judge_memory(ROWS)
    # fits and ran: a2, b2, d1, d2; fits and out of memory: b1; not and ran: c1; not and out of memory: a1, c2
    assert result["all"] == {"true_fit": 4, "false_fit": 1, "false_oom": 1, "true_oom": 2}
    assert result["publishers"] == {"Aleph Alpha": result["all"]}
    assert "| Aleph Alpha | 4 | 1 | 1 | 2 |" in format_page(result)


def test_a_thread_is_judged_by_the_job_that_it_states() -> None:
    """64 sequences of 4,096 tokens at once take more than a device has, one takes less."""
    small = THREAD | {
        "case_id": "t2",
        "outcome": {"status": "ok"},
        "plan": THREAD["plan"] | {"microbatch": 1, "zero": 1},
    }
    plan = build_thread_run(small).scenario
    assert plan is not None
    layout = plan.choose_plan()
    assert (layout.data, layout.microbatch, layout.zero, plan.problem.training.sequence) == (8, 1, 1, 4096)
    found = judge_threads([THREAD, small, THREAD | {"tier": "C"}])
    assert found["threads"] == 2
    assert found["confusion"] == {"true_fit": 1, "false_fit": 0, "false_oom": 0, "true_oom": 1}
    assert found["wrong"] == [] and found["not_judged"] == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"outcome": {"status": "mixed"}}, "ran for some and ran out of memory for others"),
        ({"plan": THREAD["plan"] | {"lora": "rank 8"}}, "trains adapters, not the model"),
        ({"kind": "rlhf"}, "holds several models, or lacks memory of a host"),
        ({"plan": THREAD["plan"] | {"sequence": None}}, "no sequence stated"),
        ({"plan": None}, "no microbatch and no sequence stated"),
    ],
)
def test_a_thread_that_cannot_be_judged_says_why(changes: dict[str, Any], reason: str) -> None:
    assert explain_exclusion(THREAD | changes) == reason


def test_a_file_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, threads = tmp_path / "rows.jsonl", tmp_path / "threads.jsonl"
    rows.write_text("")
    threads.write_text("[]\n")
    assert main([str(rows), str(threads), str(tmp_path / "out")]) == 2
    assert "threads.jsonl:1:1" in capsys.readouterr().err
    assert main([str(rows)]) == 2


def test_the_projects_own_page_is_what_its_data_say() -> None:
    data = json.loads((ROOT / "reports/accuracy/memory.json").read_text("utf-8"))
    assert format_page(data) == (ROOT / "reports/accuracy/memory.md").read_text("utf-8")
