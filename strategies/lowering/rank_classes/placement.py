"""A mesh on a machine: which ranks and devices form groups of every kind, and what these put on links.

Loads on links are given for every algorithm that a group may choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives.choose import can_run, candidates, fastest_algorithms, phases
from meshwise.simulator.collectives.placement import GroupShapes
from meshwise.simulator.collectives.traffic import Phase
from meshwise.simulator.deadline import check_deadline
from meshwise.simulator.interconnect.interconnect import Interconnect, interconnect
from meshwise.simulator.interconnect.links import Parts
from meshwise.simulator.interconnect.routes import Routes
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Crossbar
from meshwise.simulator.memo import memoise
from meshwise.simulator.program import IntArray
from meshwise.strategies.lowering.rank_classes.refinement import (
    Colours,
    FloatArray,
    Groups,
    combine,
    combine_mixed,
    quantise,
)
from meshwise.strategies.plan.mesh import (
    BACKWARD,
    CONTEXT,
    DATA,
    EXPERT,
    EXPERT_DATA,
    FORWARD,
    GROUPS,
    NORM,
    PASS_AXES,
    PIPELINE,
    REPLICA,
    TABLE_NODE,
    Mesh,
    hop_kind,
    list_data_ranks,
    tied_kind,
)
from meshwise.strategies.plan.offloading import FROM_HOST, HOST_KINDS, TO_HOST
from meshwise.strategies.plan.parallelism import Attention

USUAL_COLLECTIVES = {
    **{name: axis.collectives[0] for name, axis in PASS_AXES.items()},
    DATA: Collective.ALL_REDUCE,
    EXPERT_DATA: Collective.ALL_REDUCE,
    REPLICA: Collective.ALL_REDUCE,
    FORWARD: Collective.SEND,
    BACKWARD: Collective.SEND,
}
"""The collective that every kind of group runs most."""

_EXCHANGES = {Attention.RING: Collective.SHIFT, Attention.ULYSSES: Collective.ALL_TO_ALL}
"""The collective that context groups run besides, by their kind of attention."""


def tenant_kind(number: int) -> str:
    """Return the kind of the group of a tenant of the cluster."""
    return f"tenant {number}"


@dataclass(frozen=True)
class PlacedMesh:
    """A mesh on the devices of a cluster, and which kinds of groups its ranks form.

    Parameters
    ----------
    placement
        The device of every rank; empty where rank i is on device i.
    looped
        Whether the last stage sends to the first one too.
    offloads
        Whether ranks exchange data with their hosts.
    tied_positions
        Pairs of pipeline positions that keep one parameter.
    central
        Whether the first rank of each data group sums its gradients.
    norm_axes
        Axes along which the norm of gradients is summed.
    hops
        Pairs of pipeline positions that exchange boundaries but are no neighbours, sender first.
    attention
        How context groups compute attention.
    batches
        Sizes of the data ranks' microbatches where they are not all equal.
    exchange_axes
        Operator axes along which all-to-alls run.
    shares_tables
        Whether data ranks share embedding tables along the axis of experts.
    sums_in_nodes
        Whether the ranks of a node add up vectors of some of these.
    apart
        Whether data ranks have other work, so that each is simulated by itself.
    """

    cluster: Cluster
    mesh: Mesh
    placement: tuple[int, ...]
    looped: bool
    offloads: bool = False
    tied_positions: tuple[tuple[int, int], ...] = ()
    central: bool = False
    norm_axes: tuple[str, ...] = ()
    hops: tuple[tuple[int, int], ...] = ()
    attention: Attention | None = None
    batches: tuple[int, ...] = ()
    exchange_axes: tuple[str, ...] = ()
    shares_tables: bool = False
    sums_in_nodes: bool = False
    apart: bool = False

    @property
    def extra_collectives(self) -> dict[str, Collective]:
        """The collectives that groups run besides the usual ones, by kind."""
        extras = dict.fromkeys(self.exchange_axes, Collective.ALL_TO_ALL)
        return extras | ({CONTEXT: _EXCHANGES[self.attention]} if self.attention in _EXCHANGES else {})

    @cached_property
    def devices(self) -> IntArray:
        """The device of every rank."""
        return np.array(self.placement or range(self.mesh.num_ranks), dtype=np.int64)

    @cached_property
    def sequences(self) -> IntArray:
        """The number of sequences of a microbatch of every rank; 0 where all have as many."""
        if not self.batches:
            return np.broadcast_to(np.int64(0), self.mesh.num_ranks)
        return np.array(self.batches, dtype=np.int64)[list_data_ranks(self.mesh)]

    def group_devices(self, kind: str) -> tuple[IntArray, IntArray]:
        """Return the groups of a kind as rows of ranks and as rows of devices; a tenant's devices are no ranks."""
        if kind in HOST_KINDS:
            return np.arange(self.mesh.num_ranks)[:, None], self.devices[:, None]
        pairs = {
            tied_kind(first_position, second_position): [first_position, second_position]
            for first_position, second_position in self.tied_positions
        }
        pairs |= {hop_kind(sender, receiver): [sender, receiver] for sender, receiver in self.hops}
        if kind in (NORM, TABLE_NODE) or kind in USUAL_COLLECTIVES or kind in pairs:
            ranks = self.mesh.rows(PIPELINE)[:, pairs[kind]] if kind in pairs else self.list_groups(kind)
            # a search keeps hundreds of placed meshes of as many as 16,384 ranks
            return ranks, self.devices[ranks] if self.placement else ranks
        tenant = next(candidate for number, candidate in enumerate(self.cluster.tenants) if tenant_kind(number) == kind)
        return np.empty((1, 0), dtype=np.int64), np.array([tenant.devices], dtype=np.int64)

    def list_groups(self, kind: str) -> IntArray:
        """Return the groups of a kind, one row of ranks each; none where they would have one member."""
        if kind == EXPERT_DATA and self.mesh.size(EXPERT) == 1:
            return self.mesh.rows()  # the same groups as along data
        if kind in GROUPS:
            return self.mesh.rows(*GROUPS[kind])
        if kind == NORM:
            return self.mesh.rows(*self.norm_axes)
        if kind == TABLE_NODE:
            return np.arange(self.mesh.num_ranks).reshape(-1, self.cluster.first_node.devices)
        rows = self.mesh.rows(PIPELINE)
        if len(rows) == 0:
            return np.empty((0, 2), dtype=np.int64)
        next_ranks = np.roll(rows, -1, axis=1)
        num_senders = rows.shape[1] if self.looped else rows.shape[1] - 1
        pairs = np.stack([rows[:, :num_senders].ravel(), next_ranks[:, :num_senders].ravel()], axis=1)
        return pairs if kind == FORWARD else pairs[:, ::-1].copy()


