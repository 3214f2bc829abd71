"""Evaluation of plans in other processes, of this machine or of a cluster, through ``concurrent.futures``.

Any executor will do: ``ProcessPoolExecutor``, or that of a cluster engine such as Dask's
``Client(...).get_executor()``.
"""

import os
import pickle
from collections.abc import Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from threading import Thread, local
from time import monotonic
from typing import Any, Protocol

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.evaluation import CostModel, Evaluation, Trial
from meshwise.strategies.plan.plan import Plan

MAX_PROCESSES = 1024
"""Processes on one machine at most."""
GRACE_SECONDS = 1.0
"""Seconds to wait for processes that are given up."""
POLL_SECONDS = 0.2
"""Seconds between checks whether there is still time for an evaluation."""


class Journal(Protocol):
    """The trials of earlier runs of a search, to which the trials of this run are added."""

    def find_trial(self, plan: Plan) -> Trial | None:
        """Return the trial of ``plan`` in an earlier run; ``None`` where it was not evaluated."""

    def keep_trial(self, trial: Trial) -> None:
        """Store a trial of this run at once, so that it survives the end of the process."""


class Evaluator:
    """What evaluates the plans of one search: a cost model, here or in an executor, and a journal.

    Trials and history do not depend on the number of workers, except for the seconds in them.

    Parameters
    ----------
    costs
        The cost model; with an executor it must be picklable, for every worker gets a copy.
    executor
        Evaluates plans that an algorithm announces, in processes of this machine or of a cluster; without one, plans
        are evaluated when they are asked for.
    journal
        Answers plans that an earlier run of the same search has evaluated, and keeps the trials of this run. The
        search goes on as if it had not been interrupted, and its clock goes on from that of the earlier run.
    """

    def __init__(self, costs: CostModel, executor: Executor | None = None, journal: Journal | None = None) -> None:
        self.costs, self.executor, self.journal = costs, executor, journal
        self._pickled_costs = b"" if executor is None else pickle.dumps(costs)
        self._futures: dict[Plan, Future[Evaluation]] = {}

    @property
    def pending(self) -> int:
        """The number of plans whose evaluation was begun and not yet asked for."""
        return len(self._futures)

    def begin(self, plans: Iterable[Plan]) -> None:
        """Submit plans to the executor, in order."""
        if self.executor is None:
            return
        for plan in plans:
            if plan in self._futures:
                continue
            self._futures[plan] = self.executor.submit(_evaluate_copy, self._pickled_costs, plan)

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return the evaluation of ``plan``; wait for it where it was begun."""
        future = self._futures.pop(plan, None)
        if future is None:
            return self.costs.evaluate(plan)
        # a wait without end would outlast the time of the search
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():  # it is the evaluation that raised it
                    raise
                check_deadline()

    def find_trial(self, plan: Plan) -> Trial | None:
        """Return the trial of ``plan`` in an earlier run; ``None`` where it was not evaluated."""
        return None if self.journal is None else self.journal.find_trial(plan)

    def keep_trial(self, trial: Trial) -> None:
        """Store a trial in the journal, if there is one."""
        if self.journal is not None:
            self.journal.keep_trial(trial)

    def confirm_trial(self, trial: Trial) -> None:
        """Raise ``ValueError`` where the cost model's evaluation of a plan is not that of the journal."""
        if self.find_trial(trial.plan) is None:
            return
        evaluation, journal_entry = self.costs.evaluate(trial.plan), trial.evaluation
        if evaluation != journal_entry:
            raise ValueError(
                f"the journal says of the best plan what its simulation says, {evaluation.step_time} s and "
                f"{evaluation.peak_memory} bytes; met {journal_entry.step_time} s and {journal_entry.peak_memory} bytes"
            )

    def cancel(self) -> None:
        """Cancel the evaluations that were begun and not asked for."""
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()


_worker = local()
"""The cost model of this thread of a worker, for a cost model cannot serve two threads at once."""


def _evaluate_copy(pickled_costs: bytes, plan: Plan) -> Evaluation:
    """Return the evaluation of ``plan`` by a pickled cost model."""
    # unpickled once per search: the caches of a cost model are worth more than one evaluation
    if getattr(_worker, "copy", None) != pickled_costs:
        _worker.copy, _worker.costs = pickled_costs, pickle.loads(pickled_costs)
    evaluation: Evaluation = _worker.costs.evaluate(plan)
    return evaluation


class Processes(ProcessPoolExecutor):
    """Processes of this machine that start when they are needed, leave Ctrl-C to their parent and end with it."""

    def __init__(self, count: int) -> None:
        super().__init__(count, get_context("spawn"), initializer=_stay_with_parent)

    def submit(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Return the future of a call; a process that starts for it inherits a mask that blocks Ctrl-C."""
        mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
        try:
            return super().submit(*arguments, **keywords)
        finally:
            pthread_sigmask(SIG_SETMASK, mask)

    def give_up(self) -> None:
        """Cancel waiting calls, and wait a moment for the processes to end the calls under way.

        Processes that are left behind would report broken pipes when this process ends.
        """
        self.shutdown(wait=False, cancel_futures=True)
        deadline = monotonic() + GRACE_SECONDS
        for process in active_children():
            process.join(max(deadline - monotonic(), 0.0))


def _stay_with_parent() -> None:
    """Let this worker process end when its parent does, even if the parent is killed."""
    parent = parent_process()
    if parent is not None:
        Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def processes(count: int) -> Processes:
    """Return an executor of ``count`` processes of this machine; 0 for one per core.

    Raises
    ------
    ValueError
        Where ``count`` is negative or more than `MAX_PROCESSES`.
    """
    if not 0 <= count <= MAX_PROCESSES:
        raise ValueError(
            f"workers are 1 to {MAX_PROCESSES} processes, or 0 for one a core; met {count}; "
            f"nearest: {min(max(count, 0), MAX_PROCESSES)}"
        )
    return Processes(count or os.cpu_count() or 1)
