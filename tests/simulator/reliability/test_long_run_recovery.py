import pytest

from meshwise.simulator.reliability.long_run import HostPool, Recovery
from meshwise.simulator.units import to_ticks


def pool(spares: int, repair: float, replacement: float | None = None) -> HostPool:
    return HostPool(spares, Recovery(0.0, 0.0, repair, replacement))


def arrivals(hosts: HostPool, breaks: list[tuple[float, float]]) -> list[float]:
    """Return when the host for each of ``breaks``, (broken at, asked for at), is there."""
    found = []
    for broken, asked in breaks:
        hosts.add_broken(to_ticks(broken))
        found.append(hosts.take_host(to_ticks(asked)) / to_ticks(1.0))
    return found


def test_spares_come_first_and_then_repaired_hosts_in_turn() -> None:
    # two spares at once; the third waits for the host that broke at 0, the fourth for that of 10
    assert arrivals(pool(2, repair=100.0), [(0, 5), (10, 15), (20, 25), (30, 35)]) == [5, 15, 100, 110]


def test_a_host_repaired_in_the_meantime_is_at_hand() -> None:
    assert arrivals(pool(0, repair=100.0), [(0, 5), (200, 350)]) == [100, 350]


def test_a_replacement_comes_where_no_host_is_repaired_earlier() -> None:
    # at 5: the repaired host would come at 100, the replacement at 45, and the broken one is given for it;
    # at 25: nothing is left but the host of 20, again given away
    assert arrivals(pool(0, repair=100.0, replacement=40.0), [(0, 5), (20, 25)]) == [45, 65]


def test_a_replacement_is_given_for_the_host_that_broke_last() -> None:
    # the spare goes to the first; the second is replaced at 60 for the host of 50, so that of 0 still returns at 100
    assert arrivals(pool(1, repair=100.0, replacement=10.0), [(0, 5), (50, 50), (92, 92)]) == [5, 60, 100]


def test_a_repaired_host_is_taken_before_a_replacement_of_the_same_instant() -> None:
    hosts = pool(0, repair=100.0, replacement=95.0)
    hosts.add_broken(to_ticks(0.0))
    hosts.add_broken(to_ticks(2.0))
    # at 5 both the host of 0 and a replacement would come at 100: the host of 0 is taken, and that of 2 is left
    assert [hosts.take_host(to_ticks(asked)) / to_ticks(1.0) for asked in (5.0, 50.0)] == [100, 102]


@pytest.mark.parametrize("name", ["detection", "restart", "repair", "replacement"])
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_times_that_are_none_are_refused(name: str, value: float) -> None:
    fields = {"detection": 0.0, "restart": 0.0, "repair": 0.0, name: value}
    with pytest.raises(ValueError, match=f"{name} is not negative and finite"):
        Recovery(**fields)
