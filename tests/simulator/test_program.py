"""The garbage collector is as it was after work without it, whatever that work did."""

import gc

import pytest

from meshwise.simulator.program import pause_collection


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
