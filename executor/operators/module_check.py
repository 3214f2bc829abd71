"""Whether a user's module is that of a graph and can be run piece by piece: it is captured, and run in fp64 here."""

import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from meshwise.executor.capture.capture import capture, name_factory
from meshwise.executor.capture.captured import CaptureError
from meshwise.executor.capture.program import export_program
from meshwise.executor.capture.source_lines import find_forward_line, find_node_line
from meshwise.executor.operators.job import OperatorJob
from meshwise.executor.operators.layouts import Layouts
from meshwise.executor.operators.trainer import build_module
from meshwise.executor.operators.whole_batch import check, find_tolerance
from meshwise.simulator.operator_graph import OperatorGraph


def check_module(job: OperatorJob, graph: OperatorGraph) -> float:
    """Return how far from one process in fp64 the ranks of a job may be.

    Raises
    ------
    CaptureError
        Where the module is not the one of ``graph``, or does what the back end does not.
    """
    built_module = build_module(job)
    with name_factory(job.module), redirect_stdout(sys.stderr):  # forward may print
        captured = capture(built_module.module, built_module.microbatches[0])
        if captured.skipped_buffers:
            rule = (
                "the executor renews buffers point by point, each from one value of the loss, which does not read them"
            )
            finding = f"met {', '.join(captured.skipped_buffers)}; nearest: the update outside of forward"
            raise CaptureError(f"{rule}; {finding}", captured.update_lines[captured.skipped_buffers[0]])
        for name, parameter in built_module.module.named_parameters():
            if parameter.dtype not in (torch.float32, torch.float64):
                finding = f"met {name} of {str(parameter.dtype).removeprefix('torch.')}; nearest: the module's .float()"
                raise CaptureError(f"parameters of a captured module are of fp32, {finding}")
        double_module = build_module(replace(job, double=True))
        program = export_program(double_module.module, double_module.microbatches[0])
        check(program, double_module.module, double_module.microbatches, job.plan.sequences)
        if mismatch := _find_difference(graph, captured.graph):
            name, finding = mismatch
            nodes = (node for node in captured.module.graph.nodes if captured.operators.get(node.name) == name)
            line = next((find_node_line(node) for node in nodes), "") or find_forward_line(built_module.module)
            raise CaptureError(f"the module is the one that the scenario's graph was captured from; {finding}", line)
        Layouts(captured, {sharding.operator: sharding for sharding in job.plan.shardings})
        return find_tolerance(program)


def _find_difference(graph: OperatorGraph, captured_graph: OperatorGraph) -> tuple[str, str] | None:
    """Return the operator in which two graphs first differ, and how; None where they do not."""
    graph_operators, module_operators = (
        {
            f"{block.name}.{operator.name}": (block.repeat, operator.dims)
            for block in compared_graph.blocks
            for operator in block.operators
        }
        for compared_graph in (graph, captured_graph)
    )
    nearest = "a graph that is captured anew, with as many samples as a microbatch has"
    names = (*graph_operators, *module_operators)
    if unmatched := [name for name in names if (name in graph_operators) != (name in module_operators)]:
        source = "graph" if unmatched[0] in graph_operators else "module"
        return unmatched[0], f"met {unmatched[0]} only in the {source}; nearest: {nearest}"
    for name, (repeat, dims) in graph_operators.items():
        if (repeat, dims) != module_operators[name]:
            descriptions = [
                ", ".join(f"{dim}({size})" for dim, size in dims) + f" x {times}"
                for times, dims in (graph_operators[name], module_operators[name])
            ]
            return name, f"{name} is {descriptions[0]} in the graph, met {descriptions[1]}; nearest: {nearest}"
    return None
