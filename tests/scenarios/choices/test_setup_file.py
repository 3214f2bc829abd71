"""The scenario of a setup is the setup: its machine, its batch and its model."""

from pathlib import Path

import pytest

from meshwise.scenarios.choices.question import Question
from meshwise.scenarios.choices.setup_file import build_setup_files, name_setup_file
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.loader import load

SIZES = {
    "tinyllama-1.1b-8-a100": (1, 3),
    "gpt3-175b-1024-a100": (2, 128),
    "machines/llama3-405b-54-days": (4,),
    "machines/llama2-13b-64-tpu-v4": (),
    "operators/mlp": (),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_file_of_a_setup_is_its_problem(name: str, tmp_path: Path) -> None:
    scenario = load(name)
    for setup in Question(nodes=SIZES[name], batches=(64,)).list_setups(scenario):
        file = name_setup_file(tmp_path / f"{setup.nodes}.json")
        for path, text in build_setup_files(setup, file).items():
            path.write_text(text)
        written = load(file)
        assert written.problem == setup.scenario.problem and written.plan is None
        sizes = setup.nodes, setup.scenario.problem.training.global_batch
        is_own = sizes == (scenario.problem.cluster.num_nodes, scenario.problem.training.global_batch)
        nodes = "1 node" if setup.nodes == 1 else f"{setup.nodes} nodes"
        assert written.name == (scenario.name if is_own else f"{scenario.name}: {nodes}, batch {sizes[1]}")
        assert written.run == scenario.run


def test_another_machine_is_written_out_and_a_target_is_named(tmp_path: Path) -> None:
    scenario = load("tinyllama-1.1b-8-a100").for_target("torchtitan")
    moved = scenario.on(load("gallery/models/llama3-8b-8-h100").problem.cluster)
    setup = Question(nodes=(2,)).list_setups(moved)[0]
    for path, text in build_setup_files(setup, name_setup_file(tmp_path / "best.json")).items():
        path.write_text(text)
    written = load(tmp_path / "best.scenario.yaml")
    assert written.problem == setup.scenario.problem and written.framework == "torchtitan"


def test_the_question_and_the_own_plan_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "asked.yaml"
    text = Path(find_scenario("gpt3-175b-1024-a100")).read_text("utf-8")
    assert "\nsearch:\n" in text and "\nplan:\n" in text
    path.write_text(text.replace("\nsearch:\n", "\nsearch:\n  minimize: cost\n  price: 2\n  seconds: 9 s\n"))
    setup = Question(nodes=(1,)).list_setups(load(path))[0]
    (written,) = build_setup_files(setup, tmp_path / "p.scenario.yaml").values()
    assert "  seconds: 9 s" in written
    assert not any(f"{name}:" in written for name in ("minimize", "price", "plan", "measured"))
