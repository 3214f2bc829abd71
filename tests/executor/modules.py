"""Small networks of eight families, seeded, whose forward returns a loss: to be captured and executed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[Tensor, ...]]
BATCH = 4


class Mlp(nn.Module):
    def __init__(self, features: int = 8, hidden: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        hidden = torch.tanh(self.second(hidden))
        return functional.mse_loss(self.last(hidden), target)


class ConvNet(nn.Module):
    def __init__(self, channels: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.body = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.body_norm = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = functional.relu(self.stem_norm(self.stem(image)))
        x = functional.max_pool2d(x, 2)
        x = x + functional.relu(self.body_norm(self.body(x)))
        return functional.cross_entropy(self.classifier(x.mean((2, 3))), target)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.projection = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.projection(out.transpose(1, 2).reshape(batch, sequence, hidden))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int, *, causal: bool) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=causal)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.down(functional.gelu(self.up(self.feed_forward_norm(x))))


class Gpt(nn.Module):
    def __init__(
        self,
        layers: int = 2,
        hidden: int = 16,
        heads: int = 4,
        ffn: int = 64,
        vocab: int = 32,
        sequence: int = 8,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(0.02 * torch.randn(sequence, hidden))
        self.layers = nn.ModuleList(Layer(hidden, heads, ffn, causal=True) for _ in range(layers))
        self.final_norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.logits.weight = self.token.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.logits(self.final_norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class Vit(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, heads: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 4, stride=4)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, hidden))
        self.position = nn.Parameter(0.02 * torch.randn(1, 5, hidden))
        self.layers = nn.ModuleList(Layer(hidden, heads, 4 * hidden, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.classifier(self.norm(x)[:, 0]), target)


class Convolutions(nn.Module):
    def __init__(self, read: int, written: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(read, written, 3, padding=1)
        self.norm = nn.GroupNorm(2, written)
        self.second = nn.Conv2d(written, written, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.second(functional.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(3, channels), Convolutions(channels, 2 * channels)])
        self.middle = Convolutions(2 * channels, 4 * channels)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * channels, 2 * channels, 2, 2), nn.ConvTranspose2d(2 * channels, channels, 2, 2)]
        )
        self.up = nn.ModuleList([Convolutions(4 * channels, 2 * channels), Convolutions(2 * channels, channels)])
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        skips, x = [], image
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], dim=1))
        return functional.mse_loss(self.out(x), noise)


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.input_norm, self.feed_forward_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        query = self.query(x).view(batch, sequence, self.heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, sequence, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, sequence, self.kv_heads, self.head_dim).transpose(1, 2)
        query, key = (y * cosine + rotated(y) * sine for y in (query, key))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.projection(out.transpose(1, 2).reshape(batch, sequence, hidden))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attend(self.input_norm(x), cosine, sine)
        y = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Llama(nn.Module):
    def __init__(
        self, layers: int = 2, hidden: int = 16, heads: int = 4, kv_heads: int = 2, ffn: int = 32, vocab: int = 32
    ) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.token = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = RmsNorm(hidden)
        self.logits = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.token(tokens)
        steps = torch.arange(tokens.shape[1], dtype=x.dtype)
        rates = 10000.0 ** (-torch.arange(0, self.head_dim, 2, dtype=x.dtype) / self.head_dim)
        angles = torch.outer(steps, rates).repeat(1, 2)
        cosine, sine = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return functional.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), target.flatten())


class Experts(nn.Module):
    """Tokens go to the best of the experts: all is computed densely, with weights of 0 for experts not chosen."""

    def __init__(self, hidden: int, ffn: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, ffn) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) / ffn**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        sent = functional.one_hot(chosen, self.up.shape[0]).to(x.dtype)
        combine = torch.einsum("bske,bsk->bse", sent, weights)
        routed = torch.einsum("bse,bsh->ebsh", (combine > 0).to(x.dtype), x)
        wide = functional.gelu(torch.einsum("ebsh,ehf->ebsf", routed, self.up))
        return torch.einsum("ebsh,bse->bsh", torch.einsum("ebsf,efh->ebsh", wide, self.down), combine)


class Moe(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, vocab: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.attention = nn.ModuleList(Attention(hidden, 4, causal=True) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(hidden, 2 * hidden, experts, 2) for _ in range(layers))
        self.logits = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.token(tokens)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = x + attention(x)
            x = x + experts(x)
        return functional.cross_entropy(self.logits(x).flatten(0, 1), target.flatten())


class Recommender(nn.Module):
    def __init__(self, rows: tuple[int, ...] = (64, 32, 16), width: int = 8, dense: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = nn.Linear(dense, width)
        features = len(rows) + 1
        self.top = nn.Linear(features * features + width, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, dense: Tensor, indices: Tensor, clicked: Tensor) -> Tensor:
        bottom = functional.relu(self.bottom(dense))
        looked_up = [table(indices[:, place]) for place, table in enumerate(self.tables)]
        features = torch.stack([bottom, *looked_up], dim=1)
        pairs = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        hidden = functional.relu(self.top(torch.cat([bottom, pairs], dim=1)))
        return functional.binary_cross_entropy_with_logits(self.last(hidden).squeeze(-1), clicked)


def tokens(vocab: int = 32, sequence: int = 8, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    every = torch.randint(vocab, (batch, sequence + 1))
    return every[:, :-1].contiguous(), every[:, 1:].contiguous()


def images(size: int = 8, classes: int = 4, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def mlp() -> Example:
    return Mlp(), (torch.randn(BATCH, 8), torch.randn(BATCH, 8))


def convnet() -> Example:
    return ConvNet(), images()


def vit() -> Example:
    return Vit(), images()


def unet() -> Example:
    return UNet(), (torch.randn(BATCH, 3, 8, 8), torch.randn(BATCH, 3, 8, 8))


def gpt() -> Example:
    return Gpt(), tokens()


def llama() -> Example:
    return Llama(), tokens()


def moe() -> Example:
    return Moe(), tokens()


def recommender() -> Example:
    indices = torch.stack([torch.randint(rows, (BATCH,)) for rows in (64, 32, 16)], dim=1)
    return Recommender(), (torch.randn(BATCH, 4), indices, torch.randint(2, (BATCH,)).float())


MODULES: dict[str, Callable[[], Example]] = {
    each.__name__: each for each in (mlp, convnet, vit, unet, gpt, llama, moe, recommender)
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Example:
    """Return one of `MODULES` and its inputs, the same for the same seed, floating ones in ``dtype``."""
    torch.manual_seed(seed)
    module, inputs = MODULES[name]()
    return module.to(dtype), tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
