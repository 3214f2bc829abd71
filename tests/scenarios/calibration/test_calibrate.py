"""A machine is measured by kernels and messages, and then by training steps."""

import pytest

from meshwise.scenarios.calibration.calibrate import calibrate
from meshwise.simulator.collective import Collective


@pytest.mark.long
def test_calibrated_machine() -> None:
    pytest.importorskip("torch")
    told: list[str] = []
    found = calibrate(processes=2, seconds=1.0, progress=told.append)
    assert found.num_devices == 2
    machine = found.accelerator
    assert machine.peak("fp32") > machine.peak("fp64") > 1e8
    assert 1e-7 < machine.launch < 1e-2
    curves = {curve.collective: curve for curve in found.collectives}
    assert set(curves) == {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.SEND,
    }
    for curve in curves.values():
        assert curve.ranks == 2
        assert [size for size, _ in curve.points] == [1024 * 4**i for i in range(8)]
        assert curve.time(2**24) > curve.time(2**16)
    assert "collectives of 2 ranks" in told
