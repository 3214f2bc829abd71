"""Recommenders with tables of several kinds, and a user's file of one: ``KIND`` chooses it."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 12
SLOTS = 7
ROWS = (301, 130, 403)
"""Rows of the tables of bags, none of which two or three ranks divide evenly."""


class Ranker(nn.Module):
    """Dense features, pooled bags of lengths from 0 on, single categories, and a small table, as DLRM has them."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        modes = ("sum", "mean", "sum" if sparse else "max")
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, 8, mode=mode, sparse=sparse, padding_idx=padding)
            for rows, mode, padding in zip(ROWS, modes, (0, None, 3), strict=True)
        )
        self.item = nn.Embedding(177, 8, sparse=sparse, padding_idx=5)
        self.weighted = nn.EmbeddingBag(150, 8, mode="sum", sparse=sparse)
        self.day = nn.Embedding(7, 8)
        self.top = nn.Linear(8 * 7, 1)

    def forward(self, dense: Tensor, slots: Tensor, lengths: Tensor, day: Tensor, label: Tensor) -> Tensor:
        is_known = torch.arange(SLOTS, device=slots.device) < lengths[:, None]
        offsets = lengths.cumsum(0) - lengths
        pooled = [bag(slots[is_known] % rows, offsets) for bag, rows in zip(self.bags, ROWS, strict=True)]
        pooled.append(self.weighted(slots % 150, per_sample_weights=dense.sigmoid()[:, :1].expand(-1, SLOTS)))
        columns = [self.bottom(dense), *pooled, self.item(slots[:, 0] % 177), self.day(day)]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat(columns, 1)).squeeze(1), label)


class Factors(nn.Module):
    """Tables alone, whose loss is a sum with its weight."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.users, self.items = (nn.Embedding(rows, 8, sparse=sparse) for rows in (301, 177))

    def forward(self, dense: Tensor, slots: Tensor, lengths: Tensor, day: Tensor, label: Tensor) -> Any:
        scores = (self.users(slots[:, 0] % 301) * self.items(slots[:, 1] % 177)).sum(1)
        losses = F.mse_loss(scores, label, reduction="none")
        return (losses * lengths).sum(), lengths.sum()


def draw_sample(number: int) -> tuple[Tensor, ...]:
    """Return dense features, slots, how many of them count, a day and a label."""
    generator = torch.Generator().manual_seed(number)
    slots = torch.randint(0, 10_000, (SLOTS,), generator=generator)
    length, day = (torch.randint(0, most, (), generator=generator) for most in (SLOTS + 1, 7))
    return torch.randn(5, generator=generator), slots, length, day, torch.rand((), generator=generator).round()


class RowwiseAdagrad(torch.optim.Optimizer):
    """Keeps one sum of squares a row, as the fused optimizers of FBGEMM do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
                state = self.state[parameter]
                total = state.setdefault("sum", rows.new_zeros(len(rows)))
                total += rows.square().mean(1)
                parameter -= group["lr"] * (rows / (total.sqrt() + 1e-10)[:, None]).view_as(parameter)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "ranker": lambda: Ranker(sparse=False),
    "sparse ranker": lambda: Ranker(sparse=True),
    "factors": lambda: Factors(sparse=False),
    "sparse factors": lambda: Factors(sparse=True),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.3),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9),
    "adagrad": lambda module: torch.optim.Adagrad(module.parameters(), lr=0.05),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.01),
    "sparse adam": lambda module: torch.optim.SparseAdam(list(module.parameters()), lr=0.01),
    "rowwise": lambda module: RowwiseAdagrad(module.parameters(), lr=0.05),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters()),
}


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        return draw_sample(number)


def model() -> nn.Module:
    return KINDS[os.environ.get("KIND", "ranker")]()


def data() -> Samples:
    return Samples()


def evaluation_data() -> Samples:
    return Samples()


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[os.environ.get("OPTIMIZER", "adagrad")](module)
