import re
from collections import Counter
from pathlib import Path

import pytest

from meshwise.scenarios.published.accuracy import load_runs, predict_all, summarize
from meshwise.scenarios.published.vocabulary.publishers import find_publisher

from .accuracy_page import RIVALS, format_page, main
from .interval_ends import is_timed

RUNS = Path(__file__).parents[1] / "scenarios/published/fixtures/published_runs.jsonl"
"""A sample of runs that ten publishers measured."""


def line(text: str, heading: str, first: str) -> list[str]:
    """Return the cells of a table's row under a heading, without what Markdown escapes."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0].replace("\\", "")
    row = next(row for row in section.splitlines() if row.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_page_and_its_pictures_are_written(tmp_path: Path) -> None:
    assert main([str(RUNS), str(tmp_path / "page")]) == 0
    text = (tmp_path / "page/README.md").read_text("utf-8")
    drawn = set(re.findall(r"\]\(([\w-]+\.png)\)", text))
    assert drawn == {path.name for path in (tmp_path / "page").glob("*.png")}
    assert len(drawn) == 5
    assert all((tmp_path / "page" / name).stat().st_size < 300_000 for name in drawn)


def test_the_figures_of_the_page_are_those_of_the_summary() -> None:
    predictions = predict_all(load_runs(RUNS))
    text, result = format_page(predictions), summarize(predictions)
    assert "structure is not" in text
    for name, row in (*result["sources"].items(), ("all", result["all"])):
        cells = line(text, "By who measured", name)
        assert cells[1:4] == [str(row["rows"]), str(row["predicted"]), str(len(row["skipped"]))]
        assert cells[4] == f"{100 * row['step_time']['mape']:.1f} %"
        assert cells[8] == f"{100 * row['step_time_interval']['inside']:.1f} %"
    counts = Counter(find_publisher(row.run.source).name for row in predictions if is_timed(row))
    for name, count in counts.items():
        assert line(text, "Widths for runs that were left out", name)[1] == str(count)
    assert line(text, "Other simulators", "meshwise")[2] == (
        f"{100 * result['sources']['korthikanti_tab5']['step_time']['max']:.1f} %"
    )
    assert len(RIVALS) == 4
    assert all(reason in text.replace("\\", "") for reason in result["all"]["reasons"])


def test_one_source_alone_is_refused_in_one_message(tmp_path: Path, capsys) -> None:
    rows = [row for row in RUNS.read_text("utf-8").splitlines() if '"simumax_b200"' in row]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert main([str(tmp_path / "rows.jsonl"), str(tmp_path)]) == 2
    assert capsys.readouterr().err == "leaving a group out needs two, met Moore Threads alone\n"
    assert not (tmp_path / "README.md").exists()


@pytest.mark.parametrize("arguments", [[], ["one"], ["missing.jsonl", "."]])
def test_bad_arguments_are_one_message(arguments: list[str], capsys) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("missing.jsonl: " if "missing.jsonl" in arguments else "usage: ")
