"""``meshwise capture``: write the graph file of a torch module. It runs the user's code."""

from typing import Annotated

import typer

from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, note, show
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.inputs.graph_file import dump_graph, graph_document


def capture(
    factory: Annotated[
        str, typer.Argument(metavar="FILE.py:FACTORY", help="FACTORY() returns (module, inputs) of torch.")
    ],
    out: Annotated[str, typer.Option(help="The graph file to write (.json).")],
    as_json: Json = False,
) -> None:
    """Turn any torch module into an operator graph; forward(*inputs) returns a loss, dim 0 of inputs is the batch."""
    from meshwise.executor.capture import capture as capturing  # imported here, so that help works without torch

    check_output(out, (".json",))
    module, inputs = capturing.made(factory)
    with capturing.naming(factory):
        found = capturing.capture(module, inputs, type(module).__name__.lower())
    write(out, dump_graph(found.graph))
    for warning in found.warnings:
        note(f"warning: {warning}")
    if as_json:
        emit({"file": out, "warnings": list(found.warnings), "graph": graph_document(found.graph)})
        return
    graph = found.graph
    operators = sum(len(block.operators) for block in graph.blocks)
    words = (f"{block.name} x {block.repeat}" if block.repeat > 1 else block.name for block in graph.blocks)
    show(
        [
            ("file", out),
            ("blocks", ", ".join(words)),
            ("operators", f"{operators} of {len(found.operators)} with all copies of blocks"),
            ("parameters", graph.num_parameters),
            ("FLOP", f"{graph.flops:.4g} a sample, forward"),
            ("sequence", graph.sequence),
        ]
    )
    print(f"name it in a scenario as `model: {{graph: {out}}}` with `training: {{sequence: {graph.sequence}, ...}}`")
