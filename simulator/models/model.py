"""A model as a value: its sizes, and the operator graph that they mean."""

from functools import lru_cache
from typing import Protocol

from simulator.operator_graph import OperatorGraph


class Model(Protocol):
    """Sizes of a network of one family; a frozen dataclass."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """What the model is called."""

    @property
    def summary(self) -> str:
        """The sizes in one line."""

    def graph(self, sequence: int, precision: str) -> OperatorGraph:
        """Return the operator graph of one sample of ``sequence`` tokens."""


@lru_cache(maxsize=64)
def build(spec: Model, sequence: int, precision: str) -> OperatorGraph:
    """Return the operator graph of one sample of a model.

    Parameters
    ----------
    sequence
        Tokens of the sample; models whose samples are of one size (images) do not read it.
    precision
        Dtype of parameters and activations.

    Raises
    ------
    ValueError
        Where the model has no graph for such a sample.
    """
    return spec.graph(sequence, precision)
