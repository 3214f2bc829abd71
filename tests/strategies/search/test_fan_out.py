"""What other processes evaluate is what this one would, in the same order."""

import pickle
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from multiprocessing import active_children
from signal import SIG_BLOCK, SIGINT, pthread_sigmask
from time import monotonic, sleep
from typing import Any

import pytest

from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS
from meshwise.strategies.search.algorithms.exhaustive import Exhaustive
from meshwise.strategies.search.algorithms.random import RandomSearch
from meshwise.strategies.search.fan_out import Evaluator, processes
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import layouts

from ..problems import problem
from .small_problems import FakeCost

PROBLEM = problem(layers=2, devices=2, batch=8)
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM))


class Recorded(Executor):
    """An executor that evaluates when it is told to, and knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Plan] = []
        self.futures: list[Future[Any]] = []

    def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        self.asked.append(arguments[-1])
        self.futures.append(future)
        return future


def without_clock(result: Any) -> tuple[Any, ...]:
    trials = tuple((trial.plan, trial.evaluation) for trial in result.trials)
    history = tuple((count, best) for count, _, best in result.history)
    return trials, history, result.considered, result.lower_bound, result.gap


def test_any_number_of_processes_gives_the_same_trials() -> None:
    alone = search(RandomSearch(seed=5), PROBLEM, budget=24)
    assert alone.evaluations == 24
    for workers in (1, 2, 4):
        with processes(workers) as executor:
            result = search(RandomSearch(seed=5), PROBLEM, budget=24, costs=Evaluator(SimulatedCost(PROBLEM), executor))
        assert without_clock(result) == without_clock(alone)


@pytest.mark.parametrize("name", LAYOUT_ALGORITHMS)
def test_every_algorithm_gives_the_same_trials_with_an_executor(name: str) -> None:
    algorithm = LAYOUT_ALGORITHMS[name]()
    alone = search(algorithm, PROBLEM, budget=20)
    with ThreadPoolExecutor(2) as executor:
        assert without_clock(
            search(algorithm, PROBLEM, budget=20, costs=Evaluator(SimulatedCost(PROBLEM), executor))
        ) == without_clock(alone)


def test_a_dask_cluster_gives_the_same_trials() -> None:
    distributed = pytest.importorskip("distributed")
    alone = search(Exhaustive(), PROBLEM, budget=20)
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        result = search(
            Exhaustive(), PROBLEM, budget=20, costs=Evaluator(SimulatedCost(PROBLEM), client.get_executor())
        )
    assert without_clock(result) == without_clock(alone)


def test_the_executor_is_asked_for_no_more_than_the_budget_and_nothing_twice() -> None:
    executor = Recorded()
    result = search(RandomSearch(), PROBLEM, budget=17, costs=Evaluator(SimulatedCost(PROBLEM), executor))
    assert executor.asked == [trial.plan for trial in result.trials]
    assert len(executor.asked) == 17


def test_an_end_gives_up_what_was_begun() -> None:
    waiting: Future[Any] = Future()

    class Idle(Executor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            return waiting

    evaluator = Evaluator(SimulatedCost(PROBLEM), Idle())
    evaluator.begin(PLANS[:1])
    assert evaluator.pending == 1
    evaluator.cancel()
    assert waiting.cancelled()
    assert evaluator.pending == 0


def test_a_copy_of_costs_is_small_and_judges_alike() -> None:
    costs = SimulatedCost(PROBLEM)
    first = [costs.evaluate(plan) for plan in PLANS[:4]]
    copy = pickle.dumps(costs)
    assert len(copy) == len(pickle.dumps(SimulatedCost(PROBLEM)))
    assert [pickle.loads(copy).evaluate(plan) for plan in PLANS[:4]] == first


def test_an_error_in_a_worker_is_the_error_of_the_search() -> None:
    class Broken(Executor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(RuntimeError("a worker was lost"))
            return future

    with pytest.raises(RuntimeError, match="a worker was lost"):
        search(Exhaustive(), PROBLEM, budget=3, costs=Evaluator(SimulatedCost(PROBLEM), Broken()))


def test_an_evaluation_that_runs_out_of_its_own_time_is_no_wait_without_end() -> None:
    class TimedOut(Executor):
        def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(TimeoutError("the scheduler lost the worker"))
            return future

    evaluator = Evaluator(SimulatedCost(PROBLEM), TimedOut())
    evaluator.begin(PLANS[:1])
    with pytest.raises(TimeoutError, match="lost the worker"):
        evaluator.evaluate(PLANS[0])


def test_ctrl_c_is_left_to_the_parent() -> None:
    with processes(1) as executor:
        assert SIGINT in executor.submit(pthread_sigmask, SIG_BLOCK, ()).result()
    assert SIGINT not in pthread_sigmask(SIG_BLOCK, ())


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_number_of_processes_that_cannot_be_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match="nearest"):
        processes(count)


def test_costs_that_no_executor_gets_need_not_be_pickled() -> None:
    assert search(Exhaustive(), PROBLEM, costs=FakeCost(), budget=2).evaluations == 2


def test_processes_that_are_given_up_are_gone() -> None:
    executor = processes(2)
    futures = [executor.submit(sleep, 0.2) for _ in range(20)]
    futures[0].result()
    executor.give_up()
    end = monotonic() + 60
    while active_children() and monotonic() < end:  # it waits for a second, in which a busy machine may end none
        sleep(0.05)
    assert not active_children()
    assert futures[-1].cancelled()
