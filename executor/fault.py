"""One rank of a small run is killed or stopped at a moment that is drawn, and what the launcher makes of it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, Signals
from threading import Thread

from executor.heartbeat import operation, read_beat
from executor.job import Job
from executor.launcher import ExecutionError, launch
from executor.processes import children, is_alive, is_loopback, listeners, listening

LIMIT = 10.0
"""Seconds within which nothing of a run is left once a rank is killed, or once a stopped one has been waited for."""
PHASES = ("start", "build", "forward", "backward", "gradients", "optimizer")
_STEPLESS = ("start", "build")
_DELAY = {"start": 1.0}
"""Seconds, at most, from the begin of a phase to the fault; elsewhere `_SHORT`, about a pass of the small model."""
_SHORT = 0.005
_LOOK = 0.0005
WORDS = {SIGKILL: "was killed by SIGKILL", SIGSTOP: "was stopped by a signal"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to whom and when: ``delay`` seconds after ``rank`` is first seen in ``phase`` of ``step``, or later.

    ``step`` is -1 in the phases before the first.
    """

    rank: int
    signal: Signals
    phase: str
    step: int
    delay: float

    @classmethod
    def drawn(cls, random: Random, number: Signals, ranks: int, steps: int) -> "Fault":
        """Return a fault of any rank, in any phase, of any of the first ``steps`` steps."""
        rank, phase = random.randrange(ranks), random.choice(PHASES)
        step = -1 if phase in _STEPLESS else random.randrange(steps)
        return cls(rank, number, phase, step, random.uniform(0.0, _DELAY.get(phase, _SHORT)))

    def is_due(self, beat: str) -> bool:
        """Return whether a rank with this beat is where the fault comes, or past it.

        >>> fault = Fault(0, SIGKILL, "backward", 1, 0.0)
        >>> [fault.is_due(beat) for beat in ("", "2 build", "9 step 1, forward 0F0", "10 step 1, backward 0B0")]
        [False, False, False, True]
        >>> fault.is_due("30 step 2, forward 0F0")
        True
        """
        where = operation(beat)
        step = int(where.removeprefix("step ").partition(",")[0]) if where.startswith("step ") else -1
        return step > self.step or (step == self.step and where.rpartition(", ")[2].startswith(self.phase))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of a fault.

    Parameters
    ----------
    place
        Where the rank was, by its own last beat.
    seconds
        From the fault until no rank was left.
    rank_named, place_named
        Whether the message says which rank it was, what happened to it, and where it was.
    orphans
        Processes of the run that were left.
    ports
        Ports of the run on which anybody still listened.
    exposed
        Addresses on which the ranks listened that other machines can reach.
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
        """Return whether all is as it should be, within ``limit`` seconds."""
        left = self.orphans or self.ports or self.exposed
        return self.rank_named and self.place_named and not left and self.seconds < limit


class _Culprit(Thread):
    """Waits for the moment of a fault, then sends the signal; notes what the run was just before."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        super().__init__(daemon=True)
        self.fault, self.folder = fault, folder
        self.over = False
        self.sent = 0.0
        self.before = ""
        self.others = set(children(os.getpid()))  # of whoever asks for a trial
        self.pids: list[int] = []
        self.places: set[tuple[str, int]] = set()

    def run(self) -> None:
        """Send the signal, unless the run is over before."""
        victim = None
        while victim is None or not self.fault.is_due(read_beat(self.folder, self.fault.rank)):
            if self.over:
                return
            victim = victim or _process_of(self.fault.rank)
            time.sleep(_LOOK)
        time.sleep(self.fault.delay)
        self.pids = [pid for pid in children(os.getpid()) if pid not in self.others]
        self.places = listening(self.pids)
        self.before = operation(read_beat(self.folder, self.fault.rank))
        os.kill(victim, self.fault.signal)
        self.sent = time.monotonic()


def suffer(fault: Fault, job: Job, folder: Path) -> Outcome:
    """Return what came of a fault in a run of ``job`` in an empty folder, which keeps what the run left.

    A fault that never came, because the run ended before, does not hold.
    """
    path = job.write(folder).resolve()
    culprit = _Culprit(fault, folder)
    culprit.start()
    message = ""
    try:
        launch("executor.worker", [str(path)], folder, job.plan.mesh.num_ranks, timeout=job.timeout)
    except ExecutionError as error:
        message = str(error)
    gone = time.monotonic()
    culprit.over = True
    culprit.join()
    headline, place = message.partition("\n")[0], operation(read_beat(folder, fault.rank))
    return Outcome(
        fault,
        place,
        gone - culprit.sent if culprit.sent else 0.0,
        rank_named=bool(culprit.sent) and headline.startswith(f"rank {fault.rank} {WORDS[fault.signal]}"),
        place_named=any(f"(at {seen}; rank " in headline for seen in {place, culprit.before}),
        orphans=tuple(pid for pid in culprit.pids if is_alive(pid)),
        ports=tuple(sorted(port for _, port in culprit.places & listeners())),
        exposed=tuple(sorted(address for address, _ in culprit.places if not is_loopback(address))),
        message=headline or "all ranks ended well",
    )


def _process_of(rank: int) -> int | None:
    """Return the process that runs a rank of this process's run; None before it does."""
    for pid in children(os.getpid()):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and b"executor.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None
