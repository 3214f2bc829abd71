"""Errors by publisher: each is judged by what was fitted to all others, and the README says what the page says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.scenarios.published.accuracy import Prediction, select_split
from meshwise.scenarios.published.runs import build_run
from meshwise.scenarios.published.vocabulary.publishers import Split, find_publisher, list_publishers
from meshwise.simulator.catalog import accelerator
from meshwise.strategies.plan.framework import ENTRIES

from ..scenarios.published.test_accuracy import ROW
from .accuracy_publishers import Refit, format_page, main, refit_run, summarize_publishers

ROOT = Path(__file__).parents[2]
MANY = 10


def predict_as(source: str, ratio: float, *, count: int = 1, fits: bool = True, status: str = "ok") -> list[Prediction]:
    """Return runs of a source that are predicted to take ``ratio`` times what was measured; no host launches them."""
    run = replace(build_run(ROW | {"framework": "MaxText"}), source=source, step_time=10.0, tier="A", status=status)
    return [Prediction(run, 10.0 * ratio, 1.0, fits)] * count


ROWS = [
    *predict_as("maxtext_tpu", 0.7, count=MANY),
    *predict_as("nobody knows", 0.9, count=3 * MANY),
    *predict_as("megatron_sc21", 1.1, count=MANY // 2),
    *predict_as("korthikanti_tab5", 1.3, count=MANY // 2),
    *predict_as("few", 5.0),
    *predict_as("few", 1.0, status="oom"),
]


def test_publishers_count_once_and_those_of_few_runs_not_at_all() -> None:
    result = summarize_publishers(ROWS)
    assert {line["publisher"]: line["split"] for line in result["publishers"]} == {
        "Google": "choose",
        "NVIDIA": "choose",
        "nobody knows": "new",
        "few": "new",
    }
    # errors of 30, 10 and, of both tables of NVIDIA, (10 + 30) / 2 = 20 %
    medians = result["medians"]
    assert (medians["publishers"], medians["runs"]) == (3, 5 * MANY)
    assert medians["left_out"] == pytest.approx(0.2) and medians["largest"] == pytest.approx(0.3)
    assert medians["bias"] == pytest.approx(-0.1)  # of -30, -10 and +20 %
    text = format_page(result).replace("\\", "")
    assert "20.0 % off, at most 30.0 %, bias -10.0 %" in text
    assert "Of 52 runs 51 are told rightly" in text  # the run out of memory is said to fit


def test_what_was_fitted_to_a_publisher_is_fitted_without_it() -> None:
    hopper = build_run(ROW | {"accelerator": "H100 SXM", "framework": "Megatron-LM"})
    blackwell = build_run(ROW | {"accelerator": "B200 SXM"})
    refit = Refit(1.1, {"VIA Research": 3e-4, "others": 2e-5, "more": 8e-5})

    def device(run, publisher):
        return refit_run(run, publisher, refit).scenario.problem.cluster

    assert device(hopper, "MosaicML").accelerator.sustained == 1.1
    assert device(blackwell, "Moore Threads").accelerator.sustained == accelerator("h100-80gb").sustained
    launches = [device(hopper, name).first_node.host.launch for name in ("Google", "VIA Research")]
    # the geometric mean of 20 and 80 us
    assert launches == pytest.approx([ENTRIES["megatron"].defaults.launch, 4e-5])
    assert device(hopper, "Google") == hopper.scenario.problem.cluster


def test_publishers_of_the_last_judgement_are_left_out_of_everything_else() -> None:
    runs = [row.run for row in (*predict_as("dgxc_h100", 1.0), *predict_as("alpa_v100", 1.0), *predict_as("mine", 1.0))]
    assert [run.source for run in select_split(runs, judge=False)] == ["mine"]
    assert [run.source for run in select_split(runs, judge=True)] == ["dgxc_h100", "alpa_v100"]
    judges = {publisher.name for publisher in list_publishers().values() if publisher.split is Split.JUDGE}
    assert judges == {"Alpa", "DGX Cloud", "Jack31098"}
    data = json.loads((ROOT / "reports/accuracy/publishers.json").read_text("utf-8"))
    assert judges.isdisjoint(line["publisher"] for line in data["publishers"])


def test_biases_of_publishers_do_not_share_a_sign() -> None:
    """A bias beyond 2 % of one sign for four of five publishers is missing physics."""
    data = json.loads((ROOT / "reports/accuracy/publishers.json").read_text("utf-8"))
    biases = [line["left_out"]["bias"] for line in data["publishers"] if line["left_out"]["count"] >= MANY]
    assert len(biases) >= 5
    for sign in (1, -1):
        assert sum(sign * bias > 0.02 for bias in biases) < 0.8 * len(biases)


def test_a_source_has_one_publisher_and_an_organisation_several_sources() -> None:
    assert find_publisher("megatron_bridge").name == find_publisher("megatron_sc21").name == "NVIDIA"
    assert find_publisher("somebody").split is Split.NEW


def test_the_readme_states_the_committed_page() -> None:
    data = json.loads((ROOT / "reports/accuracy/publishers.json").read_text("utf-8"))
    assert format_page(data) == (ROOT / "reports/accuracy/publishers.md").read_text("utf-8")
    readme, medians = (ROOT / "README.md").read_text("utf-8"), data["medians"]
    cells = [f"{100 * medians[name]:.1f} %" for name in ("left_out", "largest", "after_1", "after_3", "after_5")]
    assert f"| {' | '.join(cells)} |" in readme
    assert f"{medians['runs']:,} timed runs of {medians['publishers']} publishers" in readme
    judged = data["all"]["out_of_memory"]
    right = (judged["true_fit"] + judged["true_oom"]) / sum(judged.values())
    assert f"{100 * right:.1f} % of {data['rows']:,} runs" in readme


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "rows.jsonl"), str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
