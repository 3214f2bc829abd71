"""The mesh of one rank of many, without the others: what needs no collective runs on it."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwise.executor.operators.collectives import RankMesh


def find_ranks(size: int, rank: int = 0) -> RankMesh:
    """Return the mesh of one tensor axis as a rank sees it."""
    return RankMesh(DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("tensor",), _init_backend=False, _rank=rank))
