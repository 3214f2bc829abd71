"""The result of simulating one step of a plan: its time and memory, and what they consist of."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report
from meshwise.reports.pictures.timeline import draw_timeline
from meshwise.reports.tables import list_result_rows
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.intervals import (
    Interval,
    describe_peak_runs,
    find_step_interval,
    peak_memory_interval,
)
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.notebook import to_html
from meshwise.simulator.program import Category
from meshwise.simulator.reliability.goodput import Goodput
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import LinkUse, Timeline
from meshwise.strategies.explanation.critical_path import critical_path
from meshwise.strategies.loads.loaded_step import LoadedStep
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, count_node_ranks
from meshwise.strategies.tables.report import describe_tables
from meshwise.strategies.tables.table import list_tables

if TYPE_CHECKING:
    import pandas as pd


SAVED_ENDINGS = (".html", ".png", ".svg", ".json")
"""Endings of the files that a result can be saved to."""

BACKWARD_AND_FORWARD = 3
"""FLOP of a step over those of its forward pass: backward has two products for each one of forward, for the gradients
of inputs and of weights."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the devices of one pipeline rank at its peak, by category.

    ``stages`` are all stages of that rank, ``stage`` the first of them; ``peak`` is the sum of all categories, of
    which ``buffers`` has what the runtime takes before the first tensor. ``rank`` is the first of ``ranks`` global
    ranks that are alike, and ``usable`` the largest peak that a search takes on their devices.
    ``host_peak`` is the largest number of bytes on one host of such devices, with everything that the host stores.
    ``peak_time`` is the time of the peak in seconds, ``peak_operator`` what runs then: pass, microbatch and operator.
    """

    stage: int
    stages: tuple[int, ...]
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    peak: float
    host_peak: float = 0.0
    peak_time: float = 0.0
    peak_operator: str = ""
    rank: int = 0
    ranks: int = 1
    usable: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulation of one step of a plan, in seconds, bytes, FLOP/s and fractions.

    Intervals contain 90 % of the runs of publishers that are left out (`meshwise.scenarios.intervals`). ``fits`` says
    whether every host has enough memory, and every device including what the allocator reserves beside tensors;
    ``out_of_memory`` is the probability that a device lacks memory. ``peak_reserved`` is what the allocator reserves
    when a step is replayed, ``peak_device`` adds the runtime's context and the communicators' buffers.
    ``tokens_per_second`` are samples where a sample is not a sequence of tokens (``unit`` of `to_json`).
    ``memory_capacity`` is the memory of the smallest device that the framework reports, and ``memory_usable`` the
    largest ``peak_memory`` that a search takes there. ``peak_memory`` is of tensors, and of what the runtime takes
    before the first. ``tasks``, ``classes`` and ``ranks`` are the sizes of the simulated program, ``wall_time`` the
    seconds that the simulation took. ``loads`` are step times under loads that vary, where the scenario has some; all
    other figures are of a step of full sequences.
    """

    problem: Problem
    plan: Plan
    timeline: Timeline
    step_time: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    model_flops_per_second_per_device: float
    mfu: float
    fits: bool
    peak_memory: float
    memory_capacity: float
    memory_usable: float
    step_time_interval: Interval
    peak_memory_interval: Interval
    out_of_memory: float
    peak_reserved: float
    peak_device: float
    memory: tuple[StageMemory, ...]
    bubble: float
    exposed_communication: tuple[tuple[str, float], ...]
    links: tuple[LinkUse, ...]
    bottleneck: LinkUse | None
    engine: str
    tasks: int
    classes: int
    ranks: int
    wall_time: float
    assumptions: tuple[str, ...]
    goodput: Goodput | None = None
    loads: LoadedStep | None = None

    __repr__ = brief_repr(
        "plan", "step_time", "mfu", "fits", "peak_memory", "memory_capacity", "bubble", "engine", "ranks"
    )

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON-ready data, without problem, plan and timeline."""
        excluded_names = ("problem", "plan", "timeline", "goodput", "loads")
        scalars = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in excluded_names}
        goodput = {"goodput": self.goodput.to_json()} if self.goodput else {}
        tables = {
            "unit": self.problem.training.unit,
            "memory": list(map(asdict, self.memory)),
            "exposed_communication": dict(self.exposed_communication),
            "links": list(map(asdict, self.links)),
            "bottleneck": asdict(self.bottleneck) if self.bottleneck else None,
            "peak_memory_interval_runs": describe_peak_runs(self.problem.training.framework),
            "assumptions": list(self.assumptions),
        }
        loads = {"loads": self.loads.to_json()} if self.loads else {}
        return scalars | goodput | loads | tables | describe_plan_tables(self.problem, self.plan)

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each span of the step: rank class, stream, operators, begin and end in seconds."""
        return self.timeline.to_pandas()

    def plot(self, path: str | Path) -> None:
        """Draw the timeline of the step as a picture, .png or .svg.

        Raises
        ------
        ValueError
            Where the file has another ending.
        """
        draw_timeline(self.timeline, path, title=self.plan.describe())

    def save(self, path: str | Path) -> None:
        """Write the step as a page for a browser (.html), as a picture (.png, .svg) or as its figures (.json).

        Raises
        ------
        ValueError
            Where the file has another ending or cannot be written.
        """
        check_output(path, SAVED_ENDINGS)
        ending = Path(path).suffix.lower()
        if ending == ".html":
            write(path, html(build_page_report(self, self.plan.describe())))
        elif ending == ".json":
            write(path, json.dumps(self.to_json(), indent=2) + "\n")
        else:
            self.plot(path)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the figures and the timeline."""
        with TemporaryDirectory() as folder:
            picture = Path(folder) / "timeline.png"
            self.plot(picture)
            return to_html(self.plan.describe(), list_result_rows(self.to_json()), picture.read_bytes())


def describe_plan_tables(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Return ``embedding_tables``, how they lie, where data ranks share some; else nothing."""
    if not plan.embeddings:
        return {}
    tables, samples = list_tables(problem.graph), plan.sequences * plan.data
    node_ranks = count_node_ranks(problem, plan.data)
    return {"embedding_tables": describe_tables(tables, plan.embeddings, samples, plan.data, node_ranks)}


