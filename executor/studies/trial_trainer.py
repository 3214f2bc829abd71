"""A trainer whose first parameters are drawn where they are: what they are does not matter to a trial."""

import torch

from meshwise.executor.model.network import Network
from meshwise.executor.training.trainer import Trainer


class TrialTrainer(Trainer):
    """Trains one rank; billions of numbers drawn on a core, one after the other, would take minutes."""

    def _initialize(self, network: Network) -> None:
        with torch.no_grad():
            for name, parameter in network.model_parameters():
                parameter.normal_(float(name.endswith("norm.weight")), 0.02)
