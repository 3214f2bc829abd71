"""How well steps are predicted on this machine.

``python -m tests.studies.prediction_trials --out rows.jsonl``

The machine is calibrated first, with as many processes as the plans have ranks. Then every plan is predicted from that
calibration and run, and a row is written: predicted and measured step time (median of the steps after the first two),
memory, and busy seconds by kind of task. Memory is measured twice: by torch's allocator in the run, whose peak depends
on whether it coincides with copies that gloo makes of what it reduces or gathers; and by torch's memory tracker on the
same trainer without data, which sees only torch's tensors.

A machine that shares its processors has fast and slow minutes: a plan of another model
(`meshwise.scenarios.calibration.calibrate.drift`) runs before and after each plan, and the prediction is for the
geometric mean of both slowdowns. Nothing is fitted to the rows. A plan whose run fails is reported and has no row. With
more ranks than cores, times depend on the scheduler of the operating system, so that only the order of plans is judged,
by Kendall's tau. An interrupt keeps the rows written until then.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from meshwise.executor.launch.launcher import ExecutionError
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.launch.run import WARM_UP, execute
from meshwise.executor.options import RunOptions
from meshwise.executor.recording.timeline import sum_busy_times
from meshwise.executor.supported import find_unsupported
from meshwise.scenarios.calibration.calibrate import calibrate, drift, slow_down
from meshwise.scenarios.oracle_check import check_plan
from meshwise.simulator.engine import simulate
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import TaskKind
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

from .circumstances import describe_circumstances, format_today

SPEC = Transformer(layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, tied_embeddings=False)
"""The byte-level GPT of the scenarios for one machine."""
MODELS = {
    "gpt": SPEC,
    "llama": replace(SPEC, heads=8, ffn=352, ffn_kind="swiglu", positions="rotary"),  # two heads of queries a key
}
TRAINING = Training(16, 64, "fp32", framework="torch")


@dataclass(frozen=True, slots=True)
class Trial:
    """One plan, predicted and run, in seconds and bytes; a row of the file.

    ``kinds`` are a mean rank's busy seconds of a step by kind of task, measured under the profiler; step times are
    measured without it. Peaks are ``measured`` by torch's allocator and ``tracked`` by its memory tracker. ``load`` is
    the load average of the minute before the run; ``before`` and ``after`` are the step time of another model, before
    and after the run, over that at the calibration.
    """

    ranks: int
    plan: str
    predicted_step_time: float
    measured_step_time: float
    predicted_peak_memory: float
    measured_peak_memory: float
    tracked_peak_memory: float
    predicted_kinds: dict[str, float]
    measured_kinds: dict[str, float]
    load: float
    before: float
    after: float

    @property
    def time_error(self) -> float:
        """Predicted over measured step time, minus 1."""
        return self.predicted_step_time / self.measured_step_time - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak memory, minus 1."""
        return self.predicted_peak_memory / self.measured_peak_memory - 1

    @property
    def tracked_memory_error(self) -> float:
        """Predicted over tracked peak memory, minus 1."""
        return self.predicted_peak_memory / self.tracked_peak_memory - 1


