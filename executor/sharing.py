"""Which ranks keep the same parameters, and share their states: of experts other ones than of the rest."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from executor.private_torch import flattened
from strategies.mesh import GROUPS, REPLICA


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ranks that have the same part of the model as this one.

    Parameters
    ----------
    shards
        Those that ZeRO shares states over, as one axis.
    replicas
        Those whose gradients are averaged, as one axis: of all groups that share states.
    states
        The mesh of shards, with replicas outside where there are any.
    """

    shards: DeviceMesh
    replicas: DeviceMesh
    states: DeviceMesh

    @property
    def axis(self) -> str:
        """The name of the axis along which states are shared."""
        return str((self.shards.mesh_dim_names or ("",))[0])


def sharing(mesh: DeviceMesh, kind: str) -> Sharing:
    """Return the ranks that have the same part of the model: ``kind`` is one of `strategies.mesh.GROUPS`."""
    shards = flattened(mesh, GROUPS[kind])
    if mesh[REPLICA].size() == 1:
        return Sharing(shards, shards, shards)
    states = mesh[REPLICA, (shards.mesh_dim_names or ())[0]]
    return Sharing(shards, flattened(mesh, (REPLICA, *GROUPS[kind])), states)
