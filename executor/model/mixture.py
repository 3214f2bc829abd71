"""A mixture of experts in place of a feed-forward layer, and the activations of both; no token is ever dropped.

The router takes a softmax over all experts, and a token goes to the ``top_k`` experts of the largest probabilities.
The token's result is the sum of what these experts return, weighted by their probabilities. With several experts the
weights are normalised to sum to 1 [1]_; with one expert the probability itself stays, because the router learns through
it [2]_. There is no load balancing. Each expert multiplies exactly the rows that it got [3]_: there are no slots and
no padding, so results do not depend on how tokens are grouped into microbatches.

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

from meshwise.executor.recording.tensors import to_local
from meshwise.simulator.models.transformer import Transformer

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": functional.silu, "geglu": functional.gelu}


def width(kind: str, ffn: int) -> int:
    """Return how many values enter an activation function that returns ``ffn`` values: twice as many where it is gated.

    >>> width("gelu", 8), width("swiglu", 8)
    (8, 16)
    """
    return 2 * ffn if kind in _GATES else ffn


def activation(kind: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function of a feed-forward layer, whose result is ``(..., ffn)``.

    A gated one takes ``(..., 2 ffn)``: pairs ``[ffn, 2]`` of a gate and a value.
    """
    if kind not in _GATES:
        return functional.gelu
    function = _GATES[kind]

    def apply_gate(pairs: Tensor) -> Tensor:
        gate, value = _split_pairs(pairs) if pairs.is_cuda else _ContiguousPairs.apply(pairs)  # type: ignore[no-untyped-call]
        del pairs  # the caller holds no reference either, so where both were copied the input is freed here
        return function(gate) * value

    return apply_gate


def _split_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates and the values of ``pairs``, ``(..., 2 ffn)``, as views with a stride of 2."""
    gate, value = pairs.view(*pairs.shape[:-1], pairs.shape[-1] // 2, 2).unbind(-1)
    return gate, value


class _ContiguousPairs(torch.autograd.Function):
    """Copies gates and values into contiguous tensors: a CPU is six times slower on every second number.

    It costs no memory: backward keeps the two copies, together as large as the input, instead of the input.
    """

    @staticmethod
    def forward(ctx: Any, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates and the values, each contiguous."""
        gate, value = _split_pairs(pairs)
        return gate.contiguous(), value.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the input: those of gates and values, interleaved as pairs."""
        *shape, ffn = gradients[0].shape
        pairs = gradients[0].new_empty(*shape, 2 * ffn)
        for target, gradient in zip(_split_pairs(pairs), gradients, strict=True):
            target.copy_(gradient)
        return pairs


Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""Computes the results of experts for rows sorted by expert, of the given number of rows for each expert."""


class Experts(nn.Module):
    """The feed-forward layers of all experts, or of the experts of one rank.

    ``up`` is ``(experts, width, hidden)``, with rows ``[ffn, 2]`` where the activation is gated; ``down`` is
    ``(experts, hidden, ffn)``. ``read_weight`` returns the part of a parameter that this rank multiplies by.
    """

    def __init__(self, spec: Transformer, num_experts: int, ffn: int) -> None:
        super().__init__()
        self.activation = activation(spec.ffn_kind)
        self.up = nn.Parameter(torch.empty(num_experts, width(spec.ffn_kind, ffn), spec.hidden))
        self.down = nn.Parameter(torch.empty(num_experts, spec.hidden, ffn))
        self.read_weight: Callable[[Tensor], Tensor] = to_local

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the results of the experts, ``(rows, hidden)``: expert i computes the next ``counts[i]`` rows."""
        up, down = self.read_weight(self.up), self.read_weight(self.down)
        parts = zip(rows.split(list(counts)), up.unbind(), down.unbind(), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat(
            [self.activation(part @ up_weight.t()) @ down_weight.t() for part, up_weight, down_weight in parts]
        )


class Router(nn.Linear):
    """Scores every expert for the tokens of this rank; tokens and scores are plain tensors.

    Where tensor ranks cut the sequence, the weight is a replicated DTensor: the gradient of a rank covers its own
    tokens only, and is partial until the ranks sum it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores ``(batch, sequence, experts)`` of tokens ``(batch, sequence, hidden)``."""
        weight = self.weight
        return linear(x, weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight)


class Mixture(nn.Module):
    """Router, experts and, where the model has them, shared experts that all tokens go to.

    ``dispatch`` brings rows to the ranks that have their experts, runs these, and returns the results in order.
    """

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        experts = spec.experts
        if experts is None:
            raise ValueError("a mixture of experts needs a model with experts, met none")
        self.top_k, self.activation = experts.top_k, activation(spec.ffn_kind)
        self.router = Router(spec.hidden, experts.count, bias=False)
        self.experts = Experts(spec, experts.count, experts.ffn)
        self.dispatch: Callable[[Compute, Tensor, Tensor], Tensor] = run_local_experts
        shared_ffn = experts.shared * experts.ffn
        self.shared_up = nn.Linear(spec.hidden, width(spec.ffn_kind, shared_ffn), bias=False) if shared_ffn else None
        self.shared_down = nn.Linear(shared_ffn, spec.hidden, bias=False) if shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum over the experts of every token, ``(batch, sequence, hidden)``."""
        x = to_local(x)
        weights, expert_indices = choose_experts(self.router(x).flatten(0, 1), self.top_k)
        order = expert_indices.flatten().argsort(stable=True)
        counts = torch.bincount(expert_indices.flatten(), minlength=self.router.out_features)
        rows = self.dispatch(self.experts, x.flatten(0, 1)[order // self.top_k], counts)
        outputs = rows[order.argsort()].view(-1, self.top_k, x.shape[-1])
        weighted_sum = (weights.to(x.dtype).unsqueeze(-1) * outputs).sum(1).view(x.shape)
        if self.shared_up is None or self.shared_down is None:
            return weighted_sum
        result: Tensor = weighted_sum + self.shared_down(self.activation(self.shared_up(x)))
        return result


def choose_experts(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the weights and the indices of the experts of every token, both ``(tokens, top_k)``.

    ``scores`` are ``(tokens, experts)``. The softmax is in fp32, or in fp64 where the scores are fp64.
    """
    probabilities = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float))
    weights, expert_indices = probabilities.topk(top_k)
    return weights / weights.sum(-1, keepdim=True) if top_k > 1 else weights, expert_indices


def run_local_experts(experts: Compute, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the results of experts for ``rows``, in the same order, where this rank has all experts."""
    return experts(rows, counts.tolist())
