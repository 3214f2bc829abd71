"""Ranks of small runs are killed or stopped, each at a moment that a seed draws.

``python -m executor.fault_trials`` does so. After every fault the survivors are gone in time, the message names
rank, step and operation, and neither a process nor a listening port is left; while the run went on, nothing listened
where another machine could reach it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP
from statistics import median

from executor.circumstances import circumstances, today
from executor.exit_codes import INTERRUPTED
from executor.fault import LIMIT, Fault, Outcome, suffer
from executor.job import Job
from simulator.accelerator import Accelerator
from simulator.cluster import homogeneous
from simulator.host import Host
from simulator.link import Link
from simulator.models.transformer import Transformer, build
from strategies.completion import complete
from strategies.layout import Layout
from strategies.problem import Problem
from strategies.training import Training

STEPS, FAULTY_STEPS = 50, 4
"""Steps of a run, and in how many of them a fault may come: on a busy machine it comes late, and must find the run."""
KILL_TIMEOUT, STOP_TIMEOUT = 300.0, 60.0
"""Seconds that a rank is waited for: fewer where that is what ends the run, yet more than torch takes to start."""
_COLUMNS = "{:>5}  {:<7}  {:>4}  {:<28}  {:>7}  {:>5}  {:>5}  {:>7}  {:>5}  {:<6}"
_HEAD = ("trial", "signal", "rank", "at", "gone in", "rank", "place", "orphans", "ports", "holds")


def small_job(ranks: int, timeout: float) -> Job:
    """Return a run of a tiny transformer: pipeline 2 where the ranks are even, data for the rest, ZeRO-1."""
    spec = Transformer(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=256, tied_embeddings=False)
    pipeline = 2 if ranks % 2 == 0 else 1
    layout = Layout(data=ranks // pipeline, pipeline=pipeline, microbatch=1, zero=1)
    training = Training(4 * layout.data, 16, "fp32", "adamw")
    core = Accelerator("core", (("fp32", 1e11),), memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    cluster = homogeneous("this machine", core, Host("host", 2.0**34), 1, ranks, link, link)
    plan = complete(Problem(build(spec, training.sequence, training.precision), cluster, training), layout)
    return Job(spec, training, plan, STEPS, profile=False, timeout=timeout)


def trials(kills: int, stops: int, ranks: int, seed: int) -> Iterator[Outcome]:
    """Yield what came of every fault; trial ``i`` of a seed is the same for any number of trials."""
    for index in range(kills + stops):
        number = SIGKILL if index < kills else SIGSTOP
        fault = Fault.drawn(
            Random(f"{seed} {number.name} {index if index < kills else index - kills}"), number, ranks, FAULTY_STEPS
        )
        with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
            timeout = KILL_TIMEOUT if number is SIGKILL else STOP_TIMEOUT
            yield suffer(fault, small_job(ranks, timeout), Path(name))


def limit_of(outcome: Outcome) -> float:
    """Return the seconds within which a run must be gone: a stopped rank is waited for first."""
    return LIMIT + (STOP_TIMEOUT if outcome.fault.signal is SIGSTOP else 0.0)


def to_json(outcomes: Sequence[Outcome], ranks: int, seed: int) -> dict[str, object]:
    """Return all trials as JSON-ready data."""
    rows = []
    for outcome in outcomes:
        row = asdict(outcome)
        fault = row.pop("fault") | {"signal": outcome.fault.signal.name}
        rows.append(fault | row | {"holds": outcome.holds(limit_of(outcome))})
    held = sum(bool(row["holds"]) for row in rows)
    head = {"date": today(), **circumstances(), "ranks": ranks, "seed": seed, "trials": len(rows), "held": held}
    return {**head, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print a line for each and write JSON after each; return 0 where all held, else 1.

    An interrupt ends them with what is done.
    """
    parser = argparse.ArgumentParser(prog="python -m executor.fault_trials", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="ranks to kill with SIGKILL, one a run")
    parser.add_argument("--stops", type=int, default=0, help="ranks to stop with SIGSTOP, one a run")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a run, at least 2")
    parser.add_argument("--seed", type=int, default=0, help="draws rank, phase, step and delay of every fault")
    parser.add_argument("--out", type=Path, help="write all that was seen (.json)")
    given = parser.parse_args(arguments)
    if given.ranks < 2 or given.trials < 0 or given.stops < 0:
        parser.error(
            f"--ranks is at least 2, --trials and --stops at least 0, met {given.ranks}, {given.trials}, {given.stops}"
        )
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out is in a folder that exists, met {given.out}")
    print(_COLUMNS.format(*_HEAD))
    outcomes = []
    interrupted = False
    try:
        for index, outcome in enumerate(trials(given.trials, given.stops, given.ranks, given.seed)):
            outcomes.append(outcome)
            print(_line(index, outcome), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(to_json(outcomes, given.ranks, given.seed), indent=1) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    print(_summary(outcomes))
    if interrupted:
        return INTERRUPTED
    return 0 if all(outcome.holds(limit_of(outcome)) for outcome in outcomes) else 1


def _line(index: int, outcome: Outcome) -> str:
    yes = {True: "yes", False: "NO"}
    return _COLUMNS.format(
        index,
        outcome.fault.signal.name,
        outcome.fault.rank,
        outcome.place[:28],
        f"{outcome.seconds:.2f} s",
        yes[outcome.rank_named],
        yes[outcome.place_named],
        len(outcome.orphans),
        len(outcome.ports),
        yes[outcome.holds(limit_of(outcome))],
    )


def _summary(outcomes: Sequence[Outcome]) -> str:
    held = sum(outcome.holds(limit_of(outcome)) for outcome in outcomes)
    lines = [f"{held} of {len(outcomes)} hold"]
    for number in (SIGKILL, SIGSTOP):
        seconds = [outcome.seconds for outcome in outcomes if outcome.fault.signal is number]
        if seconds:
            lines.append(f"{number.name}: gone in {median(seconds):.2f} s (median), {max(seconds):.2f} s at most")
    return "; ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
