"""Families of links that load alike are refined once, and come out as if each were refined."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.collectives import choose as collective
from meshwise.simulator.interconnect.interconnect import interconnect
from meshwise.simulator.machine.cluster import LOSSLESS, Cluster, CommunicationLibrary, Node, Protocol, Tenant
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import Crossbar, Fabric, LeafSpine, Link, PcieTree, Switch
from meshwise.strategies.lowering.rank_classes import placement as loads
from meshwise.strategies.lowering.rank_classes.classes import ClassTable, fold
from meshwise.strategies.lowering.rank_classes.placement import PlacedMesh
from meshwise.strategies.lowering.rank_classes.refinement import Groups, mix
from meshwise.strategies.plan.mesh import DATA, PIPELINE, TENSOR, Axis, Mesh

from ...problems import IDEAL
from .test_refinement import by_the_book, numbered

HOST = Host("host", 1e12, pcie=Pcie(Link(1e-6, 32e9), 2))
MESH = Mesh((Axis(PIPELINE, 2), Axis(DATA, 4), Axis(TENSOR, 4)))
FAST = Link(1e-6, 300e9)


def placed(network: Switch | PcieTree, fabric: Fabric, slow: str | None) -> PlacedMesh:
    """Return 32 ranks on 8 nodes of 4 devices that have slots of their own."""
    node = Node(IDEAL, HOST, 4, network, 4, Link(2e-6, 50e9))
    cluster = Cluster("m", ((node, 8),), fabric, link_speeds=((slow, 0.5),) if slow else ())
    return PlacedMesh(cluster, MESH, (), False)


def classes(table: ClassTable) -> list[list[int]]:
    """Return the classes of ranks, of links and of groups of every kind, as numbers in order of appearance."""
    columns = [table.class_of, table.link_class, *(groups.class_of for groups in table.tables.values())]
    return [column.tolist() for column in columns]


@pytest.mark.parametrize("network", [Switch(FAST), PcieTree(FAST, 2, 1, FAST)])
@pytest.mark.parametrize("fabric", [Crossbar(), LeafSpine(2, 2.0)])
@pytest.mark.parametrize("slow", [None, "pcie 5 out", "nic 5 out"])
def test_twins_fold_as_if_they_were_refined_themselves(
    monkeypatch: pytest.MonkeyPatch, network: Switch | PcieTree, fabric: Fabric, slow: str | None
) -> None:
    case = placed(network, fabric, slow)
    folded = classes(fold(case))
    monkeypatch.setattr(loads, "_find_twins", lambda parts, usual_phases: range(len(parts.families)))
    assert folded == classes(fold(case))


def test_slots_and_nics_are_twins_where_only_nics_use_slots() -> None:
    network = interconnect(placed(Switch(FAST), Crossbar(), None).cluster)
    _, twins = loads.GroupLoads(placed(Switch(FAST), Crossbar(), None)).colour_groups()
    names = {(network.name(twin.start), network.name(first.start)) for twin, first in twins}
    assert ("nic 0 out", "pcie 0 out") in names
    assert ("nic 0 in", "pcie 0 in") in names
    # with the optimizer on hosts, slots carry more than their NICs
    _, twins = loads.GroupLoads(replace(placed(Switch(FAST), Crossbar(), None), offloads=True)).colour_groups()
    assert not any(network.kind(twin.start).startswith("nic") for twin, _ in twins)


ALL_REDUCE, SEND, PUSH_PULL = Collective.ALL_REDUCE, Collective.SEND, Collective.PUSH_PULL


def small(
    *,
    counts: tuple[int, ...] = (2, 2),
    reduces: bool = False,
    fabric: Fabric = Crossbar(),  # noqa: B008
    slow: str = "",
    library: CommunicationLibrary = LOSSLESS,
    tenants: tuple[Tenant, ...] = (),
    mesh: Mesh = Mesh((Axis(PIPELINE, 2), Axis(DATA, 2), Axis(TENSOR, 2))),  # noqa: B008
    **placing: object,
) -> PlacedMesh:
    """Return 8 ranks, 2 stages of 2 data ranks of 2 tensor ranks, on nodes of 4 and, where counts differ, of 2."""
    nodes = tuple(
        (Node(IDEAL, HOST, each, Switch(FAST, reduces=reduces), 2, Link(2e-6, 50e9)), count)
        for each, count in zip((4, 2), counts, strict=False)
        if count
    )
    speeds = ((slow, 0.5),) if slow else ()
    cluster = Cluster("m", nodes, fabric, link_speeds=speeds, library=library, tenants=tenants)
    return PlacedMesh(cluster, mesh, looped=False, **({"placement": ()} | placing))  # type: ignore[arg-type]


def of_definition(case: PlacedMesh, kinds: dict[str, tuple[Collective, ...]]) -> list[Groups]:
    """Return groups that are coloured by all that they may run, each group's phases computed for itself."""
    cluster, result = case.cluster, []
    for number, (kind, runs) in enumerate(kinds.items()):
        ranks, devices = case.group_devices(kind)
        own: list[list[object]] = [[number] for _ in devices]
        rows: list[tuple[int, int, int]] = []
        names: dict[object, int] = {}
        for each, algorithm in product(runs, Algorithm):
            if algorithm not in collective.candidates(cluster, each):
                continue
            able = np.flatnonzero(collective.can_run(cluster, each, algorithm, devices)).tolist()
            for group in able:
                for index, phase in enumerate(collective.phases(cluster, each, algorithm, devices[[group]])):
                    own[group].append((each, algorithm, index, round(phase.latency[0], 15)))
                    for link, load in zip(phase.link.tolist(), phase.load.tolist(), strict=True):
                        name = names.setdefault((each, algorithm, index, round(load, 9)), len(names))
                        rows.append((group, link, name))
        column = np.array(sorted(rows), dtype=np.int64).reshape(-1, 3)
        numbers = np.array(numbered([(*each,) for each in own]), dtype=np.uint64)
        colour = mix(numbers) + np.uint64(number)
        ordered = kind in ("forward", "backward") or kind.startswith("send")
        result.append(Groups(ranks, ordered, column[:, 0], column[:, 1], mix(column[:, 2]), colour))
    return result


