"""Bundles that sums of ticks could not hold are refused."""

import pytest

from meshwise.simulator.engine.flows import LONGEST, shapes

SECOND = 10**12


def test_a_flow_that_takes_longer_than_ticks_can_be_summed_is_refused() -> None:
    # 2**60 ticks of a picosecond are 1,152,921.5 s: 1.1 MB at 1 B/s pass, 1.2 MB do not
    assert shapes([[(0, 1.1e6)]], [0], [1.0], SECOND).solo_ticks.tolist() == [int(1.1e6) * SECOND]
    with pytest.raises(ValueError, match=rf"a flow takes at most {LONGEST} ticks \(13 days\), met 1.2e\+06 s"):
        shapes([[(0, 1.2e6)]], [0], [1.0], SECOND)
