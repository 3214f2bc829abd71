"""Trials of the launcher: one rank of a small run is killed or stopped at a moment that a seed draws.

``python -m tests.studies.fault_trials`` checks after every fault that the other ranks end in time, that the
message names rank, step and operation, and that neither a process nor a listening port is left. It also checks that
the run listened on no address that other machines can reach.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, Signals
from statistics import median
from threading import Thread

from meshwise.executor.job import Job
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks
from meshwise.executor.launch.processes import INTERRUPTED
from meshwise.executor.recording.rank_files import parse_operation, read_beat
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training
from tests.host_processes import find_listeners, is_alive, is_loopback, list_children, list_listeners

from .circumstances import describe_circumstances, format_today

LIMIT = 10.0
"""Seconds within which a run must end after a rank is killed, or after the timeout for a stopped rank."""
PHASES = ("start", "build", "forward", "backward", "gradients", "optimizer")
_STEPLESS = ("start", "build")
_DELAY = {"start": 1.0}
"""Largest delay in seconds from the begin of a phase to the fault; by default `_SHORT`, about a pass of the model."""
_SHORT = 0.005
_LOOK = 0.0005
WORDS = {SIGKILL: "was killed by SIGKILL", SIGSTOP: "was stopped by a signal"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to a rank, sent ``delay`` seconds after the rank is first seen in ``phase`` of ``step``, or later.

    ``step`` is -1 in the phases before the first step.
    """

    rank: int
    signal: Signals
    phase: str
    step: int
    delay: float

    @classmethod
    def draw(cls, random: Random, signal: Signals, ranks: int, steps: int) -> "Fault":
        """Return a fault with random rank, phase, step (of the first ``steps``) and delay."""
        rank, phase = random.randrange(ranks), random.choice(PHASES)
        step = -1 if phase in _STEPLESS else random.randrange(steps)
        return cls(rank, signal, phase, step, random.uniform(0.0, _DELAY.get(phase, _SHORT)))

    def is_due(self, beat: str) -> bool:
        """Return whether a rank with this heartbeat has reached the phase of the fault.

        >>> fault = Fault(0, SIGKILL, "backward", 1, 0.0)
        >>> [fault.is_due(beat) for beat in ("", "2 build", "9 step 1, forward 0F0", "10 step 1, backward 0B0")]
        [False, False, False, True]
        >>> fault.is_due("30 step 2, forward 0F0")
        True
        """
        place = parse_operation(beat)
        step = int(place.removeprefix("step ").partition(",")[0]) if place.startswith("step ") else -1
        return step > self.step or (step == self.step and place.rpartition(", ")[2].startswith(self.phase))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The observed result of a fault.

    Parameters
    ----------
    place
        Operation of the rank by its last heartbeat.
    seconds
        Time from the signal until the launcher returned.
    rank_named, place_named
        Whether the message names the rank with what happened to it, and its operation.
    orphans
        Processes of the run that are still alive.
    ports
        Ports of the run on which a process still listens.
    exposed
        Addresses on which the ranks listened and that other machines can reach.
    """

    fault: Fault
    place: str
    seconds: float
    rank_named: bool
    place_named: bool
    orphans: tuple[int, ...]
    ports: tuple[int, ...]
    exposed: tuple[str, ...]
    message: str

    def holds(self, limit: float = LIMIT) -> bool:
        """Return whether the launcher did all that it should, within ``limit`` seconds."""
        leftovers = self.orphans or self.ports or self.exposed
        return self.rank_named and self.place_named and not leftovers and self.seconds < limit


class _Culprit(Thread):
    """A thread that sends the signal at the moment of a fault, and notes the state of the run just before."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        super().__init__(daemon=True)
        self.fault, self.folder = fault, folder
        self.is_over = False
        self.sent_time = 0.0
        self.place_before = ""
        self.other_pids = set(list_children(os.getpid()))  # children of the caller, which are no ranks
        self.pids: list[int] = []
        self.places: set[tuple[str, int]] = set()

    def run(self) -> None:
        """Wait for the fault and send the signal, unless the run ends before."""
        victim = None
        while victim is None or not self.fault.is_due(read_beat(self.folder, self.fault.rank)):
            if self.is_over:
                return
            victim = victim or _find_process(self.fault.rank)
            time.sleep(_LOOK)
        time.sleep(self.fault.delay)
        self.pids = [pid for pid in list_children(os.getpid()) if pid not in self.other_pids]
        self.places = find_listeners(self.pids)
        self.place_before = parse_operation(read_beat(self.folder, self.fault.rank))
        os.kill(victim, self.fault.signal)
        self.sent_time = time.monotonic()


