"""The decoder transformer that a single device trains: GPT or Llama, as the operator graph counts it."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from simulator.models.transformer import Transformer

_KINDS = ("gelu", "swiglu")


def unsupported(spec: Transformer) -> str:
    """Return why a model cannot be built here; empty where it can."""
    for field in ("experts", "latent", "parallel_residual", "dropout", "norm", "biases", "max_positions"):
        if getattr(spec, field):
            return f"{field} is not built here"
    return "" if spec.ffn_kind in _KINDS else f"ffn_kind is one of {', '.join(_KINDS)}, met {spec.ffn_kind}"


class Decoder(nn.Module):
    """A model of ``spec`` for sequences of a length, with fused attention; a window must cover the sequence."""

    def __init__(self, spec: Transformer, sequence: int) -> None:
        super().__init__()
        if why := unsupported(spec):
            raise ValueError(f"{spec.name}: {why}")
        if spec.window is not None and spec.window < sequence:
            raise ValueError(f"{spec.name}: the window({spec.window}) covers the sequence, met {sequence} tokens")
        self.rotary = spec.positions == "rotary"
        self.token = nn.Embedding(spec.vocab, spec.hidden)
        self.position = None if self.rotary else nn.Parameter(torch.zeros(sequence, spec.hidden))
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.layers))
        self.final_norm = _norm(spec)
        self.logits = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied_embeddings:
            self.logits.weight = self.token.weight
        self.register_buffer("angles", rotary_angles(sequence, spec.head_dim), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, ``(batch, sequence, vocab)``, of ``(batch, sequence)`` tokens."""
        x = self.token(tokens)
        x = x if self.position is None else x + self.position
        for layer in self.layers:
            x = layer(x, self.angles if self.rotary else None)
        logits: Tensor = self.logits(self.final_norm(x))
        return logits


class DecoderLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=spec.ffn_kind == "gelu")
        self.spec = spec
        heads = (spec.heads, spec.kv_heads, spec.kv_heads)
        self.cuts = [count * spec.head_dim for count in heads]
        self.input_norm = _norm(spec)
        self.qkv = linear(spec.hidden, sum(self.cuts))
        self.query_norm = nn.RMSNorm(spec.head_dim) if spec.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(spec.head_dim) if spec.qk_norm else nn.Identity()
        self.projection = linear(spec.heads * spec.head_dim, spec.hidden)
        self.feed_forward_norm = _norm(spec)
        self.gated = spec.ffn_kind == "swiglu"
        self.up = linear(spec.hidden, spec.ffn * (2 if self.gated else 1))
        self.down = linear(spec.ffn, spec.hidden)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """Return ``x`` after attention and feed-forward layer, both with a residual."""
        x = x + self.projection(self._attention(self.qkv(self.input_norm(x)), angles))
        wide = self.up(self.feed_forward_norm(x))
        if self.gated:
            gate, wide = wide.chunk(2, dim=-1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        result: Tensor = x + self.down(wide)
        return result

    def _attention(self, qkv: Tensor, angles: Tensor | None) -> Tensor:
        width = self.spec.head_dim
        query, key, value = (
            part.view(*part.shape[:-1], -1, width).transpose(1, 2) for part in torch.split(qkv, self.cuts, -1)
        )
        query, key = self.query_norm(query), self.key_norm(key)
        if angles is not None:
            query, key = rotated(query, angles), rotated(key, angles)
        grouped = self.spec.kv_heads != self.spec.heads
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return context.transpose(1, 2).flatten(2)


def _norm(spec: Transformer) -> nn.Module:
    return nn.LayerNorm(spec.hidden) if spec.ffn_kind == "gelu" else nn.RMSNorm(spec.hidden)


def rotary_angles(sequence: int, width: int, base: float = 10_000.0) -> Tensor:
    """Return the cosines and sines, ``(2, sequence, width / 2)``, of rotary positions.

    Su et al. 2021, "RoFormer: enhanced transformer with rotary position embedding", section 3.2.2.
    """
    rates = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(sequence, dtype=torch.float32)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return ``x`` with the two halves of its last dim turned by the angle of each position."""
    one, other = x.chunk(2, dim=-1)
    cosine, sine = angles.to(x.dtype)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1)
