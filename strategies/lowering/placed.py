"""A mesh on a machine: which ranks and devices form groups of every kind."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.cluster import Cluster
from simulator.collective_kinds import Collective
from simulator.program import IntArray
from strategies.local_batches import data_ranks
from strategies.mesh import (
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    GROUPS,
    PIPELINE,
    REPLICA,
    TENSOR,
    TENSOR_DEPTH,
    TENSOR_ROWS,
    Mesh,
)
from strategies.offloading import FROM_HOST, HOST, TO_HOST
from strategies.parallelism import Attention

FORWARD, BACKWARD = "forward", "backward"
"""Kinds of pairs of neighbouring pipeline ranks, sender first; those of `GROUPS` are the kinds of whole groups."""

HOST_KINDS = (TO_HOST, HOST, FROM_HOST)

NORM = "norm"
"""The kind of groups that sum the norm of gradients."""

USUAL = {
    TENSOR: Collective.ALL_REDUCE,
    TENSOR_ROWS: Collective.ALL_GATHER,
    TENSOR_DEPTH: Collective.ALL_GATHER,
    CONTEXT: Collective.ALL_GATHER,
    EXPERT: Collective.ALL_TO_ALL,
    DATA: Collective.ALL_REDUCE,
    EXPERT_DATA: Collective.ALL_REDUCE,
    REPLICA: Collective.ALL_REDUCE,
    FORWARD: Collective.SEND,
    BACKWARD: Collective.SEND,
}

_EXCHANGES = {Attention.RING: Collective.SHIFT, Attention.ULYSSES: Collective.ALL_TO_ALL}
"""What groups along the context axis run besides, by how they compute attention."""


def tied_kind(first: int, second: int) -> str:
    """Return the kind of the pairs of ranks that keep one parameter at two pipeline positions."""
    return f"tied {first} {second}"


def hop_kind(sender: int, receiver: int) -> str:
    """Return the kind of the pairs of ranks at two pipeline positions that exchange boundaries but do not adjoin."""
    return f"send {sender} {receiver}"


def tenant_kind(number: int) -> str:
    """Return the kind of group that a tenant of the cluster is."""
    return f"tenant {number}"


@dataclass(frozen=True)
class Placed:
    """A mesh on a machine: ``devices[rank]``; ``looped`` where the last stage sends to the first too,
    ``offloads`` where ranks exchange data with their hosts; ``tied`` are pipeline positions that keep
    one parameter, ``hops`` those that exchange boundaries but do not adjoin, sender first, and ``central``
    where the first rank of each data group sums its gradients, ``norm`` the axes over which the norm of
    gradients is summed, ``attention`` how context groups compute it, ``batches`` the sizes of the data ranks'
    microbatches where they are not all equal, ``exchanging`` the operator axes along which all-to-alls run.
    """

    cluster: Cluster
    mesh: Mesh
    placement: tuple[int, ...]
    looped: bool
    offloads: bool = False
    tied: tuple[tuple[int, int], ...] = ()
    central: bool = False
    norm: tuple[str, ...] = ()
    hops: tuple[tuple[int, int], ...] = ()
    attention: Attention | None = None
    batches: tuple[int, ...] = ()
    exchanging: tuple[str, ...] = ()

    @property
    def exchanges(self) -> dict[str, Collective]:
        """What groups run besides what is usual, by kind."""
        found = dict.fromkeys(self.exchanging, Collective.ALL_TO_ALL)
        return found | ({CONTEXT: _EXCHANGES[self.attention]} if self.attention in _EXCHANGES else {})

    @cached_property
    def devices(self) -> IntArray:
        """The device of every rank."""
        return np.array(self.placement or range(self.mesh.num_ranks), dtype=np.int64)

    @cached_property
    def sequences(self) -> IntArray:
        """The sequences of a microbatch of every rank; 0 where all have as many."""
        sizes = np.array(self.batches, dtype=np.int64)
        return sizes[data_ranks(self.mesh)] if len(sizes) else np.zeros(self.mesh.num_ranks, dtype=np.int64)

    def group_devices(self, kind: str) -> tuple[IntArray, IntArray]:
        """Return the groups of a kind as rows of ranks and of devices; a tenant's devices are no ranks."""
        if kind in HOST_KINDS:
            return np.arange(self.mesh.num_ranks)[:, None], self.devices[:, None]
        pairs = {tied_kind(first, second): [first, second] for first, second in self.tied}
        pairs |= {hop_kind(sender, receiver): [sender, receiver] for sender, receiver in self.hops}
        if kind == NORM or kind in USUAL or kind in pairs:
            ranks = self.mesh.rows(PIPELINE)[:, pairs[kind]] if kind in pairs else self.groups(kind)
            return ranks, self.devices[ranks]
        tenant = next(t for number, t in enumerate(self.cluster.tenants) if tenant_kind(number) == kind)
        return np.empty((1, 0), dtype=np.int64), np.array([tenant.devices], dtype=np.int64)

    def groups(self, kind: str) -> IntArray:
        """Return the groups of a kind, a row of ranks each; none where they would have one member."""
        if kind == EXPERT_DATA and self.mesh.size(EXPERT) == 1:
            return self.mesh.rows()  # the same groups as along data
        if kind in GROUPS:
            return self.mesh.rows(*GROUPS[kind])
        if kind == NORM:
            return self.mesh.rows(*self.norm)
        rows = self.mesh.rows(PIPELINE)
        if len(rows) == 0:
            return np.empty((0, 2), dtype=np.int64)
        after = np.roll(rows, -1, axis=1)
        keep = rows.shape[1] if self.looped else rows.shape[1] - 1
        pairs = np.stack([rows[:, :keep].ravel(), after[:, :keep].ravel()], axis=1)
        return pairs if kind == FORWARD else pairs[:, ::-1].copy()
