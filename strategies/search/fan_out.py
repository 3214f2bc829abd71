"""Evaluations by other processes, of this machine or of a cluster, through ``concurrent.futures``.

Any executor does: ``ProcessPoolExecutor``, or that of an engine for clusters, as Dask's ``Client(...).get_executor()``.
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
from typing import Any

from meshwise.simulator.deadline import check_deadline
from meshwise.strategies.cost_model import CostModel
from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.plan import Plan

MAX_PROCESSES = 1024
"""Processes that one machine is asked for."""
MOMENT = 1.0
"""Seconds for which processes that are given up are waited for."""
POLL = 0.2
"""Seconds after which it is looked at whether there is still time for an evaluation."""


class FanOut:
    """Plans under evaluation by an executor; without one, nothing is evaluated before it is asked for.

    Parameters
    ----------
    costs
        How plans are judged; with an executor a copy goes to every worker, so that they can be pickled.
    """

    def __init__(self, costs: CostModel, executor: Executor | None) -> None:
        self.costs, self.executor = costs, executor
        self._copy = b"" if executor is None else pickle.dumps(costs)
        self._begun: dict[Plan, Future[Evaluation]] = {}

    @property
    def pending(self) -> int:
        """Plans that were begun and not yet asked for."""
        return len(self._begun)

    def begin(self, plans: Iterable[Plan]) -> None:
        """Let the executor evaluate ``plans``, the first first."""
        if self.executor is None:
            return
        for plan in plans:
            if plan not in self._begun:
                self._begun[plan] = self.executor.submit(_evaluate, self._copy, plan)

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return the evaluation of ``plan``; waits for it where it was begun."""
        begun = self._begun.pop(plan, None)
        if begun is None:
            return self.costs.evaluate(plan)
        while True:
            try:
                return begun.result(POLL)
            except TimeoutError:
                check_deadline()

    def cancel(self) -> None:
        """Give up what was begun and not asked for."""
        for future in self._begun.values():
            future.cancel()
        self._begun.clear()


_worker = local()
"""What this thread of a worker judges plans by: a cost model is not made for two threads at once."""


def _evaluate(copy: bytes, plan: Plan) -> Evaluation:
    """Return the evaluation of ``plan`` by the costs in ``copy``."""
    if getattr(_worker, "copy", None) != copy:
        _worker.copy, _worker.costs = copy, pickle.loads(copy)
    found: Evaluation = _worker.costs.evaluate(plan)
    return found


class Processes(ProcessPoolExecutor):
    """Processes of this machine that begin when they are needed, leave Ctrl-C to their parent and end with it."""

    def __init__(self, count: int) -> None:
        super().__init__(count, get_context("spawn"), initializer=_stay_with_parent)

    def submit(self, *arguments: Any, **named: Any) -> Future[Any]:
        """Return the future of a call; a process that begins for it inherits that Ctrl-C is blocked."""
        mask = pthread_sigmask(SIG_BLOCK, {SIGINT})
        try:
            return super().submit(*arguments, **named)
        finally:
            pthread_sigmask(SIG_SETMASK, mask)

    def give_up(self) -> None:
        """Cancel what waits, and wait a moment for the processes, which end what they are at: left behind, they would
        tell of the pipes that break when this process ends."""
        self.shutdown(wait=False, cancel_futures=True)
        until = monotonic() + MOMENT
        for each in active_children():
            each.join(max(until - monotonic(), 0.0))


def _stay_with_parent() -> None:
    """Let a worker process end when its parent does, killed or not."""
    parent = parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def processes(count: int) -> Processes:
    """Return an executor of ``count`` processes of this machine, 0 for one a core.

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
