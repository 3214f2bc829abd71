"""``meshwise validate``: all errors in an input file, and warnings about unusual values."""

from dataclasses import asdict
from typing import Annotated

import typer

from meshwise.scenarios.commands.options import FileKind, Json
from meshwise.scenarios.console import BAD_INPUT, emit, note
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.reader import Document, read_document
from meshwise.scenarios.inputs.cluster_file import build_cluster, read_cluster_table
from meshwise.scenarios.inputs.graph_file import build_graph
from meshwise.scenarios.inputs.remarks import list_unusual
from meshwise.scenarios.loader import read_plan_table, read_scenario
from meshwise.simulator.files import escape_text


def validate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A scenario, plan, cluster or graph file.")],
    as_json: Json = False,
) -> None:
    """Check a scenario, plan, cluster or graph file and report all errors at once."""
    kind, text = FileKind.SCENARIO, ""
    faults: tuple[Fault, ...] = ()
    warnings: tuple[Fault, ...] = ()
    try:
        document = read_document(find_scenario(file))
        kind = kind_of(document.data)
        warnings = _check_document(kind, document)
    except ScenarioError as error:
        faults, text = error.faults, str(error)
    if as_json:
        errors, remarks = (list(map(asdict, faults_of_kind)) for faults_of_kind in (faults, warnings))
        emit({"file": file, "kind": kind.value, "valid": not faults, "errors": errors, "warnings": remarks})
    elif faults:
        note(text)
    else:
        for warning in warnings:
            note(str(warning))
        print(escape_text(f"{file}: a {kind.value} without errors"))
    if faults:
        raise typer.Exit(BAD_INPUT)


def kind_of(data: object) -> FileKind:
    """Return the kind of file of ``data``, by the fields that only one kind has."""
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


def _check_document(kind: FileKind, document: Document) -> tuple[Fault, ...]:
    """Return warnings about unusual values in a document; raise ``ScenarioError`` with all its errors."""
    if kind is FileKind.SCENARIO:
        return read_scenario(document).warnings
    if kind is FileKind.CLUSTER:
        build_cluster(document)
        return list_unusual(read_cluster_table(document), document)
    if kind is FileKind.GRAPH:
        build_graph(document)
    else:
        faults: list[Fault] = []
        read_plan_table(document, faults)
        if faults:
            raise ScenarioError(tuple(faults))
    return ()
