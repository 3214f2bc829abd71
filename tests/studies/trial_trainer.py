"""A trainer that draws its initial parameters on the device, since their values do not matter to a trial."""

import torch

from meshwise.executor.model.network import Network
from meshwise.executor.training.trainer import Trainer


class TrialTrainer(Trainer):
    """A trainer of one rank that starts fast: drawing billions of parameters on one CPU core would take minutes."""

    def _initialize(self, network: Network) -> None:
        with torch.no_grad():
            for name, parameter in network.model_parameters():
                parameter.normal_(float(name.endswith("norm.weight")), 0.02)
