"""``meshwise calibrate --from``: the files it writes, and one message for whatever it is given."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run
from meshwise.simulator.calibration.kernel_rows import MAX_ROW_BYTES

ROWS = Path(__file__).parents[2] / "simulator" / "calibration" / "kernels.jsonl"


def test_one_accelerator_is_written_as_the_catalogue_holds_it(tmp_path: Path, capsys) -> None:
    out = tmp_path / "a.json"
    assert run(["calibrate", "--from", str(ROWS), "--accelerator", "a100-80gb", "--out", str(out)]) == 0
    written, shipped = json.loads(out.read_text()), _shipped("a100-80gb")
    assert written.keys() == shipped.keys()
    assert written["figures"].keys() == shipped["figures"].keys()
    assert written["figures"]["matmul"].keys() == shipped["figures"]["matmul"].keys()
    printed = capsys.readouterr()
    assert "microsoft/vidur" in printed.out and "left out mean" in printed.out
    assert "rows used" in printed.err


def test_all_accelerators_are_a_table_and_errors_a_page(tmp_path: Path, capsys) -> None:
    page = tmp_path / "errors.md"
    assert run(["calibrate", "--from", str(ROWS), "--report", str(page), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"a100-80gb", "h100-80gb"}
    text = page.read_text()
    assert "## h100-80gb" in text and "Publishers against each other" in text


def test_a_source_left_out_is_predicted_and_not_fitted(capsys) -> None:
    for source in ("microsoft/vidur", "vidur_h100"):
        options = ["--accelerator", "h100-80gb", "--leave-out", source, "--json"]
        assert run(["calibrate", "--from", str(ROWS), *options]) == 0
        document = json.loads(capsys.readouterr().out)
        found = [each for each in document["errors"] if each["publisher"] == "microsoft/vidur"]
        assert found and not any("fitted" in each for each in found)
        assert any(each["left_out"]["rows"] >= 20 for each in found if "left_out" in each)
        assert document["rows"].get("vidur_h100", {"used": 0})["used"] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1:1: a file of kernels has one JSON object a line, met none"),
        (b"{}\n", ":1:1: source_id is a text of 1 to 200 characters, met None"),
        (b'{"source_id": "a", "accelerator": "A100 SXM"}\n[]\n', ":1:1: source_repo is a text"),
        (b"\n\n{nonsense\n", ":3:1: a row is a JSON object"),
        (b"\x80\x81\n", ":1:1: a row is a JSON object"),
        (b"x" * (MAX_ROW_BYTES + 10), ":1:1: a row has at most 65536 bytes, met more"),
    ],
)
def test_what_is_no_row_is_one_message_with_its_line(content: bytes, message: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert run(["calibrate", "--from", str(path)]) == 2
    printed = capsys.readouterr()
    assert f"{path}{message}" in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--from", str(ROWS), "--accelerator", "abacus"], "--accelerator is one of a100-80gb, h100-80gb, met abacus"),
        (["--from", str(ROWS), "--leave-out", "nobody"], "--leave-out is one of"),
        (["--from", str(ROWS), "--out", "x.yaml"], "a name ends in .json, met '.yaml'"),
        (["--from", str(ROWS), "--report", "x.txt"], "a name ends in .md, met '.txt'"),
        (["--accelerator", "h100-80gb"], "--accelerator goes with --from ROWS.jsonl, met no --from"),
        (["--leave-out", "a", "--report", "b.md"], "--leave-out, --report goes with --from"),
    ],
)
def test_wrong_options_say_what_is_right(options: list[str], message: str, capsys) -> None:
    assert run(["calibrate", *options]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_nothing_that_can_be_fitted_are_refused(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"source_id": "a", "source_repo": "a/b", "accelerator": "Abacus", "kernel": "gemm", "time_us": 1}\n'
    )
    assert run(["calibrate", "--from", str(path)]) == 2
    assert "can be used, met none; 1 skipped: accelerator Abacus is not in the catalogue" in capsys.readouterr().err


def _shipped(name: str) -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, object] = json.loads(
        files("meshwise.simulator.catalog").joinpath("calibration", f"{name}.json").read_text()
    )
    return found
