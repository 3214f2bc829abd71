"""What is to be laid out: a network, a machine and a training step."""

from dataclasses import dataclass

from simulator.accelerator import Accelerator
from simulator.brief import brief
from simulator.cluster import Cluster
from simulator.operator_graph import OperatorGraph
from strategies.training import Training


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be laid out: a network, a machine and a training step.

    Parameters
    ----------
    memory_margin
        Bytes that a device has to have for every byte of tensors that is predicted: 1 where predictions are trusted
        and the allocator keeps nothing beside tensors.
    """

    graph: OperatorGraph
    cluster: Cluster
    training: Training
    memory_margin: float = 1.0

    def usable(self, device: Accelerator) -> float:
        """Return the largest predicted peak, in bytes, for which a device has memory with the margin.

        What the framework takes before the first tensor is exact and has no margin.

        >>> from simulator.accelerator import Accelerator
        >>> device = Accelerator("any", (("bf16", 1e12),), memory=80.0, memory_bandwidth=1.0, reserved=2.0)
        >>> Problem(None, None, None, memory_margin=1.2).usable(device)
        67.0
        """
        return device.reserved + (device.memory - device.reserved) / self.memory_margin

    def needed(self, device: Accelerator, peak: float) -> float:
        """Return the least memory of a device, in bytes, for which a predicted peak is usable: `usable` backwards.

        >>> from simulator.accelerator import Accelerator
        >>> device = Accelerator("any", (("bf16", 1e12),), memory=80.0, memory_bandwidth=1.0, reserved=2.0)
        >>> Problem(None, None, None, memory_margin=1.2).needed(device, 67.0)
        80.0
        """
        return device.reserved + (peak - device.reserved) * self.memory_margin

    __repr__ = brief()
