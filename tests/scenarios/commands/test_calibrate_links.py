"""``meshwise calibrate --from`` with rows of collectives: what it writes, and one message for whatever it is given."""

import json
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

ROWS = Path(__file__).parents[2] / "simulator" / "calibration" / "collectives.jsonl"


def test_links_are_written_as_the_catalogue_holds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "links.json"
    assert run(["calibrate", "--from", str(ROWS), "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {"nvlink3", "nvlink4"} <= set(written)
    printed = capsys.readouterr()
    assert "aic_nccl" in printed.out and "rows used" in printed.err


def test_a_source_left_out_is_predicted_worse_than_one_that_is_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    means = []
    for option in ([], ["--leave-out", "vtrain_nccl_a100"]):
        assert run(["calibrate", "--from", str(ROWS), *option]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if "vtrain_nccl_a100" in line]
        means.append(float(line.split("%")[0].split()[-1]))
    assert means[0] < means[1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b'{"collective": "all_reduce"}\n', [], ":1:1: a file of collectives has rows that can be used, met none"),
        (None, ["--leave-out", "nobody"], "--leave-out is one of"),
        (None, ["--accelerator", "a100-80gb"], "--accelerator goes with rows of kernels"),
    ],
)
def test_what_cannot_be_fitted_is_one_message(
    content: bytes | None, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROWS
    if content is not None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
    assert run(["calibrate", "--from", str(path), *options]) == 2
    assert message in capsys.readouterr().err
