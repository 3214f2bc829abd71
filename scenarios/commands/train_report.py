"""What ``meshwise train`` tells of a run: its progress, and its measurements at the end."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshwise.executor.device import CPU
from meshwise.scenarios.console import Ticker, emit, note, print_rows
from meshwise.simulator.units import format_size, format_time

if TYPE_CHECKING:
    from meshwise.executor.user_training.log import StepRow
    from meshwise.executor.user_training.run import TrainRun
    from meshwise.scenarios.module_plans.choosing import PlannedRun

RECENT = 20
"""Steps whose mean seconds say how long the rest takes."""
QUIET_TIME = 30.0
"""Seconds between lines of progress where stderr is no terminal."""


class Follower:
    """Shows the progress of a run: on a terminal in one line that overwrites itself, else in a line at times.

    Figures of an evaluation have a line that stays.

    Parameters
    ----------
    first_lines
        Lines that are told with the first step.
    """

    def __init__(self, ticker: Ticker, num_steps: int, first_lines: Sequence[str] = ()) -> None:
        self.ticker, self.num_steps = ticker, num_steps
        self._first_lines = list(first_lines)
        self._recent_times: list[float] = []
        self._last_line = time.monotonic()

    def __call__(self, row: "StepRow") -> None:
        """Show a step."""
        while self._first_lines:
            self.ticker.clear()
            note(self._first_lines.pop(0))
        self._recent_times = [*self._recent_times, row.seconds][-RECENT:]
        text = self.describe(row)
        if row.evaluation:
            self.ticker.clear()
            note(f"step {row.step}: {describe_figures(row.evaluation)}")
        if self.ticker.is_terminal:
            self.ticker(text)
        elif time.monotonic() - self._last_line >= QUIET_TIME:
            self._last_line = time.monotonic()
            note(text)

    def describe(self, row: "StepRow") -> str:
        """Return progress, loss, samples or tokens a second, and the time that is left."""
        num_done = row.step + 1
        left = (self.num_steps - num_done) * sum(self._recent_times) / len(self._recent_times)
        share = f"{num_done}/{self.num_steps} ({num_done / self.num_steps:.0%})"
        rate = describe_rate(row.samples, row.tokens, row.seconds)
        return f"step {share}, loss {row.loss:.4f}, {rate}, {format_left(left)} left"


def format_left(seconds: float) -> str:
    """Return a time in hours, minutes and seconds.

    >>> format_left(4521.4), format_left(61), format_left(3)
    ('1:15:21', '1:01', '0:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_rate(samples: int, tokens: int | None, seconds: float) -> str:
    """Return tokens a second where there are tokens, else samples."""
    return f"{samples / seconds:.4g} samples/s" if tokens is None else f"{tokens / seconds:.4g} tokens/s"


def describe_figures(figures: dict[str, float]) -> str:
    """Return the figures of an evaluation in words."""
    return "evaluation " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items())


def tell_run(run: "TrainRun", planned: "PlannedRun", *, as_json: bool) -> None:
    """Print a run with its prediction."""
    if as_json:
        emit(to_json(run, planned))
    else:
        _print_run(run, planned)


def to_json(run: "TrainRun", planned: "PlannedRun") -> dict[str, Any]:
    """Return a run with its prediction as JSON-ready data."""
    difference, prediction = run.difference, planned.prediction
    return {
        "plan": run.job.layout.to_json(),
        "first_step": run.first_step,
        "loss": list(run.losses),
        "evaluation": [{"step": row.step} | row.evaluation for row in run.evaluations],
        "step_time": run.step_time,
        "predicted_step_time": None if prediction is None else prediction.step_time,
        "samples_per_second": run.samples / run.step_time,
        "tokens_per_second": None if run.tokens is None else run.tokens / run.step_time,
        "parameters": run.parameters,
        "blocks": run.blocks,
        "tables": run.tables or None,
        "peak_memory": run.peak_memory,
        "predicted_peak_memory": None if prediction is None else prediction.peak_memory,
        "plans": planned.num_plans,
        "assumptions": planned.list_assumptions(),
        "host_memory": run.host_memory,
        "whole_start": run.whole_reason or None,
        "verify": None
        if difference is None
        else {
            "loss_error": difference.loss,
            "parameter_error": difference.weights,
            "reference": "single process",
            "draws_error": difference.draws,
            "update": None
            if difference.update is None
            else {
                "error": difference.update.error,
                "bound": difference.update.bound,
                "name": difference.update.name,
                "equal": difference.update.is_equal,
            },
            "equal": difference.is_equal,
        },
        "checkpoint": str(run.checkpoints),
        "weights": str(run.weights),
    }


def _compare(predicted: float, measured: float | None, describe: Callable[[float], str]) -> str:
    """Return a predicted figure with its error."""
    error = "" if measured is None else f", {predicted / measured - 1:+.1%}".replace("%", " %")
    return f"{describe(predicted)}{error}"


def _print_run(run: "TrainRun", planned: "PlannedRun") -> None:
    difference, prediction = run.difference, planned.prediction
    first_loss, last_loss, last_step = run.losses[0], run.losses[-1], run.first_step + len(run.losses)
    rate = describe_rate(run.samples, run.tokens, run.step_time)
    rows = [
        ("plan", run.job.layout.describe()),
        ("module", f"{run.parameters:,} parameters, {run.blocks} blocks"),
        *([("start", f"with the whole module on every rank: {run.whole_reason}")] if run.whole_reason else []),
        *([("tables", run.tables)] if run.tables else []),
        ("loss", f"{first_loss:.4f} at step {run.first_step}, {last_loss:.4f} at step {last_step - 1}"),
        *(
            ("evaluation", ", ".join(f"{name} {value:.6g}" for name, value in row.evaluation.items()))
            for row in run.evaluations[-1:]
        ),
        ("step time", f"{format_time(run.step_time)} (median), {rate}"),
    ]
    if prediction is not None:
        rows.append(("predicted step time", _compare(prediction.step_time, run.step_time, format_time)))
    where = "of tensors of a process" if run.job.device == CPU else "of tensors on a device"
    if run.peak_memory is not None:
        rows.append(("peak memory", f"{format_size(run.peak_memory)} {where}"))
    if prediction is not None:
        rows.append(("predicted memory", _compare(prediction.peak_memory, run.peak_memory, format_size)))
    rows.append(("memory of a process", f"{format_size(run.host_memory)}, with Python and torch"))
    if difference is not None:
        rows.append(
            (
                "equal to one process",
                f"yes: losses {difference.loss:.0e}, weights {difference.weights:.0e} apart in fp64",
            )
        )
        if difference.draws is not None:
            rows.append(("equal recomputation", f"yes: with dropout {difference.draws:.0e} apart from kept blocks"))
        if (update := difference.update) is not None:
            text = f"yes: {update.error:.2f} of at most {update.bound:.2f} ({update.name})"
            rows.append((f"updates in {run.job.precision}", text))
    print_rows([*rows, ("checkpoints", str(run.checkpoints)), ("weights", str(run.weights))])
