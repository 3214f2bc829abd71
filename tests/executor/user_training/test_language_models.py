"""Language models whose samples have different numbers of labels compute over ranks what one process computes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import TrainRun, train
from meshwise.strategies.plan.recomputation import Recompute

from .language_zoo import KINDS, evaluation_data

ZOO = Path(__file__).parent / "language_zoo.py"


def run(kind: str, layout: ModuleLayout, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> TrainRun:
    if kind != "counted":
        pytest.importorskip("transformers")
    monkeypatch.setenv("KIND", kind)
    return train(TrainJob(str(ZOO), layout, steps=2, evaluate_every=1, learning_rate=0.01), folder, **options)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("counted", ModuleLayout(2, num_microbatches=2)),
        ("counted", ModuleLayout(1)),
        ("llama", ModuleLayout(2, zero=3, num_microbatches=2, recompute=Recompute.FULL)),
        ("gpt2", ModuleLayout(2, num_microbatches=2)),
        ("t5", ModuleLayout(2, zero=2, num_microbatches=2, recompute=Recompute.FULL)),
        ("counted", ModuleLayout(2, num_microbatches=2, pipeline=2)),
        ("llama", ModuleLayout(2, zero=3, num_microbatches=2, pipeline=2, recompute=Recompute.FULL)),
        ("gpt2", ModuleLayout(num_microbatches=4, pipeline=2)),
        ("t5", ModuleLayout(num_microbatches=4, pipeline=2, schedule="interleaved", chunks=2)),
    ],
)
def test_labels_count_once_wherever_they_are(
    kind: str, layout: ModuleLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(kind, layout, tmp_path, monkeypatch, verify=True)
    assert result.difference is not None and result.difference.is_equal
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens_per_second"] == pytest.approx(10 * row["samples_per_second"]) for row in rows)
    last = rows[-1]["evaluation"]["loss"]
    assert last != rows[0]["evaluation"]["loss"]
    assert last == pytest.approx(compute_loss(kind, result.weights), rel=1e-5)


def compute_loss(kind: str, weights: Path) -> float:
    """Return the loss of exported weights on all samples of the evaluation at once, loaded as their users load them."""
    samples = [evaluation_data()[number] for number in range(len(evaluation_data()))]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    module = KINDS[kind]()
    if kind == "counted":
        module.load_state_dict(read_weights(weights))
        with torch.no_grad():
            return float(module(**batch, num_items_in_batch=(batch["labels"] != -100).sum()))
    loaded = type(module).from_pretrained(weights, local_files_only=True)  # type: ignore[attr-defined]
    assert loaded.config.architectures == [type(module).__name__]
    with torch.no_grad():
        return float(loaded.eval()(**batch).loss)


def test_losses_and_evaluations_do_not_depend_on_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = ModuleLayout(1), ModuleLayout(2, zero=3), ModuleLayout(2, num_microbatches=2)
    runs = [run("llama", layout, tmp_path / str(place), monkeypatch) for place, layout in enumerate(layouts)]
    for other in runs[1:]:
        assert other.losses == pytest.approx(runs[0].losses, rel=1e-5)
        figures = [[row.evaluation["loss"] for row in result.evaluations] for result in (other, runs[0])]
        assert figures[0] == pytest.approx(figures[1], rel=1e-5)
