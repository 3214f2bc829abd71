"""Networks whose operators are cut, with data of their own, as a user's file has them; KIND names one."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8
WORDS, LENGTH = 40, 8


class PackedLayer(nn.Module):
    """Attention with packed queries, keys and values, dropout in it and after it."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.feed_forward = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout.p)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, length, hidden)))
        return x + self.dropout(self.feed_forward(x))


class Packed(nn.Module):
    """A language model with one table at both ends."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Parameter(0.1 * torch.randn(LENGTH, 16))
        self.layers = nn.ModuleList(PackedLayer(16, 4, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class GatedLayer(nn.Module):
    """Grouped queries that are turned by their positions, and a gated feed-forward network, after RMS norms."""

    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, width = heads, groups, hidden // heads
        self.norm, self.second_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.out = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = (nn.Linear(hidden, groups * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, -1).transpose(1, 2)

        def turn(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cosine + torch.cat((-second, first), -1) * sine

        y = self.norm(x)
        q, k = turn(split(self.query(y), self.heads)), turn(split(self.key(y), self.groups))
        v = split(self.value(y), self.groups)
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, hidden)
        x = x + self.out(y)
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gated(nn.Module):
    """A language model whose loss is a sum and the number of tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
        self.layers, self.norm = nn.ModuleList(GatedLayer(16, 4, 2) for _ in range(2)), nn.RMSNorm(16)
        angles = torch.arange(LENGTH)[:, None] * 100 ** -torch.arange(0, 1, 0.5)[None]
        self.register_buffer("cosine", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sine", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


class Attentive(nn.Module):
    """Three heads, which two ranks do not divide: queries that share keys, and a mask that depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 12), nn.Embedding(LENGTH, 12)
        self.query, self.pair, self.qkv = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(12, 36)
        self.out, self.norm, self.head = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        batch, length = ids.shape
        places = torch.arange(length, device=ids.device)
        x = self.words(ids) + self.positions(places)
        q = self.query(x).view(batch, length, 3, 4).transpose(1, 2)
        k, v = self.pair(x).view(batch, length, 2, 1, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.norm(x + self.out(y.transpose(1, 2).flatten(2)))
        q, k, v = self.qkv(x).view(batch, length, 3, 3, 4).permute(2, 0, 3, 1, 4)
        sees = (ids != 0)[:, None, None, :] & (places[:, None] >= places - 2) | (places[:, None] == places)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(1, 2).flatten(2)
        logits = self.head(x + y)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


class Mixture(nn.Module):
    """Two mixtures of experts: all of them on every token, and each on the tokens that it was sent."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)
        self.experts, self.router = experts, nn.Linear(12, experts)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(experts, *shape)) for shape in ((12, 20), (20, 12)))
        self.bias = nn.Parameter(0.1 * torch.randn(experts, 20))
        self.late_up, self.late_down = (
            nn.Parameter(0.3 * torch.randn(experts, *shape)) for shape in ((12, 20), (20, 12))
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gates = (F.one_hot(chosen, self.experts) * weights.unsqueeze(-1)).sum(-2)
        hidden = F.gelu(torch.einsum("bsh,ehf->bsef", x, self.up) + self.bias)
        x = x + torch.einsum("bseh,bse->bsh", torch.einsum("bsef,efh->bseh", hidden, self.down), gates)
        sent = (x.unsqueeze(0) * gates.permute(2, 0, 1).unsqueeze(-1)).flatten(1, 2)
        received = torch.bmm(F.silu(torch.bmm(sent, self.late_up)), self.late_down)
        x = x + received.unflatten(1, ids.shape).sum(0)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class GroupedLayer(nn.Module):
    """Experts by one grouped product of the tokens in their order."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts, self.router = experts, nn.Linear(12, experts, bias=False)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(experts, *shape)) for shape in ((12, 20), (20, 12)))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = F.one_hot(chosen.flatten(), self.experts).sum(0).cumsum(0).to(torch.int32)
        y = F.silu(F.grouped_mm(rows[order // 2], self.up, offs=ends))
        y = F.grouped_mm(y, self.down, offs=ends) * weights.flatten()[order, None]
        return x + torch.zeros_like(rows).index_add(0, order // 2, y).view_as(x)


class Grouped(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)
        self.layers = nn.ModuleList(GroupedLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def make_mixtral() -> nn.Module:
    """Return a model whose experts are multiplied by one grouped product."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="grouped_mm",
    )
    return MixtralForCausalLM(config)  # type: ignore[no-any-return]


class Regrouped(nn.Module):
    """Samples follow each other within a position, and factors of a width are regrouped inside heads that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(WORDS, 16), nn.Linear(16, 4 * 480), nn.Linear(4 * 480, 16)

    def forward(self, ids: Tensor) -> Tensor:
        samples, length = ids.shape
        rows = self.words(ids).transpose(0, 1).reshape(length * samples, -1)
        heads = (
            self.up(rows).view(-1, 4, 24, 20).view(len(rows), 4, 30, 16)
        )  # 24 times 20 does not split into 30 times 16
        y = self.down(heads.tanh().flatten(1)).view(length, samples, -1).transpose(0, 1)
        return y.square().mean()


class Perceptron(nn.Module):
    """Its outputs are no loss, and one of its layers has batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Hooked(Perceptron):
    """A gradient that no program of operators has."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return self.last(torch.tanh(hidden))


Draw = Callable[[torch.Generator], Any]


def draw_words(generator: torch.Generator) -> Any:
    return (torch.randint(WORDS, (LENGTH,), generator=generator),)


def draw_labels(generator: torch.Generator) -> Any:
    labels = torch.randint(WORDS, (LENGTH,), generator=generator)
    labels[int(torch.randint(1, LENGTH, (1,), generator=generator)) :] = -100
    return {"ids": draw_words(generator)[0], "labels": labels}


def draw_inputs(generator: torch.Generator) -> Any:
    (words,) = draw_words(generator)
    return {"input_ids": words, "labels": words.clone()}


def draw_floats(generator: torch.Generator) -> Any:
    return {"x": torch.randn(6, generator=generator), "y": torch.randn(4, generator=generator)}


KINDS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "packed": (Packed, draw_words),
    "dropout": (lambda: Packed(0.3), draw_words),
    "gated": (Gated, draw_labels),
    "mixture": (Mixture, draw_words),
    "grouped": (Grouped, draw_words),
    "mixtral": (make_mixtral, draw_inputs),
    "attentive": (Attentive, draw_labels),
    "regrouped": (Regrouped, draw_words),
    "perceptron": (Perceptron, draw_floats),
    "hooked": (Hooked, draw_floats),
}
KIND = os.environ.get("KIND", "packed")


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, number: int) -> Any:
        return KINDS[KIND][1](torch.Generator().manual_seed(number))


def model() -> nn.Module:
    return KINDS[KIND][0]()


def data() -> Samples:
    return Samples()


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    plain = [parameter for name, parameter in module.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in module.named_parameters() if "norm" not in name]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": others}], lr=0.01, eps=1e-6)


def scheduler(source: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(source, 0.9)


if KIND in ("perceptron", "hooked"):

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["y"])
