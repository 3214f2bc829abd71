"""``meshwise init``, ``list``, ``validate`` and ``schema``: files and names."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import BAD_INPUT, emit, note, show
from meshwise.simulator.files import escaped

if TYPE_CHECKING:
    from meshwise.scenarios.files.errors import Fault


class Listing(StrEnum):
    """What can be listed."""

    MODELS = "models"
    ACCELERATORS = "accelerators"
    CLUSTERS = "clusters"
    SCHEDULES = "schedules"
    ALGORITHMS = "algorithms"
    SCENARIOS = "scenarios"


class FileKind(StrEnum):
    """Kinds of input files."""

    SCENARIO = "scenario"
    PLAN = "plan"
    CLUSTER = "cluster"
    GRAPH = "graph"


def init(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to write it.")] = ".", as_json: Json = False
) -> None:
    """Write a commented scenario to start from, and beside it the schema by which an editor completes it."""
    from meshwise.scenarios.files.library import root
    from meshwise.scenarios.files.results import folder, write
    from meshwise.scenarios.schema.json_schema import FILE

    target = Path(directory) / "scenario.yaml"
    if target.exists():
        raise ValueError(f"{target}: the file exists; name another folder or remove it")
    folder(directory)
    schema = Path(directory) / FILE
    if not schema.exists():
        write(schema, (root() / FILE).read_text("utf-8"))
    write(target, (root() / "starter.yaml").read_text("utf-8"))
    if as_json:
        emit({"file": str(target), "schema": str(schema)})
    else:
        print(f"{target} is written; try: meshwise simulate {target}")


def names(what: Annotated[Listing, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what a scenario can name."""
    rows = _LISTS[what]()
    if as_json:
        catalogued = what in (Listing.ACCELERATORS, Listing.CLUSTERS)
        emit([{"name": name, "description": text} | (_origins(name) if catalogued else {}) for name, text in rows])
    else:
        show(rows)


def _models() -> list[tuple[str, str]]:
    from meshwise.simulator.models.presets import MODELS

    return [(name, spec.summary) for name, spec in MODELS.items()]


def _accelerators() -> list[tuple[str, str]]:
    from meshwise.simulator.catalog import accelerator, accelerator_names
    from meshwise.simulator.units import format_bandwidth, format_compute_rate, format_size

    rows = []
    for name in accelerator_names():
        device = accelerator(name)
        peaks = dict(device.peak_flops)
        dtype = next((dtype for dtype in ("bf16", "fp16") if dtype in peaks), device.peak_flops[0][0])
        memory, rate = format_size(device.memory), format_bandwidth(device.memory_bandwidth)
        rows.append((name, f"{device.name}: {dtype} {format_compute_rate(peaks[dtype])}, {memory} at {rate}"))
    return rows


def _clusters() -> list[tuple[str, str]]:
    from meshwise.simulator.catalog import assumed, cluster, cluster_names
    from meshwise.simulator.units import format_bandwidth

    rows = []
    for name in cluster_names():
        one = cluster(name)
        node = one.first
        inside = f"{_words(node.network)} of {format_bandwidth(node.network.link.bandwidth)} links"
        outside = f"{node.nics} NIC{'s' * (node.nics > 1)} of {format_bandwidth(node.nic.bandwidth)}"
        text = f"{node.devices} x {node.accelerator.name}, {inside}; {outside}, {_words(one.fabric)}"
        doubts = assumed(name)
        rows.append((name, f"{text}; assumes {', '.join(doubts)}" if doubts else text))
    return rows


