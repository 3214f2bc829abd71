"""Modules of many kinds with data of their own, as a user's file has them; KIND in the environment names one."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8
WORDS, LENGTH = 40, 10
Draw = Callable[[torch.Generator], Any]


class Convolutions(nn.Module):
    """Batch statistics in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2)
        self.first_norm, self.second_norm = nn.BatchNorm2d(6), nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(image)))
        x = F.relu(self.second_norm(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class Block(nn.Module):
    """A convolution with batch statistics, and a scale that all blocks share."""

    def __init__(self, scale: nn.Linear) -> None:
        super().__init__()
        self.convolution, self.norm, self.scale = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.convolution(x))) * self.scale.weight.mean()


class Residual(nn.Module):
    """Blocks with batch statistics, computed again in backward, and a part in common."""

    def __init__(self) -> None:
        super().__init__()
        scale = nn.Linear(2, 2)
        self.blocks, self.head = nn.ModuleList(Block(scale) for _ in range(3)), nn.Linear(3, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image)
        return F.cross_entropy(self.head(image.mean((2, 3))), label)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.core = nn.Embedding(WORDS, 8), nn.LSTM(8, 12, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(12, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.core(self.words(ids))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Routed(nn.Module):
    """Which experts run depends on the data, and the router has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(6, 4), nn.Linear(6, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        choice, out = self.router(x).argmax(-1), x.clone()
        for number, expert in enumerate(self.experts):
            mask = choice == number
            if mask.any():
                out[mask] = expert(x[mask])
        return F.mse_loss(self.head(out)[:, 0], y)


class Weighted(nn.Module):
    """Its loss is a sum and a weight: samples have different numbers of tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def compute_loss(self, ids: Tensor, labels: Tensor, reduction: str) -> Tensor:
        logits = self.head(self.words(ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction, ignore_index=-100)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return self.compute_loss(ids, labels, "sum"), (labels != -100).sum()


class TokenMean(Weighted):
    """A mean over the tokens of a batch, which is no mean over samples."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return {"loss": self.compute_loss(ids, labels, "mean")}


class Contrastive(nn.Module):
    """Every sample is told from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        likeness = 10 * F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(y), dim=-1).T
        return F.cross_entropy(likeness, torch.arange(len(x)))


class Tied(nn.Module):
    """Layers of attention with dropout, and one table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Spectral(nn.Module):
    """Complex numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.ones(5)), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter))[:, 0], y)


class Woven(nn.Module):
    """Layers that read early values of all kinds: with gradients, without, indices, and what depends on data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(6, 6), nn.Embedding(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        early = F.relu_(self.first(x))
        choice, still, mask = early.argmax(-1), early.detach() * 2, (x > 0).to(x.dtype)
        x = early
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale + mask
        with torch.no_grad():
            target = self.frozen(early)
        x += self.table(choice) + still * early + target
        return F.mse_loss(self.head(x)[:, 0], y)


class Translated(nn.Module):
    """An encoder and a decoder, which embeds words of its own before it reads the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.new_words = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        states = self.words(ids)
        for layer in self.encoder:
            states = layer(states)
        x = self.new_words(labels[:, :-1])
        for layer in self.decoder:
            x = layer(x, states)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels[:, 1:].flatten())


class Warm(nn.Module):
    """Parameters without dims, of which some belong to blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"layer": nn.Linear(6, 6)}) for _ in range(2))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(0.5))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = y + block.gain * torch.tanh(block["layer"](y))
        return (y / self.temperature.exp() - x).square().mean()


class Averaged(nn.Module):
    """A buffer is a running mean of samples; KIND says whether ranks take it together."""

    def __init__(self, is_common: bool) -> None:
        super().__init__()
        self.layer, self.is_common = nn.Linear(6, 6), is_common
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = y.detach().mean(0)
        if self.is_common and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.average = self.average.lerp(mean, 0.1)  # another tensor, as some write it
        return y.square().mean()


class Physical(nn.Module):
    """Its loss has a derivative of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.layers(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope.sum(1, keepdim=True) - y).square().mean()


class Outputs(nn.Module):
    """It returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def floats(*shapes: tuple[int, ...]) -> Draw:
    """Return a draw of tensors of normal numbers."""
    return lambda generator: tuple(torch.randn(shape, generator=generator) for shape in shapes)


def words(generator: torch.Generator) -> Any:
    """Return the tokens of a sample."""
    return (torch.randint(WORDS, (LENGTH,), generator=generator),)


def labelled_words(generator: torch.Generator) -> Any:
    """Return tokens and labels, of which a drawn number counts."""
    labels = torch.randint(WORDS, (LENGTH,), generator=generator)
    labels[int(torch.randint(1, LENGTH, (1,), generator=generator)) :] = -100
    return {"ids": words(generator)[0], "labels": labels}


def translations(generator: torch.Generator) -> Any:
    """Return tokens of two languages."""
    return words(generator)[0], torch.randint(WORDS, (LENGTH - 2,), generator=generator)


def images(generator: torch.Generator) -> Any:
    """Return an image and its class."""
    return torch.randn(3, 9, 9, generator=generator), torch.randint(5, (), generator=generator)


KINDS: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    "convolutions": (Convolutions, images),
    "residual": (Residual, images),
    "recurrent": (Recurrent, words),
    "routed": (Routed, floats((6,), ())),
    "weighted": (Weighted, labelled_words),
    "token mean": (TokenMean, labelled_words),
    "contrastive": (Contrastive, floats((6,), (6,))),
    "tied": (Tied, words),
    "spectral": (Spectral, floats((8,), ())),
    "outputs": (Outputs, floats((6,))),
    "woven": (Woven, floats((6,), ())),
    "translated": (Translated, translations),
    "averaged": (lambda: Averaged(False), floats((6,))),
    "averaged together": (lambda: Averaged(True), floats((6,))),
    "warm": (Warm, floats((6,))),
    "physical": (Physical, floats((6,))),
}


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that are drawn from their number."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 44

    def __getitem__(self, number: int) -> Any:
        return self.draw(torch.Generator().manual_seed(number))


def model() -> nn.Module:
    return KINDS[os.environ["KIND"]][0]()


def data() -> Samples:
    return Samples(KINDS[os.environ["KIND"]][1])
