"""The decoder transformer that the executor trains, GPT or Llama, cut into the blocks of the operator graph.

Blocks carry the graph's names (``embedding``, ``layers.0``, ..., ``head``), so a stage is built from the names that a
plan puts on it, and a parameter has the same name and the same first value whatever stage or process it lives on.

Rotary positions [1]_ rotate queries and keys by an angle that grows with the position of their token.

The root mean square norm [2]_ keeps only its input for backward, as torch's own kernel for GPUs does. On other devices
torch composes the norm of operators that each keep what they read: the normalised input too, and an fp32 copy of an
input of 16 bits.

References
----------
.. [1] Su et al. 2021, "RoFormer: enhanced transformer with rotary position embedding", section 3.2.2.
.. [2] Zhang and Sennrich 2019, "Root mean square layer normalization", equation 4.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwise.executor.model.mixture import Mixture, activation, width
from meshwise.executor.model.recompute import Contexts, recompute_operators, run_recomputed_once
from meshwise.simulator.models.attention import UNFUSED
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.recomputation import Recompute, SomeOperators, StageRecompute

BASE = 10000.0
"""Base of the geometric series of rotary wavelengths."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (positions, half of a head)."""


def compute_rotation(positions: Tensor, values: Tensor) -> Rotation:
    """Return the cosines and sines that rotate ``values``, ``(..., head_dim)``, at the given positions.

    Angles are computed in fp64 for values of fp64, else in fp32: 16 bits do not tell large positions apart.
    """
    half, device = values.shape[-1] // 2, values.device
    dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
    frequencies = BASE ** (-torch.arange(half, dtype=dtype, device=device) / half)
    angles = positions.to(device, dtype)[:, None] * frequencies
    return angles.cos().to(values.dtype), angles.sin().to(values.dtype)


def rotate_heads(heads: Tensor, angles: Rotation) -> Tensor:
    """Return ``heads``, ``(batch, sequence, ..., head_dim)``, rotated by position: value i with value i + head_dim / 2.

    Tokens come before heads, so that the result of attention lies in memory as the next product reads it.
    """
    result: Tensor = _RotateHeads.apply(heads, *angles)  # type: ignore[no-untyped-call]
    return result


