"""Predictions for the training steps that were measured on one device.

``python -m tests.studies.device_predictions ROWS.json``

The rows come from `tests.studies.device_trials`. They are predicted for the machine in ``--cluster``, as
calibration writes it, or for the catalogue's machine with the accelerator that the rows name. Nothing is fitted to the
rows. ``--out`` gets the document with predictions, with the date and the machine of the measurement.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from meshwise.executor.job import Job
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.scenarios.console import note
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.simulator.calibration.kernel_rows import DEVICES
from meshwise.simulator.catalog import accelerator, cluster, cluster_names
from meshwise.simulator.engine import simulate
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.model import build
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.problem import Problem

FRAMEWORK = "torch"


def find_machine(name: str) -> Cluster:
    """Return one node of the first catalogue machine with the accelerator ``name``.

    Raises
    ------
    ValueError
        Where the catalogue has no such machine.
    """
    if name not in DEVICES:
        known = ", ".join(sorted(DEVICES))
        raise ValueError(f"accelerator: the catalogue has {known}, met {name!r:.60}; nearest: --cluster FILE.yaml")
    target_accelerator = accelerator(DEVICES[name][0])
    machines = (cluster(preset, 1) for preset in cluster_names())
    known_machine = next(
        (machine_candidate for machine_candidate in machines if machine_candidate.accelerator == target_accelerator),
        None,
    )
    if known_machine is None:
        raise ValueError(f"accelerator: a machine of the catalogue has it, met {name}; nearest: --cluster FILE.yaml")
    return known_machine


def predict_rows(rows: Sequence[Mapping[str, Any]], machine: Cluster) -> list[dict[str, Any]]:
    """Return rows with simulated step time (s) and peak memory of device and host (bytes) for a machine.

    The device's peak is of tensors only, as torch's allocator counts it: without the driver and libraries.
    """
    return [{**row, **_predict_row(row, machine)} for row in rows]


def _predict_row(row: Mapping[str, Any], machine: Cluster) -> dict[str, Any]:
    job = Job.from_document(row["job"], str(row["trial"]))
    training = replace(job.training, framework=FRAMEWORK)
    problem = Problem(build(job.spec, training.sequence, training.precision), machine, training)
    timeline = simulate(lower(problem, job.plan), "discrete_event")
    host = max((profile.peak for profile in timeline.host_memory), default=0.0)
    return {
        "predicted_step_time": timeline.step_time,
        "predicted_peak": timeline.peak_memory - machine.accelerator.reserved,
        "predicted_host_peak": host,
    }


def list_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the relative errors, predicted over measured minus 1, of step times and peaks of the measured rows."""
    measured_rows = [row for row in rows if row["status"] == "ok"]
    times = [row["predicted_step_time"] / row["step_time"] - 1 for row in measured_rows]
    peaks = [row["predicted_peak"] / row["held"]["peak"] - 1 for row in measured_rows if row["held"]]
    return {"step time": times, "peak memory": peaks}


def describe_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per row, and one for each kind of error that has values."""
    row_lines = [_describe_row(row) for row in rows]
    for quantity, values in list_errors(rows).items():
        if values:
            sizes = [abs(value) for value in values]
            row_lines.append(
                f"{quantity}: median error {median(sizes):.1%}, worst {max(sizes):.1%}, of {len(sizes)} rows"
            )
    return row_lines


def _describe_row(row: Mapping[str, Any]) -> str:
    prediction_text = (
        f"{row['trial']}: predicted {row['predicted_step_time'] * 1e3:.1f} ms, {row['predicted_peak'] / 2**30:.2f} GiB"
    )
    if row["status"] != "ok":
        return f"{prediction_text}; {row['status']}"
    error = row["predicted_step_time"] / row["step_time"] - 1
    memory_text = f", {row['held']['peak'] / 2**30:.2f} GiB" if row["held"] else ""
    return f"{prediction_text}; measured {row['step_time'] * 1e3:.1f} ms ({error:+.1%}){memory_text}"


def main(arguments: Sequence[str]) -> int:
    """Predict as the command line says and return the exit code: 0, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.device_predictions", description=__doc__)
    parser.add_argument("rows", type=Path, metavar="ROWS.json", help="what tests.studies.device_trials wrote")
    parser.add_argument("--cluster", metavar="CLUSTER.yaml", help="the machine, as meshwise calibrate writes it")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where rows with predictions go")
    options = parser.parse_args(arguments)
    try:
        document = json.loads(options.rows.read_text(encoding="utf-8"))
        name = str(document["machine"]["accelerator"])
        machine = load_cluster(options.cluster) if options.cluster else find_machine(name)
        document["rows"] = predict_rows(document["rows"], machine)
        document["predicted_for"] = options.cluster or machine.name
    except (ValueError, OSError) as error:
        note(str(error))
        return 2
    except (KeyError, TypeError) as error:
        rule = "rows of tests.studies.device_trials have a machine and jobs"
        note(f"{options.rows}: {rule}, met {error!r:.100}")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(describe_rows(document["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
