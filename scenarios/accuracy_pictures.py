"""Pictures of predictions against measured runs: each run, and the errors by source, size and technique."""

from collections.abc import Sequence
from pathlib import Path

from reports.accuracy import AccuracyRow, draw_accuracy
from reports.accuracy_classes import draw_errors_by_class
from scenarios.accuracy import Prediction
from scenarios.accuracy_summary import by_class, devices_of, size_class, size_classes
from scenarios.published import GROUP
from scenarios.rows.techniques import techniques

TECHNIQUES = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "vpp": "interleaved pipeline",
    "sp": "sequence parallel",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
    "hsdp": "ZeRO 3 over groups",
    "moe": "mixture of experts",
    "tp overlap": "tensor overlap",
}
"""Tags of `scenarios.rows.techniques` in words; others are words themselves."""


def draw_pictures(predictions: Sequence[Prediction], folder: Path) -> tuple[Path, ...]:
    """Draw into ``folder`` and return the files; none where no run has a predicted and a measured step time."""
    found = points(predictions)
    if not found:
        return ()
    sizes = by_class(predictions, lambda row: (size_class(devices_of(row)),))
    used = by_class(predictions, lambda row: techniques(row.run.scenario) if row.run.scenario else ())
    classes = {
        "source": ("Error by who measured", by_class(predictions, lambda row: (row.run.source,))),
        "devices": (
            "Error by size of run",
            {f"{name} devices": sizes[name] for name in size_classes() if name in sizes},
        ),
        "technique": ("Error by technique", {TECHNIQUES.get(name, name): used[name] for name in used}),
    }
    paths = [folder / "predicted-measured.png"]
    draw_accuracy(found, paths[0])
    for name, (title, errors) in classes.items():
        paths.append(folder / f"error-by-{name}.png")
        draw_errors_by_class(errors, paths[-1], title=title)
    return tuple(paths)


def points(predictions: Sequence[Prediction]) -> list[AccuracyRow]:
    """Return the runs that have a predicted and a measured step time, under the names of their models."""
    return [
        AccuracyRow(row.run.row_id, row.run.source, model_of(row), row.step_time, row.run.step_time)
        for row in predictions
        if row.step_time and row.run.step_time
    ]


def model_of(prediction: Prediction) -> str:
    """Return what the publisher calls the model of a run."""
    return prediction.run.group.rsplit(", ", len(GROUP) - 1)[0]
