"""The file of a run's plan: ``plan.json`` in its folder, which ``--plan`` reads again."""

import json
from pathlib import Path

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.stages.supported_modules import find_module_layout, read_plan
from meshwise.scenarios.files.results import write
from meshwise.scenarios.module_plans.choosing import PlannedRun

PLAN_FILE = "plan.json"
LAYOUT = "module_layout"
"""Key of the layout in the file."""


def write_plan(planned: PlannedRun, folder: Path) -> Path:
    """Write the plan of a run, with what it is predicted to take and why it was chosen, and return the file."""
    prediction = planned.prediction
    document = {
        LAYOUT: planned.layout.to_json(),
        "predicted_step_time": None if prediction is None else prediction.step_time,
        "predicted_peak_memory": None if prediction is None else prediction.peak_memory,
        "plans": planned.num_plans,
        "reasons": planned.list_reasons(),
        "assumptions": planned.list_assumptions(),
    }
    path = folder / PLAN_FILE
    write(path, json.dumps(document, indent=2) + "\n")
    return path


def read_layout(path: Path) -> ModuleLayout:
    """Return the layout of a file that `write_plan` or ``meshwise search --out`` has written.

    Raises
    ------
    ValueError
        Where it is neither, or says more than a module that stays whole can do.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict) or LAYOUT not in document:
        return find_module_layout(read_plan(path))
    try:
        return ModuleLayout.from_json(document[LAYOUT])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a plan file as `meshwise train --out` writes it, met {error}") from error
