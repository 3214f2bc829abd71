"""The program's own speed on this machine, in CPU time of one core.

Every figure is measured in a new process that imports only what it needs, so that no cache is warm that a user would
find cold. The time to build tasks counts wherever a user pays for it. A cold figure can be measured once per process,
and varies by a tenth with the placement of memory: it is the median of five processes. A warm figure is the best of
several times in one process.
"""

import resource
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

import numpy as np

from meshwise.scenarios.loader import load
from meshwise.scenarios.studies.figure import Figure, best, seconds
from meshwise.scenarios.studies.search_benchmark import auto, best_first, gpt3, llama, mixed, wide
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import idle_time, phases
from meshwise.simulator.engine import discrete_event, simulate
from meshwise.simulator.engine.longest_path import by_kernel
from meshwise.simulator.engine.step_graph import compile_program
from meshwise.simulator.program import LinkClass, RankClass, Stream, StreamKind, Task, TaskKind, program_of
from meshwise.strategies.bounds.path_times import LongestPaths
from meshwise.strategies.lowering import Granularity, StageCosts, lower
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import CORE, layouts

GROUPS = ("engine", "search")
_COLD_RUNS = 5


def benchmark(group: str = "all") -> Iterator[Figure]:
    """Yield the figures of a group as they are measured; ``all`` stands for every group."""
    if group not in (*GROUPS, "all"):
        raise ValueError(f"benchmark is one of {', '.join(GROUPS)}, all; met {group}")
    chosen = [name for of, name in _RUNS if group in ("all", of)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in chosen:
            runs = [pool.submit(_run, name).result() for _ in range(_COLD_RUNS if name.endswith("_cold") else 1)]
            for same in zip(*runs, strict=True):
                yield replace(same[0], value=median(figure.value for figure in same))


def _run(name: str) -> list[Figure]:
    figures: list[Figure] = globals()[name]()
    return figures


def _events() -> list[Figure]:
    """Measure tasks per second of the discrete-event engine, without and with compiling the program."""
    scenario = load("gpt3-175b-1024-a100")
    program = lower(scenario.problem, scenario.chosen(), Granularity.OPERATOR)
    alone = replace(program, flow_of=np.full(program.num_tasks, -1))
    graph = compile_program(alone)
    rate = program.num_tasks / best(lambda: discrete_event.run(graph), 7)
    with_compiling = program.num_tasks / best(lambda: discrete_event.run(compile_program(alone)))
    what = f"gpt3-175b-1024-a100, {program.num_tasks:,} operators, no transfers"
    return [
        Figure("discrete event, tasks", rate, "tasks/s", 1e6, what),
        Figure("discrete event, tasks, compiling included", with_compiling, "tasks/s", 5e5, what),
    ]


def _flows() -> list[Figure]:
    """Measure flows per second on uplinks that several senders share, at the same time or in turns."""

    def rate(uplinks: int, senders: int, each: int, *, by_turns: bool = False) -> float:
        ranks = range(uplinks * senders)
        classes = [RankClass(f"rank {rank}", (0,), (rank,)) for rank in ranks]
        streams = [Stream(rank, StreamKind.SEND_FORWARD) for rank in ranks]
        links = [LinkClass(f"nic {rank}", 50e9) for rank in ranks]
        links += [LinkClass(f"uplink {number}", 100e9) for number in range(uplinks)]
        tasks = [
            Task(
                TaskKind.PIPELINE_COMMUNICATION,
                (rank,),
                1_000_000,
                (_before(turn, rank, senders, len(ranks)),) if by_turns and turn + rank % senders else (),
                tuple((link, 1e6 + 7919.0 * ((31 * turn + rank) % 1000)) for link in _way(rank, senders, ranks)),
            )
            for turn in range(each)
            for rank in ranks
        ]
        graph = compile_program(program_of(classes, streams, tasks, links=links))
        return len(tasks) / best(lambda: discrete_event.run(graph))

    return [
        Figure("discrete event, flows", rate(512, 2, 50, by_turns=True), "flows/s", 1e5, "2 on an uplink by turns"),
        Figure("discrete event, flows that contend", rate(128, 8, 50), "flows/s", 1e5, "8 on an uplink, 1,024 at once"),
    ]


def _before(turn: int, rank: int, senders: int, ranks: int) -> int:
    """Return the task that used the uplink in the turn before."""
    return turn * ranks + rank - 1 if rank % senders else (turn - 1) * ranks + rank + senders - 1


def _way(rank: int, senders: int, ranks: range) -> tuple[int, int]:
    return rank, len(ranks) + rank // senders


def _longest_path() -> list[Figure]:
    scenario = load("gpt3-175b-1024-a100")
    program = lower(scenario.problem, scenario.chosen(), Granularity.OPERATOR)
    graph = compile_program(program)
    by_kernel(graph)  # compiles
    rate = program.num_tasks / best(lambda: by_kernel(graph), 5)
    return [Figure("longest path, tasks", rate, "tasks/s", 50e6, f"{program.num_tasks:,} operators of GPT-3")]


def _gpt3_cold() -> list[Figure]:
    return [_cold("gpt3-175b-1024-a100", 0.1)]


def _gpt3() -> list[Figure]:
    return _step("gpt3-175b-1024-a100", 0.01)


def _llama_cold() -> list[Figure]:
    return [_cold("llama3-405b-16384-1f1b", 0.1)]


def _llama() -> list[Figure]:
    return _step("llama3-405b-16384-1f1b", 0.01)


def _cold(name: str, goal: float) -> Figure:
    """Time the first step of a process, from the parsed scenario to the timeline."""
    scenario = load(name)
    problem, plan, costs = scenario.problem, scenario.chosen(), StageCosts(scenario.problem)
    taken = seconds(lambda: simulate(lower(problem, plan, costs=costs)))
    return Figure(f"{name}, cold", taken, "s", goal, "from the parsed scenario to the timeline, folded")


def _step(name: str, goal: float) -> list[Figure]:
    """Time a step with warm caches, and with all spans and memory profiles expanded."""
    scenario = load(name)
    problem, plan, costs = scenario.problem, scenario.chosen(), StageCosts(scenario.problem)

    def step() -> None:
        simulate(lower(problem, plan, costs=costs))

    def written_out() -> int:
        timeline = simulate(lower(problem, plan, costs=costs))
        return len(timeline.spans) + sum(len(profile.times) for profile in timeline.memory)

    step()
    warm = best(step, 7)
    spans = len(simulate(lower(problem, plan, costs=costs)).spans)
    return [
        Figure(f"{name}, warm", warm, "s", goal, "the same with templates and costs kept"),
        Figure(f"{name}, written out", best(written_out), "s", None, f"with all {spans:,} spans and all memory"),
    ]


def _straggler() -> list[Figure]:
    llama = load("llama3-405b-16384-1f1b").problem
    machine = replace(cluster("dgx-h100", 16384), speeds=((77_777, 0.8),))
    problem = Problem(llama.graph, machine, replace(llama.training, global_batch=16 * 1024))
    layout = Layout(data=1024, tensor=8, pipeline=16, sequence_parallel=True, zero=1, stages="balanced")
    taken = seconds(lambda: simulate(lower(problem, complete(problem, layout))).memory[0])
    return [Figure("131,072 devices with one straggler", taken, "s", 2.0, "Llama 3 405B, data 1024, folded")]


def _unfolded() -> list[Figure]:
    scenario = load("llama3-405b-16384-1f1b")
    problem, plan = scenario.problem, scenario.chosen()
    taken = seconds(lambda: discrete_event.finish_times(lower(problem, plan, folded=False), every_event=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    short = seconds(lambda: discrete_event.finish_times(lower(problem, plan, folded=False)))
    what = "every rank and every transfer of Llama 3 405B, from scenario to step time"
    return [
        Figure("16,384 ranks unfolded, every event", taken, "s", 10.0, what),
        Figure("16,384 ranks unfolded, memory", memory, "byte", 2 * 2.0**30, "the whole process at its peak"),
        Figure("16,384 ranks unfolded", short, "s", 10.0, "events from where the first transfers meet"),
    ]


def _plans() -> list[Figure]:
    """Measure plans per second by longest path over the core of GPT-3's space, with the completion of plans."""
    problem = load("gpt3-175b-1024-a100").problem
    chosen = list(layouts(problem, CORE))
    LongestPaths(StageCosts(problem)).ticks([complete(problem, chosen[0])])  # compiles
    paths = LongestPaths(StageCosts(problem))
    first = seconds(lambda: paths.ticks([complete(problem, layout) for layout in chosen]))
    again = best(lambda: paths.ticks([complete(problem, layout) for layout in chosen]))
    what = f"the {len(chosen):,} plans of 3-D parallelism of gpt3-175b-1024-a100"
    return [
        Figure("longest path, plans", len(chosen) / again, "plans/s", 20e3, f"{what}, costs and templates kept"),
        Figure("longest path, plans, from nothing", len(chosen) / first, "plans/s", None, f"{what}, all costs built"),
    ]


def _best_first() -> list[Figure]:
    return best_first()


def _wide() -> list[Figure]:
    return wide()


def _auto() -> list[Figure]:
    return auto()


def _mixed() -> list[Figure]:
    return mixed()


def _operators_cold() -> list[Figure]:
    return gpt3()


def _operators() -> list[Figure]:
    return llama()


def _ring() -> list[Figure]:
    machine = cluster("dgx-a100-80gb", 128)
    group, size = np.arange(1024)[None, :], 2.0**30

    def ring() -> float:
        found = phases(machine, Collective.ALL_REDUCE, Algorithm.RING, group)
        return idle_time(machine, found, 0, size)

    cold = seconds(ring)
    node = machine.first
    inside, ranks = node.network.link, machine.num_devices
    between = machine.num_nodes * node.nic.latency + (ranks - machine.num_nodes) * inside.latency
    transfer = between + size / (node.nics * node.nic.bandwidth)
    closed = max(node.nic.launch, inside.launch) + 2 * (ranks - 1) / ranks * transfer
    error = abs(ring() / closed - 1)
    return [
        Figure("ring all-reduce of 1 GiB on 1,024 devices", cold, "s", 0.1, "128 nodes, 8 channels"),
        Figure("its distance from the closed form", error, "fraction", 0.01, "2 (n-1)/n size / (8 NICs) + latency"),
    ]


_STEPS = ("_gpt3_cold", "_gpt3", "_llama_cold", "_llama", "_straggler", "_unfolded")
_ENGINE = ("_events", "_flows", "_longest_path", *_STEPS, "_ring", "_plans")
_SEARCH = ("_best_first", "_wide", "_auto", "_mixed", "_operators_cold", "_operators")
_RUNS = [("engine", name) for name in _ENGINE] + [("search", name) for name in _SEARCH]
