"""Errors by publisher: each counts once, those first whose rows had no part in anything, and the README says so."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.published.accuracy import Prediction
from meshwise.scenarios.published.runs import Run

from .accuracy_publishers import (
    PARTS,
    PUBLISHERS,
    Part,
    Standing,
    format_page,
    main,
    summarize_publishers,
)

ROOT = Path(__file__).parents[2]


def predicted(
    source: str, predicted: float, measured: float = 10.0, *, fits: bool = True, ran: bool = True
) -> Prediction:
    run = Run(f"{source}-1", source, source, measured, None, "ok" if ran else "oom", None, "", ())
    return Prediction(run, predicted, None, fits)


ROWS = (
    *[predicted("libai_bench_oneflow", 7.0)] * 3,  # 30 % too fast, three times
    predicted("alpa_v100", 9.0),  # 10 % too fast
    predicted("somebody new", 12.0, fits=False, ran=False),  # 20 % too slow
    predicted("dgxc_h100", 5.0),  # NVIDIA's, of whom other rows had a part
    predicted("megatron_sc21", 10.1),
    predicted("llmfoundry", 10.3, ran=False),
)


def test_every_publisher_counts_once_and_those_without_a_part_come_first() -> None:
    result = summarize_publishers(ROWS)
    assert [(line["publisher"], line["standing"]) for line in result["publishers"]] == [
        ("Alpa", "publisher unseen"),
        ("OneFlow", "publisher unseen"),
        ("somebody new", "publisher unseen"),
        ("NVIDIA", "other rows seen"),
        ("MosaicML", "rows seen"),
        ("NVIDIA", "rows seen"),
    ]
    unseen = result["means"][Standing.UNSEEN]
    assert unseen["step_time"] == pytest.approx((0.3 + 0.1 + 0.2) / 3)  # of five rows the mean would be 0.24
    assert unseen["bias"] == pytest.approx((-0.3 - 0.1 + 0.2) / 3)
    assert (unseen["publishers"], unseen["rows"], unseen["too_fast"]) == (3, 5, 2)
    assert result["means"][Standing.SEEN]["step_time"] == pytest.approx((0.01 + 0.03) / 2)


def test_the_page_says_who_had_a_part_and_what_was_told_rightly() -> None:
    text = format_page(summarize_publishers(ROWS))
    assert "| MosaicML | structure and figures | 1 |" in text
    assert "Of 8 runs 7 are told rightly, 87.5 %." in text.replace("\\", "")  # one of MosaicML's is said to fit


def test_every_source_that_figures_were_fitted_to_is_named_as_such() -> None:
    """Figures of frameworks and of memory under unknown conventions were fitted to their rows."""
    fitted = {source for source, part in PARTS.items() if part is Part.FIGURES}
    assert fitted == {"alephalpha_layouts", "llmfoundry", "vtrain_single"}
    assert PARTS.keys() <= PUBLISHERS.keys()


def test_the_readme_states_the_committed_table() -> None:
    data = json.loads((ROOT / "reports/accuracy/publishers.json").read_text("utf-8"))
    assert format_page(data) == (ROOT / "reports/accuracy/publishers.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for means in data["means"].values():
        cells = (means["publishers"], means["rows"])
        numbers = (means["step_time"], means["bias"], means["interval"])
        error, bias, inside = (
            f"{100 * number:{sign}.1f} %" for number, sign in zip(numbers, ("", "+", ""), strict=True)
        )
        assert f"| {cells[0]} | {cells[1]} | {error} | {bias} | {inside} |" in readme
    judged = data["all"]["out_of_memory"]
    right = (judged["true_fit"] + judged["true_oom"]) / sum(judged.values())
    assert f"{100 * right:.1f} % are told rightly" in readme and f"{data['rows']:,} published runs" in readme
    assert f"{100 * data['means'][Standing.UNSEEN]['memory']:.1f} % off" in readme


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "rows.jsonl"), str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
