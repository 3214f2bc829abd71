"""The garbage collector is as it was after work without it, whatever that work did."""

import gc

import pytest

from meshwise.simulator.program import NEW_OBJECTS, collect_rarely, pause_collection


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_out_and_then_as_it_was(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), pause_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize(("before", "inside"), [(700, NEW_OBJECTS), (2 * NEW_OBJECTS, 2 * NEW_OBJECTS), (0, 0)])
def test_the_collector_runs_seldom_and_then_as_before(before: int, inside: int) -> None:
    was = gc.get_threshold()
    try:
        gc.set_threshold(before, 10, 10)
        with pytest.raises(KeyError), collect_rarely():
            assert gc.get_threshold() == (inside, 10, 10)
            raise KeyError
        assert gc.get_threshold() == (before, 10, 10)
    finally:
        gc.set_threshold(*was)
