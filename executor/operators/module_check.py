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
    made = build_module(job)
    with name_factory(job.module), redirect_stdout(sys.stderr):  # forward may print
        captured = capture(made.module, made.microbatches[0])
        if captured.skipped_buffers:
            held = (
                "the executor renews buffers point by point, each from one value of the loss, which does not read them"
            )
            met = f"met {', '.join(captured.skipped_buffers)}; nearest: the update outside of forward"
            raise CaptureError(f"{held}; {met}", captured.update_lines[captured.skipped_buffers[0]])
        for name, parameter in made.module.named_parameters():
            if parameter.dtype not in (torch.float32, torch.float64):
                met = f"met {name} of {str(parameter.dtype).removeprefix('torch.')}; nearest: the module's .float()"
                raise CaptureError(f"parameters of a captured module are of fp32, {met}")
        double = build_module(replace(job, double=True))
        program = export_program(double.module, double.microbatches[0])
        check(program, double.module, double.microbatches, job.plan.sequences)
        if different := _difference(graph, captured.graph):
            name, met = different
            nodes = (node for node in captured.program.graph.nodes if captured.operators.get(node.name) == name)
            line = next((find_node_line(node) for node in nodes), "") or find_forward_line(made.module)
            raise CaptureError(f"the module is the one that the scenario's graph was captured from; {met}", line)
        Layouts(captured, {each.operator: each for each in job.plan.shardings})
        return find_tolerance(program)


def _difference(graph: OperatorGraph, other: OperatorGraph) -> tuple[str, str] | None:
    """Return the operator in which two graphs first differ, and how; None where they do not."""
    sizes = [
        {f"{b.name}.{o.name}": (b.repeat, o.dims) for b in each.blocks for o in b.operators} for each in (graph, other)
    ]
    first, second = sizes
    nearest = "a graph that is captured anew, with as many samples as a microbatch has"
    if alone := [name for name in (*first, *second) if (name in first) != (name in second)]:
        where = "graph" if alone[0] in first else "module"
        return alone[0], f"met {alone[0]} only in the {where}; nearest: {nearest}"
    for name, (repeat, dims) in first.items():
        if (repeat, dims) != second[name]:
            met = [
                ", ".join(f"{dim}({size})" for dim, size in dims) + f" x {times}"
                for times, dims in (first[name], second[name])
            ]
            return name, f"{name} is {met[0]} in the graph, met {met[1]}; nearest: {nearest}"
    return None
