"""Stages that are cut anywhere and run one after the other have the loss and the gradients of the whole module."""

from functools import lru_cache

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.executor.recording.private_torch import backward_inputs_first
from meshwise.executor.stages.cuts import list_operators
from meshwise.executor.stages.export import StepGraph, export_step, list_paths
from meshwise.executor.stages.parts import divide_graph, make_key, splits_by_inputs
from meshwise.executor.stages.stage import Stage, make_examples
from meshwise.strategies.plan.recomputation import Recompute, parse_words
from tests.executor.stages.woven import BATCH, NUM_OPERATORS, build_woven
from tests.executor.user_training.zoo import Translated

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


TOKENS = tuple(torch.randint(40, (2, length), generator=torch.Generator().manual_seed(3)) for length in (10, 8))


@lru_cache
def build_translated() -> tuple[Translated, StepGraph]:
    """Return an encoder with a decoder in fp64, without dropout, and its graph for `TOKENS`."""
    torch.manual_seed(0)
    module = Translated().double()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = 0.0
    return module, export_step(module, None, TOKENS)


NUM_TRANSLATED = len(list_operators(build_translated()[1]))


@settings(max_examples=20, deadline=None)
@given(st.booleans(), st.sets(st.floats(0.02, 0.98), min_size=1, max_size=3))
def test_gradients_of_weights_can_come_after_those_of_inputs_where_it_is_said(
    is_woven: bool, fractions: set[float]
) -> None:
    module, step = build_woven() if is_woven else build_translated()
    inputs = tuple(tensor.double() for tensor in BATCH) if is_woven else TOKENS
    batch = dict(zip(step.inputs, inputs, strict=True))
    operators = list_operators(step)
    places = sorted({max(int(fraction * len(operators)), 1) for fraction in fractions})
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    values: tuple[torch.Tensor, ...] = ()
    for place, nodes in enumerate(divide_graph(step, operators, places, frozenset())):
        stage = Stage(step, nodes, parameters, buffers, recompute=Recompute.NONE, copies_outputs=True)
        received = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
        outputs = values = stage(*received, **batch)
        if not place or not splits_by_inputs(step, nodes):
            continue
        floats = [output for output in outputs if output.requires_grad]
        weights = [parameter for parameter in stage.list_parameters().values() if parameter.requires_grad]
        grads = [torch.ones_like(output) for output in floats]
        leaves = [value for value in received if value.requires_grad]
        expected = torch.autograd.grad(floats, [*leaves, *weights], grads, retain_graph=True)
        for parameter in weights:
            parameter.grad = None
        found = [*backward_inputs_first(floats, grads, leaves, weights), *(weight.grad for weight in weights)]
        assert all(other is not None and torch.allclose(one, other) for one, other in zip(expected, found, strict=True))
        values = tuple(torch.as_tensor(value) for value in stage(*received, **batch))


@pytest.mark.parametrize(("name", "splits"), [("new_words", False), ("encoder.1", False), ("decoder.1", False)])
def test_a_decoder_that_embeds_words_of_its_own_makes_all_gradients_at_once(name: str, splits: bool) -> None:
    _, step = build_translated()
    operators = list_operators(step)
    place = next(place for place, node in enumerate(operators) if name in list_paths(node))
    _, nodes = divide_graph(step, operators, [place], frozenset())
    assert splits_by_inputs(step, nodes) is splits
