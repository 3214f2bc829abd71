"""Pictures of predicted against measured steps: every run, and errors by source, size and technique."""

from collections.abc import Sequence
from pathlib import Path

from meshwise.reports.pictures.accuracy import AccuracyRow, draw_accuracy, draw_errors_by_class
from meshwise.scenarios.published.accuracy import (
    Prediction,
    devices_of,
    group_errors,
    list_techniques,
    size_class,
    size_classes,
)
from meshwise.scenarios.published.runs import GROUP

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
"""Names of the tags of `meshwise.scenarios.published.accuracy`; other tags are their own names."""


def draw_pictures(predictions: Sequence[Prediction], folder: Path) -> tuple[Path, ...]:
    """Draw the pictures into ``folder`` and return their files; none without a predicted and measured step time."""
    point_rows = list_points(predictions)
    if not point_rows:
        return ()
    errors_by_size = group_errors(predictions, lambda row: (size_class(devices_of(row)),))
    errors_by_technique = group_errors(
        predictions, lambda row: list_techniques(row.run.scenario) if row.run.scenario else ()
    )
    classes = {
        "source": ("Error by who measured", group_errors(predictions, lambda row: (row.run.source,))),
        "devices": (
            "Error by size of run",
            {f"{name} devices": errors_by_size[name] for name in size_classes() if name in errors_by_size},
        ),
        "technique": (
            "Error by technique",
            {TECHNIQUES.get(name, name): errors_by_technique[name] for name in errors_by_technique},
        ),
    }
    paths = [folder / "predicted-measured.png"]
    draw_accuracy(point_rows, paths[0])
    for name, (title, errors) in classes.items():
        paths.append(folder / f"error-by-{name}.png")
        draw_errors_by_class(errors, paths[-1], title=title)
    return tuple(paths)


def list_points(predictions: Sequence[Prediction]) -> list[AccuracyRow]:
    """Return a point for every run with a predicted and a measured step time, under the name of its model."""
    return [
        AccuracyRow(row.run.row_id, row.run.source, model_of(row), row.step_time, row.run.step_time)
        for row in predictions
        if row.step_time and row.run.step_time
    ]


def model_of(prediction: Prediction) -> str:
    """Return the publisher's name for the model of a run."""
    return prediction.run.group.rsplit(", ", len(GROUP) - 1)[0]
