"""The woven module of the zoo and its graph: it has values of all kinds between its layers."""

import torch

from meshwise.executor.stages.cuts import list_operators
from meshwise.executor.stages.export import StepGraph, export_step
from tests.executor.user_training.zoo import Woven

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.arange(4.0)


def build_woven() -> tuple[Woven, StepGraph]:
    """Return the module in fp64, and its graph for `BATCH`."""
    torch.manual_seed(0)
    module = Woven().double()
    return module, export_step(module, None, tuple(tensor.double() for tensor in BATCH))


NUM_OPERATORS = len(list_operators(build_woven()[1]))
