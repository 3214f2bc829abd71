"""Modules as operator graphs: the same numbers, the true sizes, and cuts that mean what they say."""

from collections.abc import Callable
from functools import cache
from math import prod

import pytest

pytest.importorskip("torch")
import modules
import torch
from cutting import Values, arguments, check
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwise.executor.capture.capture import capture
from meshwise.executor.capture.captured import CapturedModule, CaptureError
from meshwise.simulator.operator_graph import BATCH

NAMES = list(modules.MODULES)


@cache
def captured(name: str) -> tuple[CapturedModule, nn.Module, tuple[Tensor, ...]]:
    module, inputs = modules.make(name, dtype=torch.float64)
    return capture(module, inputs, name), module, inputs


@pytest.mark.parametrize("name", NAMES)
def test_the_program_computes_what_the_module_computes(name: str) -> None:
    found, module, inputs = captured(name)
    (loss,) = found.module(*arguments(found, module, inputs))
    expected = module(*inputs)
    parameters = list(module.parameters())
    assert abs(loss.item() - expected.item()) < 1e-12
    for mine, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_all_there_once(name: str) -> None:
    found, module, _ = captured(name)
    assert found.graph.num_parameters == sum(each.numel() for each in module.parameters())
    of = dict(module.named_parameters(remove_duplicate=False))
    blocks = {block.name: block for block in found.graph.blocks}
    for (block, _copy, tensor), placeholder in found.parameter_names.items():
        assert blocks[block].tensor[tensor].size == of[found.parameters[placeholder]].numel()


@pytest.mark.parametrize("name", NAMES)
def test_flop_are_those_that_torch_counts(name: str) -> None:
    found, module, inputs = captured(name)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the fused kernel of the CPU is not counted
        module(*inputs)
    assert found.graph.flops * modules.BATCH == counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_named_dims_have_the_sizes_of_torch_dims(name: str) -> None:
    found, module, inputs = captured(name)
    values = Values(found, arguments(found, module, inputs)).values
    for node, value in values.items():
        if node.name not in found.operators or not isinstance(value, Tensor):
            continue
        block = next(each for each in found.graph.blocks if found.operators[node.name].startswith(f"{each.name}."))
        tensor = block.tensor[found.tensors[node.name]]
        size = dict(zip(tensor.dims, tensor.shape, strict=True)) | {BATCH: found.batch}
        assert tuple(prod(size[dim] for dim in parts) for parts in found.dims[node.name]) == tuple(value.shape)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_with_a_gradient_are_those_that_autograd_reaches(name: str) -> None:
    found, module, inputs = captured(name)
    values = Values(found, arguments(found, module, inputs)).values
    loss = values[found.module.graph.output_node().all_input_nodes[0]]
    blocks = {block.name: block for block in found.graph.blocks}
    for node, value in values.items():
        if node.name not in found.operators or not isinstance(value, Tensor) or node.name not in found.tensors:
            continue
        block = next(each for label, each in blocks.items() if found.operators[node.name].startswith(f"{label}."))
        reached = value.requires_grad and torch.autograd.grad(loss, value, retain_graph=True, allow_unused=True)[0]
        assert block.tensor[found.tensors[node.name]].differentiable == isinstance(reached, Tensor), node.name


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_in_parts_gives_the_whole(name: str) -> None:
    """The law of every rule: along any dim that may be cut, parts are put together, or summed where it is reduced."""
    found, module, inputs = captured(name)
    assert check(found, module, inputs) >= len(found.operators)


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_a_capture_is_the_same_every_time(name: str) -> None:
    found, module, inputs = captured(name)
    again = capture(module, inputs, name)
    assert again.graph == found.graph and again.dims == found.dims and again.operators == found.operators


def test_tied_parameters_are_counted_once() -> None:
    found, _, _ = captured("gpt")
    ((first, second),) = found.graph.tied
    assert {first[0], second[0]} == {"token", "logits"}


class Calls(nn.Module):
    """Weights and a function of them and the input."""

    def __init__(self, call: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight).square().sum()  # type: ignore[operator]


