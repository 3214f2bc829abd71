"""Publishers against each other by hand: the same kernels, sizes between, and what one factor explains."""

from functools import partial
from math import sqrt

import pytest

from meshwise.simulator.calibration.collective_report import collective_floors
from meshwise.simulator.calibration.collective_rows import CollectiveRow
from meshwise.simulator.calibration.evidence import comparison_key, kernel_floors, kernel_group
from meshwise.simulator.calibration.kernel_rows import Row
from meshwise.simulator.calibration.kernels import FusedAttention, Kernel, Product, Stream
from meshwise.simulator.calibration.noise import PublisherTimes
from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.compute import Pass
from meshwise.simulator.machine.kernels import AttentionShape, Matmul


def row(kernel: Kernel, seconds: float, publisher: str = "a/a", bandwidth: float | None = None) -> Row:
    return Row(1, publisher, publisher, "h100-80gb", bandwidth, "f", kernel, seconds, True)


def gemm(m: int, n: int = 1024, dtype: str = "bf16") -> Product:
    return Product(Matmul(1, m, n, 512), dtype)


def times_of(*rows: Row) -> PublisherTimes:
    return PublisherTimes((*comparison_key(each), each.seconds) for each in rows)


def at(times: PublisherTimes, kernel: Kernel, bandwidth: float | None = None) -> float | None:
    return times.interpolate_seconds(*comparison_key(row(kernel, 9.0, bandwidth=bandwidth)))


def test_a_time_between_two_sizes_is_interpolated_along_logarithms() -> None:
    times = times_of(row(gemm(1000), 1.0), row(gemm(4000), 4.0), row(gemm(1000, dtype="fp16"), 3.0))
    # of the same kernel in both dtypes of 16 bits the geometric mean, sqrt(3); between it and 4 half way again
    assert at(times, gemm(1000)) == pytest.approx(sqrt(3.0))
    assert at(times, gemm(2000)) == pytest.approx(sqrt(sqrt(3.0) * 4.0))
    exact, between = (times.pair_time(*comparison_key(row(gemm(m), 9.0)), 9.0) for m in (1000, 2000))
    assert exact is not None and exact.has_same_size
    assert between is not None and not between.has_same_size


def test_nothing_is_said_of_kernels_beyond_or_far_between_or_unlike() -> None:
    times = times_of(row(gemm(1000), 1.0), row(gemm(4001), 4.0), row(gemm(8000), 8.0))
    assert at(times, gemm(2000)) is None  # 4001 / 1000 > 4
    assert at(times, gemm(5000)) is not None
    for unlike in (gemm(9000), gemm(5000, n=2048), gemm(5000, dtype="fp8"), Stream("norm", 5000.0)):
        assert at(times, unlike) is None


def test_of_two_sizes_the_nearer_ends_speak() -> None:
    # along m between 1000 and 4000: 1 and 16 s, at 2000 4 s; along n between 1000 and 1050: 3 s and 3 s
    near = [row(gemm(2000, n=1000), 3.0), row(gemm(2000, n=1050), 3.0)]
    far = [row(gemm(1000), 1.0), row(gemm(4000), 16.0)]
    assert at(times_of(*far), gemm(2000)) == pytest.approx(4.0)
    assert at(times_of(*near, *far), gemm(2000)) == pytest.approx(3.0)


def test_a_factor_explains_what_all_kernels_share() -> None:
    # ratios 1.2, 1.2 and 1.5: raw (0.2 + 0.2 + 0.5) / 3; over the median 1.2: (0 + 0 + 0.25) / 3
    ours = [row(gemm(m), 1.0) for m in (100, 200, 300)]
    theirs = [row(gemm(m), s, "b/b") for m, s in ((100, 1.2), (200, 1.2), (300, 1.5))]
    (found,) = kernel_floors(ours, [*ours, *theirs], lambda each: 0.9)
    assert (found.predicted_publisher, found.reference_publisher, found.group) == ("a/a", "b/b", "products")
    assert (found.num_pairs, found.num_same_sizes) == (3, 3)
    assert (found.factor, found.raw_error, found.scaled_error) == pytest.approx((1.2, 0.3, 0.25 / 3))
    assert found.model_error == pytest.approx(0.1)


