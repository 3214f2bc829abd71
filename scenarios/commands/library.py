"""``meshwise list``: what a scenario can name."""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, print_rows
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.library import list_names as library_names
from meshwise.scenarios.files.reader import read_document
from meshwise.simulator.catalog import (
    accelerator,
    accelerator_names,
    cluster,
    cluster_names,
    list_assumed_figures,
    sources,
    statuses,
)
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_size
from meshwise.strategies.plan.framework import ENTRIES
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.search.algorithms import ALGORITHMS


class Listing(StrEnum):
    """What can be listed."""

    MODELS = "models"
    ACCELERATORS = "accelerators"
    CLUSTERS = "clusters"
    SCHEDULES = "schedules"
    ALGORITHMS = "algorithms"
    SCENARIOS = "scenarios"
    FRAMEWORKS = "frameworks"


def names(what: Annotated[Listing, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what a scenario can name."""
    rows = _LISTS[what]()
    if not as_json:
        print_rows(rows)
        return
    documents: list[dict[str, object]] = [{"name": name, "description": text} for name, text in rows]
    if what in (Listing.ACCELERATORS, Listing.CLUSTERS):
        for document, (name, _) in zip(documents, rows, strict=True):
            document |= {"sources": sources(name), "status": statuses(name), "assumed": list_assumed_figures(name)}
    if what is Listing.FRAMEWORKS:
        for document, entry in zip(documents, ENTRIES.values(), strict=True):
            document |= {"read": entry.read, "aliases": list(entry.aliases), "sources": dict(entry.sources)}
    emit(documents)


def _list_accelerators() -> list[tuple[str, str]]:
    rows = []
    for name in accelerator_names():
        device = accelerator(name)
        peaks = dict(device.peak_flops)
        dtype = next((dtype for dtype in ("bf16", "fp16") if dtype in peaks), device.peak_flops[0][0])
        memory, rate = format_size(device.memory), format_bandwidth(device.memory_bandwidth)
        rows.append((name, f"{device.name}: {dtype} {format_compute_rate(peaks[dtype])}, {memory} at {rate}"))
    return rows


def _list_clusters() -> list[tuple[str, str]]:
    rows = []
    for name in cluster_names():
        machine = cluster(name)
        node = machine.first_node
        inner_links = f"{_split_words(node.network)} of {format_bandwidth(node.network.link.bandwidth)} links"
        outer_links = f"{node.nics} NIC{'s' * (node.nics > 1)} of {format_bandwidth(node.nic.bandwidth)}"
        text = f"{node.devices} x {node.accelerator.name}, {inner_links}; {outer_links}, {_split_words(machine.fabric)}"
        doubts = list_assumed_figures(name)
        rows.append((name, f"{text}; assumes {', '.join(doubts)}" if doubts else text))
    return rows


def _split_words(network: object) -> str:
    """Return the class name of a network as lower-case words, such as ``leaf spine``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(network).__name__).strip()


def _first_line(documented_object: object) -> str:
    line = (documented_object.__doc__ or "").strip().splitlines()[0].removeprefix("Return ")
    return re.sub(r" \[\d+\]_|``", "", line)  # what a terminal cannot follow: references and marks of code


def _read_title(scenario: str) -> str:
    return str(read_document(find_scenario(scenario)).data.get("name", ""))


_LISTS: dict[Listing, Callable[[], list[tuple[str, str]]]] = {
    Listing.MODELS: lambda: [(name, spec.summary) for name, spec in MODELS.items()],
    Listing.ACCELERATORS: _list_accelerators,
    Listing.CLUSTERS: _list_clusters,
    Listing.SCHEDULES: lambda: [(name, _first_line(rule.order)) for name, rule in SCHEDULES.items()],
    Listing.ALGORITHMS: lambda: [(name, _first_line(kind)) for name, kind in ALGORITHMS.items()],
    Listing.SCENARIOS: lambda: [(name, _read_title(name)) for name in library_names()],
    Listing.FRAMEWORKS: lambda: [(name, entry.description) for name, entry in ENTRIES.items()],
}