CALLS = {
    "the same weight twice": lambda x, w: torch.tanh(x @ w) @ w,
    "similarity of samples": lambda x, w: (x @ w) @ (x @ w).t(),
    "a residual product": lambda x, w: x + x @ w,
    "a matrix and its transpose": lambda x, w: x @ (w + w.t()),
    "scores and their transpose": lambda x, w: (
        torch.einsum("bi,bj->bij", x @ w, x) + torch.einsum("bi,bj->bij", x @ w, x).transpose(1, 2)
    ),
    "parts of a tensor": lambda x, w: torch.cat([(x @ w)[:, :2], (x @ w)[:, 3:]], dim=1),
    "factors that do not nest": lambda x, w: (x @ w).reshape(-1, 2, 3).reshape(-1, 3, 2),
    "a cumulative sum": lambda x, w: (x @ w).cumsum(1),
    "indexing": lambda x, w: (x @ w)[:, torch.tensor([0, 2, 5])],
    "statistics": lambda x, w: (x @ w) / (x @ w).std(0) + (x @ w).amax(1, keepdim=True),
    "repeated columns": lambda x, w: (x @ w).repeat_interleave(2, dim=1),
    "padding": lambda x, w: functional.pad(x @ w, (1, 2)).roll(1, 1),
    "stacked and split": lambda x, w: sum(torch.stack([x @ w, x], 1).unbind(1), x),
    "dropout": lambda x, w: functional.dropout(x @ w, 0.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_is_done_with_dims_cuts_mean_what_they_say(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = Calls(CALLS[name]), (torch.randn(4, 6, dtype=torch.float64),)
    found = capture(module, inputs)
    assert not found.warnings
    assert check(found, module, inputs)
    (loss,) = found.module(*arguments(found, module, inputs))
    torch.testing.assert_close(loss, module(*inputs))


class ByHand(nn.Module):
    """Causal attention with its scores written out; queries, keys and values of one product, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.projection = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("mask", torch.ones(12, 12).tril().view(1, 1, 12, 12))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        parts = self.qkv(x).split(hidden, dim=2)
        query, key, value = (each.view(batch, sequence, 4, 4).transpose(1, 2) for each in parts)
        scores = (query @ key.transpose(-2, -1)).masked_fill(self.mask[:, :, :sequence, :sequence] == 0, -1e9)
        return self.projection((scores.softmax(-1) @ value).transpose(1, 2).contiguous().view(batch, sequence, hidden))


class Windows(nn.Module):
    """Attention in shifted windows of an image; queries, keys and values of one product, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, hidden = x.shape
        x = torch.roll(x, (-1, -1), (1, 2)).view(batch, height // 2, 2, width // 2, 2, hidden)
        windows = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, hidden)
        query, key, value = self.qkv(windows).view(-1, 4, 4, 3, 4).permute(3, 0, 2, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(query, key, value)


def tokens_of(width: int = 16) -> Tensor:
    return torch.randn(4, 6, width)


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "attention by hand": lambda: (ByHand(), (tokens_of(),)),
    "windows": lambda: (Windows(), (torch.randn(4, 4, 4, 16),)),
    "decoder": lambda: (
        nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
        (tokens_of(), torch.randn(4, 10, 16)),
    ),
    "lstm": lambda: (nn.LSTM(16, 8, batch_first=True), (tokens_of(),)),
    "norms": lambda: (nn.Sequential(nn.Conv1d(6, 4, 3), nn.InstanceNorm1d(4), nn.PReLU()), (tokens_of(),)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_all_kinds_are_captured(name: str) -> None:
    class Loss(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *inputs: Tensor) -> Tensor:
            out = self.layer(*inputs)
            return (out[0] if isinstance(out, tuple) else out).square().mean()

    torch.manual_seed(0)
    layer, inputs = LAYERS[name]()
    module, inputs = Loss(layer).double(), tuple(each.double() for each in inputs)
    found = capture(module, inputs)
    assert not found.warnings
    assert check(found, module, inputs)
    assert found.graph.num_parameters == sum(each.numel() for each in module.parameters())


def test_one_sample_is_told_from_a_dim_of_size_one() -> None:
    module = modules.Gpt()
    one, more = (capture(module, modules.tokens(batch=batch)).graph for batch in (1, 4))
    assert one == more


def test_inputs_that_have_no_common_batch_are_refused() -> None:
    module = modules.Mlp()
    with pytest.raises(CaptureError, match="of one size for all, met 4, 2"):
        capture(module, (torch.randn(4, 8), torch.randn(2, 8)))
    with pytest.raises(CaptureError, match="met a scalar at place 0"):
        capture(module, (torch.tensor(1.0),))
    with pytest.raises(CaptureError, match="at least one input"):
        capture(module, ())


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    class Vector(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(CaptureError, match=r"returns a scalar loss, met a tensor of shape \(4, 6\)"):
        capture(Vector(), (torch.randn(4, 6),))


class Packed(nn.Module):
    """Heads that are one torch dim with their widths, in a product and in what is computed of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.first(x)).cumsum(0)
        return self.last(hidden.view(-1, 4, 2)).sum()


def test_inner_dims_of_a_torch_dim_are_cut_of_products_and_pointwise_operators_alone() -> None:
    found = capture(Packed(), (torch.randn(4, 6),))
    by_name = {each.name: each for block in found.graph.blocks for each in block.operators}
    batch, inner = by_name["cumsum"].uncut
    assert batch == "batch"
    for name in ("first", "gelu"):
        assert inner in dict(by_name[name].dims) and by_name[name].uncut == ()