def test_a_publisher_is_from_itself_as_far_as_its_repeats() -> None:
    # 1, 1 and 1.5 s of one kernel, 1 s of another: the median of the three is 1, (0 + 0 + 1 / 3) / 3
    ours = [row(gemm(100), seconds) for seconds in (1.0, 1.0, 1.5)] + [row(gemm(200), 1.0)]
    (found,) = kernel_floors(ours, [])
    assert (found.reference_publisher, found.num_pairs, found.model_error) == ("itself", 3, None)
    assert (found.factor, found.raw_error) == pytest.approx((1.0, 1 / 9))


def test_sources_of_collectives_are_compared_on_the_same_links_and_ranks() -> None:
    def rows(source: str, ranks: int, sizes: tuple[float, ...], rate: float) -> list[CollectiveRow]:
        made = partial(CollectiveRow, source, "dgx-a100-80gb", 1, ranks, Collective.ALL_REDUCE)
        return [made(size, size / rate) for size in sizes]

    ours, theirs = rows("a", 8, (1e6, 2e6, 9e6), 200e9), rows("b", 8, (1e6, 4e6), 160e9)
    found = collective_floors([*ours, *theirs, *rows("c", 4, (1e6, 4e6), 100e9)])
    # 1 MB and, half way between 1 and 4 MB, 2 MB: each 200 / 160 of the time; 9 MB is beyond
    assert [
        (each.hardware, each.predicted_publisher, each.reference_publisher, each.num_pairs, each.num_same_sizes)
        for each in found
    ] == [
        ("nvlink3", "a", "b", 2, 1),
        ("nvlink3", "b", "a", 1, 1),  # 4 MB lies between 2 and 9, more than 4 times apart
    ]
    assert (found[0].factor, found[0].raw_error) == pytest.approx((1.25, 0.25))


def test_a_constant_factor_leaves_no_scatter_and_the_other_way_round_is_its_inverse() -> None:
    ours = [row(gemm(m), m / 1e3) for m in range(100, 1000, 100)]
    theirs = [row(gemm(m), 1.25 * m / 1e3, "b/b") for m in range(100, 1000, 100)]
    (one,), (other,) = kernel_floors(ours, theirs), kernel_floors(theirs, ours)
    assert (one.factor, one.raw_error, one.model_error) == (pytest.approx(1.25), pytest.approx(0.25), None)
    assert (other.factor, other.raw_error) == pytest.approx((0.8, 0.2))
    assert one.scaled_error == pytest.approx(0.0, abs=1e-12)


def test_kernels_are_compared_with_their_like_alone() -> None:
    shape = AttentionShape(8, 1024, 1024, 128.0, 512.0, 128.0)
    full = AttentionShape(8, 1024, 1024, 128.0, 1024.0, 128.0)
    times = times_of(row(FusedAttention(shape, "bf16", (Pass.FORWARD,)), 1.0), row(Stream("norm", 1e9), 1.0))
    assert at(times, FusedAttention(shape, "bf16", (Pass.FORWARD,))) == 1.0
    assert at(times, FusedAttention(full, "bf16", (Pass.FORWARD,))) is None
    assert at(times, FusedAttention(shape, "bf16", (Pass.BACKWARD,))) is None
    assert at(times, Stream("norm", 1e9, backward=True)) is None
    assert at(times, Stream("norm", 1e9), bandwidth=1e12) is None  # a variant of slower memory
    names = [kernel_group(row(each, 1.0)) for each in (gemm(1), gemm(1, dtype="fp8"), Stream("norm", 1.0))]
    assert names == ["products", "products fp8", "memory-bound"]
