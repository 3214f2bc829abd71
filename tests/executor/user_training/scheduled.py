"""The modules of the zoo with a learning rate that changes with the step."""

from typing import Any

import torch

from tests.executor.user_training.zoo import BATCH, data, model

__all__ = ["BATCH", "data", "model", "scheduler"]


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
