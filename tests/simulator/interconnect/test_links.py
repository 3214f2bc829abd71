"""Links belong to nodes and switches, and come on every part in the same order."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwise.simulator.interconnect.interconnect import Interconnect
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.machine.topology import Torus

from .machines import FAST, clusters, every_pair, machine, node


@given(clusters())
@settings(max_examples=40, deadline=None)
def test_routes_use_links_of_parts_that_their_ends_are_in(cluster: Cluster) -> None:
    network = Interconnect(cluster)
    parts = network.parts
    if not parts.owns_all_links:
        return
    source, target = every_pair(cluster.num_devices)
    routes = network.routes(source, target)
    owner = parts.owner(routes.link)
    ends = np.concatenate([parts.device_parts[:, source[routes.pair]], parts.device_parts[:, target[routes.pair]]])
    assert (ends == owner).any(axis=0).all()


@given(clusters(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_links_place_leads_back_to_it_and_to_links_built_alike(cluster: Cluster, data: st.DataObject) -> None:
    network = Interconnect(cluster)
    parts, devices = network.parts, np.arange(cluster.num_devices)
    link = np.full(1, data.draw(st.integers(0, max(network.num_links - 1, 0))))
    if not parts.owns_all_links or not network.num_links:
        return
    here = devices[(parts.device_parts == parts.owner(link)).any(axis=0)][:1]
    if not len(here):  # the switch of NICs that no device uses
        return
    family, place = parts.places(link, here)
    assert parts.links(family, place, here).tolist() == link.tolist()
    for other in devices[network.place == network.place[here]]:
        found = parts.links(family, place, np.array([other]))
        assert network.kind(int(found[0])) == network.kind(int(link[0]))


@given(clusters())
@example(machine((node(1), 1), fabric=Torus((1,), FAST)))  # no links at all
@settings(max_examples=20, deadline=None)
def test_many_names_at_once_are_those_one_by_one(cluster: Cluster) -> None:
    network = Interconnect(cluster)
    links = np.arange(network.num_links)[::-1]
    assert network.names(links) == [network.name(link) for link in links.tolist()]
