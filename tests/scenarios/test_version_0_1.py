"""Files that version 0.1 wrote stay readable: scenario, cluster, plan, result and checkpoint.

The folder ``version_0_1`` beside this file was written by commit 7e94737: ``simulate tiny.yaml --save result.json``,
``search tiny.yaml --out plan.json``, ``execute trained.yaml --steps 3 --checkpoint-every 3 --out run``, and in
``resumed.jsonl`` the metrics of ``--steps 5 --resume`` from that checkpoint.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.strategies.plan.completion import complete, recover_layout
from meshwise.strategies.plan.layout import DECISIONS
from meshwise.strategies.plan.plan import Plan

FOLDER = Path(__file__).parent / "version_0_1"


def document(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


def test_a_scenario_that_states_every_decision_and_its_cluster_are_read() -> None:
    scenario = load(FOLDER / "tiny.yaml")
    assert scenario.plan is not None and scenario.problem.cluster.num_devices == 4
    layout = recover_layout(scenario.problem, scenario.plan)
    assert (layout.data, layout.pipeline, layout.stages, str(layout.recompute)) == (2, 2, (2, 2), "selective")
    space = scenario.search_settings.make_space()
    assert space.limits.keys() == {"zero", "schedule", "recompute", "stages"}
    assert scenario.problem.cluster.first_node.host.cores == 4


def test_every_decision_of_then_is_one_of_today() -> None:
    text = (FOLDER / "tiny.yaml").read_text("utf-8")
    plan = text.partition("\nplan:\n")[2].partition("\nsearch:")[0]
    stated = {line.split(":")[0].strip() for line in plan.splitlines()}
    assert stated <= DECISIONS.keys() and len(stated) == 22


@pytest.mark.parametrize("name", ["plan.json", "run/plan.json"])
def test_a_plan_means_what_it_meant(name: str) -> None:
    scenario = load(FOLDER / ("tiny.yaml" if name == "plan.json" else "trained.yaml"), FOLDER / name)
    assert scenario.plan == complete(scenario.problem, recover_layout(scenario.problem, scenario.plan))
    written, stated = json.loads(json.dumps(scenario.plan.to_json())), document(name)
    assert {key: written[key] for key in stated} == stated


def test_a_result_has_the_keys_of_then_and_its_plan_is_read(tmp_path: Path) -> None:
    saved, path = document("result.json"), tmp_path / "result.json"
    assert run(["simulate", str(FOLDER / "tiny.yaml"), "--save", str(path)]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert Plan.from_json(saved["plan"]) == Plan.from_json(result["plan"])
    assert saved["result"].keys() <= result["result"].keys() and saved.keys() <= result.keys()


@pytest.mark.slow
def test_a_checkpoint_is_trained_on_from(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "run", tmp_path / "run")
    command = ["execute", str(FOLDER / "trained.yaml"), "--steps", "5", "--resume", "--out", str(tmp_path / "run")]
    assert run(command) == 0
    lines = [(tmp_path / "run" / "metrics.jsonl").read_text("utf-8"), (FOLDER / "resumed.jsonl").read_text("utf-8")]
    now, then = ([(row["step"], row["loss"]) for row in map(json.loads, text.splitlines())] for text in lines)
    assert [step for step, _ in now] == [0, 1, 2, 3, 4]
    assert now == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in then]