class _RotateHeads(torch.autograd.Function):
    """Rotates pairs of numbers; the gradient is rotated back, so backward keeps only cosines and sines."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the rotated heads."""
        ctx.save_for_backward(cosine, sine)
        return _rotate_halves(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the heads; angles have none."""
        cosine, sine = ctx.saved_tensors
        return _rotate_halves(gradients[0], cosine, -sine), None, None


def _rotate_halves(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    cosine, sine = torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)
    cosine, sine = (part.view(part.shape[0], *(1,) * (heads.dim() - 3), -1) for part in (cosine, sine))
    lower_half, upper_half = heads.chunk(2, dim=-1)
    return torch.cat([upper_half, lower_half], dim=-1).mul_(sine).addcmul_(heads, cosine)


class RMSNorm(nn.RMSNorm):
    """Norm along the last dim, ``(..., width)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` over the root of its mean square, times the weight."""
        if x.is_cuda:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        result: Tensor = _Norm.apply(x, self.weight, eps)  # type: ignore[no-untyped-call]
        return result


class _Norm(torch.autograd.Function):
    """``y = x r w`` with ``r = (mean(x**2) + eps) ** -0.5``; values of 16 bits are computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return ``y``."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_exact = x.to(dtype)
        scale = torch.rsqrt(x_exact.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x_exact * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ``x``, ``r (g w - n mean(g w n))`` with ``n = x r``, and of ``w``, ``g n`` summed."""
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0].to(scale.dtype)
        normal = x.to(scale.dtype) * scale
        weight_gradient = (gradient * normal).sum(tuple(range(x.dim() - 1)))
        inner = gradient * weight
        inner -= normal.mul_((inner * normal).mean(-1, keepdim=True))
        return inner.mul_(scale).to(x.dtype), weight_gradient.to(weight.dtype), None


Core = Callable[..., Tensor]
"""Attention of queries to keys and values: causal, or with a fourth argument by the mask that this is."""


_NORM_EPSILON = 1e-5
"""What root mean square norms add to the mean square under the root."""


class Embedding(nn.Module):
    """Token embedding, plus learned position embedding where the model has it.

    Maps ``(batch, sequence)`` to ``(batch, sequence, hidden)``. ``token_positions`` are the positions of the tokens
    that this rank gets; ``None`` where it gets whole sequences.
    """

    token_positions: Tensor | None = None

    def __init__(self, spec: Transformer, sequence: int) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab, spec.hidden)
        learned = spec.positions == "learned"
        self.position = nn.Parameter(torch.empty(sequence, spec.hidden)) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens."""
        embeddings: Tensor = self.token(tokens)
        if self.position is None:
            return embeddings
        return embeddings + (self.position if self.token_positions is None else self.position[self.token_positions])


class Layer(nn.Module):
    """One pre-norm layer of attention and feed-forward.

    Rows of ``qkv`` lie as ``[kv_heads, group + 2, head_dim]`` and rows of a gated ``up`` as ``[ffn, 2]``, so that
    cutting columns cuts over heads of keys, or over the width, and leaves each group or pair whole.
    ``token_positions`` are the positions of the tokens that this rank gets; ``None`` where it gets whole sequences.
    ``run_core`` calls the core of attention. With ``routed``, a mixture of experts replaces the feed-forward layer.
    """

    token_positions: Tensor | None = None

    def __init__(self, spec: Transformer, *, routed: bool = False) -> None:
        super().__init__()
        hidden, self.head_dim, self.group = spec.hidden, spec.head_dim, spec.heads // spec.kv_heads
        biases = resolve_biases(spec)
        self.core: Core = unfused_attention if spec.attention == UNFUSED else flash_attention
        self.run_core: Callable[..., Tensor] = self.call_core
        self.rotary = spec.positions == "rotary"
        self.activation = activation(spec.ffn_kind)
        self.input_norm = build_norm(spec)
        self.qkv = nn.Linear(hidden, spec.kv_heads * (self.group + 2) * spec.head_dim, bias=biases != "none")
        self.query_norm, self.key_norm = (_build_head_norm(spec) for _ in range(2))
        self.has_qk_norm = spec.qk_norm
        self.projection = nn.Linear(spec.heads * spec.head_dim, hidden, bias=biases == "all")
        self.feed_forward_norm = build_norm(spec)
        self.mixture = Mixture(spec) if routed else None
        if not routed:
            self.up = nn.Linear(hidden, width(spec.ffn_kind, spec.ffn), bias=biases == "all")
            self.down = nn.Linear(spec.ffn, hidden, bias=biases == "all")

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` after attention and feed-forward, each with a residual."""
        x = x + self.projection(self.attention(self.qkv(self.input_norm(x))))
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the result of the feed-forward layer, or of the mixture of experts, for ``x``."""
        result: Tensor = self.down(self.activation(self.up(x))) if self.mixture is None else self.mixture(x)
        return result

    def attention(self, qkv: Tensor) -> Tensor:
        """Return attention over as many heads as ``qkv`` has: all of the model, or those of a tensor rank."""
        batch, sequence, _ = qkv.shape
        parts = qkv.view(batch, sequence, -1, self.group + 2, self.head_dim)
        heads = torch.split(parts, [self.group, 1, 1], dim=-2)  # its backward joins the three gradients in one copy
        query, key, value = self.query_norm(heads[0]), self.key_norm(heads[1]), heads[2]
        if self.rotary:
            positions = self.token_positions
            if positions is None:
                positions = torch.arange(sequence, device=qkv.device)
            angles = compute_rotation(positions, query)
            query, key = rotate_heads(query, angles), rotate_heads(key, angles)
        # queries are already copies then; keys and values as views would keep all of qkv alive for backward
        if not self.has_qk_norm and (self.rotary or self.group > 1):
            key, value = key if self.rotary else key.clone(), value.clone()
        context = self.run_core(self.core, *(part.flatten(2, 3).transpose(1, 2) for part in (query, key, value)))
        return context.transpose(1, 2).reshape(batch, sequence, -1)

    @staticmethod
    def call_core(core: Core, *tensors: Tensor) -> Tensor:
        """Return the result of an attention core, which keeps what its backward reads."""
        return core(*tensors)


def resolve_biases(spec: Transformer) -> str:
    """Return which linear layers have a bias: ``all``, ``qkv`` or ``none``."""
    return spec.biases or ("all" if spec.ffn_kind == "gelu" else "none")


def build_norm(spec: Transformer) -> nn.Module:
    """Return a norm over the hidden size, of the kind that the model has."""
    kind = spec.norm or ("layer" if spec.ffn_kind == "gelu" else "rms")
    return nn.LayerNorm(spec.hidden) if kind == "layer" else RMSNorm(spec.hidden, eps=_NORM_EPSILON)


def _build_head_norm(spec: Transformer) -> nn.Module:
    return RMSNorm(spec.head_dim, eps=_NORM_EPSILON) if spec.qk_norm else nn.Identity()


def flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return causal attention as one kernel; shapes ``(batch, heads, sequence, head_dim)``.

    Several heads of queries may share one head of keys and values. ``mask``, ``(queries, keys)``, replaces the causal
    mask: it is true where a query sees a key.
    """
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def unfused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return causal attention operator by operator, with scores and probabilities kept; see `flash_attention`."""
    sequence, group = query.shape[-2], query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.ones(sequence, sequence, dtype=torch.bool, device=query.device).triu(1) if mask is None else ~mask
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ value


class Head(nn.Module):
    """Final norm and logits; the head block of the graph ends with `cross_entropy`."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        self.final_norm = build_norm(spec)
        self.logits = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``(batch, sequence, vocab)``."""
        logits: Tensor = self.logits(self.final_norm(x))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_checkpointed(contexts: Contexts, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``function(*inputs)``; backward keeps only the inputs, and runs the function again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def make_null_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts that change nothing."""
    return nullcontext(), nullcontext()


class Network(nn.Module):
    """The blocks named ``blocks``, in order; all blocks of the graph make the whole model.

    ``make_layer_context(number, layer)`` makes the context under which a layer runs forward, but not its recomputation.

    Parameters
    ----------
    recompute
        What the forward pass drops and backward computes again: nothing, the attention core, operators by name, or
        whole layers; in all layers or in the first ones.
    contexts
        Makes the contexts under which the forward pass and its recomputation run.
    splits_backward
        Whether backward comes in two parts, which then share one recomputation.
    """

    def __init__(
        self,
        spec: Transformer,
        sequence: int,
        blocks: Sequence[str],
        recompute: StageRecompute = Recompute.NONE,
        contexts: Contexts | None = None,
        *,
        splits_backward: bool = False,
    ) -> None:
        super().__init__()
        contexts = contexts or make_null_contexts
        self.checkpoint_function: Callable[..., Any] = partial(
            run_recomputed_once if splits_backward else run_checkpointed, contexts
        )
        self.embedding = Embedding(spec, sequence) if "embedding" in blocks else None
        num_dense = spec.experts.dense_layers if spec.experts is not None else spec.layers
        indices = [layer_index(name, spec) for name in blocks if "layers" in name]
        self.layers = nn.ModuleDict({str(index): Layer(spec, routed=index >= num_dense) for index in indices})
        self.head = Head(spec) if "head" in blocks else None
        recomputed_layers = self.decoder_layers()[: recompute.layers]
        self.num_recomputed = len(recomputed_layers) if recompute.layer is Recompute.FULL else 0
        if recompute.layer is Recompute.SELECTIVE:
            for layer in recomputed_layers:
                layer.run_core = self.checkpoint_function
        if isinstance(recompute.layer, SomeOperators):
            for layer in recomputed_layers:
                recompute_operators(layer, recompute.layer.names, self.checkpoint_function, contexts)
        self.make_layer_context: Callable[[int, nn.Module], AbstractContextManager[Any]] = lambda number, layer: (
            nullcontext()
        )
        self.ties_embeddings = spec.tied_embeddings
        self.tie_embeddings()

    def decoder_layers(self) -> list[Layer]:
        """Return the layers in order."""
        return [layer for layer in self.layers.values() if isinstance(layer, Layer)]

    def tie_embeddings(self) -> None:
        """Make the output weight the token table where this stage has both and the model ties them."""
        if self.ties_embeddings and self.embedding is not None and self.head is not None:
            self.head.logits.weight = self.embedding.token.weight

    def model_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters with their names in the whole model, where a tied output weight is the token table."""
        for name, parameter in self.named_parameters():
            is_copy = self.ties_embeddings and name == "head.logits.weight"
            yield "embedding.token.weight" if is_copy else name, parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations that leave the last block: logits where it is the head."""
        if self.embedding is not None:
            x = self.embedding(x)
        for number, layer in enumerate(self.decoder_layers()):
            with self.make_layer_context(number, layer):
                x = self.checkpoint_function(layer, x) if number < self.num_recomputed else layer(x)
        return self.head(x) if self.head is not None else x


def layer_index(name: str, spec: Transformer) -> int:
    """Return the index among all layers of a block such as ``layers.3`` or ``dense_layers.0``.

    The blocks ``layers`` follow those of ``dense_layers``; a block that occurs once has no number in its name.
    """
    kind, _, number = name.partition(".")
    num_dense = spec.experts.dense_layers if spec.experts is not None and kind == "layers" else 0
    return num_dense + int(number or 0)


def initialize(network: Network, seed: int) -> None:
    """Fill every parameter with random values that only its name and ``seed`` decide, whatever rank has it.

    Biases are random too, for an error in a plan would hide behind zeros. Values are drawn in fp64 and rounded to the
    parameter's dtype.
    """
    with torch.no_grad():
        for name, parameter in network.model_parameters():
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.02
            parameter.copy_(value + 1 if name.endswith("norm.weight") else value)
