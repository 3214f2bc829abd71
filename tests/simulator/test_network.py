"""Max-min fairness: hand-computed cases, and the defining property."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.network import Bundle, bundle, max_min_rates

PORTS = ("a", "b", "c", "d")


def test_equal_flows_share_equally() -> None:
    flows = [bundle([("a", 5.0)], {"a": 12.0}, 1) for _ in range(3)]
    assert max_min_rates(flows, {"a": 12.0}) == [4.0, 4.0, 4.0]


def test_a_flow_held_up_elsewhere_leaves_its_share() -> None:
    # x uses a; y uses a and b (1 byte/s): y gets 1, x the other 9
    x, y = bundle([("a", 1.0)], {"a": 10.0}, 1), bundle([("a", 1.0), ("b", 1.0)], {"a": 10.0, "b": 1.0}, 1)
    assert max_min_rates([x, y], {"a": 10.0, "b": 1.0}) == [9.0, 1.0]


def test_solo_ticks_are_set_by_the_slowest_port() -> None:
    # 8 bytes over a at 4 byte/s are 2 s; 2 bytes over b at 0.5 byte/s are 4 s
    shape = bundle([("a", 8.0), ("b", 2.0)], {"a": 4.0, "b": 0.5}, 1000)
    assert (shape.solo_ticks, shape.solo_rate) == (4000, 2.0)


usage = st.dictionaries(st.sampled_from(PORTS), st.floats(0.1, 10), min_size=1)


@given(st.lists(usage, min_size=1, max_size=6), st.lists(st.floats(0.1, 10), min_size=4, max_size=4))
def test_every_bundle_has_a_full_port_on_which_none_is_faster(uses: list[dict[str, float]], rates: list[float]) -> None:
    capacity = dict(zip(PORTS, rates, strict=True))
    bundles: list[Bundle] = [bundle(list(use.items()), capacity, 1) for use in uses]
    result = max_min_rates(bundles, capacity)
    load = {
        port: sum(rate * dict(b.shares).get(port, 0.0) for b, rate in zip(bundles, result, strict=True))
        for port in PORTS
    }
    assert all(load[port] <= capacity[port] * (1 + 1e-9) for port in PORTS)
    for b, rate in zip(bundles, result, strict=True):
        full = [port for port, _ in b.shares if load[port] >= capacity[port] * (1 - 1e-9)]
        fastest = [max(r for o, r in zip(bundles, result, strict=True) if port in dict(o.shares)) for port in full]
        assert fastest and min(fastest) <= rate * (1 + 1e-9)
