"""Stages that are cut anywhere and run one after the other have the loss and the gradients of the whole module."""

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.executor.stages.cuts import list_operators
from meshwise.executor.stages.parts import divide_graph, make_key
from meshwise.executor.stages.stage import Stage, make_examples
from meshwise.strategies.plan.recomputation import Recompute, parse_words
from tests.executor.stages.woven import BATCH, NUM_OPERATORS, build_woven

BLOCKS = frozenset(f"layers.{number}" for number in range(4))


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(1, NUM_OPERATORS - 1), max_size=3),
    st.sampled_from(("none", "full", "2", "selective", "selective:1")),
)
def test_stages_are_the_module(places: set[int], recompute: str) -> None:
    module, step = build_woven()
    batch = tuple(tensor.double() for tensor in BATCH)
    all_nodes = divide_graph(step, list_operators(step), sorted(places), BLOCKS)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    stages = [Stage(step, nodes, parameters, buffers, recompute=parse_words(recompute)) for nodes in all_nodes]
    values: tuple[torch.Tensor, ...] = ()
    for stage, nodes in zip(stages, all_nodes, strict=True):
        # a boundary: shapes and dtypes are those that the other side expects
        examples = make_examples(nodes.received, None)
        assert [(v.shape, v.dtype) for v in values] == [(example.shape, example.dtype) for example in examples]
        values = stage(*values, **dict(zip(step.inputs, batch, strict=True)))
    (loss,) = values
    expected = module(*batch)
    assert torch.equal(loss, expected)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, list(trained.values()))
    assert all(map(torch.allclose, gradients, expected_gradients))


def test_a_parameter_is_in_the_part_that_reads_it_alone() -> None:
    module, step = build_woven()
    operators = list_operators(step)
    (nodes,) = divide_graph(step, operators, [], BLOCKS)
    stage = Stage(step, nodes, dict(module.named_parameters()), dict(module.named_buffers()), recompute=Recompute.NONE)
    parts = {part.name: part.parameter_names for part in stage.pieces if part.name}
    assert parts == {f"layers.{n}": (f"layers.{n}.weight", f"layers.{n}.bias") for n in range(4)}
    assert stage.shared == []
    assert stage.list_parameters() == dict(module.named_parameters())
    first = next(part for part in stage.pieces if part.name == "layers.0")
    assert list(dict(first.named_parameters())) == [make_key("layers.0.weight"), make_key("layers.0.bias")]
