"""Pairs of runs of one source that differ in one switch alone: they test structure free of any scale.

Run ``python -m tests.studies.pairs ROWS.jsonl`` for the errors of predicted ratios by field. Of every pair the ratio
of both measured step times is compared with that of both predictions; pairs whose measured times differ by less than
3 % say nothing, for repeats of a run differ as much.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

from meshwise.scenarios.console import BAD_INPUT, note, print_table
from meshwise.scenarios.published.accuracy import Prediction, load_runs, predict_all, select_split

from .interval_ends import is_timed

SWITCHES = (
    "norm_kernel", "compiled", "tp_overlap", "precision", "micro_batch", "zero_stage", "recompute", "attention_kernel",
    "schedule", "vpp", "sequence_parallel", "loss", "dp_overlap", "gradient_precision", "offload",
)  # fmt: skip
"""Fields of a plan or of software in which the runs of a pair may differ."""

SAME = (
    "source_id", "model", "accelerator", "n_devices", "global_batch", "seq_len", "dp", "tp", "pp", "cp", "ep",
    "framework", "recompute_detail", "n_layers", "hidden", *SWITCHES,
)  # fmt: skip
"""Fields in which all but one are equal."""


LEAST_DIFFERENCE = 0.03


class Pair(NamedTuple):
    """Two runs that differ in ``field``: the ratio of their measured step times, and that of their predicted ones."""

    field: str
    source: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted ratio."""
        return self.predicted / self.measured - 1.0


def list_pairs(rows: Sequence[Mapping[str, Any]], predictions: Sequence[Prediction]) -> Iterator[Pair]:
    """Yield the pairs among rows, each with its prediction, the slower run over the faster one."""
    groups: dict[tuple[str, ...], list[tuple[Mapping[str, Any], Prediction]]] = defaultdict(list)
    for row, prediction in zip(rows, predictions, strict=True):
        if is_timed(prediction):
            for field in SWITCHES:
                key = (field, *(json.dumps(row.get(name)) for name in SAME if name != field))
                groups[key].append((row, prediction))
    for (field, *_), members in groups.items():
        for (first, first_run), (second, second_run) in combinations(members, 2):
            if json.dumps(first.get(field)) == json.dumps(second.get(field)):
                continue
            times = [row.run.step_time or 0.0 for row in (first_run, second_run)]
            seconds = [row.step_time or 0.0 for row in (first_run, second_run)]
            slower = times.index(max(times))
            if max(times) >= (1 + LEAST_DIFFERENCE) * min(times):
                measured, predicted = (values[slower] / values[1 - slower] for values in (times, seconds))
                yield Pair(field, first_run.run.source, measured, predicted)


HEAD = ("switch", "source", "pairs", "measured ratio", "predicted", "mean error")


def list_lines(pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield the rows under `HEAD`, and one for all pairs, in which every switch of a source counts once."""
    members: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        members[pair.field, pair.source].append(pair)
    errors = []
    for (field, source), rows in sorted(members.items()):
        error = fmean(abs(row.error) for row in rows)
        errors.append(error)
        ratios = (fmean(values) for values in zip(*((row.measured, row.predicted) for row in rows), strict=True))
        yield field, source, str(len(rows)), *(f"{ratio:.3f}" for ratio in ratios), f"{100 * error:.1f} %"
    if errors:
        yield "all", "", str(len(pairs)), "", "", f"{100 * fmean(errors):.1f} %"


def main(arguments: Sequence[str]) -> int:
    """Print the errors of predicted ratios of the pairs in a file; return the exit code."""
    if len(arguments) != 1:
        note("usage: python -m tests.studies.pairs ROWS.jsonl")
        return BAD_INPUT
    try:
        runs = select_split(load_runs(arguments[0]), judge=False)
        with open(arguments[0], encoding="utf-8") as file:
            fields = {row["row_id"]: row for row in map(json.loads, file)}
        print_table(HEAD, list(list_lines(list(list_pairs([fields[run.row_id] for run in runs], predict_all(runs))))))
    except (KeyError, OSError, ValueError) as error:
        note(f"{arguments[0]}: {error!s}")
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
