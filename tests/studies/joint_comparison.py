"""A page that compares the joint search with the searches for uniform plans and for operators alone.

Run ``python -m tests.studies.joint_comparison FOLDER [--seconds S] [--only NAME,...]`` to write ``joint.md`` and
``joint.jsonl`` into a folder. Every search has S seconds of wall time, 120 by default. Every problem is stored as it is
done: the same command goes on after an interruption.

Twelve networks are captured from torch (`tests.studies.joint_models`), on two nodes with a slow network between them;
eight transformers are presets, on machines of several clouds.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from meshwise.executor.capture.capture import capture
from meshwise.reports.document import Section, to_markdown
from meshwise.scenarios.files.results import write
from meshwise.scenarios.inputs.graph_file import GraphModel
from meshwise.simulator import catalog
from meshwise.simulator.models.model import Model, build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.units import format_size, format_time
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.algorithms import ALGORITHMS
from meshwise.strategies.search.simulated_search import search

from .joint_models import FACTORIES

NAMES = ("auto", "frontier", "joint")
"""The searches: uniform plans, operators of one stage, and both with stages."""

NETWORK = "gcp-a2-highgpu-8g"
"""The machine of the captured networks: 8 A100 of 40 GB a node, 100 Gb/s between nodes."""

TRANSFORMERS = (
    ("llama3-8b", "gcp-a2-highgpu-8g", 2, 64, 4096, "bf16"),
    ("gpt3-13b", "gcp-a2-highgpu-8g", 2, 64, 2048, "bf16"),
    ("llama2-13b", "aws-p4d", 2, 64, 4096, "bf16"),
    ("gpt3-6.7b", "aws-p3dn", 2, 64, 2048, "fp16"),
    ("llama3-70b", "dgx-h100", 2, 32, 4096, "bf16"),
    ("mistral-7b", "dgx-a100-40gb", 1, 64, 4096, "bf16"),
    ("llama2-7b", "azure-ndv2", 4, 64, 4096, "fp16"),
    ("qwen3-8b", "gcp-a3-high", 2, 64, 4096, "bf16"),
)
"""Preset, machine, nodes, sequences of a step, their length, and precision."""

EQUAL = 1e-3
"""Fraction by which a step time may differ and count as equal."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one search found: seconds, bytes, the plan in words, the gap, CPU seconds and how it ended."""

    step_time: float | None
    peak_memory: float | None
    plan: str
    gap: float | None
    cpu_time: float
    end: str


def list_problems() -> Iterator[tuple[str, Problem]]:
    """Yield the name of every problem, and the problem."""
    for name in FACTORIES:
        yield name, capture_problem(name)
    for name, cluster, nodes, batch, sequence, precision in TRANSFORMERS:
        training = Training(batch, sequence, precision=precision)
        yield f"{name}, {nodes} x {cluster}", _build_problem(MODELS[name], cluster, nodes, training)


def capture_problem(name: str) -> Problem:
    """Return the problem of a network of plain torch, by its name."""
    factory, batch = FACTORIES[name]
    graph = capture(*factory(), name).graph
    training = Training(batch, graph.sequence, precision="bf16", framework="torch")
    return _build_problem(GraphModel(graph, "fp32"), NETWORK, 2, training)


def _build_problem(model: Model, cluster: str, nodes: int, training: Training) -> Problem:
    graph = build(model, training.sequence, training.precision)
    return Problem(graph, catalog.cluster(cluster, nodes), training)


def run_searches(problem: Problem, seconds: float) -> dict[str, Found]:
    """Return what every search finds for a problem."""
    result = {}
    for name in NAMES:
        start = process_time()
        found = search(ALGORITHMS[name](), problem, seconds=seconds)
        best = found.best
        result[name] = Found(
            None if best is None else best.evaluation.step_time,
            None if best is None else best.evaluation.peak_memory,
            "none" if best is None else best.plan.describe(),
            found.gap,
            process_time() - start,
            found.end,
        )
    return result


def build_page(rows: dict[str, dict[str, Found]], seconds: float) -> str:
    """Return the page of all problems."""
    table = [
        (
            name,
            *(_describe_time(found[search_name]) for search_name in NAMES),
            f"{100 * (_find_best(found) / found['joint'].step_time - 1):+.1f} %" if found["joint"].step_time else "-",
            "-" if found["joint"].gap is None else f"{100 * found['joint'].gap:.0f} %",
            f"{found['joint'].cpu_time:.0f} s",
            found["joint"].plan,
        )
        for name, found in rows.items()
    ]
    gains = [_find_best(found) / found["joint"].step_time - 1 for found in rows.values() if found["joint"].step_time]
    text = (
        f"Joint search against the better of the two others, {seconds:g} s of wall time each: faster on "
        f"{sum(gain > EQUAL for gain in gains)} of {len(gains)} problems, slower on "
        f"{sum(gain < -EQUAL for gain in gains)}. Gap: over the bound of uniform plans and of all meshes; what devices "
        "must compute is nearly all that it knows, so that it is wide where the network is slow."
    )
    header = ("problem", "uniform (auto)", "operators (frontier)", "joint", "faster by", "gap", "CPU", "joint plan")
    return to_markdown("Stages and operators together", [Section("Step times", (text,), (header, *table))])


def _find_best(found: dict[str, Found]) -> float:
    return min(found[name].step_time or float("inf") for name in NAMES[:-1])


def _describe_time(found: Found) -> str:
    if found.step_time is None or found.peak_memory is None:
        return f"none ({found.end})"
    return f"{format_time(found.step_time)}, {format_size(found.peak_memory)}"


def main(arguments: Sequence[str]) -> int:
    """Write the page of the command line; return the exit code."""
    parser = ArgumentParser(prog="python -m tests.studies.joint_comparison")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    store = options.folder / "joint.jsonl"
    rows: dict[str, dict[str, Found]] = {}
    if store.exists():
        for line in store.read_text("utf-8").splitlines():
            document = json.loads(line)
            rows[document["name"]] = {name: Found(**document[name]) for name in NAMES}
    names = options.only.split(";") if options.only else None
    for name, problem in list_problems():
        if name in rows or (names is not None and name not in names):
            continue
        rows[name] = run_searches(problem, options.seconds)
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name} | {key: asdict(found) for key, found in rows[name].items()}) + "\n")
        print(name, {key: found.step_time for key, found in rows[name].items()}, flush=True)
    write(str(options.folder / "joint.md"), build_page(rows, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