def run_fault(fault: Fault, job: Job, folder: Path) -> Outcome:
    """Run ``job`` with a fault in an empty folder, which keeps the run's files, and return the outcome.

    Where the run ended before the fault came, the outcome does not hold.
    """
    path = job.write(folder).resolve()
    culprit = _Culprit(fault, folder)
    culprit.start()
    message = ""
    try:
        launch_ranks(
            "meshwise.executor.launch.worker", [str(path)], folder, job.plan.mesh.num_ranks, timeout=job.timeout
        )
    except ExecutionError as error:
        message = str(error)
    end_time = time.monotonic()
    culprit.is_over = True
    culprit.join()
    headline, place = message.partition("\n")[0], parse_operation(read_beat(folder, fault.rank))
    return Outcome(
        fault,
        place,
        end_time - culprit.sent_time if culprit.sent_time else 0.0,
        rank_named=bool(culprit.sent_time) and headline.startswith(f"rank {fault.rank} {WORDS[fault.signal]}"),
        place_named=any(f"(at {operation_name}; rank " in headline for operation_name in {place, culprit.place_before}),
        orphans=tuple(pid for pid in culprit.pids if is_alive(pid)),
        ports=tuple(sorted(port for _, port in culprit.places & list_listeners())),
        exposed=tuple(sorted(address for address, _ in culprit.places if not is_loopback(address))),
        message=headline or "all ranks ended well",
    )


def _find_process(rank: int) -> int | None:
    """Return the process id of a rank that this process launched; None before it runs."""
    for pid in list_children(os.getpid()):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            f"RANK={rank}".encode() in environment
            and b"meshwise.executor.launch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ):
            return pid
    return None


STEPS, FAULTY_STEPS = 50, 4
"""Steps of a run, and how many of the first ones may have the fault: on a busy machine it comes late, yet the run must
not have ended by then."""
KILL_TIMEOUT, STOP_TIMEOUT = 300.0, 60.0
"""Seconds that the launcher waits for a silent rank: fewer for a stopped rank, since that wait ends the run, yet more
than torch takes to start."""
_COLUMNS = "{:>5}  {:<7}  {:>4}  {:<28}  {:>7}  {:>5}  {:>5}  {:>7}  {:>5}  {:<6}"
_HEAD = ("trial", "signal", "rank", "at", "gone in", "rank", "place", "orphans", "ports", "holds")


