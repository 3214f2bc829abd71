"""Plans of one, two or three techniques, run on torch and compared with one process in fp64.

``python -m tests.studies.plan_matrix`` runs all plans of 2, 4 and 8 processes and writes the results as
JSON lines and as a page of Markdown. Rows are appended as they come, so that a stopped run can be continued.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

from meshwise.executor.check.verification import TOLERANCE, Verification
from meshwise.executor.job import Job
from meshwise.executor.launch.launcher import ExecutionError, require_torch
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.launch.run import compare_job, run_jobs

from .circumstances import describe_circumstances, format_today
from .techniques import STEPS, Combination, list_plans, techniques

ROWS, PAGE = "plan-matrix.jsonl", "plan-matrix.md"
LAUNCH_SIZE = 12
"""Number of plans that one launch runs one after the other: a launch has to import torch in every process."""
EQUAL, DIFFERENT, FAILED, REFUSED, LEFT_OUT = "equal", "different", "failed", "refused", "left out"
_MEASURED = ("key", "state", "loss", "gradient", "parameter")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan to run; ``key`` identifies it, and ``combination`` is the first that has it."""

    combination: Combination
    key: str

    @property
    def job(self) -> Job:
        """The job that runs the plan."""
        assert self.combination.job is not None
        return self.combination.job


def trials(combinations: Iterable[Combination]) -> tuple[Trial, ...]:
    """Return the distinct plans that can run, in order of their number of ranks."""
    trials_by_key: dict[str, Trial] = {}
    for combination in combinations:
        if combination.job is not None:
            trials_by_key.setdefault(key_of(combination.job), Trial(combination, key_of(combination.job)))
    return tuple(sorted(trials_by_key.values(), key=lambda trial: trial.combination.ranks))


def key_of(job: Job) -> str:
    """Return a hash of what a job computes: equal for equal jobs, on any machine."""
    document = {"spec": asdict(job.spec), "training": asdict(job.training), "plan": job.plan.to_json()}
    return sha256(json.dumps([document, job.steps, job.seed], sort_keys=True, default=str).encode()).hexdigest()[:16]


def run_trials(
    chosen: Sequence[Trial], known: Mapping[str, Row], progress: Callable[[str], None], *, seconds: float = inf
) -> Iterator[Row]:
    """Yield the row of every trial that is not ``known``, as soon as its launch has ended.

    One launch runs several plans with the same number of ranks. After a failure the rest run in a new launch. No launch
    begins after ``seconds``.
    """
    open_trials = [trial for trial in chosen if trial.key not in known]
    num_done, start = 0, time.monotonic()
    for ranks in sorted({trial.combination.ranks for trial in open_trials}):
        rank_trials = [trial for trial in open_trials if trial.combination.ranks == ranks]
        while rank_trials and time.monotonic() - start < seconds:
            progress(f"{num_done} of {len(open_trials)} plans, {ranks} ranks: {rank_trials[0].combination.name} ...")
            rows = _launch_trials(rank_trials[:LAUNCH_SIZE])
            yield from rows
            rank_trials = rank_trials[len(rows) :]
            num_done += len(rows)


def _launch_trials(chosen: Sequence[Trial]) -> list[Row]:
    """Run trials in one launch and return their rows, up to the first trial that makes the launch fail."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        pairs = [(trial.job, Path(name) / str(number)) for number, trial in enumerate(chosen)]
        stopped = ""
        try:
            run_jobs(pairs)
        except ExecutionError as error:
            stopped = str(error).splitlines()[0]
        rows = []
        for trial, (job, folder) in zip(chosen, pairs, strict=True):
            try:
                rows.append(_build_compared_row(trial, compare_job(job, folder)))
            except (ValueError, LookupError, OSError) as error:  # the ranks did not leave all that they should
                rows.append(_build_failed_row(trial, stopped or f"{type(error).__name__}: {error}"))
                if stopped:
                    break
        return rows


def _build_compared_row(trial: Trial, verification: Verification) -> Row:
    errors = {name: getattr(verification, f"{name}_error") for name in ("loss", "gradient", "parameter")}
    return {"key": trial.key, "state": EQUAL if verification.equal else DIFFERENT, **errors}


def _build_failed_row(trial: Trial, reason: str) -> Row:
    return {"key": trial.key, "state": FAILED, "reason": reason}


def build_head() -> dict[str, Any]:
    """Return the circumstances under which the rows of a file are measured, without the date."""
    return {**describe_circumstances(), "steps": STEPS, "precision": "fp64", "tolerance": TOLERANCE}


def read_known_rows(path: Path) -> tuple[dict[str, Any], dict[str, Row]]:
    """Return the head of a file and its rows by key; a new head and no rows where the circumstances differ."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be cut short
    head = build_head()
    if not rows or {name: value for name, value in rows[0].items() if name != "date"} != head:
        return {"date": format_today(), **head}, {}
    judged_rows = (row for row in rows[1:] if row["state"] in (EQUAL, DIFFERENT))
    return rows[0], {row["key"]: {name: row[name] for name in _MEASURED} for row in judged_rows}


