"""A language model in the form of Llama, in torch alone, and random tokens for it.

It imports nothing of this repository, so that a user's file beside a copy of it can train it.

References
----------
Touvron et al. 2023, "LLaMA", section 2.2 (RMS norm, SwiGLU, rotary positions); Zhang et al. 2024, "TinyLlama", table 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sizes(NamedTuple):
    """The sizes of a model; ``length`` is the tokens of a sample."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    words: int
    length: int

    def count_parameters(self) -> int:
        """Return the elements of all parameters."""
        head_dim = self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.words * self.hidden + self.hidden

    def count_flops(self) -> int:
        """Return the FLOP that a token needs in forward and backward: products of weights, and causal attention.

        Looking a token up in the table is none.
        """
        weights = self.count_parameters() - self.words * self.hidden - (2 * self.layers + 1) * self.hidden
        return 6 * weights + 6 * self.layers * self.hidden * self.length


TINY_LLAMA = Sizes(22, 2048, 32, 4, 5632, 32000, 2048)


class Layer(nn.Module):
    """A layer: grouped attention with rotary positions, and a gated feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.head_dim = sizes, sizes.hidden // sizes.heads
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.query = nn.Linear(sizes.hidden, sizes.heads * self.head_dim, bias=False)
        self.key, self.value = (nn.Linear(sizes.hidden, sizes.kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.gate, self.up = (nn.Linear(sizes.hidden, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        y = self.attention_norm(x)
        query, key, value = (
            part(y).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = (rotate(part, cosines, sines) for part in (query, key))
        repeats = self.sizes.heads // self.sizes.kv_heads
        key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys turned by the angles of their positions."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(x.dtype)


class Llama(nn.Module):
    """The model; forward returns the mean loss of tokens, or the scores of words where there are no targets."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.words, bias=False)
        head_dim = sizes.hidden // sizes.heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(sizes.length), frequencies)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.words(inputs)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        scores: Tensor = self.head(self.norm(x))
        return scores if targets is None else F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples of random tokens, each with the tokens that follow."""

    def __init__(self, sizes: Sizes, samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(sizes.words, (samples, sizes.length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tokens[number, :-1], self.tokens[number, 1:]

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Return ``size`` samples from one on."""
        part = self.tokens[first : first + size]
        return part[:, :-1].contiguous(), part[:, 1:].contiguous()
