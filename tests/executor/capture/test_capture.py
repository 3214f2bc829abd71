"""Modules as operator graphs: the same numbers, the true sizes, and cuts that mean what they say."""

from collections.abc import Callable
from functools import cache
from math import prod

import pytest

pytest.importorskip("torch")

import modules
import torch
from cutting import Values, arguments, check, operators, place
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwise.executor.capture.capture import capture
from meshwise.executor.capture.captured import Captured, CaptureError
from meshwise.simulator.operator_graph import BATCH, OperatorKind

NAMES = list(modules.MODULES)


@cache
def captured(name: str) -> tuple[Captured, nn.Module, tuple[Tensor, ...]]:
    module, inputs = modules.make(name, dtype=torch.float64)
    return capture(module, inputs, name), module, inputs


@pytest.mark.parametrize("name", NAMES)
def test_the_program_computes_what_the_module_computes(name: str) -> None:
    found, module, inputs = captured(name)
    (loss,) = found.program(*arguments(found, module, inputs))
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
    loss = values[found.program.graph.output_node().all_input_nodes[0]]
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


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_has_a_rule(name: str) -> None:
    assert not [line for line in captured(name)[0].warnings if "replicated" in line]


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_a_capture_is_the_same_every_time(name: str) -> None:
    found, module, inputs = captured(name)
    again = capture(module, inputs, name)
    assert again.graph == found.graph and again.dims == found.dims and again.operators == found.operators


def test_layers_are_one_block_that_repeats() -> None:
    found, _, _ = captured("gpt")
    layers = found.graph.blocks[1]
    assert (layers.name, layers.repeat, layers.layer) == ("layers", 2, True)
    assert [name for name, _ in found.graph.occurrences] == ["token", "layers.0", "layers.1", "final_norm", "logits"]
    assert found.parameters[found.parameter_names["layers", 1, "attention.query.weight"]] == (
        "layers.1.attention.query.weight"
    )
    (query,) = [each for each in layers.operators if each.name == "attention_query"]
    assert query.dims == ((BATCH, 1), ("sequence", 8), ("heads", 4), ("head_dim", 4), ("hidden", 16))
    assert query.uncut == ("head_dim",)  # heads are the outermost factor of the torch dim, their widths are not
    (core,) = [each for each in layers.operators if each.kind is OperatorKind.ATTENTION]
    assert core.executed_fraction == 0.5 and set(core.uncut) == {"sequence", "key"}


def test_tied_parameters_are_counted_once() -> None:
    found, _, _ = captured("gpt")
    ((first, second),) = found.graph.tied
    assert {first[0], second[0]} == {"token", "logits"}


def test_a_deep_mlp_without_residuals_does_not_repeat() -> None:
    """Its layers hand hidden dims of their own to each other: one sharding for all would forbid Megatron's pattern."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().sum()

    graph = capture(Deep(), (torch.randn(2, 8),)).graph
    assert [block.repeat for block in graph.blocks] == [1, 1, 1, 1]
    assert all(block.layer for block in graph.blocks)


def test_skips_are_carried_through_the_blocks_between() -> None:
    graph = captured("unet")[0].graph
    middle = next(block for block in graph.blocks if block.name == "middle")
    assert len(middle.inputs) == 3 and middle.inputs[:2] == middle.outputs[:2]
    read = {name for operator in middle.operators for name in operator.inputs}
    assert not read & set(middle.inputs[:2])


def test_statistics_of_a_batch_norm_are_sums_over_the_batch() -> None:
    found = captured("convnet")[0]
    (first, *_) = [each for name, each in operators(found).items() if "norm_sum" in name]
    assert BATCH in first.reduced


class Renewing(nn.Module):
    """A layer that keeps something of what it has seen."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        old = self.seen.clone()
        mean = y.mean(0)
        y = y if self.how == "of a value of its own" else y - mean
        if self.how in ("by points", "of a value of its own"):
            self.seen.mul_(0.5).add_(mean.detach())
        elif self.how == "sorted":
            self.seen.copy_(mean.detach().sort().values)
        elif self.how == "of two values":
            self.seen.copy_((mean + self.linear.bias).detach())
        elif self.how == "read by the loss":
            self.seen.add_(mean.detach())
            y = y * old
        return y.square().sum()


