"""Traces for other programs, whose size is printed before they are written, and ``meshwise replay``."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.reports.difference import HEAD, Difference, difference
from meshwise.reports.pictures.timeline import draw_timeline
from meshwise.reports.traces import chrome, kineto, perfetto
from meshwise.reports.traces.chakra import GROUPS_FILE, PREFIX, Chakra
from meshwise.reports.traces.chakra_reader import read_chakra
from meshwise.reports.traces.execution import Execution
from meshwise.reports.traces.kineto import name_by_collective, name_operation, read_kineto, select_ranks
from meshwise.reports.traces.processes import list_processes
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, note, print_rows, print_table
from meshwise.scenarios.files.results import check_output
from meshwise.scenarios.files.results import make_folder as made
from meshwise.simulator.engine import simulate
from meshwise.simulator.units import format_size, format_time
from meshwise.strategies.lowering.lower import lower_with_sites

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario
    from meshwise.scenarios.simulation import Simulation
    from meshwise.simulator.timeline import Timeline

MAX_JSON = 2 * 2**30
"""Largest JSON trace in bytes, since its readers load it as a whole."""
MAX_TRACE = 64 * 2**30
"""Largest total size of other traces, in bytes."""


def write_trace(timeline: "Timeline", path: str, ranks: str) -> None:
    """Write a trace for a trace viewer: Perfetto's protobuf where the name ends in .pftrace, else Chrome's JSON."""
    shown_ranks = list_processes(timeline, ranks)
    if path.lower().endswith(".pftrace"):
        _announce(path, perfetto.estimate_size(timeline, shown_ranks), len(shown_ranks), MAX_TRACE)
        perfetto.write_perfetto(timeline, path, shown_ranks)
    else:
        _announce(path, chrome.estimate_size(timeline, shown_ranks), len(shown_ranks), MAX_JSON)
        chrome.write_trace(timeline, path, shown_ranks)


def write_kineto(timeline: "Timeline", folder: str, ranks: str) -> None:
    """Write a folder of traces as torch.profiler writes them, a file a rank."""
    shown_ranks = list_processes(timeline, ranks)
    target = made(folder)
    _announce(folder, kineto.estimate_size(timeline, shown_ranks), len(shown_ranks), MAX_TRACE)
    kineto.write_kineto(timeline, target, shown_ranks)


def write_chakra(value: "Scenario", result: "Simulation", folder: str) -> None:
    """Write a folder of Chakra execution traces, a file a rank, and the ranks of their groups."""
    target = made(folder)
    chakra = Chakra(Execution(lower_with_sites(value.problem, result.plan), result.engine))
    _announce(folder, chakra.size, result.ranks, MAX_TRACE, about="")
    chakra.write(target)
    note(f"ASTRA-sim: --workload-configuration={target / PREFIX} --comm-group-configuration={target / GROUPS_FILE}")


def _announce(path: str, size: int, count: int, limit: int, about: str = "about ") -> None:
    """Print the size of a trace to write; raise ``ValueError`` where it exceeds ``limit`` or the free disk space."""
    announcement = f"{path}: {about}{format_size(size)}, {count:,} process{'es' if count != 1 else ''}"
    free_space = shutil.disk_usage(Path(path).resolve().parent).free
    if size > min(limit, free_space):
        limit_text = f"{format_size(limit)} at most" if size > limit else f"{format_size(free_space)} of disk are free"
        remedy = "name fewer with --ranks, or write .pftrace" if limit == MAX_JSON else "name fewer ranks"
        raise ValueError(f"{announcement}: {limit_text}; {remedy}")
    note(announcement)


def compare_measured(result: "Simulation", paths: Sequence[str]) -> Difference:
    """Return how a predicted step differs from the one in Kineto traces, by the operations that both sides name."""
    measured = read_kineto(paths)
    ranks = [rank for members in measured.rank_classes for rank in members.ranks]
    return difference(name_by_collective(select_ranks(result.timeline, ranks)), measured, name_operation)


def print_measured(comparison: Difference) -> None:
    """Print which kinds of operations were predicted wrongly."""
    predicted, measured = format_time(comparison.predicted), format_time(comparison.measured)
    print(f"\nwhat leads from {predicted} predicted to {measured} measured")
    print_table(HEAD, comparison.lines())


def replay(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Chakra execution traces: NAME.RANK.et.")],
    trace: Annotated[str | None, typer.Option(help="Write a trace for a trace viewer (.json, .pftrace).")] = None,
    timeline: Annotated[str | None, typer.Option(help="Draw the step (.png, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Simulate Chakra execution traces: a file a rank, as `meshwise simulate --chakra` writes them and others do.

    Every node takes as long as its file says, collectives and transfers from when all of their ranks are there.
    """
    check_output(trace, (".json", ".pftrace"))
    check_output(timeline, (".png", ".svg"))
    program = read_chakra(folder)
    replayed = simulate(program)
    if timeline is not None:
        draw_timeline(replayed, Path(timeline), title=Path(folder).name)
    if trace is not None:
        write_trace(replayed, trace, "classes")
    exposed = {str(kind): seconds for kind, seconds in replayed.exposed_communication().items()}
    document = {
        "step_time": replayed.step_time,
        "ranks": len(replayed.rank_classes),
        "tasks": program.num_tasks,
        "bubble": replayed.bubble,
        "exposed_communication": exposed,
    }
    if as_json:
        emit(document)
        return
    print_rows([("step", format_time(replayed.step_time)), ("ranks", f"{len(replayed.rank_classes):,}")])
    kinds = [(kind, format_time(seconds)) for kind, seconds in exposed.items() if seconds]
    print_rows([("tasks", f"{program.num_tasks:,}"), *kinds])
