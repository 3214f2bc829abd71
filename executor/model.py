"""The byte-level GPT that the executor trains, cut into the blocks of the operator graph.

Blocks carry the graph's names (``embedding``, ``layers.0``, ..., ``head``), so that a stage
is built from the names that a plan puts on it, and a parameter has the same name, and the
same first value, whatever stage or process it lives on.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from simulator.models.attention import UNFUSED
from simulator.models.transformer import Transformer
from strategies.recomputation import OfStage, Recompute

ContextFactory = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Embedding(nn.Module):
    """Token plus position embedding: ``(batch, sequence)`` -> ``(batch, sequence, hidden)``."""

    def __init__(self, spec: Transformer, sequence: int) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab, spec.hidden)
        self.position = nn.Parameter(torch.empty(sequence, spec.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens."""
        embedded: Tensor = self.token(tokens)
        return embedded + self.position


class Layer(nn.Module):
    """One pre-norm layer. Rows of ``qkv`` lie as ``[heads, 3, head_dim]``: a column cut is a cut over heads."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        hidden = spec.hidden
        self.head_dim = spec.head_dim
        self.core: Callable[..., Tensor] = unfused_attention if spec.attention == UNFUSED else flash_attention
        self.input_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, spec.ffn)
        self.down = nn.Linear(spec.ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after attention and feed-forward, both with a residual."""
        x = x + self.projection(self.attention(self.qkv(self.input_norm(x))))
        wide = functional.gelu(self.up(self.feed_forward_norm(x)))
        result: Tensor = x + self.down(wide)
        return result

    def attention(self, qkv: Tensor) -> Tensor:
        """Return the attention of however many heads ``qkv`` holds."""
        batch, sequence, width = qkv.shape
        heads = width // (3 * self.head_dim)
        query, key, value = qkv.view(batch, sequence, heads, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        context = self.core(query, key, value)
        return context.transpose(1, 2).reshape(batch, sequence, heads * self.head_dim)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention as one kernel; shapes ``(batch, heads, sequence, head_dim)``."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def unfused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention with scores and probabilities kept, operator by operator."""
    sequence = query.shape[-2]
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value


class Head(nn.Module):
    """Final norm and logits; `cross_entropy` is the rest of the block."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        self.final_norm = nn.LayerNorm(spec.hidden)
        self.logits = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``(batch, sequence, vocab)``."""
        logits: Tensor = self.logits(self.final_norm(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Network(nn.Module):
    """The blocks named ``blocks``, in order; all of them make the whole model.

    Parameters
    ----------
    recompute
        What is dropped in the forward pass: nothing, the attention core, or whole layers; of all or of the first.
    contexts
        Makes the contexts under which the forward pass and its recomputation run.
    """

    def __init__(
        self,
        spec: Transformer,
        sequence: int,
        blocks: Sequence[str],
        recompute: OfStage = Recompute.NONE,
        contexts: ContextFactory | None = None,
    ) -> None:
        super().__init__()
        extra: dict[str, Any] = {"context_fn": contexts} if contexts is not None else {}
        again: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **extra)
        self.again: Callable[..., Any] = again
        self.embedding = Embedding(spec, sequence) if "embedding" in blocks else None
        indices = [layer_index(name) for name in blocks if name.startswith("layers")]
        self.layers = nn.ModuleDict({str(index): Layer(spec) for index in indices})
        self.head = Head(spec) if "head" in blocks else None
        first = self.decoder_layers()[: recompute.layers]
        self.num_again = len(first) if recompute.layer is Recompute.FULL else 0
        if recompute.layer is Recompute.SELECTIVE:
            for layer in first:
                layer.core = partial(self.again, layer.core)
        self.tied = spec.tied_embeddings
        self.tie()

    def decoder_layers(self) -> list[Layer]:
        """Return the layers in order."""
        return [layer for layer in self.layers.values() if isinstance(layer, Layer)]

    def tie(self) -> None:
        """Make the output weight the token table where both are here and the model ties them."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.logits.weight = self.embedding.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations that leave the blocks: logits where the head is one of them."""
        if self.embedding is not None:
            x = self.embedding(x)
        for number, layer in enumerate(self.decoder_layers()):
            x = self.again(layer, x) if number < self.num_again else layer(x)
        return self.head(x) if self.head is not None else x


def layer_index(name: str) -> int:
    """Return the index in ``layers.3``; a model of one layer calls it ``layers``."""
    return int(name.partition(".")[2] or 0)


def initialize(network: Network, seed: int) -> None:
    """Fill every parameter from its own name and ``seed``: random throughout, so that no error hides behind a zero.

    Values are drawn in fp64 and rounded to the parameter's dtype.
    """
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.02
            parameter.copy_(value + 1 if name.endswith("norm.weight") else value)
