"""Parameters of torch modules, and graphs of models, that tests of families set side by side."""

from typing import Any

from meshwise.simulator.models.model import Model, build
from meshwise.simulator.operator_graph import OperatorGraph


def count(*modules: Any) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def graph_of(spec: Model, sequence: int = 16, precision: str = "fp32") -> OperatorGraph:
    return build(spec, sequence, precision)
