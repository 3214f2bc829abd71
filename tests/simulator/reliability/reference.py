"""The semantics of a long run, spelt out second by second, and the goodput that renewal theory expects.

Second by second every duration is a whole number of seconds.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, exp, expm1

from hypothesis import strategies as st

from meshwise.simulator.reliability.failures import Component, Failure, FailureKind, FailureModel, FailureRate, Restart
from meshwise.simulator.reliability.long_run import Checkpoint, Interruption, LongRun, Outcome, Recovery
from meshwise.simulator.units import to_seconds

NEVER = FailureModel("hardly ever", (FailureRate(FailureKind.HOST, 1e30, Component.JOB, Restart.IN_PLACE),))


class Reference:
    """A run that advances by one second at a time."""

    def __init__(self, run: LongRun, failures: Sequence[Failure]) -> None:
        self.run, self.failures, self.now = run, list(failures), 0
        self.every = max(1, ceil(run.checkpoint.interval / run.step_time))
        self.steps = self.since_checkpoint = self.kept = self.into_step = self.unsafe = self.checkpoints = 0
        self.standing = 0  # seconds that the checkpoint still blocks
        self.saving: tuple[int, int, int] | None = None  # durable at, steps in it, training until it
        self.phases: list[str] = []  # of the recovery, the present one first
        self.left = 0  # seconds of the present phase
        self.outside = [0] * run.spares
        self.missing = self.there_at = 0
        self.spent = {"trained": 0, "checkpointing": 0, "recovering": 0, "waiting": 0}
        self.log: list[Interruption] = []

    def outcome(self) -> Outcome:
        while True:
            while self.settle():
                pass
            if self.now == self.run.duration or self.steps == self.run.steps:
                break
            while self.failures and self.failures[0].time == self.now:
                self.strike(self.failures.pop(0))
                while self.settle():
                    pass
            self.second()
            self.now += 1
        useful = self.steps * self.run.step_time
        parts = {name: float(value) for name, value in self.spent.items() if name != "trained"}
        lost = self.spent["trained"] - useful
        return Outcome(
            float(self.now),
            self.steps,
            useful,
            lost,
            checkpoints=self.checkpoints,
            interruptions=tuple(self.log),
            **parts,
        )

    def settle(self) -> bool:
        """Let one thing happen that is due now; return whether there was one."""
        if self.phases and self.left == 0:
            self.next_phase()
            return True
        if self.saving and self.saving[0] == self.now:
            _, self.kept, trained = self.saving
            self.unsafe -= trained
            self.saving = None
            self.checkpoints += 1
            return True
        if not self.phases and self.into_step == self.run.step_time:
            self.into_step = 0
            self.steps += 1
            self.since_checkpoint += 1
            return True
        if self.due() and not self.saving:
            self.since_checkpoint = 0
            self.standing = int(self.run.checkpoint.blocking)
            self.saving = (self.now + int(self.run.checkpoint.save), self.steps, self.unsafe)
            return True
        return False

    def due(self) -> bool:
        return not self.phases and self.since_checkpoint == self.every

    def strike(self, failure: Failure) -> None:
        self.log.append(Interruption(float(self.now), failure.kind, self.steps, self.kept, float(self.unsafe)))
        self.steps, self.saving = self.kept, None
        self.since_checkpoint = self.into_step = self.unsafe = self.standing = 0
        if failure.restart is Restart.REPLACE_HOST:
            self.missing += 1
            self.outside.append(self.now + int(self.run.recovery.repair))
        self.phases, self.left = ["detection", "waiting", "restart"], int(self.run.recovery.detection)

    def next_phase(self) -> None:
        ended = self.phases.pop(0)
        if ended == "detection":
            for _ in range(self.missing):
                self.there_at = max(self.there_at, self.host())
            self.missing = 0
            self.left = max(0, self.there_at - self.now)
        elif ended == "waiting":
            self.left = int(self.run.recovery.restart + self.run.checkpoint.load)
        elif self.run.duration is None or self.now < self.run.duration:
            self.log[-1] = replace(self.log[-1], resumed=float(self.now))

    def host(self) -> int:
        soonest, replacement = min(self.outside), self.run.recovery.replacement
        if replacement is not None and soonest > self.now + replacement:
            self.outside.remove(max(self.outside))
            return self.now + int(replacement)
        self.outside.remove(soonest)
        return soonest

    def second(self) -> None:
        if self.phases:
            self.left -= 1
            waiting = self.phases[0] == "waiting"
            self.spent["waiting" if waiting else "recovering"] += 1
            self.log[-1] = replace(self.log[-1], waited=self.log[-1].waited + waiting)
        elif self.standing or self.due():
            self.standing -= bool(self.standing)
            self.spent["checkpointing"] += 1
        else:
            self.into_step += 1
            self.unsafe += 1
            self.spent["trained"] += 1


def whole(most: int, least: int = 0) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(float)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    blocking = draw(whole(4))
    return Checkpoint(draw(whole(20, 1)), blocking, blocking + draw(whole(12)), draw(whole(4)))


recoveries = st.builds(Recovery, whole(5), whole(5), whole(40), st.none() | whole(20))
traces = st.lists(st.tuples(whole(120), st.sampled_from(FailureKind), st.sampled_from(Restart)), max_size=9).map(
    lambda trace: [Failure(*failure) for failure in sorted(trace, key=lambda failure: failure[0])]
)


@st.composite
def runs(draw: st.DrawFn) -> LongRun:
    length = {"duration": draw(whole(150, 1))} if draw(st.booleans()) else {"steps": draw(st.integers(1, 40))}
    return LongRun(
        step_time=draw(whole(4, 1)),
        devices=1,
        hosts=1,
        failures=NEVER,
        checkpoint=draw(checkpoints()),
        recovery=draw(recoveries),
        spares=draw(st.integers(0, 2)),
        **length,  # type: ignore[arg-type]
    )


def recovery_time(run: LongRun) -> float:
    """Seconds from a failure until the job trains again, if a host is ready and no other failure strikes."""
    return run.recovery.detection + run.recovery.restart + run.checkpoint.load


def expected_goodput(run: LongRun) -> float:
    """Return the goodput of a run without end in which no failure waits for a host.

    Failures come at rate ``r``; a recovery of ``R`` s that starts again at every further
    failure, and the training that follows it, take ``exp(r R) / r`` on average. Of that
    training checkpoint ``j`` keeps ``work`` s if it becomes durable, ``work + (j - 1) period
    + save`` s after the recovery: a geometric series in ``j``. Where saving is synchronous
    this is the complete model of J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006).
    """
    cycle = run.checkpoint.cycle(run.step_time)
    work, period, save = (to_seconds(ticks) for ticks in (cycle.work, cycle.period, cycle.save))
    rate = 1 / run.mtbf
    return rate * work * exp(-rate * (work + save + recovery_time(run))) / -expm1(-rate * period)
