"""Predictions of whether a plan fits against what happened, by publisher.

Run ``python -m tests.studies.memory_accuracy ROWS.jsonl [THREADS.jsonl] FOLDER`` to write ``memory.md``
and ``memory.json`` into a folder; the project's own are in ``reports/accuracy``. A line of the second file is a job
described in a discussion thread: its ``plan``, and whether it ran or ran out of memory.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.console import BAD_INPUT, Ticker, note
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.results import make_folder, write
from meshwise.scenarios.intervals import RISK
from meshwise.scenarios.published.accuracy import Prediction, count_confusion, load_runs, predict_all, select_split
from meshwise.scenarios.published.runs import Run, build_run
from meshwise.scenarios.published.vocabulary.publishers import find_publisher
from meshwise.simulator.files import JsonError, parse_json

TITLE = "Whether it fits: predicted against what happened"
PAGE, DATA = "memory.md", "memory.json"

BEFORE: Mapping[str, Any] = {
    "commit": "d9f4d73",
    "wrong": {
        "Aleph Alpha": (89, 109),
        "Alpa": (2, 0),
        "Google": (0, 16),
        "Huawei": (0, 11),
        "Jack31098": (0, 1),
        "NVIDIA": (0, 1),
        "PyTorch": (0, 16),
        "all": (91, 154),
    },
    "threads": (9, 1),
    "picks": {"jobs": 15, "out_of_memory": 3},
}
"""Wrong predictions of the former rule by publisher: (predicted to fit but out of memory, the reverse).

That rule compared tensors alone with the nominal memory of a device. Measured with this file added to that commit.
"""

_FIELDS = {
    "data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "virtual": "vpp",
    "microbatch": "micro_batch", "grad_accum": "grad_accum", "global_batch": "global_batch", "sequence": "seq_len",
    "zero": "zero_stage", "recompute": "recompute", "offload": "offload", "sequence_parallel": "sequence_parallel",
    "precision": "precision", "optimizer": "optimizer",
}  # fmt: skip
"""Fields of a published row by the fields of a thread's plan."""
_SHARED_FIELDS = ("model", "n_params", "accelerator", "accel_mem_gb", "n_devices", "devices_per_node", "framework")
_REQUIRED_FIELDS = ("microbatch", "sequence")
_TIERS = ("A", "B")
"""Tiers of threads that are judged: A states all that memory depends on, B lacks a field or two with an obvious
default."""


