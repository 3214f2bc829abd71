"""The parameters of a rank: how many, and what optimizer and precision keep of them besides."""

from typing import NamedTuple

from strategies.mesh import OPERATOR_AXES


class Parameters(NamedTuple):
    """Parameters on one rank.

    Parameters
    ----------
    elements, tensors
        How many, and in how many tensors.
    factored
        Rows and columns of all matrices, and elements of all vectors.
    quantised
        Elements of weights that layers multiply by in fp8.
    experts, factored_experts
        The part of ``elements`` and of ``factored`` that only one expert uses, where experts are shared.
    replicated
        For each of `strategies.mesh.OPERATOR_AXES` the part of ``elements`` that every rank along it has, with
        gradients of its own tokens, heads or samples alone.
    """

    elements: int
    tensors: int
    factored: int = 0
    quantised: int = 0
    experts: int = 0
    factored_experts: int = 0
    replicated: tuple[int, ...] = (0,) * len(OPERATOR_AXES)
