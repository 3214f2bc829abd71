"""Users' files under the plans that the search chooses: curves beside one process, and equality in fp64.

Run ``python -m tests.studies.user_training FOLDER OUT.json [PROCESSES ...]`` with a folder of files for
``meshwise train``. Every file is trained 200 steps in one process, and on so many processes under a plan of its own;
the first 20 steps of that plan are made in fp64, without dropout, beside a plain loop of torch. Results of files that
are done are kept in OUT.json, so that a run that was stopped goes on.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.plain_training import train_plainly
from meshwise.executor.user_training.run import train

STEPS, EXACT_STEPS = 200, 20


def run_command(file: Path, processes: int) -> dict[str, Any]:
    """Return what ``meshwise train`` tells of a file on so many processes, under the plan that it chooses."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwise", "train", str(file), "--steps", str(STEPS), "--json"]
        options = ["--processes", str(processes), "--out", folder]
        result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if result.returncode:
        return {"error": result.stderr.strip().splitlines()[-1] if result.stderr.strip() else str(result.returncode)}
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def measure_equality(file: Path, layout: ModuleLayout) -> float:
    """Return the largest relative difference of losses in fp64 from those of a plain loop of torch."""
    options = {"precision": "fp64", "without_dropout": True, "is_trial": True}
    job = TrainJob(str(file.resolve()), layout, EXACT_STEPS, **options)  # type: ignore[arg-type]
    expected = train_plainly(job).losses
    with TemporaryDirectory() as folder:
        losses = train(job, Path(folder)).losses
    return max(abs(loss - value) / abs(value) for loss, value in zip(losses, expected, strict=True))


def try_file(file: Path, processes: int) -> dict[str, Any]:
    """Return the result of a file on so many processes."""
    result = run_command(file, processes)
    row = {"file": file.stem, "processes": processes}
    if "error" not in result and processes > 1:
        try:
            row["difference"] = measure_equality(file, ModuleLayout.from_json(result["plan"]))
        except (ValueError, RuntimeError) as error:
            row["difference_error"] = str(error)
    return row | result


def main(arguments: Sequence[str]) -> None:
    """Try all files of a folder."""
    folder, out = Path(arguments[0]), Path(arguments[1])
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    known = {(row["file"], row["processes"]) for row in rows}
    for file in sorted(folder.glob("*.py")):
        for processes in (1, *map(int, arguments[2:] or ("2", "4"))):
            if (file.stem, processes) in known:
                continue
            row = try_file(file, processes)
            rows.append(row)
            out.write_text(json.dumps(rows, indent=1))
            losses = row.get("loss") or [float("nan")]
            print(
                file.stem,
                processes,
                row.get("error") or f"loss {losses[0]:.4f} to {losses[-1]:.4f}",
                row.get("difference", row.get("difference_error", "")),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
