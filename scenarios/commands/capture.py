"""``meshwise capture``: write the graph file of a torch module. It runs the user's code."""

from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, note, print_rows
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.inputs.graph_file import build_graph_document, dump_graph
from meshwise.scenarios.inputs.operator_cuts import keep_causal_queries_whole

if TYPE_CHECKING:
    from meshwise.executor.capture.captured import CapturedModule


def capture(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:FACTORY]",
            help="FACTORY() returns (module, inputs) of torch; without one the file is that of `meshwise train`.",
        ),
    ],
    out: Annotated[str, typer.Option(help="The graph file to write (.json).")],
    as_json: Json = False,
) -> None:
    """Turn any torch module into an operator graph; forward(*inputs) returns a loss, dim 0 of inputs is the batch."""
    check_output(out, (".json",))
    captured_model = _capture_factory(source) if ":" in source else _capture_training_file(source)
    graph = keep_causal_queries_whole(captured_model.graph)
    write(out, dump_graph(graph))
    for warning in captured_model.warnings:
        note(f"warning: {warning}")
    if as_json:
        emit(
            {
                "file": out,
                "warnings": list(captured_model.warnings),
                "graph": build_graph_document(graph),
            }
        )
        return
    operators = sum(len(block.operators) for block in graph.blocks)
    words = (f"{block.name} x {block.repeat}" if block.repeat > 1 else block.name for block in graph.blocks)
    print_rows(
        [
            ("file", out),
            ("blocks", ", ".join(words)),
            ("operators", f"{operators} of {len(captured_model.operators)} with all copies of blocks"),
            ("parameters", graph.num_parameters),
            ("FLOP", f"{graph.flops:.4g} a sample, forward"),
            ("sequence", graph.sequence),
        ]
    )
    print(f"name it in a scenario as `model: {{graph: {out}}}`")


def _capture_factory(factory: str) -> "CapturedModule":
    """Return the module that a factory returns with its inputs."""
    from meshwise.executor.capture import capture as capturing  # imported here, so that help works without torch

    module, inputs = capturing.run_factory(factory)
    with capturing.name_factory(factory):
        return capturing.capture(module, inputs, type(module).__name__.lower())


def _capture_training_file(path: str) -> "CapturedModule":
    """Return the module of a file of ``meshwise train`` with its loss, as its first batch shows it."""
    from meshwise.executor.module_measures.first_batch import FirstBatch  # needs torch
    from meshwise.executor.modules.layout import ModuleLayout
    from meshwise.executor.user_training.job import TrainJob

    return FirstBatch(TrainJob(path, ModuleLayout(), steps=1)).capture_module()