def build_job(ranks: int, timeout: float) -> Job:
    """Return the job of a tiny transformer with ZeRO 1: pipeline 2 for an even number of ranks, data for the rest."""
    spec = Transformer(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=256, tied_embeddings=False)
    pipeline = 2 if ranks % 2 == 0 else 1
    layout = Layout(data=ranks // pipeline, pipeline=pipeline, microbatch=1, zero=1)
    training = Training(4 * layout.data, 16, "fp32", "adamw")
    core = Accelerator("core", (("fp32", 1e11),), memory=2.0**33, memory_bandwidth=1e10)
    link = Link(latency=1e-6, bandwidth=1e9)
    cluster = build_homogeneous("this machine", core, Host("host", 2.0**34), 1, ranks, link, link)
    plan = complete(Problem(build(spec, training.sequence, training.precision), cluster, training), layout)
    return Job(spec, training, plan, STEPS, profile=False, timeout=timeout)


def trials(kills: int, stops: int, ranks: int, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of every fault; trial ``i`` of a seed is the same for any number of trials."""
    for index in range(kills + stops):
        signal = SIGKILL if index < kills else SIGSTOP
        fault = Fault.draw(
            Random(f"{seed} {signal.name} {index if index < kills else index - kills}"), signal, ranks, FAULTY_STEPS
        )
        with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
            timeout = KILL_TIMEOUT if signal is SIGKILL else STOP_TIMEOUT
            yield run_fault(fault, build_job(ranks, timeout), Path(name))


def limit_of(outcome: Outcome) -> float:
    """Return the seconds within which a run must end; the launcher first waits for a stopped rank."""
    return LIMIT + (STOP_TIMEOUT if outcome.fault.signal is SIGSTOP else 0.0)


def to_json(outcomes: Sequence[Outcome], ranks: int, seed: int) -> dict[str, object]:
    """Return all trials as JSON-ready data."""
    rows = []
    for outcome in outcomes:
        row = asdict(outcome)
        fault = row.pop("fault") | {"signal": outcome.fault.signal.name}
        rows.append(fault | row | {"holds": outcome.holds(limit_of(outcome))})
    num_held = sum(bool(row["holds"]) for row in rows)
    head = {
        "date": format_today(),
        **describe_circumstances(),
        "ranks": ranks,
        "seed": seed,
        "trials": len(rows),
        "held": num_held,
    }
    return {**head, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, print a line and write JSON after each; return 0 where all held, 1 where not, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.fault_trials", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="ranks to kill with SIGKILL, one a run")
    parser.add_argument("--stops", type=int, default=0, help="ranks to stop with SIGSTOP, one a run")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a run, at least 2")
    parser.add_argument("--seed", type=int, default=0, help="draws rank, phase, step and delay of every fault")
    parser.add_argument("--out", type=Path, help="write all that was seen (.json)")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.trials < 0 or options.stops < 0:
        values = f"{options.ranks}, {options.trials}, {options.stops}"
        parser.error(f"--ranks is at least 2, --trials and --stops at least 0, met {values}")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out is in a folder that exists, met {options.out}")
    print(_COLUMNS.format(*_HEAD))
    outcomes = []
    interrupted = False
    try:
        for index, outcome in enumerate(trials(options.trials, options.stops, options.ranks, options.seed)):
            outcomes.append(outcome)
            print(_format_line(index, outcome), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(to_json(outcomes, options.ranks, options.seed), indent=1) + "\n")
    except KeyboardInterrupt:
        interrupted = True
    print(_summarize(outcomes))
    if interrupted:
        return INTERRUPTED
    return 0 if all(outcome.holds(limit_of(outcome)) for outcome in outcomes) else 1


def _format_line(index: int, outcome: Outcome) -> str:
    answers = {True: "yes", False: "NO"}
    return _COLUMNS.format(
        index,
        outcome.fault.signal.name,
        outcome.fault.rank,
        outcome.place[:28],
        f"{outcome.seconds:.2f} s",
        answers[outcome.rank_named],
        answers[outcome.place_named],
        len(outcome.orphans),
        len(outcome.ports),
        answers[outcome.holds(limit_of(outcome))],
    )


def _summarize(outcomes: Sequence[Outcome]) -> str:
    num_held = sum(outcome.holds(limit_of(outcome)) for outcome in outcomes)
    lines = [f"{num_held} of {len(outcomes)} hold"]
    for signal in (SIGKILL, SIGSTOP):
        seconds = [outcome.seconds for outcome in outcomes if outcome.fault.signal is signal]
        if seconds:
            lines.append(f"{signal.name}: gone in {median(seconds):.2f} s (median), {max(seconds):.2f} s at most")
    return "; ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
