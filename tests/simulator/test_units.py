"""Text with units becomes SI floats, and nothing else does."""

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwise.simulator.units import UNITS, Dimension, parse, to_ticks


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("400 Gb/s", Dimension.BANDWIDTH, 400e9 / 8),
        ("24 GB/s", Dimension.BANDWIDTH, 24e9),
        ("80 GiB", Dimension.SIZE, 80 * 2**30),
        ("80 GB", Dimension.SIZE, 80e9),
        ("2us", Dimension.TIME, 2e-6),
        (" 1.5e3 TFLOP/s ", Dimension.COMPUTE_RATE, 1.5e15),
    ],
)
def test_known_quantities(text: str, dimension: Dimension, value: float) -> None:
    assert parse(text, dimension) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["400", "GB/s", "400 GB", "400 gb/s", "1e999 GB/s", "nan GB/s", "4 0 GB/s", "9" * 200])
def test_what_is_no_bandwidth_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="as in '400 Gb/s'"):
        parse(text, Dimension.BANDWIDTH)


def test_a_quantity_is_finite() -> None:
    with pytest.raises(ValueError, match="a bandwidth is finite, met '1e999 GB/s'"):
        parse("1e999 GB/s", Dimension.BANDWIDTH)


@given(st.floats(min_value=1e-3, max_value=1e6), st.sampled_from(list(Dimension)), st.data())
def test_every_unit_scales(value: float, dimension: Dimension, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[dimension])))
    assert parse(f"{value!r} {unit}", dimension) == pytest.approx(value * UNITS[dimension][unit])


@given(st.integers(0, 10**15), st.integers(1, 10**6))
@example(17_592_186_044_415, 1)
def test_ticks_round_up_by_less_than_one(picoseconds: int, parts: int) -> None:
    seconds = picoseconds / 1e12 / parts
    exact = Fraction(seconds) * 10**12
    rounding = exact / 2**52  # of the product, in double precision
    assert exact - rounding <= to_ticks(seconds) < exact + 1 + rounding
