"""A mixture of experts in the place of a feed-forward layer; no token is dropped, however uneven the choice.

A token goes to the ``top_k`` experts of the largest probabilities, a softmax over all experts. What they return is
weighted by these, which are made to sum to 1 where there are several [1]_; of a single expert the probability stays,
for the router learns by it [2]_. Nothing balances the load besides. Tokens go to experts in products of as many rows
as each has [3]_, so that neither slots nor padding depend on how tokens are grouped.

What is between the two products of a feed-forward layer.

References
----------
.. [1] Jiang et al. 2024, "Mixtral of experts", section 2.1.
.. [2] Fedus, Zoph and Shazeer 2022, "Switch transformers", section 2.1, equation 2.
.. [3] Gale et al. 2023, "MegaBlocks" (dropless).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.nn.functional import linear

from meshwise.executor.recording.tensors import local
from meshwise.simulator.models.transformer import Transformer

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": functional.silu, "geglu": functional.gelu}


def width(kind: str, ffn: int) -> int:
    """Return the width of what comes into an activation of a kind that ``ffn`` values leave.

    >>> width("gelu", 8), width("swiglu", 8)
    (8, 16)
    """
    return 2 * ffn if kind in _GATES else ffn


def activation(kind: str) -> Callable[[Tensor], Tensor]:
    """Return what makes the middle, ``(..., ffn)``, of what is wide: where it is gated, of pairs ``[ffn, 2]``."""
    if kind not in _GATES:
        return functional.gelu
    function = _GATES[kind]

    def gated(wide: Tensor) -> Tensor:
        gate, value = _pairs(wide) if wide.is_cuda else _Apart.apply(wide)  # type: ignore[no-untyped-call]
        del wide  # where both were copied it is not needed any longer, and whoever made it has let it go
        return function(gate) * value

    return gated


def _pairs(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates and the values of ``(..., 2 ffn)`` as views."""
    gate, value = wide.view(*wide.shape[:-1], wide.shape[-1] // 2, 2).unbind(-1)
    return gate, value


class _Apart(torch.autograd.Function):
    """Gates and values, each brought together: of every second number a CPU computes six times as slowly.

    What a gate and a product keep of them is as large as the input, which nothing keeps then.
    """

    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Return gates and values."""
        gate, value = _pairs(wide)
        return gate.contiguous(), value.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return both gradients beside each other."""
        *shape, ffn = gradients[0].shape
        wide = gradients[0].new_empty(*shape, 2 * ffn)
        for place, gradient in zip(_pairs(wide), gradients, strict=True):
            place.copy_(gradient)
        return wide


Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""What experts make of rows: first those of the first expert, as many as said, then those of the next."""


class Experts(nn.Module):
    """The feed-forward layers of all experts, or of a rank's.

    ``up`` is ``(experts, width, hidden)`` with rows ``[ffn, 2]`` where it is gated, ``down`` is
    ``(experts, hidden, ffn)``. ``own`` makes of a parameter what this rank multiplies by.
    """

    def __init__(self, spec: Transformer, count: int, ffn: int) -> None:
        super().__init__()
        self.activation = activation(spec.ffn_kind)
        self.up = nn.Parameter(torch.empty(count, width(spec.ffn_kind, ffn), spec.hidden))
        self.down = nn.Parameter(torch.empty(count, spec.hidden, ffn))
        self.own: Callable[[Tensor], Tensor] = local

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return what every expert makes of its ``counts`` rows, ``(rows, hidden)``."""
        up, down = self.own(self.up), self.own(self.down)
        parts = zip(rows.split(list(counts)), up.unbind(), down.unbind(), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([self.activation(part @ wide.t()) @ narrow.t() for part, wide, narrow in parts])


class Router(nn.Linear):
    """Scores of every expert for the tokens of this rank, plain tensors both.

    Where ranks cut the sequence the weight is one that they all have, and of its gradient each has the part of its
    tokens.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, sequence, experts)`` of ``(batch, sequence, hidden)``."""
        weight = self.weight
        return linear(x, weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight)


class Mixture(nn.Module):
    """Router, experts and, where the model has some, the experts that all tokens go to.

    ``spread`` runs experts where they are; it gives ``Experts`` its rows, and the results back.
    """

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        experts = spec.experts
        if experts is None:
            raise ValueError("a mixture of experts needs a model with experts, met none")
        self.top_k, self.activation = experts.top_k, activation(spec.ffn_kind)
        self.router = Router(spec.hidden, experts.count, bias=False)
        self.experts = Experts(spec, experts.count, experts.ffn)
        self.spread: Callable[[Compute, Tensor, Tensor], Tensor] = here
        shared = experts.shared * experts.ffn
        self.shared_up = nn.Linear(spec.hidden, width(spec.ffn_kind, shared), bias=False) if shared else None
        self.shared_down = nn.Linear(shared, spec.hidden, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum over every token's experts, ``(batch, sequence, hidden)``."""
        x = local(x)
        weights, chosen = choice(self.router(x).flatten(0, 1), self.top_k)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        rows = self.spread(self.experts, x.flatten(0, 1)[order // self.top_k], counts)
        returned = rows[order.argsort()].view(-1, self.top_k, x.shape[-1])
        mixed = (weights.to(x.dtype).unsqueeze(-1) * returned).sum(1).view(x.shape)
        if self.shared_up is None or self.shared_down is None:
            return mixed
        result: Tensor = mixed + self.shared_down(self.activation(self.shared_up(x)))
        return result


def choice(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return weights and indices of the experts of every token, both ``(tokens, top_k)``, from ``(tokens, experts)``.

    Probabilities are in fp32, or in fp64 where scores are.
    """
    probabilities = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float))
    weights, chosen = probabilities.topk(top_k)
    return weights / weights.sum(-1, keepdim=True) if top_k > 1 else weights, chosen


def here(experts: Compute, rows: Tensor, counts: Tensor) -> Tensor:
    """Return what experts make of ``rows``, in their order, where all experts are on this rank."""
    return experts(rows, counts.tolist())
