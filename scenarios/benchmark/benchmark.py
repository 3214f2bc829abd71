"""The program's own speed on this machine, in CPU time of one core.

Every figure is measured in a new process that imports only what it needs, so that no cache is warm that a user would
find cold. The time to build tasks counts wherever a user pays for it. A cold figure can be measured once per process,
and varies by a tenth with the placement of memory: it is the median of five processes. A warm figure is the best of
several times in one process.
"""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from statistics import median

import numpy as np

from meshwise.scenarios.benchmark.figure import Figure, measure_best, measure_seconds
from meshwise.scenarios.benchmark.search_benchmark import (
    GPT3,
    LLAMA,
    time_auto,
    time_best_first,
    time_gpt3,
    time_llama,
    time_mixed,
    time_wide,
)
from meshwise.scenarios.files.errors import suggest_nearest
from meshwise.scenarios.loader import load
from meshwise.simulator.catalog import cluster
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import idle_time, phases
from meshwise.simulator.engine import discrete_event, simulate
from meshwise.simulator.engine.longest_path import walk_graph
from meshwise.simulator.engine.step_graph import compile_program
from meshwise.simulator.program import LinkClass, RankClass, Stream, StreamKind, Task, TaskKind, program_of
from meshwise.simulator.timeline import Timeline
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.cuts import Granularity
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import CORE, layouts

GROUPS = ("engine", "search")
_COLD_RUNS = 5


def benchmark(group: str = "all") -> Iterator[Figure]:
    """Yield the figures of a group as they are measured; ``all`` stands for every group."""
    if group not in (*GROUPS, "all"):
        raise ValueError(f"benchmark is one of {', '.join(GROUPS)}, all; met {group}{suggest_nearest(group, GROUPS)}")
    groups = [_MEASUREMENTS[name] for name in GROUPS if group in ("all", name)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, measure in chain.from_iterable(measurements.items() for measurements in groups):
            num_runs = _COLD_RUNS if name.endswith("_cold") else 1
            runs = [pool.submit(measure).result() for _ in range(num_runs)]
            for repeated_figures in zip(*runs, strict=True):
                yield replace(repeated_figures[0], value=median(figure.value for figure in repeated_figures))


def _time_events() -> list[Figure]:
    """Measure tasks per second of the discrete-event engine, without and with compiling the program."""
    scenario = load(GPT3)
    program = lower(scenario.problem, scenario.choose_plan(), Granularity.OPERATOR)
    compute_program = replace(program, flow_of=np.full(program.num_tasks, -1))
    graph = compile_program(compute_program)
    rate = program.num_tasks / measure_best(lambda: discrete_event.run_graph(graph), 7)
    compiled_time = measure_best(lambda: discrete_event.run_graph(compile_program(compute_program)))
    with_compiling = program.num_tasks / compiled_time
    description = f"{GPT3}, {program.num_tasks:,} operators, no transfers"
    return [
        Figure("discrete event, tasks", rate, "tasks/s", 1e6, description),
        Figure("discrete event, tasks, compiling included", with_compiling, "tasks/s", 5e5, description),
    ]


def _time_flows() -> list[Figure]:
    """Measure flows per second on uplinks that several senders share, at the same time or in turns."""

    def measure_rate(uplinks: int, senders: int, messages: int, *, by_turns: bool = False) -> float:
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
                (_previous_task(turn, rank, senders, len(ranks)),) if by_turns and turn + rank % senders else (),
                tuple((link, 1e6 + 7919.0 * ((31 * turn + rank) % 1000)) for link in _list_links(rank, senders, ranks)),
            )
            for turn in range(messages)
            for rank in ranks
        ]
        graph = compile_program(program_of(classes, streams, tasks, links=links))
        return len(tasks) / measure_best(lambda: discrete_event.run_graph(graph))

    by_turns, contending = measure_rate(512, 2, 50, by_turns=True), measure_rate(128, 8, 50)
    return [
        Figure("discrete event, flows", by_turns, "flows/s", 1e5, "2 on an uplink by turns"),
        Figure("discrete event, flows that contend", contending, "flows/s", 1e5, "8 on an uplink, 1,024 at once"),
    ]


def _previous_task(turn: int, rank: int, senders: int, ranks: int) -> int:
    """Return the task that used the uplink in the turn before."""
    return turn * ranks + rank - 1 if rank % senders else (turn - 1) * ranks + rank + senders - 1


def _list_links(rank: int, senders: int, ranks: range) -> tuple[int, int]:
    return rank, len(ranks) + rank // senders


def _time_longest_path() -> list[Figure]:
    scenario = load(GPT3)
    program = lower(scenario.problem, scenario.choose_plan(), Granularity.OPERATOR)
    graph = compile_program(program)
    walk_graph(graph, is_compiled=True)  # compiles
    rate = program.num_tasks / measure_best(lambda: walk_graph(graph, is_compiled=True), 5)
    return [Figure("longest path, tasks", rate, "tasks/s", 50e6, f"{program.num_tasks:,} operators of GPT-3")]


def _prepare_step(name: str) -> Callable[[], Timeline]:
    """Return what simulates a step of a scenario's plan, with the costs of its stages kept."""
    scenario = load(name)
    problem, plan, costs = scenario.problem, scenario.choose_plan(), StageCosts(scenario.problem)
    return lambda: simulate(lower(problem, plan, costs=costs))


