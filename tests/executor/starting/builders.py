"""Programs that build modules in many ways, and the oracle of their first values: the same program, run with values.

A draw has its seed from the tape, and the program is run as torch runs it: in order, whole, each operator once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.executor.starting.tape import Tape

SIZE = 6


@torch.no_grad()
def copy_weight(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight.copy_(neighbour.weight.t())
    module.weight[1:] *= 2


@torch.no_grad()
def copy_itself(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight.copy_(module.weight)
    module.bias.fill_(module.bias[0])


@torch.no_grad()
def scale_by_norm(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight.div_(float(module.weight.norm()))
    if module.weight.max() > neighbour.weight.min():
        module.weight.neg_()


@torch.no_grad()
def write_parts(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight[2:4].normal_(std=3.0)
    module.weight[:, 1] = neighbour.bias
    neighbour.weight.diagonal().fill_(1.0)
    module.weight[module.weight > 1] = 0.5


@torch.no_grad()
def add_read(module: nn.Linear, neighbour: nn.Linear) -> None:
    bias = torch.from_numpy(neighbour.bias.detach().numpy().copy())
    module.bias.copy_(torch.tensor(neighbour.weight[0].tolist()) + bias)


def tie(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight = neighbour.weight


def replace(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.02)
    module.bias = nn.Parameter(torch.linspace(0, 1, SIZE) + torch.rand(()))


def replace_data(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.weight.data = torch.triu(torch.ones(SIZE, SIZE)).cumsum(0) / neighbour.weight.data.abs().sum()


def add_buffer(module: nn.Linear, neighbour: nn.Linear) -> None:
    module.register_buffer("table", torch.outer(torch.arange(4.0), torch.arange(3.0)).sin())
    module.register_buffer("noise", torch.randn(5), persistent=False)
    rows, columns = torch.tril_indices(4, 4)
    module.register_buffer("rows", rows)
    module.register_buffer("columns", columns)


def initialise(function: Callable[..., Any], module: nn.Linear, neighbour: nn.Linear) -> None:
    function(module.weight)


INITS: dict[str, Callable[[nn.Linear, nn.Linear], None]] = {
    "kaiming": partial(initialise, partial(nn.init.kaiming_normal_, nonlinearity="relu")),
    "orthogonal": partial(initialise, nn.init.orthogonal_),
    "truncated": partial(initialise, partial(nn.init.trunc_normal_, std=0.5, a=-0.6, b=0.6)),
    "sparse": partial(initialise, partial(nn.init.sparse_, sparsity=0.3)),
    "identity": partial(initialise, nn.init.eye_),
    "copied": copy_weight,
    "itself": copy_itself,
    "scaled": scale_by_norm,
    "parts": write_parts,
    "read": add_read,
    "tied": tie,
    "replaced": replace,
    "data": replace_data,
    "buffers": add_buffer,
}
PLAIN = "plain"
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "table": lambda: nn.Embedding(7, SIZE, padding_idx=2),
    "normalised table": lambda: nn.Embedding.from_pretrained(torch.randn(4, 3).softmax(1), freeze=False),
    "convolution": lambda: nn.Conv2d(3, 4, 3),
    "recurrent": lambda: nn.LSTM(3, 4, 2),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False),
    "attention": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "half": lambda: nn.Linear(3, 4).to(torch.bfloat16),
}


class Module(nn.Module):
    """Linear layers, each of which an init changes with its neighbour, and other layers."""

    def __init__(self, inits: Sequence[str], layers: Sequence[str]) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(len(inits) + 1))
        self.others = nn.ModuleList(LAYERS[name]() for name in layers)
        for place, name in enumerate(inits):
            if name != PLAIN:
                INITS[name](self.lines[place], self.lines[place + 1])


class SeededDraws(TorchDispatchMode):
    """Runs a program with values; each draw has the seed that a tape has for it, in their order."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.seeds = [tape.find_seed(number) for number, item in enumerate(tape.operations) if item.is_draw]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.manual_seed(self.seeds.pop(0))
        return function(*args, **(kwargs or {}))


def build_seeded(build: Callable[[], nn.Module], tape: Tape) -> nn.Module:
    """Return what a program builds with values and the draws of a tape, all of which it takes."""
    draws = SeededDraws(tape)
    with draws:
        module = build()
    assert not draws.seeds
    return module


def list_states(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, those that are not kept too."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items() if not is_lazy(tensor)}