FOLDED = {
    "alike": small(),
    "another order": small(placement=(0, 1, 4, 5, 2, 3, 6, 7)),
    "nodes of 4 and of 2": small(counts=(1, 2)),
    "leaves": small(fabric=LeafSpine(1, 2.0)),
    "a slow NIC": small(slow="nic 1 out"),
    "switches that reduce": small(reduces=True),
    "switches that reduce, slow port": small(reduces=True, slow="device 3 in"),
    "protocols": small(counts=(1, 2), library=CommunicationLibrary((Protocol("ll", 0.5, 0.5, 0.5, True),))),
    "a central server": small(central=True),
    "a central server alone": small(central=True, mesh=Mesh((Axis(DATA, 4),)), counts=(1,), slow="device 2 in"),
    "tied and hops": small(tied_positions=((0, 1),), hops=((1, 0),)),
    "a tenant": small(tenants=(Tenant("t", (0, 5), ALL_REDUCE, 1e6, 1.0),)),
    "mixed groups": small(counts=(1, 2), placement=(0, 4, 1, 2, 3, 5, 6, 7)),
    "mixed groups, protocols": small(
        counts=(1, 2),
        placement=(0, 4, 1, 2, 3, 5, 6, 7),
        library=CommunicationLibrary((Protocol("ll", 0.5, 0.5, 0.5, True),)),
    ),
    "mixed groups, switches that reduce": small(counts=(1, 2), placement=(0, 1, 2, 4, 3, 5, 6, 7), reduces=True),
    "all-to-alls": small(exchange_axes=(TENSOR,), counts=(1, 2)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folding_is_refinement_by_the_book_of_what_every_group_may_run(name: str) -> None:
    case = FOLDED[name]
    folded, mesh = fold(case), case.mesh
    kinds = loads.GroupLoads(case).collectives
    gathers = {kind: (*runs, Collective.ALL_GATHER) for kind, runs in kinds.items()} if "reduce" in name else kinds
    servers = np.minimum(mesh.coordinates(DATA), 1) * case.central  # the first rank of a data group sums for all
    ranks = list(zip(mesh.coordinates(PIPELINE).tolist(), servers.tolist(), strict=True))
    links = interconnect(case.cluster).bandwidth.tolist()
    book = by_the_book(ranks, links, of_definition(case, gathers))
    book[1] = list(zip(folded.link_class.tolist(), book[1], strict=True)) if "reduce" in name else book[1]  # or finer
    found = (folded.class_of, folded.link_class, *(table.class_of for table in folded.tables.values()))
    for part, wanted in zip(found, book, strict=True):
        assert numbered(part.tolist()) == numbered(wanted)


@pytest.mark.parametrize("name", FOLDED)
def test_phases_of_many_groups_are_those_of_each(name: str) -> None:
    case = FOLDED[name]
    found, cluster = loads.GroupLoads(case), case.cluster
    for kind, runs in found.collectives.items():
        _, devices = case.group_devices(kind)
        chosen = np.arange(len(devices))[::-1]
        for each, algorithm in product(runs, Algorithm):
            able = collective.can_run(cluster, each, algorithm, devices)
            if algorithm not in collective.candidates(cluster, each) or not able.any():
                continue
            phases = found.list_phases(kind, each, algorithm, chosen)
            for place, group in enumerate(chosen.tolist()):
                if not able[group]:
                    assert not any((phase.group == place).any() for phase in phases)
                    continue
                alone = collective.phases(cluster, each, algorithm, devices[[group]])
                assert not any((phase.group == place).any() for phase in phases[len(alone) :])
                for phase, own in zip(phases, alone, strict=False):
                    rows = phase.group == place
                    assert phase.latency[place] == own.latency[0]
                    assert (phase.launch is None) == (own.launch is None)
                    assert phase.launch is None or phase.launch[place] == own.launch[0]
                    assert sorted(zip(phase.link[rows], phase.load[rows], strict=True)) == sorted(
                        zip(own.link, own.load, strict=True)
                    )


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_chosen_for_a_group_is_among_what_may_be(name: str) -> None:
    case = FOLDED[name]
    found = loads.GroupLoads(case)
    for kind, runs in found.collectives.items():
        _, devices = case.group_devices(kind)
        for each, size, (number, group) in product(runs, 10.0 ** np.arange(2, 12), enumerate(devices)):
            chosen = collective.choose(case.cluster, each, group, float(size))
            assert chosen in found.list_candidates(kind, each)
            assert chosen in found.list_algorithms(kind, each, int(found.groups[kind].shape[number]))


def test_the_kinds_of_groups_and_what_they_run() -> None:
    usual = {TENSOR: (ALL_REDUCE,), DATA: (ALL_REDUCE,), "forward": (SEND,), "backward": (SEND,)}
    assert loads.GroupLoads(small()).collectives == usual
    assert loads.GroupLoads(small(central=True)).collectives == usual | {DATA: (PUSH_PULL,)}
    assert loads.GroupLoads(small(norm_axes=(TENSOR,))).collectives == usual | {"norm": (ALL_REDUCE,)}
    assert loads.GroupLoads(small(exchange_axes=(TENSOR,))).collectives == usual | {
        TENSOR: (ALL_REDUCE, Collective.ALL_TO_ALL)
    }
    copies = dict.fromkeys(("to host", "host", "from host"), (SEND,))
    offloading = loads.GroupLoads(small(offloads=True))
    assert offloading.collectives == usual | copies
    assert (
        offloading.list_candidates("host", SEND) == offloading.list_algorithms("host", SEND, 0) == (Algorithm.DIRECT,)
    )


def test_a_fixed_algorithm_is_the_only_choice_of_groups_that_can_run_it() -> None:
    # tensor groups lie inside nodes, data groups across
    case = small(placement=(0, 1, 4, 5, 2, 3, 6, 7), counts=(2,))
    case = replace(case, cluster=replace(case.cluster, algorithms=((ALL_REDUCE, Algorithm.TREE),)))
    found = loads.GroupLoads(case)
    assert found.list_algorithms(DATA, ALL_REDUCE, 0) == (Algorithm.TREE,)  # from node to node
    assert found.list_algorithms(TENSOR, ALL_REDUCE, 0) == (Algorithm.RING,)  # inside a node there are no trees
    assert found.list_candidates(DATA, ALL_REDUCE) == (Algorithm.TREE,)  # all groups are alike
    # where groups differ, others stay candidates for those that cannot run it
    slow = loads.GroupLoads(replace(case, cluster=replace(case.cluster, link_speeds=(("nic 1 out", 0.5),))))
    assert slow.list_candidates(DATA, ALL_REDUCE) == (Algorithm.TREE, Algorithm.RING)
    assert slow.list_algorithms(DATA, ALL_REDUCE, 0) == (Algorithm.TREE,)
    assert slow.list_algorithms(TENSOR, ALL_REDUCE, 0) == (Algorithm.RING,)


def test_phases_that_load_in_proportion_are_told_by_their_ratio() -> None:
    def phase(*load: float, group: tuple[int, ...] = (0, 0, 1), link: tuple[int, ...] = (3, 4, 5)) -> collective.Phase:
        return collective.Phase(np.zeros(3), np.array(group), np.array(link), np.array(load))

    one = phase(1.0, 2.0, 4.0)
    # thrice, but for the last bits: 0.1 * 3 is a little more than 0.3, and 0.6 / 0.2 a little less than 3
    rounded = loads._find_ratio(phase(0.1 * 3, 0.6, 4.0), phase(0.1, 0.2, 4.0))
    assert rounded is not None and rounded == pytest.approx([3.0, 1.0, 1.0])
    # twice the bytes of the first group's, half of the second's; the third loads nothing, which is once of nothing
    assert loads._find_ratio(phase(2.0, 4.0, 2.0), one).tolist() == [2.0, 0.5, 1.0]
    assert loads._find_ratio(phase(2.0, 2.0, 4.0), one) is None  # twice on one link, once on another
    assert loads._find_ratio(phase(1.0, 2.0, 4.0, group=(0, 1, 1)), one) is None
    assert loads._find_ratio(phase(1.0, 2.0, 4.0, link=(3, 4, 6)), one) is None


@pytest.mark.parametrize(("protocols", "classes"), [((), 4), ((Protocol("ll", 0.5, 1.0, 0.5, True),), 8)])
def test_groups_that_differ_in_launches_alone_differ_where_protocols_do(
    protocols: tuple[Protocol, ...], classes: int
) -> None:
    # 4 stages inside each of two nodes, where a message takes 4 us, of which 1 us or 2 us is launch
    nodes = tuple(
        (Node(IDEAL, HOST, 4, Switch(Link(latency, 300e9, launch)), 2, Link(2e-6, 50e9)), 1)
        for latency, launch in ((3e-6, 1e-6), (2e-6, 2e-6))
    )
    cluster = Cluster("m", nodes, Crossbar(), library=CommunicationLibrary(protocols))
    mesh = Mesh((Axis(DATA, 2), Axis(PIPELINE, 4)))
    assert len(fold(PlacedMesh(cluster, mesh, (), False))) == classes
