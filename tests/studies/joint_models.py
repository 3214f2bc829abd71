"""Networks of many kinds in plain torch, at the size at which people train them on two nodes.

They are built on the meta device: their graphs need no weights. Each factory returns a module and its inputs, as
``meshwise capture`` takes them.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

META = torch.device("meta")
Factory = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def tokens(batch: int, length: int) -> Tensor:
    """Return numbers of tokens, of shape ``(batch, length)``."""
    return torch.zeros(batch, length, dtype=torch.long, device=META)


def numbers(*shape: int) -> Tensor:
    """Return floats of a shape, the batch first."""
    return torch.zeros(*shape, device=META)


def labels(batch: int) -> Tensor:
    """Return a class for every sample."""
    return torch.zeros(batch, dtype=torch.long, device=META)


def linear(size_in: int, size_out: int) -> nn.Linear:
    """Return a linear layer."""
    return nn.Linear(size_in, size_out, device=META)


class Layer(nn.Module):
    """A layer of attention, over its own or another sequence, and a feed-forward network."""

    def __init__(self, hidden: int, heads: int, ffn: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first_norm, self.second_norm = (nn.LayerNorm(hidden, device=META) for _ in range(2))
        self.query, self.key, self.value, self.out = (linear(hidden, hidden) for _ in range(4))
        self.up, self.down = linear(hidden, ffn), linear(ffn, hidden)

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what x finds in y."""
        batch, length, hidden = x.shape

        def split(z: Tensor) -> Tensor:
            return z.view(batch, z.shape[1], self.heads, hidden // self.heads).transpose(1, 2)

        projected = split(self.query(x)), split(self.key(y)), split(self.value(y))
        result = F.scaled_dot_product_attention(*projected, is_causal=self.causal)
        return self.out(result.transpose(1, 2).reshape(batch, length, hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x)
        x = x + self.attend(y, y)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def stack(count: int, hidden: int, heads: int, ffn: int, causal: bool) -> nn.ModuleList:
    """Return layers of one size."""
    return nn.ModuleList([Layer(hidden, heads, ffn, causal) for _ in range(count)])


class LanguageModel(nn.Module):
    """A decoder with an embedding and a head."""

    def __init__(self, hidden: int, heads: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden, device=META)
        self.layers = stack(layers, hidden, heads, 4 * hidden, causal=True)
        self.norm, self.head = nn.LayerNorm(hidden, device=META), linear(hidden, vocab)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class VisionTransformer(nn.Module):
    """Patches, an encoder and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1280, 16, 16, device=META)
        self.layers, self.head = stack(16, 1280, 16, 5120, causal=False), linear(1280, 1000)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), classes)


class Classifier(nn.Module):
    """Wide layers and very many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear(8192, 8192) for _ in range(8)])
        self.head = linear(8192, 200_000)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x), classes)


class MixerLayer(nn.Module):
    """A network over tokens, and one over channels."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.LayerNorm(hidden, device=META) for _ in range(2))
        self.token_up, self.token_down = linear(length, 4 * length), linear(4 * length, length)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first_norm(x).transpose(1, 2)
        x = x + self.token_down(F.gelu(self.token_up(y))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = linear(768, 2048), linear(2048, 1000)
        self.layers = nn.ModuleList([MixerLayer(196, 2048) for _ in range(12)])

    def forward(self, patches: Tensor, classes: Tensor) -> Tensor:
        x = self.embedding(patches)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), classes)


class VGG(nn.Module):
    """Convolutions, and large linear layers behind them (VGG-16)."""

    POOLED = (1, 3, 6, 9, 12)

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
        pairs = pairwise(sizes)
        self.convolutions = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1, device=META) for a, b in pairs])
        self.first, self.second, self.head = linear(512 * 49, 4096), linear(4096, 4096), linear(4096, 1000)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = images
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            if number in self.POOLED:
                x = F.max_pool2d(x, 2)
        x = F.relu(self.second(F.relu(self.first(x.flatten(1)))))
        return F.cross_entropy(self.head(x), classes)


class TwoTowers(nn.Module):
    """A text tower and an image tower whose results are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.patches = nn.Embedding(49408, 1024, device=META), linear(588, 1280)
        self.text, self.image = stack(8, 1024, 16, 4096, causal=True), stack(12, 1280, 16, 5120, causal=False)
        self.text_head, self.image_head = linear(1024, 1024), linear(1280, 1024)

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        x, y = self.embedding(ids), self.patches(patches)
        for layer in self.text:
            x = layer(x)
        for layer in self.image:
            y = layer(y)
        return F.mse_loss(self.text_head(x.mean(1)), self.image_head(y.mean(1)))