def judge_memory(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the confusion matrices by publisher and overall, and the outcome of picks, as JSON-ready data."""
    rows: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        rows[find_publisher(prediction.run.source).name].append(prediction)
    return {
        "risk": RISK,
        "rows": len(predictions),
        "skipped": sum(bool(row.skipped) for row in predictions),
        "publishers": {name: count_confusion(rows[name]) for name in sorted(rows, key=str.lower)},
        "all": count_confusion(predictions),
        "before": dict(BEFORE),
        "picks": judge_picks(predictions),
    }


def judge_picks(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the outcome of the picks: of every job the plan predicted fastest among those predicted to fit.

    A job is a model, machine, batch and sequence of one source. Only jobs count in which some plan ran and another ran
    out of memory: in the others every choice is right, or none is.
    """
    jobs: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for row in predictions:
        if row.step_time is not None:
            jobs[row.run.source, row.run.group].append(row)
    counts: Counter[str] = Counter()
    failed = []
    for (source, job), rows in sorted(jobs.items()):
        if not {"ok", "oom"} <= {row.run.status for row in rows}:
            continue
        fitting = [row for row in rows if row.fits]
        picked_row = min(fitting, key=lambda row: (row.step_time or 0.0, row.run.row_id), default=None)
        outcome = "none said to fit" if picked_row is None else picked_row.run.status
        counts[outcome] += 1
        if picked_row is not None and outcome == "oom":
            failed.append({"publisher": find_publisher(source).name, "job": job, "row": picked_row.run.row_id})
    return {
        "jobs": sum(counts.values()),
        "ran": counts["ok"],
        "out_of_memory": counts["oom"],
        "nothing_said_to_fit": counts["none said to fit"],
        "failed": failed,
    }


def read_threads(path: str | Path) -> list[dict[str, Any]]:
    """Return the threads in a file of JSON lines; `ScenarioError` names a faulty line."""
    with open(path, "rb") as file:
        return [_parse_thread(line, str(path), number) for number, line in enumerate(file, start=1) if line.strip()]


def _parse_thread(line: bytes, file: str, number: int) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except JsonError as error:
        raise ScenarioError((Fault(file, number, error.column, "", f"a thread is a JSON object: {error}"),)) from None
    if not isinstance(value, dict) or not isinstance(value.get("outcome"), dict) or "case_id" not in value:
        raise ScenarioError((Fault(file, number, 1, "", "a thread is a JSON object with a case_id and an outcome"),))
    if not isinstance(value.get("plan") or {}, dict):
        raise ScenarioError((Fault(file, number, 1, "plan", "the plan of a thread is a JSON object"),))
    return value


def explain_exclusion(thread: Mapping[str, Any]) -> str:
    """Return the reason why a thread cannot be judged; empty where it can."""
    plan, status = thread.get("plan") or {}, thread["outcome"].get("status")
    if status is None:
        return "no outcome stated"
    if status not in ("ok", "oom"):
        return "ran for some and ran out of memory for others"
    if plan.get("lora"):
        return "trains adapters, not the model"
    if thread.get("kind") in ("rlhf", "host memory"):
        return "holds several models, or lacks memory of a host"
    missing = [name for name in _REQUIRED_FIELDS if plan.get(name) is None]
    return f"no {' and no '.join(missing)} stated" if missing else ""


def build_thread_run(thread: Mapping[str, Any]) -> Run:
    """Return the run of a thread's job, with its scenario or the reason why it has none."""
    plan = thread.get("plan") or {}
    row = {name: thread.get(name) for name in _SHARED_FIELDS} | {
        row_field: plan.get(thread_field) for thread_field, row_field in _FIELDS.items()
    }
    row |= {"row_id": thread["case_id"], "source_id": thread.get("repository"), "status": thread["outcome"]["status"]}
    return build_run(row, str(thread["case_id"]))


def judge_threads(threads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the confusion matrix of the threads' jobs, and why others are not judged, as JSON-ready data."""
    judged_tiers = [thread for thread in threads if thread.get("tier") in _TIERS]
    reasons = {id(thread): explain_exclusion(thread) for thread in judged_tiers}
    predictions = predict_all([build_thread_run(thread) for thread in judged_tiers if not reasons[id(thread)]])
    skipped = [reason for reason in reasons.values() if reason] + [row.skipped for row in predictions if row.skipped]
    return {
        "threads": len(judged_tiers),
        "confusion": count_confusion(predictions),
        "wrong": [
            {"case": row.run.row_id, "said": "fits" if row.fits else "does not fit", "was": row.run.status}
            for row in predictions
            if row.fits is not None and row.fits != (row.run.status == "ok")
        ],
        "not_judged": dict(Counter(skipped).most_common()),
    }


HEAD = ("publisher", "fits, and ran", "fits, but out of memory", "does not fit, but ran", "does not fit, out of memory")
_OUTCOMES = ("true_fit", "false_fit", "false_oom", "true_oom")


def format_page(result: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    sections = [
        Section("What this is", tuple(_build_introduction(result))),
        Section("By publisher", (), (HEAD, *_list_rows(result))),
        _build_before(result),
        Section("Picks", tuple(_describe_picks(result["picks"]))),
    ]
    if "threads" in result:
        sections.append(_build_threads(result["threads"]))
    return to_markdown(TITLE, sections)


def _build_introduction(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{result['rows']} published runs, of which {result['skipped']} could not be predicted. A plan is said to fit "
        f"where its predicted peak, with what the allocator keeps beside tensors, exceeds the memory that the "
        f"framework reports with a probability of {100 * result['risk']:g} % at most. Written by "
        "python -m tests.studies.memory_accuracy."
    )
    yield (
        "How much the allocator keeps comes from other runs (intervals of prediction_intervals.json). A run of which "
        "recompute or microbatch is not stated is given the first that fits, so that it is said to fit wherever "
        "anything does: of those the table says little."
    )


def _list_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, publisher_figures in {**result["publishers"], "all": result["all"]}.items():
        if sum(publisher_figures.values()):
            yield (name, *(str(publisher_figures[outcome]) for outcome in _OUTCOMES))


def _build_before(result: Mapping[str, Any]) -> Section:
    former_result, current_result = result["before"], {**result["publishers"], "all": result["all"]}
    picks, threads = former_result["picks"], former_result["threads"]
    words = (
        f"At commit {former_result['commit']} fits compared tensors with the nominal memory of a device. What was told "
        f"wrongly then and is now, by publisher; {picks['out_of_memory']} of the picks of {picks['jobs']} jobs ran out "
        f"of memory. Of the jobs of threads {threads[0]} were said to fit and ran out, {threads[1]} the reverse."
    )
    rows = (
        (
            name,
            str(before_fit),
            str(current_result[name]["false_fit"]),
            str(before_oom),
            str(current_result[name]["false_oom"]),
        )
        for name, (before_fit, before_oom) in former_result["wrong"].items()
        if name in current_result
    )
    return Section("Before", (words,), (_BEFORE_HEAD, *rows))


_BEFORE_HEAD = (
    "publisher",
    "fits, but out of memory: before",
    "now",
    "does not fit, but ran: before",
    "now",
)


def _describe_picks(pick_figures: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Of {pick_figures['jobs']} jobs (a model, a machine, a batch and a sequence) some plan ran and another ran "
        "out of memory. Of each the plan was taken that is predicted fastest among those said to fit: "
        f"{pick_figures['ran']} ran, {pick_figures['out_of_memory']} ran out of memory, and of "
        f"{pick_figures['nothing_said_to_fit']} no plan was said to fit."
    )
    if pick_figures["failed"]:
        yield "Out of memory: " + "; ".join(f"{pick['job']} ({pick['row']})" for pick in pick_figures["failed"]) + "."


def _build_threads(thread_figures: Mapping[str, Any]) -> Section:
    confusion_counts = thread_figures["confusion"]
    words = [
        f"Of {thread_figures['threads']} jobs that people wrote of, {sum(confusion_counts.values())} could be judged: "
        f"{confusion_counts['true_fit']} were said to fit and ran, "
        f"{confusion_counts['true_oom']} were said not to and ran out of memory, "
        f"{confusion_counts['false_fit']} were said to fit and ran out, "
        f"{confusion_counts['false_oom']} were said not to fit and ran. "
        "The others are counted below with the reason. They are no random sample: people write when something fails."
    ]
    if thread_figures["wrong"]:
        cases = (
            f"{thread['case']} ({thread['said']}, {'ran' if thread['was'] == 'ok' else 'ran out'})"
            for thread in thread_figures["wrong"]
        )
        words.append("Told wrongly: " + "; ".join(cases) + ".")
    rows = ((reason, str(count)) for reason, count in thread_figures["not_judged"].items())
    return Section("Jobs of threads", tuple(words), (("why not judged", "jobs"), *rows))


def main(arguments: Sequence[str]) -> int:
    """Write the page and its data into the folder of the command line; return the exit code."""
    if len(arguments) not in (2, 3):
        note("usage: python -m tests.studies.memory_accuracy ROWS.jsonl [THREADS.jsonl] FOLDER")
        return BAD_INPUT
    ticker = Ticker()
    try:
        rows, *thread_files, place = arguments
        target = make_folder(place)
        threads = read_threads(thread_files[0]) if thread_files else []
        result = judge_memory(
            predict_all(
                select_split(load_runs(rows), judge=False),
                lambda num_done, num_runs: ticker(f"{num_done} of {num_runs} runs"),
            )
        )
        if threads:
            result["threads"] = judge_threads(threads)
        write(target / DATA, json.dumps(result, indent=1) + "\n")
        write(target / PAGE, format_page(result))
    except (OSError, ValueError) as error:
        note(str(error))
        return BAD_INPUT
    finally:
        ticker.clear()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