def build_rows(combinations: Sequence[Combination], ranks: Sequence[int], rows_by_key: Mapping[str, Row]) -> list[Row]:
    """Return a row for every combination, in order, without those whose techniques clash.

    ``same_as`` names the first combination that has the same plan.
    """
    kinds = {technique.name: technique.kind for technique in techniques()}
    first_names: dict[str, str] = {}
    rows: list[Row] = []
    for combination in combinations:
        if combination.clash:
            continue
        row: dict[str, Any] = {
            "techniques": list(combination.names),
            "kinds": [kinds[name] for name in combination.names],
        }
        if combination.job is None:
            rows.append(row | {"state": REFUSED, "reason": "; ".join(combination.reasons)})
            continue
        key = key_of(combination.job)
        row |= {"ranks": combination.ranks, "plan": combination.job.plan.describe()}
        if first_names.setdefault(key, combination.name) != combination.name:
            row["same_as"] = first_names[key]
        if combination.ranks not in ranks:
            row |= {"state": LEFT_OUT, "reason": f"{combination.ranks} ranks, not one of {', '.join(map(str, ranks))}"}
        elif key not in rows_by_key:
            row |= {"state": LEFT_OUT, "reason": "not run yet: time was up"}
        rows.append(row | dict(rows_by_key.get(key, {"key": key})))
    return rows


def format_page(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the rows as a page of Markdown: plans that ran, then refused and left-out ones by reason."""
    own_rows = [row for row in rows if "same_as" not in row]
    run_rows = [row for row in own_rows if row.get("state") in (EQUAL, DIFFERENT, FAILED)]
    equal_rows = [row for row in run_rows if row["state"] == EQUAL]
    refused_rows = [row for row in own_rows if row.get("state") == REFUSED]
    worst = max((row["gradient"] for row in equal_rows), default=0.0)
    lines = [
        "# Plans that ran, against one process",
        "",
        f"Every technique alone, every two, and some threes, {head['steps']} steps in {head['precision']}: "
        f"{len(equal_rows)} of {len(run_rows)} plans equal one process (loss and gradients within "
        f"{head['tolerance']:g}; largest gradient error {worst:.1e}), {len(refused_rows)} are refused before anything "
        "starts.",
        "",
        f"Written by `python -m tests.studies.plan_matrix` on {head['date']} with torch {head['torch']}, "
        f"Python {head['python']}, {head['machine']}.",
        "",
        "| techniques | plan | ranks | loss error | gradient error | parameter error | equal |",
        "|---|---|---|---|---|---|---|",
        *map(_format_line, run_rows),
        "",
        "## Refused",
        "",
        *_list_reasons(refused_rows),
        "",
        "## Left out",
        "",
        *_list_reasons(row for row in own_rows if row.get("state") == LEFT_OUT),
        "",
    ]
    return "\n".join(lines)


def _list_reasons(rows: Iterable[Row]) -> list[str]:
    """Return reasons as items of a list, each with the techniques that it holds for; that there are none where none."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(" + ".join(row["techniques"]))
    return [f"- {reason}\n  ({'; '.join(names)})" for reason, names in reasons.items()] or ["None."]


def _format_line(row: Row) -> str:
    start = f"| {' + '.join(row['techniques'])} | {row['plan']} | {row['ranks']} |"
    if row["state"] == FAILED:
        return f"{start} | | | failed: {row['reason'].replace('|', '/')} |"
    errors = " | ".join(f"{row[name]:.1e}" for name in ("loss", "gradient", "parameter"))
    return f"{start} {errors} | {'yes' if row['state'] == EQUAL else '**no**'} |"


def write(
    folder: Path,
    ranks: Sequence[int],
    combinations: Sequence[Combination],
    say: Callable[[str], None],
    seconds: float = inf,
) -> bool:
    """Run what is not known yet, write both files into ``folder``, and return whether all that ran is equal."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS
    head, known = read_known_rows(path)
    chosen = [trial for trial in trials(combinations) if trial.combination.ranks in ranks]
    rows_by_key = dict(known)
    with path.open("w") as lines:
        for row in (head, *known.values()):
            lines.write(json.dumps(row) + "\n")
        lines.flush()
        for row in run_trials(chosen, known, say, seconds=seconds):
            rows_by_key[row["key"]] = row
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if row["state"] != EQUAL:
                say(f"{row['state']}: {row}")
    rows = build_rows(combinations, ranks, rows_by_key)
    path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))
    (folder / PAGE).write_text(format_page(head, rows))
    return all(row.get("state") not in (DIFFERENT, FAILED) for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Run the matrix and return the exit code: 0 where all that ran is equal to one process."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.plan_matrix", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="processes of the plans that run")
    parser.add_argument("--out", type=Path, default=Path("reports/executor"), help="folder of table and rows")
    parser.add_argument("--seconds", type=float, default=inf, help="no launch begins after so long; run again to go on")
    options = parser.parse_args(arguments)
    require_torch()
    chosen = tuple(list_plans())
    try:
        all_equal = write(options.out, options.ranks, chosen, _say, options.seconds)
    except KeyboardInterrupt:
        _say("interrupted; run again to go on")
        return INTERRUPTED
    return 0 if all_equal else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
