"""Predictions for the training steps that were measured on one device.

``python -m meshwise.scenarios.studies.device_predictions ROWS.json``

The rows come from `meshwise.executor.studies.device_trials`. They are predicted for the machine in ``--cluster``, as
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
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.problem import Problem

FRAMEWORK = "torch"


def machine_of(name: str) -> Cluster:
    """Return one node of the first catalogue machine with the accelerator ``name``.

    Raises
    ------
    ValueError
        Where the catalogue has no such machine.
    """
    if name not in DEVICES:
        known = ", ".join(sorted(DEVICES))
        raise ValueError(f"accelerator: the catalogue has {known}, met {name!r:.60}; nearest: --cluster FILE.yaml")
    wanted = accelerator(DEVICES[name][0])
    machines = (cluster(preset, 1) for preset in cluster_names())
    found = next((each for each in machines if each.accelerator == wanted), None)
    if found is None:
        raise ValueError(f"accelerator: a machine of the catalogue has it, met {name}; nearest: --cluster FILE.yaml")
    return found


def predicted(rows: Sequence[Mapping[str, Any]], machine: Cluster) -> list[dict[str, Any]]:
    """Return rows with simulated step time (s) and peak memory of device and host (bytes) for a machine.

    The device's peak is of tensors only, as torch's allocator counts it: without the driver and libraries.
    """
    return [{**row, **_prediction(row, machine)} for row in rows]


def _prediction(row: Mapping[str, Any], machine: Cluster) -> dict[str, Any]:
    job = Job.of(row["job"], str(row["trial"]))
    training = replace(job.training, framework=FRAMEWORK)
    problem = Problem(build(job.spec, training.sequence, training.precision), machine, training)
    timeline = simulate(lower(problem, job.plan), "discrete_event")
    host = max((profile.peak for profile in timeline.host_memory), default=0.0)
    return {
        "predicted_step_time": timeline.step_time,
        "predicted_peak": timeline.peak_memory - machine.accelerator.reserved,
        "predicted_host_peak": host,
    }


def errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the relative errors, predicted over measured minus 1, of step times and peaks of the measured rows."""
    done = [row for row in rows if row["status"] == "ok"]
    times = [row["predicted_step_time"] / row["step_time"] - 1 for row in done]
    peaks = [row["predicted_peak"] / row["held"]["peak"] - 1 for row in done if row["held"]]
    return {"step time": times, "peak memory": peaks}


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per row, and one for each kind of error that has values."""
    found = [_line(row) for row in rows]
    for what, values in errors(rows).items():
        if values:
            sizes = [abs(value) for value in values]
            found.append(f"{what}: median error {median(sizes):.1%}, worst {max(sizes):.1%}, of {len(sizes)} rows")
    return found


def _line(row: Mapping[str, Any]) -> str:
    told = (
        f"{row['trial']}: predicted {row['predicted_step_time'] * 1e3:.1f} ms, {row['predicted_peak'] / 2**30:.2f} GiB"
    )
    if row["status"] != "ok":
        return f"{told}; {row['status']}"
    error = row["predicted_step_time"] / row["step_time"] - 1
    held = f", {row['held']['peak'] / 2**30:.2f} GiB" if row["held"] else ""
    return f"{told}; measured {row['step_time'] * 1e3:.1f} ms ({error:+.1%}){held}"


def main(arguments: Sequence[str]) -> int:
    """Predict as the command line says and return the exit code: 0, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m meshwise.scenarios.studies.device_predictions", description=__doc__
    )
    parser.add_argument(
        "rows", type=Path, metavar="ROWS.json", help="what meshwise.executor.studies.device_trials wrote"
    )
    parser.add_argument("--cluster", metavar="CLUSTER.yaml", help="the machine, as meshwise calibrate writes it")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where rows with predictions go")
    given = parser.parse_args(arguments)
    try:
        document = json.loads(given.rows.read_text(encoding="utf-8"))
        name = str(document["machine"]["accelerator"])
        machine = load_cluster(given.cluster) if given.cluster else machine_of(name)
        document["rows"] = predicted(document["rows"], machine)
        document["predicted_for"] = given.cluster or machine.name
    except (ValueError, OSError) as error:
        note(str(error))
        return 2
    except (KeyError, TypeError) as error:
        note(
            f"{given.rows}: rows of meshwise.executor.studies.device_trials have a machine and jobs, met {error!r:.100}"
        )
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(document["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