def _words(network: object) -> str:
    """Return the name of a kind of network as words, as in ``leaf spine``."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(network).__name__).strip()


def _origins(name: str) -> dict[str, Any]:
    from meshwise.simulator.catalog import assumed, sources, statuses

    return {"sources": sources(name), "status": statuses(name), "assumed": assumed(name)}


def _schedules() -> list[tuple[str, str]]:
    from meshwise.strategies.schedules.schedule import SCHEDULES

    return [(name, _first_line(rule.order)) for name, rule in SCHEDULES.items()]


def _algorithms() -> list[tuple[str, str]]:
    from meshwise.strategies.search import ALGORITHMS

    return [(name, _first_line(kind)) for name, kind in ALGORITHMS.items()]


def _first_line(thing: Any) -> str:
    text = (thing.__doc__ or "").strip().splitlines()[0].removeprefix("Return ").replace("]_", "]")
    return text


def _scenarios() -> list[tuple[str, str]]:
    from meshwise.scenarios.files.library import find
    from meshwise.scenarios.files.library import names as library_names
    from meshwise.scenarios.files.reader import read

    return [(name, str(read(find(name)).data.get("name", ""))) for name in library_names()]


_LISTS = {
    Listing.MODELS: _models,
    Listing.ACCELERATORS: _accelerators,
    Listing.CLUSTERS: _clusters,
    Listing.SCHEDULES: _schedules,
    Listing.ALGORITHMS: _algorithms,
    Listing.SCENARIOS: _scenarios,
}


def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A scenario, plan, cluster or graph file.")],
    as_json: Json = False,
) -> None:
    """Check a scenario, plan, cluster or graph file and report all errors at once."""
    from meshwise.scenarios.files.errors import Fault, ScenarioError
    from meshwise.scenarios.files.library import find
    from meshwise.scenarios.files.reader import read

    kind, text = FileKind.SCENARIO, ""
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    try:
        document = read(find(file))
        kind = kind_of(document.data)
        warnings = _check(kind, document)
    except ScenarioError as error:
        faults, text = error.faults, str(error)
    if as_json:
        errors, remarks = (list(map(asdict, each)) for each in (faults, warnings))
        emit({"file": file, "kind": kind.value, "valid": not faults, "errors": errors, "warnings": remarks})
    elif faults:
        note(text)
    else:
        for warning in warnings:
            note(str(warning))
        print(escaped(f"{file}: a {kind.value} without errors"))
    if faults:
        raise typer.Exit(BAD_INPUT)


def kind_of(data: Any) -> FileKind:
    """Return which kind of file ``data`` is of, by the fields that only one kind has."""
    fields = set(data) if isinstance(data, dict) else set()
    if fields & {"model", "training", "cluster", "search"}:
        return FileKind.SCENARIO
    if "blocks" in fields:
        return FileKind.GRAPH
    if fields & {"accelerator", "host", "intra_node", "inter_node", "node_types"}:
        return FileKind.CLUSTER
    if fields & {"version", "mesh", "data", "tensor", "pipeline", "microbatch", "schedule"}:
        return FileKind.PLAN
    return FileKind.SCENARIO


def _check(kind: FileKind, document: Any) -> "tuple[Fault, ...]":
    """Return what is unusual in a document; ``ScenarioError`` lists what is wrong with it."""
    from meshwise.scenarios.files.errors import Fault, ScenarioError
    from meshwise.scenarios.inputs.cluster_file import cluster_in, cluster_table
    from meshwise.scenarios.inputs.remarks import unusual
    from meshwise.scenarios.loader import plan_in, scenario_in

    if kind is FileKind.SCENARIO:
        return scenario_in(document).warnings
    if kind is FileKind.CLUSTER:
        cluster_in(document)
        return unusual(cluster_table(document), document)
    if kind is FileKind.GRAPH:
        from meshwise.scenarios.inputs.graph_file import graph_in

        graph_in(document)
    else:
        faults: list[Fault] = []
        plan_in(document, faults)
        if faults:
            raise ScenarioError(tuple(faults))
    return ()


def schema(kind: Annotated[FileKind, typer.Argument(help="Which file.")], as_json: Json = False) -> None:
    """Print the JSON Schema of a kind of file, for completion in editors."""
    from meshwise.scenarios.schema.json_schema import json_schema

    emit(json_schema(kind.value))
