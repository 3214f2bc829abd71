"""Twelve runs of ``meshwise train`` on one device: step time and memory as predicted, and as measured.

The prediction comes first, from some seconds of each module, as the command makes it. Nothing is fitted to the runs.
"""

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import train
from meshwise.scenarios.module_plans.planning import plan_run

from . import language
from .language import Sizes
from .rows import LEFT_OUT, OK, RowFile, read_rows

STEPS = 12
TIME_ASKED, MEMORY_ASKED = 0.15, 0.05
"""Median error of the time of a step, and error of the peak of memory, at most."""
LONGEST = 690.0
"""Seconds after which no further run begins."""
GIB = 2.0**30

FILE = """
import torch

from language import Llama, Sizes, Tokens

SIZES, BATCH = Sizes{sizes}, {batch}


def model():
    return Llama(SIZES)


def data():
    return Tokens(SIZES, 64 * BATCH)
"""


class Model(NamedTuple):
    """A model with the samples of a step."""

    name: str
    sizes: Sizes
    batch: int


class Run(NamedTuple):
    """A model under the words of a plan."""

    model: Model
    words: str
    precision: str


SMALL = Model("125M", Sizes(12, 768, 12, 12, 2048, 32000, 1024), 16)
MIDDLE = Model("350M", Sizes(24, 1024, 16, 4, 2816, 32000, 1024), 16)
LARGE = Model("1.1B", language.TINY_LLAMA, 4)
TINY = Model("tiny", Sizes(2, 32, 4, 2, 64, 128, 16), 4)
RUNS = (
    *(Run(SMALL, words, "bf16") for words in ("num_microbatches=1", "num_microbatches=4", "recompute=full")),
    *(Run(SMALL, words, "fp32") for words in ("num_microbatches=2", "recompute=full")),
    *(Run(MIDDLE, words, "bf16") for words in ("num_microbatches=1", "num_microbatches=4", "recompute=full")),
    Run(MIDDLE, "num_microbatches=2,recompute=full", "fp32"),
    *(Run(LARGE, words, "bf16") for words in ("num_microbatches=1", "num_microbatches=2", "recompute=full")),
)
TINY_RUNS = (Run(TINY, "num_microbatches=2,recompute=full", "bf16"),)


def predict_and_run(run: Run, device: str) -> dict[str, Any]:
    """Return what a run was predicted to take, what it took, and the errors."""
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder = Path(name)
        shutil.copy(language.__file__, folder / "language.py")
        file = folder / "run.py"
        file.write_text(FILE.format(sizes=tuple(run.model.sizes), batch=run.model.batch))
        layout = parse_layout(run.words, ModuleLayout())
        job = TrainJob(str(file), layout, STEPS, precision=run.precision, checkpoint_every=-1, device=device)
        planned = plan_run(job, layout=layout, processes=1, calibrates=True)
        result = train(job, folder / "out")
    measured: dict[str, Any] = {"step_time": result.step_time, "peak_memory": result.peak_memory}
    figures = {"parameters": result.parameters, "assumptions": planned.assumptions, **measured}
    if planned.prediction is None:
        raise RuntimeError(f"no prediction: {'; '.join(planned.assumptions)}")
    predicted = {name: getattr(planned.prediction, name) for name in measured}
    errors = {name: None if value is None else predicted[name] / value - 1 for name, value in measured.items()}
    summary = f"{result.step_time * 1e3:.1f} ms, predicted {errors['step_time']:+.1%}"
    if errors["peak_memory"] is not None:
        summary += f"; {result.peak_memory / GIB:.2f} GiB, predicted {errors['peak_memory']:+.1%}"
    return figures | {"predicted": predicted, "errors": errors, "summary": summary}


def sum_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the largest size of the errors of rows, beside what is asked."""
    figures: dict[str, Any] = {"runs": len(rows)}
    words = []
    for name, asked in (("step_time", TIME_ASKED), ("peak_memory", MEMORY_ASKED)):
        sizes = [abs(row["errors"][name]) for row in rows if row["errors"][name] is not None]
        if not sizes:
            continue
        met = median(sizes) <= asked
        figures[name] = {"median": median(sizes), "largest": max(sizes), "asked": asked, "met": met}
        words.append(
            f"{name.replace('_', ' ')} {median(sizes):.1%} median, {max(sizes):.1%} at most: "
            f"{'met' if met else 'not met'} (at most {asked:.0%})"
        )
    return figures | {"summary": "; ".join(words) or "no run was measured"}


def measure(rows: RowFile, device: str, *, is_tiny: bool) -> None:
    """Predict and run everything, one row each, and one with the errors of all."""
    end = monotonic() + LONGEST
    for run in TINY_RUNS if is_tiny else RUNS:
        case = f"{run.model.name}, {run.precision}, {run.words}"
        if monotonic() > end:
            rows.write(case, LEFT_OUT, reason=f"{LONGEST:.0f} s are over")
            continue
        rows.measure(case, partial(predict_and_run, run, device))
    own = [row for row in read_rows(rows.path) if row["part"] == rows.part and row["status"] == OK]
    rows.write("all", OK, **sum_up(own))
