"""What is to be laid out: a network, a machine and a training step."""

from dataclasses import dataclass

from simulator.cluster import Cluster
from simulator.operator_graph import OperatorGraph
from strategies.training import Training


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be laid out: a network, a machine and a training step."""

    graph: OperatorGraph
    cluster: Cluster
    training: Training