BoolArray = NDArray[np.bool_]

_MEMORY_KIND = "memory in"
"""Kind of the links into host memory."""


class GroupLoads:
    """The loads that the groups of every kind put on links, computed once for groups that lie alike."""

    def __init__(self, placed: PlacedMesh) -> None:
        self.placed, self.cluster = placed, placed.cluster
        self.collectives: dict[str, tuple[Collective, ...]] = {}
        self.ranks: dict[str, IntArray] = {}
        self.groups: dict[str, GroupShapes] = {}
        tenants = {tenant_kind(number): tenant.collective for number, tenant in enumerate(placed.cluster.tenants)}
        host_copies = dict.fromkeys(HOST_KINDS if placed.offloads else (), Collective.SEND)
        tied_sums = {
            tied_kind(first_position, second_position): Collective.ALL_REDUCE
            for first_position, second_position in placed.tied_positions
        }
        hops = {hop_kind(sender, receiver): Collective.SEND for sender, receiver in placed.hops}
        server_sums = dict.fromkeys((DATA, EXPERT_DATA) if placed.central else (), Collective.PUSH_PULL)
        norm_sums = {NORM: Collective.ALL_REDUCE} if placed.norm_axes else {}
        table_sums = {TABLE_NODE: Collective.REDUCE_SCATTER} if placed.sums_in_nodes else {}
        for kind, collective in (
            USUAL_COLLECTIVES | hops | server_sums | tenants | host_copies | tied_sums | norm_sums | table_sums
        ).items():
            ranks, devices = placed.group_devices(kind)
            if len(ranks):
                extra = placed.extra_collectives.get(kind)
                collectives = (collective, extra) if extra else (collective,)
                self.collectives[kind], self.ranks[kind], self.groups[kind] = (
                    collectives,
                    ranks,
                    GroupShapes(self.cluster, devices),
                )

    @memoise
    def list_algorithms(self, kind: str, collective: Collective, shape: int) -> tuple[Algorithm, ...]:
        """Return the algorithms that groups of a shape may choose from: the user's choice alone where it can run."""
        algorithms = tuple(
            algorithm
            for algorithm in self.list_candidates(kind, collective)
            if self._find_runnable(kind, collective, algorithm)[shape]
        )
        user_choice = dict(self.cluster.algorithms).get(collective)
        return (user_choice,) if user_choice in algorithms else algorithms

    def list_phases(
        self, kind: str, collective: Collective, algorithm: Algorithm, groups: IntArray
    ) -> tuple[Phase, ...]:
        """Return the phases of a collective on some groups of a kind; groups that cannot run it have no rows."""
        alike = self.groups[kind].select(groups)
        return tuple(alike.spread_phase(phase) for phase in self._compute_phases(kind, collective, algorithm, alike))

    def _compute_phases(
        self, kind: str, collective: Collective, algorithm: Algorithm, alike: GroupShapes
    ) -> tuple[Phase, ...]:
        """Return the phases of a collective on the representatives of some groups of a kind."""
        check_deadline()
        if kind in HOST_KINDS:
            return host_phases(self.cluster, kind, alike.representatives)
        is_runnable = self._find_runnable(kind, collective, algorithm)[alike.numbers]
        runnable_phases = phases(self.cluster, collective, algorithm, alike.representatives[is_runnable])
        return tuple(_expand_phase(phase, np.flatnonzero(is_runnable), len(is_runnable)) for phase in runnable_phases)

    def colour_groups(self) -> tuple[tuple[Groups, ...], tuple[tuple[slice, slice], ...]]:
        """Return all kinds of groups for refinement, and the twins among link families.

        Twins are pairs of a family that is loaded as an earlier one is, and that earlier one. Their loads are left out
        of the groups: the NICs of devices, say, where all that crosses a device's slot goes through its NIC.
        """
        usual_phases = {kind: self._list_usual_phases(kind) for kind in self.collectives}
        network = interconnect(self.cluster)
        families, first_twins = (
            network.parts.families,
            _find_twins(network.parts, list(chain.from_iterable(usual_phases.values()))),
        )
        is_kept = np.ones(network.num_links, dtype=np.bool_)
        for number, original in enumerate(first_twins):
            is_kept[families[number]] = number == original
        groups = tuple(
            self._colour_kind(number, kind, usual_phases[kind], is_kept) for number, kind in enumerate(self.collectives)
        )
        return groups, tuple(
            (families[n], families[original]) for n, original in enumerate(first_twins) if n != original
        )

    def colour_links(self) -> Colours:
        """Return the first colours of links: their bandwidth, and their family where switches run gathers.

        Usual collectives load both directions of a port alike. A gather in switches does not, and a scatter is its
        mirror image, so that the two directions of a port differ where a group may run them.
        """
        network = interconnect(self.cluster)
        colours = quantise(network.bandwidth)
        gathers = [phase for kind in self.collectives for phase in self._list_gathers(kind)]
        if gathers:
            for links, original in zip(network.parts.families, _find_twins(network.parts, gathers), strict=True):
                colours[links] = combine_mixed(colours[links], np.uint64(original))
        return colours

    def _list_gathers(self, kind: str) -> tuple[Phase, ...]:
        """Return the phases of a gather in switches, where groups of a kind may run it."""
        if kind in HOST_KINDS or not self._find_runnable(kind, Collective.ALL_GATHER, Algorithm.IN_SWITCH).any():
            return ()
        return self._compute_phases(kind, Collective.ALL_GATHER, Algorithm.IN_SWITCH, self.groups[kind])

    def _list_usual_phases(self, kind: str) -> list[Phase]:
        """Return the phases of a kind's usual collectives by every algorithm that may be chosen, on representatives."""
        alike = self.groups[kind]
        phase_lists = (
            self._compute_phases(kind, collective, algorithm, alike)
            for collective in self.collectives[kind]
            for algorithm in self.list_candidates(kind, collective)
        )
        return list(chain.from_iterable(phase_lists))

    def _colour_kind(self, number: int, kind: str, usual_phases: list[Phase], is_kept: BoolArray) -> Groups:
        """Return the groups of a kind with first colours that stand for their kind, latencies and loads."""
        alike = self.groups[kind]
        colour = np.full(len(alike.representatives), number, dtype=np.uint64)
        rows, weights, counted_phases = [], [], list[Phase]()
        for index, phase in enumerate(usual_phases):
            colour = combine(colour, quantise(phase.latency))
            if phase.launch is not None and self.cluster.library.protocols:
                colour = combine(colour, quantise(phase.launch))
            # A phase whose loads are a multiple of an earlier one's tells links nothing new: its ratio in the colour
            # suffices.
            ratio = next(
                (match for counted_phase in counted_phases if (match := _find_ratio(phase, counted_phase)) is not None),
                None,
            )
            if ratio is not None:
                colour = combine(colour, quantise(ratio))
                continue
            counted_phases.append(phase)
            entries = np.flatnonzero(is_kept[phase.link])
            kept_phase = Phase(phase.latency, phase.group[entries], phase.link[entries], phase.load[entries])
            rows.append(alike.spread_rows(kept_phase))
            weights.append(combine_mixed(quantise(kept_phase.load), np.uint64(index))[rows[-1].row])
        group, link = _join_parts([row.group for row in rows]), _join_parts([row.link for row in rows])
        ordered = kind in (FORWARD, BACKWARD, *(hop_kind(*pair) for pair in self.placed.hops))
        return Groups(self.ranks[kind], ordered, group, link, _join_parts(weights), colour[alike.shape])

    def list_candidates(self, kind: str, collective: Collective) -> tuple[Algorithm, ...]:
        """Return the algorithms that some group of a kind may choose."""
        if kind in HOST_KINDS:
            return (Algorithm.DIRECT,)
        # Then one group decides for all, and slower algorithms need not be expanded.
        if self._is_alike(kind):
            return fastest_algorithms(self.cluster, collective, self.groups[kind].representatives[0])
        algorithms = candidates(self.cluster, collective)
        return tuple(algorithm for algorithm in algorithms if self._find_runnable(kind, collective, algorithm).any())

    @memoise
    def _is_alike(self, kind: str) -> bool:
        """Return whether all groups of a kind have as many ranks on each of their nodes, and nodes are equal."""
        nodes = np.sort(self.cluster.device_nodes[self.groups[kind].representatives], axis=1)
        node_changes = np.diff(nodes, axis=1) != 0
        is_homogeneous = len(self.cluster.nodes) == 1 and not self.cluster.link_speeds
        has_crossbar = isinstance(self.cluster.fabric, Crossbar)
        return is_homogeneous and has_crossbar and bool((node_changes == node_changes[0]).all())

    @memoise
    def _find_runnable(self, kind: str, collective: Collective, algorithm: Algorithm) -> BoolArray:
        """Return, for every shape of groups of a kind, whether it can run a collective by an algorithm."""
        devices = self.groups[kind].representatives
        if kind in HOST_KINDS:
            return np.ones(len(devices), dtype=np.bool_)
        return can_run(self.cluster, collective, algorithm, devices)


