"""The fields of a training step, as the framework that a scenario names runs it."""

from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.schema.scenario import TrainingTable, build_training
from meshwise.strategies.plan.framework import ENTRIES


def test_a_step_runs_as_its_framework_does_unless_words_say_otherwise() -> None:
    table = {"global_batch": 8, "sequence": 8}
    assumed, titan = (build_training(TrainingTable(**table, **more)) for more in ({}, {"framework": "torchtitan"}))
    assert (assumed.framework, assumed.composed) == ("megatron", ())
    assert titan.composed == ENTRIES["torchtitan"].defaults.composed != ()
    fused = build_training(TrainingTable(**table, framework="torchtitan", kernels="fused", loss="gathered"))
    assert (fused.composed, fused.gathers_logits) == ((), True)
    assert build_training(TrainingTable(**table, kernels="eager")).composed == titan.composed


def test_scales_of_fp8_belong_to_fp8() -> None:
    table = {"global_batch": 8, "sequence": 32}
    assert build_training(TrainingTable(**table, precision="fp8", fp8_scaling="row")).fp8_scaling == "row"
    with pytest.raises(ValueError, match="fp8_scaling is of precision fp8, met precision bf16"):
        TrainingTable(**table, fp8_scaling="row")


@pytest.mark.parametrize(("word", "seconds"), [("framework", 110e-6), ("12 us", 12e-6), ("0 us", 0.0), (None, 0.0)])
def test_hosts_launch_as_a_scenario_says(word: str | None, seconds: float, tmp_path: Path) -> None:
    launch = "" if word is None else f", launch: {word}"
    (tmp_path / "s.yaml").write_text(
        "model: {transformer: {layers: 2, hidden: 64, heads: 4, ffn: 256, vocab: 128}}\n"
        f"training: {{global_batch: 8, sequence: 32{launch}}}\ncluster: {{preset: dgx-h100, nodes: 1}}\n"
    )
    ((node, _),) = load(tmp_path / "s.yaml").problem.cluster.nodes
    assert node.host.launch == pytest.approx(seconds)


def test_a_launch_is_a_time_or_a_word(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "model: {preset: gpt3-175b}\ntraining: {global_batch: 8, sequence: 32, launch: quick}\n"
        "cluster: {preset: dgx-h100, nodes: 1}\n"
    )
    with pytest.raises(ScenarioError, match=r"training\.launch: holds a time or framework; .*met 'quick'"):
        load(tmp_path / "s.yaml")