def list_layouts(ranks: int, batch: int) -> list[Layout]:
    """Return different layouts of ``ranks`` ranks for a batch: first one of every split into axes, then further ones.

    >>> [(each.data, each.tensor, each.pipeline) for each in list_layouts(2, 16)[:3]]
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    splits = [
        (data, tensor, ranks // (data * tensor)) for data in sizes for tensor in sizes if ranks % (data * tensor) == 0
    ]
    families = [list(_list_variants(batch, *split)) for split in splits]
    return list(dict.fromkeys(layout for row in zip_longest(*families) for layout in row if layout is not None))


def _list_variants(batch: int, data: int, tensor: int, pipeline: int) -> Iterator[Layout]:
    count = 1 if pipeline == 1 else 2 * pipeline  # microbatches
    full_size = max(batch // (data * count), 1)
    base = Layout(data=data, tensor=tensor, pipeline=pipeline, microbatch=full_size)
    half_layout = replace(base, microbatch=max(full_size // 2, 1))
    yield base
    if data > 1:
        yield from (replace(base, zero=zero) for zero in (1, 3, 2))
    if tensor > 1:
        yield replace(base, sequence_parallel=True)
        yield replace(half_layout, sequence_parallel=True, recompute=Recompute.FULL)
    if pipeline > 1:
        yield replace(base, schedule="gpipe")
        yield replace(base, schedule="interleaved", chunks=2)
        yield replace(base, schedule="zb1p")
    yield half_layout
    yield replace(base, recompute=Recompute.FULL)
    if data > 1:
        yield replace(half_layout, zero=3, recompute=Recompute.FULL)
        yield replace(base, overlap_gradients=False)
    if pipeline > 1:
        yield replace(half_layout, schedule="gpipe", recompute=Recompute.FULL)
    yield replace(base, recompute=Recompute.SELECTIVE)
    yield replace(half_layout, recompute=Recompute.SELECTIVE)
    yield replace(base, microbatch=max(full_size // 4, 1))


def list_plans(problem: Problem, ranks: int, max_plans: int, spec: Transformer = SPEC) -> list[Plan]:
    """Return the plans of the first ``max_plans`` layouts of `list_layouts` that suit the problem and the executor."""
    return list(islice(_list_executable(problem, ranks, spec), max_plans))


def _list_executable(problem: Problem, ranks: int, spec: Transformer) -> Iterator[Plan]:
    known_plans = set()
    for layout in list_layouts(ranks, problem.training.global_batch):
        try:
            plan = complete(problem, layout)
        except ValueError:  # not of this problem: more stages than layers, a batch that does not divide
            continue
        if plan not in known_plans and not find_unsupported(spec, problem.training, plan):
            known_plans.add(plan)
            yield plan


def trial(
    problem: Problem,
    plan: Plan,
    steps: int,
    folder: Path,
    drift_before: float = 1.0,
    calm_drift: float = 1.0,
    spec: Transformer = SPEC,
) -> Trial:
    """Predict a plan, run it for ``steps`` steps after the first two, and return both.

    ``calm_drift`` is the drift at the calibration, ``drift_before`` the current drift over it.
    """
    load = os.getloadavg()[0]
    run = execute(spec, problem.training, plan, RunOptions(steps + WARM_UP, verify=False), folder=folder)
    drift_after = drift(problem.cluster) / calm_drift
    current_problem = replace(problem, cluster=slow_down(problem.cluster, math.sqrt(drift_before * drift_after)))
    # simulated only now: the drift after the run is part of the prediction's machine
    prediction = simulate(lower(current_problem, plan), "discrete_event")
    return Trial(
        ranks=plan.mesh.num_ranks,
        plan=plan.describe(),
        predicted_step_time=prediction.step_time,
        measured_step_time=run.step_time,
        predicted_peak_memory=prediction.peak_memory,
        measured_peak_memory=run.peak_memory,
        tracked_peak_memory=check_plan(spec, problem, plan).peak,
        predicted_kinds=_sum_kinds(prediction),
        measured_kinds=_sum_kinds(run.timeline),
        load=load,
        before=drift_before,
        after=drift_after,
    )


def _sum_kinds(timeline: Timeline) -> dict[str, float]:
    return {str(kind): seconds for kind, seconds in sum_busy_times(timeline).items()}


def summarize_trials(trials: Sequence[Trial]) -> list[str]:
    """Return lines about the trials: errors of time and memory, the order of plans, and the ratio by kind of task."""
    if not trials:
        return ["no plan was run"]
    result = [f"{len(trials)} plans of {trials[0].ranks} ranks"]
    for label, errors in (
        ("step time", [item.time_error for item in trials]),
        ("peak memory, tracker", [item.tracked_memory_error for item in trials]),
        ("peak memory, allocator", [item.memory_error for item in trials]),
    ):
        sizes = [abs(error) for error in errors]
        worst_trial = trials[sizes.index(max(sizes))]
        result.append(f"{label}: median error {median(sizes):.1%}, worst {max(sizes):.1%} ({worst_trial.plan})")
    pairs = [(item.predicted_step_time, item.measured_step_time) for item in trials]
    result.append(f"order of plans by step time: Kendall's tau {kendall_tau(pairs):.2f}")
    for kind in map(str, TaskKind):
        kind_times = [(item.predicted_kinds.get(kind, 0.0), item.measured_kinds.get(kind, 0.0)) for item in trials]
        if measured_total := sum(measured_time for _, measured_time in kind_times):
            predicted_total = sum(predicted_time for predicted_time, _ in kind_times)
            result.append(f"{kind}: predicted {predicted_total / measured_total:.2f} of what was measured")
    return result


def run_trials(
    max_plans: int, ranks: int, steps: int, seconds: float, out_path: Path, model: str = "gpt"
) -> list[Trial]:
    """Calibrate, run plans of a model, write one row each to a file and return the trials."""
    _note(f"calibrating {ranks} processes for about {seconds:.0f} s")
    machine = calibrate(processes=ranks, seconds=seconds)
    spec = MODELS[model]
    problem = Problem(build(spec, TRAINING.sequence, TRAINING.precision), machine, TRAINING)
    trials: list[Trial] = []
    drift_before, calm_drift = 1.0, drift(machine)
    trial_plans = list_plans(problem, ranks, max_plans, spec)
    with out_path.open("w") as file:
        head = {"date": format_today(), **describe_circumstances(), "model": model, "ranks": ranks, "steps": steps}
        file.write(json.dumps(head) + "\n")
        for number, plan in enumerate(trial_plans, 1):
            with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
                try:
                    result = trial(problem, plan, steps, Path(folder), drift_before, calm_drift, spec)
                except ExecutionError as error:
                    _note(f"{number}/{len(trial_plans)} {plan.describe()}: {error}")
                    continue
            trials.append(result)
            drift_before = result.after
            file.write(json.dumps(_build_row(result)) + "\n")
            file.flush()
            times = (
                f"{result.predicted_step_time * 1e3:.1f} ms predicted, {result.measured_step_time * 1e3:.1f} measured"
            )
            paces = f"drift {result.before:.2f} to {result.after:.2f}, load {result.load:.1f}"
            _note(f"{number}/{len(trial_plans)} {result.plan}: {times} ({result.time_error:+.1%}), {paces}")
    return trials


def _build_row(result: Trial) -> dict[str, Any]:
    errors = ("time_error", "memory_error", "tracked_memory_error")
    return asdict(result) | {name: getattr(result, name) for name in errors}


def _note(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials of the command line, print their summary and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.prediction_trials", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", choices=MODELS, default="gpt", help="of which model (gpt)")
    parser.add_argument("--plans", type=int, default=24, help="different plans (24)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a plan (2)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a plan, after two to warm up (20)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to calibrate, about (60)")
    parser.add_argument("--out", type=Path, required=True, metavar="ROWS.jsonl", help="one row a plan")
    options = parser.parse_args(arguments)
    if min(options.plans, options.ranks, options.steps) < 1 or options.seconds <= 0:
        parser.error("plans, ranks and steps are at least 1 and seconds above 0")
    try:
        run_trials(
            options.plans,
            options.ranks,
            options.steps,
            options.seconds,
            options.out,
            options.model,
        )
    except KeyboardInterrupt:
        _note("interrupted")
        code = INTERRUPTED
    else:
        code = 0
    for line in summarize_trials(read_trials(options.out)):
        print(line)
    return code


def read_trials(path: Path) -> list[Trial]:
    """Return the trials of a file, whose first line is a header; none where the file is missing."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [Trial(**{name: row[name] for name in Trial.__dataclass_fields__}) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
