"""A captured GPT beside the one that the simulator builds: the same FLOP and parameters, nearly the same step."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import modules
import torch

from meshwise.executor.capture.capture import capture
from meshwise.simulator.catalog import cluster
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import recomputation

SIZES: dict[str, Any] = {"layers": 4, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 8192}


@pytest.fixture(scope="module")
def graphs() -> tuple[OperatorGraph, OperatorGraph]:
    with torch.device("meta"):
        module = modules.Gpt(**SIZES, sequence=1024)
        tokens = torch.zeros(2, 1024, dtype=torch.int64)
    built = Transformer(**SIZES, kv_heads=16).graph(1024, "fp32")
    return capture(module, (tokens, tokens), "gpt").graph, built


def test_flop_and_parameters_are_equal(graphs: tuple[OperatorGraph, OperatorGraph]) -> None:
    captured, built = graphs
    assert captured.flops == built.flops
    assert captured.num_parameters == built.num_parameters
    assert captured.sequence == built.sequence


LAYOUTS = {
    "data": Layout(data=8),
    "zero": Layout(data=8, zero=3),
    "pipeline": Layout(data=2, pipeline=4, microbatch=2),
    "recompute": Layout(data=8, recompute=recomputation("full")),
    "tensor": Layout(data=2, tensor=4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_near(graphs: tuple[OperatorGraph, OperatorGraph], name: str) -> None:
    """A captured loss is written out, and norms and residuals are not fused: a step is a little slower, up to 15 %."""
    training = Training(global_batch=16, sequence=1024, precision="fp32")
    found = []
    for graph in graphs:
        problem = Problem(graph, cluster("dgx-a100-80gb", 1), training)
        found.append(SimulatedCost(problem).evaluate(complete(problem, LAYOUTS[name])))
    captured, built = found
    assert 1.0 <= captured.step_time / built.step_time < 1.15
    assert captured.peak_memory == pytest.approx(built.peak_memory, rel=0.1)


def test_equal_graphs_are_one_problem(graphs: tuple[OperatorGraph, OperatorGraph]) -> None:
    captured, _ = graphs
    assert replace(captured) == captured and hash(replace(captured)) == hash(captured)
