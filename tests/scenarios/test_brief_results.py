"""Whatever a scenario, its simulation or its search holds is a line or a short table at a prompt."""

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice

import pytest

from meshwise import load
from meshwise.simulator.engine import simulate
from meshwise.strategies.lowering.lower import lower

from ..pace import measure_cpu

LONGEST, LINES, SECONDS = 2000, 25, 0.1
OWN = {"meshwise"}
FIRST = 3000
"""Items of a collection that are looked at: the 336,204 spans of a step are of one type."""


def reachable(*roots: object) -> Iterator[object]:
    """Yield every value of the five packages that `roots` hold, each once; collections of them too."""
    waiting, seen = list(roots), set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, Mapping):
            waiting += islice(value.values(), FIRST)
        elif isinstance(value, Sequence | Set):
            waiting += islice(value, FIRST)
        if type(value).__module__.split(".")[0] in OWN:
            yield value


@pytest.fixture(scope="module")
def values() -> list[object]:
    scenario = load("gpt3-175b-1024-a100")
    assert scenario.problem.cluster.num_devices == 1024 and scenario.plan is not None
    result = scenario.search("beam", budget=20)
    program = lower(scenario.problem, scenario.plan)
    roots = [scenario, scenario.simulate(), result, program, simulate(program, "longest_path")]
    roots += [scenario.plan.actions, load("llama3-405b-16384-h100").simulate()]
    return list(reachable(*roots))


def test_what_is_reachable_is_the_whole_of_it(values: list[object]) -> None:
    met = {type(value).__name__ for value in values}
    assert met >= {"Scenario", "Problem", "Cluster", "OperatorGraph", "Operator", "Transformer", "Plan", "Schedule"}
    assert met >= {"Simulation", "Timeline", "Spans", "MemoryProfile", "SearchResult", "Trial", "Program", "RankClass"}


def repr_seconds(value: object) -> float:
    """Return the seconds of CPU that a repr takes; where they are many, at the pace of a quiet machine."""
    start = time.process_time()
    repr(value)
    seconds = time.process_time() - start
    if seconds > SECONDS:
        with measure_cpu() as spent:
            repr(value)
        seconds = spent.seconds
    return seconds


def test_every_value_is_short_at_a_prompt_and_quickly_so(values: list[object]) -> None:
    long = set()
    for value in values:
        text, seconds = repr(value), repr_seconds(value)
        if len(text) > LONGEST or text.count("\n") >= LINES or seconds > SECONDS:
            long.add((type(value).__name__, len(text), round(seconds, 3)))
    assert not long


def test_many_results_are_a_line_each() -> None:
    # 19 algorithms with their plans were one line of 5,289 characters
    text = repr(load("starter").compare(["best_first", "random", "mcmc"], budget=2))
    assert len(text.splitlines()) == 3 and len(text) < 400
    assert text.startswith("best_first")