def _time_cold(name: str) -> list[Figure]:
    """Time the first step of a process, from the parsed scenario to the timeline."""
    elapsed = measure_seconds(_prepare_step(name))
    return [Figure(f"{name}, cold", elapsed, "s", 0.1, "from the parsed scenario to the timeline, folded")]


def _time_warm(name: str) -> list[Figure]:
    """Time a step with warm caches, and with all spans and memory profiles expanded."""
    run_step = _prepare_step(name)

    def expand_step() -> int:
        timeline = run_step()
        return len(timeline.spans) + sum(len(profile.times) for profile in timeline.memory)

    run_step()
    warm = measure_best(run_step, 7)
    description = f"with all {len(run_step().spans):,} spans and all memory"
    return [
        Figure(f"{name}, warm", warm, "s", 0.01, "the same with templates and costs kept"),
        Figure(f"{name}, written out", measure_best(expand_step), "s", None, description),
    ]


def _time_straggler() -> list[Figure]:
    llama = load(LLAMA).problem
    machine = replace(cluster("dgx-h100", 16384), speeds=((77_777, 0.8),))
    problem = Problem(llama.graph, machine, replace(llama.training, global_batch=16 * 1024))
    layout = Layout(data=1024, tensor=8, pipeline=16, sequence_parallel=True, zero=1, stages="balanced")
    elapsed = measure_seconds(lambda: simulate(lower(problem, complete(problem, layout))).memory[0])
    return [Figure("131,072 devices with one straggler", elapsed, "s", 2.0, "Llama 3 405B, data 1024, folded")]


def _time_unfolded() -> list[Figure]:
    scenario = load(LLAMA)
    problem, plan = scenario.problem, scenario.choose_plan()
    elapsed = measure_seconds(lambda: discrete_event.finish_times(lower(problem, plan, folded=False), every_event=True))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    short_elapsed = measure_seconds(lambda: discrete_event.finish_times(lower(problem, plan, folded=False)))
    description = "every rank and every transfer of Llama 3 405B, from scenario to step time"
    return [
        Figure("16,384 ranks unfolded, every event", elapsed, "s", 10.0, description),
        Figure("16,384 ranks unfolded, memory", memory, "byte", 2 * 2.0**30, "the whole process at its peak"),
        Figure("16,384 ranks unfolded", short_elapsed, "s", 10.0, "events from where the first transfers meet"),
    ]


def _time_plans() -> list[Figure]:
    """Measure plans per second by longest path over the core of GPT-3's space, with the completion of plans."""
    problem = load(GPT3).problem
    core_layouts = list(layouts(problem, CORE))
    SimulatedCost(problem).longest_paths([complete(problem, core_layouts[0])])  # compiles
    costs = SimulatedCost(problem)

    def price_plans() -> None:
        costs.longest_paths([complete(problem, layout) for layout in core_layouts])

    cold_rate = len(core_layouts) / measure_seconds(price_plans)
    warm_rate = len(core_layouts) / measure_best(price_plans)
    plans = f"the {len(core_layouts):,} plans of 3-D parallelism of {GPT3}"
    return [
        Figure("longest path, plans", warm_rate, "plans/s", 20e3, f"{plans}, costs and templates kept"),
        Figure("longest path, plans, from nothing", cold_rate, "plans/s", None, f"{plans}, all costs built"),
    ]


def _time_ring() -> list[Figure]:
    machine = cluster("dgx-a100-80gb", 128)
    group, size = np.arange(1024)[None, :], 2.0**30

    def find_ring_time() -> float:
        ring_phases = phases(machine, Collective.ALL_REDUCE, Algorithm.RING, group)
        return idle_time(machine, ring_phases, 0, size)

    cold = measure_seconds(find_ring_time)
    node = machine.first_node
    inside, ranks = node.network.link, machine.num_devices
    link_time = machine.num_nodes * node.nic.latency + (ranks - machine.num_nodes) * inside.latency
    transfer = link_time + size / (node.nics * node.nic.bandwidth)
    closed_form = max(node.nic.launch, inside.launch) + 2 * (ranks - 1) / ranks * transfer
    error = abs(find_ring_time() / closed_form - 1)
    return [
        Figure("ring all-reduce of 1 GiB on 1,024 devices", cold, "s", 0.1, "128 nodes, 8 channels"),
        Figure("its distance from the closed form", error, "fraction", 0.01, "2 (n-1)/n size / (8 NICs) + latency"),
    ]


_MEASUREMENTS: dict[str, dict[str, Callable[[], list[Figure]]]] = {
    "engine": {
        "events": _time_events,
        "flows": _time_flows,
        "longest_path": _time_longest_path,
        "gpt3_cold": partial(_time_cold, GPT3),
        "gpt3": partial(_time_warm, GPT3),
        "llama_cold": partial(_time_cold, LLAMA),
        "llama": partial(_time_warm, LLAMA),
        "straggler": _time_straggler,
        "unfolded": _time_unfolded,
        "ring": _time_ring,
        "plans": _time_plans,
    },
    "search": {
        "best_first": time_best_first,
        "wide": time_wide,
        "auto": time_auto,
        "mixed": time_mixed,
        "operators_cold": time_gpt3,
        "operators": time_llama,
    },
}
"""Group -> name of a measurement -> the function that makes its figures; those that end in ``_cold`` run repeatedly."""
