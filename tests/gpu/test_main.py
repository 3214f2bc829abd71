"""What is measured on one GPU is driven on cores, and without a device it says what waits."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from . import calibration, matrix, predictions, throughput  # noqa: E402
from .language import Llama, Tokens  # noqa: E402
from .main import PARTS, main, measure_part, summarise  # noqa: E402
from .matrix import MAX_NORM, Case  # noqa: E402
from .rows import read_rows  # noqa: E402


def test_without_a_device_every_part_waits_with_what_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main([str(tmp_path / "rows.jsonl")]) == 0
    text = capsys.readouterr().out
    assert all(f"  {part.name} " in text and part.asked in text for part in PARTS)
    assert not (tmp_path / "rows.jsonl").exists()
    assert main(["--device", "cpu"]) == 2 and "--tiny and OUT" in capsys.readouterr().err


def test_parts_fit_into_half_an_hour() -> None:
    assert sum(part.longest for part in PARTS) < 30 * 60
    assert {part.name for part in PARTS} == {
        module.__name__.rpartition(".")[2] for module in (matrix, throughput, calibration, predictions)
    }
    assert len(predictions.RUNS) == 12


def test_features_are_compared_with_a_plain_loop_and_failures_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = (Case("num_microbatches=4,recompute=full", "bf16"), Case("zero=3,num_microbatches=2", is_sharded=True))
    monkeypatch.setattr(matrix, "QUICK", (*cases, Case(words="no_such_word=1")))
    out = tmp_path / "rows.jsonl"
    measure_part("matrix", out, "cpu", is_tiny=True)
    rows = read_rows(out)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 1 and "no_such_word" in failed[0]["reason"]
    assert rows[-1]["equal"] == len(rows) - 2 > 5
    assert all({"date", "device", "driver", "torch", "tiny"} <= row.keys() for row in rows)
    assert f"{len(rows) - 2} of {len(rows) - 1} equal" in summarise(out)


def test_a_step_that_is_not_clipped_is_no_equal_of_one_that_is() -> None:
    bench = matrix.Bench(torch.device("cpu"), matrix.TINY)
    case = Case(max_norm=MAX_NORM / 100)
    losses, module = bench.train_plainly(Case())
    with pytest.raises(AssertionError, match="of their way apart; at most"):
        matrix.compare(bench, case, losses, module.state_dict(), bench.train_plainly(case))


def test_both_sides_of_the_throughput_begin_with_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    study = throughput.TINY._replace(steps=1, backend="eager")
    row = throughput.compare(study, torch.device("cpu"))
    assert row["first_losses"][0] == pytest.approx(row["first_losses"][1], rel=1e-6)
    assert len(row["step_times"]) == study.pairs and row["verdict"] in ("met", "not met", "not decided")
    json.dumps(row)


def test_flops_of_a_token_are_those_that_torch_counts() -> None:
    sizes = throughput.TINY.sizes
    module = Llama(sizes)
    assert sum(parameter.numel() for parameter in module.parameters()) == sizes.count_parameters()
    with FlopCounterMode(display=False) as counter:
        module(*Tokens(sizes, 2).batch(0, 2)).backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 6 * sizes.layers * sizes.hidden * sizes.length  # half of all pairs: 2 products forward, 4 backward
    assert products == 2 * sizes.length * (sizes.count_flops() - attention)