class EncoderDecoder(nn.Module):
    """An encoder, a decoder that reads it in every layer, and one embedding for both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32128, 1024, device=META), linear(1024, 32128)
        self.encoder, self.decoder, self.cross = (stack(12, 1024, 16, 4096, causal) for causal in (False, True, False))

    def forward(self, source: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(source)
        for layer in self.encoder:
            x = layer(x)
        y = self.embedding(ids)
        for layer, cross in zip(self.decoder, self.cross, strict=True):
            y = layer(y)
            y = y + cross.attend(cross.first_norm(y), x)
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten())


class Recommender(nn.Module):
    """Large embedding tables, and small networks around them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(4_000_000, 128, device=META) for _ in range(8)])
        self.bottom = nn.ModuleList([linear(13, 512), linear(512, 128)])
        self.top = nn.ModuleList([linear(128 * 9, 4096), linear(4096, 4096)])
        self.head = linear(4096, 1)

    def forward(self, dense: Tensor, rows: Tensor, clicks: Tensor) -> Tensor:
        x = dense
        for layer in self.bottom:
            x = F.relu(layer(x))
        x = torch.cat([x, *(table(rows[:, number]) for number, table in enumerate(self.tables))], 1)
        for layer in self.top:
            x = F.relu(layer(x))
        return F.mse_loss(self.head(x).flatten(), clicks)


class UNet(nn.Module):
    """Convolutions down and up again, with skips."""

    def __init__(self, channels: int = 256) -> None:
        super().__init__()
        sizes = (channels, 2 * channels, 4 * channels)
        pairs = list(pairwise(sizes))

        def convolution(size_in: int, size_out: int, stride: int = 1) -> nn.Conv2d:
            return nn.Conv2d(size_in, size_out, 3, stride, 1, device=META)

        self.first, self.last = convolution(4, channels), convolution(channels, 4)
        self.down = nn.ModuleList([convolution(a, b, 2) for a, b in pairs])
        self.middle = nn.ModuleList([convolution(sizes[-1], sizes[-1]) for _ in range(4)])
        self.up = nn.ModuleList([convolution(a + b, a) for a, b in reversed(pairs)])

    def forward(self, noisy: Tensor, noise: Tensor) -> Tensor:
        x, skips = F.silu(self.first(noisy)), []
        for layer in self.down:
            skips.append(x)
            x = F.silu(layer(x))
        for layer in self.middle:
            x = x + F.silu(layer(x))
        for layer in self.up:
            x = F.silu(layer(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)))
        return F.mse_loss(self.last(x), noise)


class GatedModel(nn.Module):
    """A language model of gated linear layers without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50_000, 4096, device=META), linear(4096, 50_000)
        self.gates = nn.ModuleList([linear(4096, 3 * 4096) for _ in range(6)])

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for gate in self.gates:
            a, b, c = gate(x).chunk(3, -1)
            x = x + torch.sigmoid(a) * torch.tanh(b) + c
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


FACTORIES: dict[str, tuple[Factory, int]] = {
    "GPT 0.7B": (lambda: (LanguageModel(2048, 16, 12, 32_000), (tokens(2, 1024), tokens(2, 1024))), 128),
    "GPT, 256,000 words": (lambda: (LanguageModel(1024, 16, 6, 256_000), (tokens(2, 1024), tokens(2, 1024))), 128),
    "GPT, hidden 8192": (lambda: (LanguageModel(8192, 64, 4, 50_000), (tokens(2, 1024), tokens(2, 1024))), 64),
    "ViT": (lambda: (VisionTransformer(), (numbers(2, 3, 224, 224), labels(2))), 512),
    "200,000 classes": (lambda: (Classifier(), (numbers(4, 8192), labels(4))), 4096),
    "MLP-Mixer": (lambda: (Mixer(), (numbers(2, 196, 768), labels(2))), 512),
    "VGG-16": (lambda: (VGG(), (numbers(2, 3, 224, 224), labels(2))), 1024),
    "two towers": (lambda: (TwoTowers(), (tokens(2, 77), numbers(2, 256, 588))), 1024),
    "encoder and decoder": (lambda: (EncoderDecoder(), (tokens(2, 512), tokens(2, 256), tokens(2, 256))), 256),
    "recommender": (lambda: (Recommender(), (numbers(4, 13), tokens(4, 8), numbers(4))), 16_384),
    "U-Net": (lambda: (UNet(), (numbers(2, 4, 64, 64), numbers(2, 4, 64, 64))), 512),
    "gated layers": (lambda: (GatedModel(), (tokens(2, 256), tokens(2, 256))), 256),
}
"""Every network by name: its factory, and the samples of a step."""
