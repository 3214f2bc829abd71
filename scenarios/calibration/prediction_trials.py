"""How well steps are predicted on this machine.

``python -m meshwise.scenarios.calibration.prediction_trials --out rows.jsonl``

The machine is calibrated first, with as many processes as the plans have ranks. Then every plan is predicted from that
calibration and run, and a row is written: predicted and measured step time (median of the steps after the first two),
memory, and busy seconds by kind of task. Memory is measured twice: by torch's allocator in the run, whose peak depends
on whether it coincides with copies that gloo makes of what it reduces or gathers; and by torch's memory tracker on the
same trainer without data, which sees only torch's tensors.

A machine that shares its processors has fast and slow minutes: a plan of another model
(`meshwise.scenarios.calibration.pace.drift`) runs before and after each plan, and the prediction is for the geometric
mean of both slowdowns. Nothing is fitted to the rows. A plan whose run fails is reported and has no row. With more
ranks than cores, times depend on the scheduler of the operating system, so that only the order of plans is judged, by
Kendall's tau. An interrupt keeps the rows written until then.
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

from meshwise.executor.launch.doctor import circumstances, today
from meshwise.executor.launch.launcher import ExecutionError
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.launch.run import WARM_UP, execute
from meshwise.executor.options import RunOptions
from meshwise.executor.recording.timeline import busy_by_kind
from meshwise.executor.supported import unsupported
from meshwise.scenarios.calibration.calibrate import calibrate
from meshwise.scenarios.calibration.pace import drift, slower
from meshwise.scenarios.oracle_check import check
from meshwise.simulator.engine import simulate
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import TaskKind
from meshwise.simulator.rank_correlation import kendall_tau
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.lowering import lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import Recompute

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


def layouts(ranks: int, batch: int) -> list[Layout]:
    """Return different layouts of ``ranks`` ranks for a batch: first one of every split into axes, then further ones.

    >>> [(each.data, each.tensor, each.pipeline) for each in layouts(2, 16)[:3]]
    [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    """
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    splits = [(d, t, ranks // (d * t)) for d in sizes for t in sizes if ranks % (d * t) == 0]
    families = [list(_variants(batch, *split)) for split in splits]
    return list(dict.fromkeys(each for row in zip_longest(*families) for each in row if each is not None))


def _variants(batch: int, data: int, tensor: int, pipeline: int) -> Iterator[Layout]:
    count = 1 if pipeline == 1 else 2 * pipeline  # microbatches
    whole = max(batch // (data * count), 1)
    base = Layout(data=data, tensor=tensor, pipeline=pipeline, microbatch=whole)
    half = replace(base, microbatch=max(whole // 2, 1))
    yield base
    if data > 1:
        yield from (replace(base, zero=zero) for zero in (1, 3, 2))
    if tensor > 1:
        yield replace(base, sequence_parallel=True)
        yield replace(half, sequence_parallel=True, recompute=Recompute.FULL)
    if pipeline > 1:
        yield replace(base, schedule="gpipe")
        yield replace(base, schedule="interleaved", chunks=2)
        yield replace(base, schedule="zb1p")
    yield half
    yield replace(base, recompute=Recompute.FULL)
    if data > 1:
        yield replace(half, zero=3, recompute=Recompute.FULL)
        yield replace(base, overlap_gradients=False)
    if pipeline > 1:
        yield replace(half, schedule="gpipe", recompute=Recompute.FULL)
    yield replace(base, recompute=Recompute.SELECTIVE)
    yield replace(half, recompute=Recompute.SELECTIVE)
    yield replace(base, microbatch=max(whole // 4, 1))


def plans(problem: Problem, ranks: int, most: int, spec: Transformer = SPEC) -> list[Plan]:
    """Return the plans of the first ``max_plans`` layouts of `list_layouts` that suit the problem and the executor."""
    return list(islice(_executable(problem, ranks, spec), most))


def _executable(problem: Problem, ranks: int, spec: Transformer) -> Iterator[Plan]:
    seen = set()
    for layout in layouts(ranks, problem.training.global_batch):
        try:
            plan = complete(problem, layout)
        except ValueError:  # not of this problem: more stages than layers, a batch that does not divide
            continue
        if plan not in seen and not unsupported(spec, problem.training, plan):
            seen.add(plan)
            yield plan


def trial(
    problem: Problem,
    plan: Plan,
    steps: int,
    folder: Path,
    before: float = 1.0,
    calm: float = 1.0,
    spec: Transformer = SPEC,
) -> Trial:
    """Predict a plan, run it for ``steps`` steps after the first two, and return both.

    ``calm_drift`` is the drift at the calibration, ``drift_before`` the current drift over it.
    """
    load = os.getloadavg()[0]
    run = execute(spec, problem.training, plan, RunOptions(steps + WARM_UP, verify=False), folder=folder)
    after = drift(problem.cluster) / calm
    now = replace(problem, cluster=slower(problem.cluster, math.sqrt(before * after)))
    # simulated only now: the drift after the run is part of the prediction's machine
    predicted = simulate(lower(now, plan), "discrete_event")
    return Trial(
        ranks=plan.mesh.num_ranks,
        plan=plan.describe(),
        predicted_step_time=predicted.step_time,
        measured_step_time=run.step_time,
        predicted_peak_memory=predicted.peak_memory,
        measured_peak_memory=run.peak_memory,
        tracked_peak_memory=check(spec, problem, plan).peak,
        predicted_kinds=_told(predicted),
        measured_kinds=_told(run.timeline),
        load=load,
        before=before,
        after=after,
    )


def _told(timeline: Timeline) -> dict[str, float]:
    return {str(kind): seconds for kind, seconds in busy_by_kind(timeline).items()}


def summary(trials: Sequence[Trial]) -> list[str]:
    """Return lines about the trials: errors of time and memory, the order of plans, and the ratio by kind of task."""
    if not trials:
        return ["no plan was run"]
    result = [f"{len(trials)} plans of {trials[0].ranks} ranks"]
    for what, errors in (
        ("step time", [each.time_error for each in trials]),
        ("peak memory, tracker", [each.tracked_memory_error for each in trials]),
        ("peak memory, allocator", [each.memory_error for each in trials]),
    ):
        sizes = [abs(error) for error in errors]
        worst = trials[sizes.index(max(sizes))]
        result.append(f"{what}: median error {median(sizes):.1%}, worst {max(sizes):.1%} ({worst.plan})")
    pairs = [(each.predicted_step_time, each.measured_step_time) for each in trials]
    result.append(f"order of plans by step time: Kendall's tau {kendall_tau(pairs):.2f}")
    for kind in map(str, TaskKind):
        both = [(each.predicted_kinds.get(kind, 0.0), each.measured_kinds.get(kind, 0.0)) for each in trials]
        if measured := sum(after for _, after in both):
            result.append(f"{kind}: predicted {sum(before for before, _ in both) / measured:.2f} of what was measured")
    return result


def run(most: int, ranks: int, steps: int, seconds: float, out: Path, model: str = "gpt") -> list[Trial]:
    """Calibrate, run plans of a model, write one row each to a file and return the trials."""
    _note(f"calibrating {ranks} processes for about {seconds:.0f} s")
    machine = calibrate(processes=ranks, seconds=seconds)
    spec = MODELS[model]
    problem = Problem(build(spec, TRAINING.sequence, TRAINING.precision), machine, TRAINING)
    done: list[Trial] = []
    before, calm = 1.0, drift(machine)
    chosen = plans(problem, ranks, most, spec)
    with out.open("w") as file:
        head = {"date": today(), **circumstances(), "model": model, "ranks": ranks, "steps": steps}
        file.write(json.dumps(head) + "\n")
        for number, plan in enumerate(chosen, 1):
            with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
                try:
                    found = trial(problem, plan, steps, Path(folder), before, calm, spec)
                except ExecutionError as error:
                    _note(f"{number}/{len(chosen)} {plan.describe()}: {error}")
                    continue
            done.append(found)
            before = found.after
            file.write(json.dumps(_row(found)) + "\n")
            file.flush()
            times = f"{found.predicted_step_time * 1e3:.1f} ms predicted, {found.measured_step_time * 1e3:.1f} measured"
            paces = f"drift {found.before:.2f} to {found.after:.2f}, load {found.load:.1f}"
            _note(f"{number}/{len(chosen)} {found.plan}: {times} ({found.time_error:+.1%}), {paces}")
    return done


def _row(found: Trial) -> dict[str, Any]:
    errors = ("time_error", "memory_error", "tracked_memory_error")
    return asdict(found) | {name: getattr(found, name) for name in errors}


def _note(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials of the command line, print their summary and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m meshwise.scenarios.calibration.prediction_trials", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", choices=MODELS, default="gpt", help="of which model (gpt)")
    parser.add_argument("--plans", type=int, default=24, help="different plans (24)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a plan (2)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a plan, after two to warm up (20)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to calibrate, about (60)")
    parser.add_argument("--out", type=Path, required=True, metavar="ROWS.jsonl", help="one row a plan")
    given = parser.parse_args(arguments)
    if min(given.plans, given.ranks, given.steps) < 1 or given.seconds <= 0:
        parser.error("plans, ranks and steps are at least 1 and seconds above 0")
    try:
        run(given.plans, given.ranks, given.steps, given.seconds, given.out, given.model)
    except KeyboardInterrupt:
        _note("interrupted")
        code = INTERRUPTED
    else:
        code = 0
    for line in summary(read(given.out)):
        print(line)
    return code


def read(path: Path) -> list[Trial]:
    """Return the trials of a file, whose first line is a header; none where the file is missing."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [Trial(**{name: row[name] for name in Trial.__dataclass_fields__}) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