def build_page_report(result: Simulation, title: str, **extra_parts: Any) -> Report:
    """Return the report of a simulated step; ``extra_parts`` are further fields of the `Report`."""
    return Report(
        title=title,
        result=result.to_json(),
        timeline=result.timeline,
        plan=result.plan,
        cluster=result.problem.cluster,
        path=critical_path(lower(result.problem, result.plan), result.timeline.engine),
        **extra_parts,
    )


def simulate_plan(problem: Problem, plan: Plan, engine: str, assumptions: tuple[str, ...]) -> Simulation:
    """Return the simulation of one step of ``plan``, by an engine by name."""
    start = time.perf_counter()
    program = lower(problem, plan)
    timeline = simulate(program, engine)
    wall_time = time.perf_counter() - start
    training = problem.training
    devices = plan.mesh.num_ranks
    tokens = training.global_batch * training.sequence / timeline.step_time
    model_flops = BACKWARD_AND_FORWARD * problem.graph.flops * training.global_batch  # without recomputation
    rate = model_flops / timeline.step_time / devices
    interval = find_step_interval(problem, timeline.step_time, assumptions)
    forecast = forecast_plan(problem, plan)
    return Simulation(
        problem=problem,
        plan=plan,
        timeline=timeline,
        step_time=timeline.step_time,
        tokens_per_second=tokens,
        tokens_per_second_per_device=tokens / devices,
        model_flops_per_second_per_device=rate,
        mfu=rate * devices / _sum_peak_flops(problem, plan),
        fits=forecast.fits,
        peak_memory=timeline.peak_memory,
        memory_capacity=min(device.memory for device in problem.cluster.accelerators),
        memory_usable=min(problem.usable_memory(device) for device in problem.cluster.accelerators),
        step_time_interval=interval,
        peak_memory_interval=peak_memory_interval(timeline.peak_memory, training.framework),
        out_of_memory=forecast.out_of_memory,
        peak_reserved=forecast.reserved,
        peak_device=forecast.device,
        memory=tuple(list_stage_memory(timeline)),
        bubble=timeline.bubble,
        exposed_communication=tuple((str(kind), value) for kind, value in timeline.exposed_communication().items()),
        links=tuple(link for link in timeline.links if link.bytes > 0),
        bottleneck=timeline.bottleneck,
        engine=timeline.engine,
        tasks=program.num_tasks,
        classes=len(program.rank_classes),
        ranks=sum(len(members.ranks) for members in program.rank_classes),
        wall_time=wall_time,
        assumptions=(*assumptions, *_list_steady_assumptions(timeline)),
    )


def _list_steady_assumptions(timeline: Timeline) -> Iterator[str]:
    """Yield the assumptions about the steady state of a pipeline without a flush."""
    if timeline.begin:
        yield "the pipeline has no flush: the step is one of the steady state, its filling at the start left out"
    if not timeline.repeats:
        yield f"steps do not repeat exactly: the step time is the mean of {timeline.steps}"


def _sum_peak_flops(problem: Problem, plan: Plan) -> float:
    """Return the sum of the data-sheet FLOP/s of all devices that the plan uses."""
    cluster, precision = problem.cluster, problem.training.precision
    if len(cluster.accelerators) == 1:
        return cluster.accelerator.peak(precision) * plan.mesh.num_ranks
    devices = plan.placement or range(plan.mesh.num_ranks)
    return sum(cluster.node_kind(device).accelerator.peak(precision) for device in devices)


def list_stage_memory(timeline: Timeline) -> Iterator[StageMemory]:
    """Yield the memory of every rank class at its peak."""
    hosts = _find_host_peaks(timeline)
    for profile in timeline.memory:
        members = timeline.rank_classes[profile.rank_class]
        stages = members.stages
        row = profile.usage[profile.totals.index(profile.peak)]
        usage = {str(category): row[CATEGORIES.index(category)] for category in Category}
        host_peak = hosts.get(profile.rank_class, 0.0)
        peak = {"peak": profile.peak, "host_peak": host_peak, "peak_time": profile.peak_time}
        operator_text = _describe_span(timeline.find_span(profile.rank_class, profile.peak_time))
        yield StageMemory(
            stages[0] if stages else 0,
            stages,
            **usage,
            **peak,
            peak_operator=operator_text,
            rank=members.representative,
            ranks=len(members.ranks),
            usable=profile.capacity,
        )


def _describe_span(span: Span | None) -> str:
    """Return in words what runs in a span; no text for none."""
    if span is None:
        return ""
    microbatch = f" of microbatch {span.microbatch}" if span.microbatch >= 0 else ""
    return f"{span.kind}{microbatch}, {span.operators}"


def _find_host_peaks(timeline: Timeline) -> dict[int, float]:
    """Return by rank class the largest peak, in bytes, of a host of its ranks."""
    peaks: dict[int, float] = {}
    for profile in timeline.host_memory if timeline.hosts else ():
        for rank_class, _ in timeline.hosts[profile.rank_class].members:
            peaks[rank_class] = max(peaks.get(rank_class, 0.0), profile.peak)
    return peaks