def test_how_forward_renews_buffers_is_kept() -> None:
    found, module, inputs = captured("convnet")
    assert not found.warnings and not found.left
    expected = {name: each.clone() for name, each in module.named_buffers()}
    assert {update.buffer for update in found.updates} == set(expected)
    values = Values(found, arguments(found, module, inputs)).values
    by_name = {node.name: value for node, value in values.items()}
    module.train()(*inputs)
    for update in found.updates:
        read = [by_name[update.reads]] if update.reads else []
        new = update.program(expected[update.buffer], *read)
        torch.testing.assert_close(new, module.get_buffer(update.buffer), rtol=0, atol=1e-12)
        assert not torch.equal(new, expected[update.buffer])


@pytest.mark.parametrize("how", ["by points", "of a value of its own", "sorted", "of two values", "read by the loss"])
def test_a_buffer_that_ranks_could_not_renew_in_parts_is_left(how: str) -> None:
    found = capture(Renewing(how), (torch.randn(4, 4),))
    renewed = how == "by points"
    assert [update.buffer for update in found.updates] == ["seen"] * renewed
    assert found.left == ("seen",) * (not renewed)
    assert any("stay as they are: seen" in line for line in found.warnings) is not renewed


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
    (loss,) = found.program(*arguments(found, module, inputs))
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


def test_an_operator_without_a_rule_is_named_and_replicated() -> None:
    found = capture(Calls(lambda x, w: torch.linalg.pinv(x @ w)), (torch.randn(4, 6, dtype=torch.float64),))
    assert any("replicated" in line for line in found.warnings)
    unknown = [
        each for each in operators(found).values() if each.uncut and set(each.uncut) == {d for d, _ in each.dims}
    ]
    assert unknown


def test_one_sample_is_told_from_a_dim_of_size_one() -> None:
    module = modules.Gpt()
    one, more = (capture(module, modules.tokens(batch=batch)).graph for batch in (1, 4))
    assert one == more


LOSSES = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": lambda x, y: functional.huber_loss(x, y, delta=0.7),
    "smooth_l1": lambda x, y: functional.smooth_l1_loss(x, y, beta=0.3),
    "bce": lambda x, y: functional.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].exp()),
    "cross entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "ignored": lambda x, y: functional.cross_entropy(x, y.argmax(1), ignore_index=1),
    "weighted": lambda x, y: functional.cross_entropy(x, y.argmax(1), weight=y[0].exp().detach()),
    "smoothed": lambda x, y: functional.cross_entropy(x, y.argmax(1), label_smoothing=0.2, weight=y[1].exp()),
    "probabilities": lambda x, y: functional.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    "nll": lambda x, y: functional.nll_loss(x.log_softmax(1), y.argmax(1)),
    "mean": lambda x, y: (x * y).mean() + (x.mean(0) * y.mean(1)[:1]).mean(),
    "batch norm": lambda x, y: (functional.batch_norm(x, None, None, training=True) * y).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_written_out_are_the_losses_and_none_is_a_mean(name: str) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 2, 6, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = LOSSES[name](x * self.scale, y)
            return result

    torch.manual_seed(1)
    module, inputs = Loss(), tuple(torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    found = capture(module, inputs)
    (loss,) = found.program(*arguments(found, module, inputs))
    expected = module(*inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, [module.scale]), torch.autograd.grad(expected, [module.scale]))
    targets = {str(node.target) for node in found.program.graph.nodes}
    assert not [each for each in targets if "loss" in each or "mean" in each or "batch_norm" in each]


def test_inputs_that_have_no_common_batch_are_refused() -> None:
    module = modules.Mlp()
    with pytest.raises(CaptureError, match="of one size for all, met 4, 2"):
        capture(module, (torch.randn(4, 8), torch.randn(2, 8)))
    with pytest.raises(CaptureError, match="met a scalar at place 0"):
        capture(module, (torch.tensor(1.0),))
    with pytest.raises(CaptureError, match="at least one input"):
        capture(module, ())


def test_a_module_that_torch_cannot_export_is_refused_in_one_line() -> None:
    def decides(x: Tensor, w: Tensor) -> Tensor:
        return x @ w if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="torch cannot export the module") as caught:
        capture(Calls(decides), (torch.randn(4, 6, dtype=torch.float64),))
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    class Vector(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(CaptureError, match=r"returns a scalar loss, met a tensor of shape \(4, 6\)"):
        capture(Vector(), (torch.randn(4, 6),))


def test_place_is_checked() -> None:
    found, _, _ = captured("gpt")
    (node,) = [each for each in found.program.graph.nodes if each.name == "linear"]
    with pytest.raises(AssertionError, match="head_dim lies within"):
        place(found, node, "head_dim")
