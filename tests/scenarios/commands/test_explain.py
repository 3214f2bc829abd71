import json
from pathlib import Path

import pytest

from meshwise.reports.explanation import explanation_lines
from meshwise.scenarios.commands.main import run
from meshwise.simulator.units import format_size

SMALL = """\
name: small
model: {transformer: {layers: 4, hidden: 256, heads: 4, ffn: 1024, vocab: 1024}}
training: {global_batch: 16, sequence: 128, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 2}
plan: {data: 8, tensor: 2, microbatch: 1, recompute: full}
search: {space: {schedule: [1f1b], zero: [0, 1], tensor: [1, 2, 4]}}
"""
CRAMPED = """\
name: too large
model: {preset: gpt3-13b}
training: {global_batch: 64, sequence: 2048, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1}
plan: {data: 8, microbatch: 8}
search: {space: {core: true, data: [8], zero: [0]}}
"""
SECTIONS = (
    "plan", "critical_path", "device_time", "own_plan", "shadow_prices", "runner_up", "decisions", "recommendation",
    "memory_front", "sensitivity", "device_front",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MESHWISE_DEBUG", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "cramped.yaml").write_text(CRAMPED)
    return tmp_path


def test_everything_is_explained_and_numbers_agree(folder: Path, capsys) -> None:
    assert run(["explain", "small.yaml", "--json", "--price", "2", "--front", "front.png"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    assert [name for name in SECTIONS if name not in found] == []
    time = found["plan"]["step_time"]
    assert sum(found["critical_path"]["seconds"].values()) == pytest.approx(time)
    assert sum(found["device_time"].values()) == pytest.approx(time)
    own = found["own_plan"]
    assert sum(own["more_seconds"].values()) == pytest.approx(own["step_time"] - time)
    assert found["runner_up"]["margin"] == min(each["margin"] for each in found["decisions"]) >= 0
    cost = found["device_front"][0]
    assert cost["cost_per_million_tokens"] == pytest.approx(16 * time / 3600 / (16 * 128) * 1e6 * 2)
    low, high = found["plan"]["step_time_interval"]
    assert low < time < high
    text = "\n".join(explanation_lines(found))
    assert "critical path" in text and "shadow prices" in text and "runner-up" in text


def test_the_search_finds_the_plan_that_is_explained(folder: Path, capsys) -> None:
    assert run(["search", "small.yaml", "--json", "--out", "best.json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert run(["explain", "small.yaml", "--json", "--plan", "best.json", "--why-not", "microbatch=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["step_time"] == best["evaluation"]["step_time"]
    assert "best" not in found
    assert found["why_not"]["asked"] == {"microbatch": 2}


def test_a_given_plan_is_compared_with_the_best(folder: Path, capsys) -> None:
    (folder / "plan.yaml").write_text("data: 8\ntensor: 2\nmicrobatch: 1\nrecompute: full\n")
    assert run(["explain", "small.yaml", "--plan", "plan.yaml", "--json", "--why-not", "recompute=none"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["margin"] < 0
    more = found["best"]["more_seconds"]
    assert sum(more.values()) == pytest.approx(found["best"]["step_time"] - found["plan"]["step_time"])
    assert more["recompute"] < 0


def test_lost_devices(folder: Path, capsys) -> None:
    assert run(["explain", "small.yaml", "--lost", "8"]) == 0
    text = capsys.readouterr().out
    assert "8 devices lost, 8 left" in text and "migration:" in text
    assert run(["explain", "small.yaml", "--lost", "16"]) == 2
    assert "lost devices lie between 1 and 15, met 16; nearest: 15" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["simulate"], ["search"], ["explain"], ["explain", "--plan", "plan.yaml"]])
def test_nothing_fits_is_an_answer_with_changes_that_do(command: list[str], folder: Path, capsys) -> None:
    (folder / "plan.yaml").write_text("data: 8\nmicrobatch: 8\n")
    assert run([command[0], "cramped.yaml", "--json", *command[1:]]) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert 1 <= len(found["changes"]) <= 3
    for each in found["changes"]:
        assert each["peak_memory"] <= 80 * 2**30 or each["change"].startswith("devices with")
        assert each["step_time"] > 0
        assert each["change"] in captured.err


def test_a_plan_is_explained_by_the_conventions_of_a_target(folder: Path, capsys) -> None:
    found = {}
    for command in ("search", "explain", "simulate"):
        plan = ["--plan", "plan.json"] if command == "simulate" else []
        out = ["--out", "plan.json"] if command == "search" else []
        assert run([command, "small.yaml", "--for", "torchtitan", "--json", *plan, *out]) == 0
        found[command] = json.loads(capsys.readouterr().out)
    explained, best = found["explain"]["plan"], found["search"]["best"]
    assert explained["step_time"] == best["evaluation"]["step_time"] == found["simulate"]["step_time"]
    assert explained["peak_memory"] == best["evaluation"]["peak_memory"]
    assert run(["explain", "small.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["peak_memory"] != explained["peak_memory"]


def test_a_target_limits_the_plans_that_are_ranked(folder: Path, capsys) -> None:
    asked = ["explain", "small.yaml", "--json", "--why-not", "recompute=selective"]  # which DeepSpeed cannot say
    assert run([*asked, "--for", "deepspeed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why_not"]["legal_plans"] == 0 and found["why_not"]["outside_space"]
    assert "and what deepspeed 0.19.8 can say allow no such plan" in "\n".join(explanation_lines(found))
    assert run(["explain", "small.yaml", "--for", "magic"]) == 2
    assert "met 'magic'" in capsys.readouterr().err


def test_the_limit_of_risk_is_told_and_the_brave_lift_it(folder: Path, capsys) -> None:
    least = {}
    for words, brave in (("(at most 5% is allowed)", []), ("(--brave: no limit)", ["--brave"])):
        assert run(["explain", "small.yaml", "--why-not", "microbatch=2", *brave]) == 0
        assert words in capsys.readouterr().out
        assert run(["explain", "small.yaml", "--why-not", "microbatch=2", "--json", *brave]) == 0
        least[words] = json.loads(capsys.readouterr().out)["plan"]["memory_usable"]
    usual, lifted = least.values()
    assert usual < lifted


@pytest.mark.parametrize("command", [["simulate"], ["search"], ["explain", "--plan", "plan.yaml"]])
def test_where_nothing_fits_memory_stands_with_its_risk(command: list[str], folder: Path, capsys) -> None:
    (folder / "plan.yaml").write_text("data: 8\nmicrobatch: 8\n")
    assert run([command[0], "cramped.yaml", "--json", *command[1:]]) == 3
    captured = capsys.readouterr()
    changes = json.loads(captured.out)["changes"]
    told = captured.err.splitlines()
    assert changes and all(0 <= each["out_of_memory"] <= 0.05 for each in changes)
    sized = [line for line in told if "GiB" in line]
    assert sized and all("out of memory with probability" in line for line in sized), told


def test_why_not_tells_the_risk_of_every_plan(folder: Path, capsys) -> None:
    for asked, words in (("microbatch=2", "it takes"), ("tensor=8,zero=3", "nearest plan that works")):
        assert run(["explain", "small.yaml", "--why-not", asked]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if words in line)
        assert "out of memory with probability" in line


def test_time_that_runs_out_is_said_with_what_it_was_to_be_spent_on(folder: Path, capsys, monkeypatch) -> None:
    assert run(["explain", "small.yaml", "--json", "--seconds", "0"]) == 1
    captured = capsys.readouterr()
    assert "time ran out after 0 s, before the end of: looking at plans of the space" in captured.err
    assert "plan" not in json.loads(captured.out)

    from meshwise.scenarios import explanation
    from meshwise.scenarios.commands import explain

    late = []
    whole = explanation.critical_path
    monkeypatch.setattr(explanation, "critical_path", lambda program: late.append(True) or whole(program))
    monkeypatch.setattr(explain.time, "process_time", lambda: 9.0 if late else 0.0)  # the plan is known, time is up
    assert run(["explain", "small.yaml", "--json", "--seconds", "5"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "critical_path" in found and "sensitivity" not in found
    assert f"before the end of: {found['not_looked_at']}" in captured.err


def test_a_given_plan_is_told_before_any_other_is_looked_at(folder: Path, capsys, monkeypatch) -> None:
    from meshwise.scenarios import explanation
    from meshwise.strategies.search.proposals import OutOfTime

    def too_late(*_: object, **__: object) -> None:
        raise OutOfTime

    monkeypatch.setattr(explanation, "ranking", too_late)
    (folder / "plan.yaml").write_text("{data: 8, tensor: 2, recompute: full}")
    assert run(["explain", "small.yaml", "--plan", "plan.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["step_time"] == pytest.approx(sum(found["device_time"].values()))
    assert "critical_path" in found and "among" not in found["plan"]
    assert found["not_looked_at"] == "looking at plans of the space"


def test_why_not_the_plan_itself_is_told_as_such(folder: Path, capsys) -> None:
    assert run(["explain", "small.yaml", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plan"]["document"]
    microbatch = best["microbatch"]
    for asked, is_itself in ((microbatch, True), (2 if microbatch == 1 else 1, False)):
        assert run(["explain", "small.yaml", "--json", "--why-not", f"microbatch={asked}"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["why_not"]["is_explained"] is is_itself
        lines = "\n".join(explanation_lines(found))
        assert ("the plan that is explained has it, and is the fastest of" in lines) is is_itself
        assert ("it takes +" in lines) is not is_itself


def test_a_large_space_is_not_listed_and_no_proof_is_claimed_of_it(folder: Path, capsys, monkeypatch) -> None:
    from meshwise.strategies.explanation import ranking

    assert run(["explain", "small.yaml", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(ranking, "MOST_RANKED", 10)
    assert run(["explain", "small.yaml", "--json"]) == 0
    near = json.loads(capsys.readouterr().out)
    assert whole["plan"]["among"]["whole"] and not near["plan"]["among"]["whole"]
    assert near["plan"]["among"]["space"] == whole["plan"]["among"]["plans"] == whole["plan"]["among"]["space"]
    assert near["plan"]["step_time"] >= whole["plan"]["step_time"]
    assert "all of the space" in "\n".join(explanation_lines(whole))
    text = "\n".join(explanation_lines(near))
    assert f"not all {whole['plan']['among']['space']:,} of the space" in text and "all of the space" not in text


@pytest.mark.parametrize(("algorithm", "code"), [("best_first", 3), ("exhaustive", 3), ("random", 1), ("beam", 1)])
def test_nothing_fits_is_said_where_it_is_proven_alone(algorithm: str, code: int, folder: Path, capsys) -> None:
    assert run(["search", "cramped.yaml", "--algorithm", algorithm]) == code
    said = capsys.readouterr().err
    assert ("nothing fits" in said) is (code == 3)
    assert ("is not known" in said) is (code == 1)


def test_ctrl_c_prints_what_is_known(folder: Path, capsys, monkeypatch) -> None:
    from meshwise.scenarios import explanation

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explanation, "prices_of_rates", interrupted)
    assert run(["explain", "small.yaml", "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert "critical_path" in found and "shadow_prices" not in found


def test_the_own_plan_is_explained_where_nothing_of_the_space_fits(folder: Path, capsys) -> None:
    own = CRAMPED.replace("{data: 8, microbatch: 8}", "{tensor: 8, sequence_parallel: true, recompute: full}")
    (folder / "own.yaml").write_text(own)
    assert run(["explain", "own.yaml", "--json", "--why-not", "recompute=none"]) == 0
    assert "tensor 8" in json.loads(capsys.readouterr().out)["plan"]["plan"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensr=8", "tensr: there is no such field"),
        ("tensor=8x", "tensor: "),
        ("tensor", "fields of a plan with values, as tensor=8,pipeline=2; met 'tensor'"),
        ("tensor=8,tensor=4", "tensor"),
        ("recompute=most", "recompute: "),
        ("", "fields of a plan with values"),
    ],
)
def test_what_is_not_a_field_of_a_plan(text: str, message: str, folder: Path, capsys) -> None:
    assert run(["explain", "small.yaml", "--why-not", text]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert "Traceback" not in captured.err


def test_robust_choice(folder: Path, capsys) -> None:
    assert run(["search", "small.yaml", "--json", "--robust", "0.9", "--out", "robust.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    robust = found["robust"]["best"]
    assert robust["out_of_memory"] <= found["robust"]["most_out_of_memory"]
    assert robust["quantile"] >= robust["step_time"]
    assert json.loads((folder / "robust.json").read_text()) == found["best"]["plan"]  # memory is plenty
    assert run(["search", "small.yaml", "--robust", "1.5"]) == 2
    assert "a quantile lies between 0 and 1, met 1.5" in capsys.readouterr().err


NEAR_LIMIT = """\
name: near the limit of memory
model: {preset: llama3-8b}
training: {global_batch: 128, sequence: 8320, precision: bf16, optimizer: adamw}
cluster: {preset: dgx-h100, nodes: 1}
plan: {data: 4, context: 2, microbatch: 1, zero: 1, recompute: {operators: [activation, input_norm, feed_forward_norm]}}
search: {space: {data: [4], context: [2], tensor: [1], pipeline: [1], microbatch: [1], zero: [1]}}
"""


def test_search_simulate_and_explain_tell_one_risk_of_a_plan(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near.yaml").write_text(NEAR_LIMIT)
    assert run(["search", "near.yaml", "--json", "--out", "best.json"]) == 0
    found = json.loads(capsys.readouterr().out)["best"]["evaluation"]
    assert 0.01 < found["out_of_memory"] <= 0.05
    assert run(["simulate", "near.yaml", "--plan", "best.json", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert run(["explain", "near.yaml", "--plan", "best.json", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)["plan"]
    for name in ("out_of_memory", "peak_memory", "fits"):
        assert found[name] == simulated[name] == explained[name]
    assert list(simulated["step_time_interval"]) == explained["step_time_interval"]
    for name in ("peak_reserved", "peak_device"):
        assert simulated[name] == explained[name]


def test_memory_is_told_as_what_it_is_and_of_which_rank(folder: Path, capsys) -> None:
    assert run(["explain", "small.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = "\n".join(explanation_lines(found))
    plan, rows = found["plan"], found["memory"]
    assert "of tensors and runtime; usable are" in text
    assert f"{format_size(plan['peak_reserved'])} by the allocator for the tensors" in text
    assert f"{format_size(plan['peak_device'])} of the device, with runtime and communicators" in text
    assert "peak memory of the fullest rank: rank 0 and 15 alike, stage 0, at " in text
    assert max(row["peak"] for row in rows) == plan["peak_memory"]


def test_a_plan_beyond_the_margin_of_a_search_that_fits_when_replayed_is_explained(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(
        "{data: 32, tensor: 8, pipeline: 4, schedule: interleaved, chunks: 12, microbatch: 4, zero: 1, "
        "sequence_parallel: true, overlap_tensor: true}"
    )
    assert run(["simulate", "gpt3-175b-1024-a100", "--plan", "plan.yaml", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["peak_memory"] > simulated["memory_usable"] and simulated["fits"]
    # time runs out after the sections about the plan itself
    run(["explain", "gpt3-175b-1024-a100", "--plan", "plan.yaml", "--json", "--seconds", "3"])
    explained = json.loads(capsys.readouterr().out)["plan"]
    for name in ("step_time", "out_of_memory", "peak_memory", "fits"):
        assert simulated[name] == explained[name]