def _find_twins(parts: Parts, usual_phases: Sequence[Phase]) -> list[int]:
    """Return, for every link family, the first one that the same groups load in the same way."""
    first_families: dict[tuple[bytes, ...], int] = {}
    twins = []
    for number, links in enumerate(parts.families):
        signature = [parts.owners(number).tobytes()]
        for phase in usual_phases:
            rows = np.flatnonzero((phase.link >= links.start) & (phase.link < links.stop))
            columns = phase.group[rows], phase.link[rows] - links.start, phase.load[rows]
            signature += [column.tobytes() for column in columns]
        twins.append(first_families.setdefault(tuple(signature), number))
    return twins


def _find_ratio(phase: Phase, reference: Phase) -> FloatArray | None:
    """Return, for every group, the ratio of its bytes to those of another phase on the same links, or ``None``."""
    if not (np.array_equal(phase.group, reference.group) and np.array_equal(phase.link, reference.link)):
        return None
    factors = phase.load / reference.load
    ratio = np.ones(len(phase.latency))
    ratio[phase.group] = factors
    return ratio if np.allclose(ratio[phase.group], factors, rtol=1e-12, atol=0.0) else None


def _join_parts(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays as one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _expand_phase(phase: Phase, groups: IntArray, count: int) -> Phase:
    """Return a phase of some groups as a phase of all ``count`` groups, where the others have no rows."""
    if len(groups) == count:
        return phase
    latency = np.zeros(count)
    launch: FloatArray | None = None
    latency[groups] = phase.latency
    if phase.launch is not None:
        launch = np.zeros(count)
        launch[groups] = phase.launch
    return Phase(latency, groups[phase.group], phase.link, phase.load, launch, phase.messages)


def host_phases(cluster: Cluster, kind: str, devices: IntArray) -> tuple[Phase, ...]:
    """Return what one byte to, on or from the host puts on links, for each device (rows of one)."""
    network = interconnect(cluster)
    routes = _find_routes(network, kind, devices[:, 0])
    latency: FloatArray = np.bincount(routes.pair, network.latency[routes.link], len(devices)).astype(np.float64)
    return (Phase(latency, routes.pair, routes.link, routes.share),)


def _find_routes(network: Interconnect, kind: str, devices: IntArray) -> Routes:
    """Return the routes of a kind of copy between devices and their hosts."""
    if kind == FROM_HOST:
        return network.from_host(devices)
    routes = network.to_host(devices)
    if kind == TO_HOST:
        return routes
    is_memory = {int(link): network.kind(int(link)) == _MEMORY_KIND for link in np.unique(routes.link)}
    entries = np.array([is_memory[link] for link in routes.link.tolist()], dtype=bool)
    return Routes(routes.pair[entries], routes.link[entries], routes.share[entries])
