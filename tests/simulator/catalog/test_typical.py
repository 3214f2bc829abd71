"""What is typical is the median of what was timed, figure by figure."""

from dataclasses import replace
from statistics import median

from meshwise.simulator.catalog import accelerator
from meshwise.simulator.catalog.records import list_fitted_links
from meshwise.simulator.catalog.typical import timed_accelerators, typical_efficiency, typical_link


def test_launch_and_bandwidths_are_medians_of_the_timed_accelerators() -> None:
    timed = [accelerator(name) for name in timed_accelerators()]
    typical = typical_efficiency()
    assert typical.launch == median(device.launch for device in timed)
    assert typical.sustained == median(device.sustained for device in timed)
    norms = [dict(device.kernel_bandwidth)["norm"] for device in timed if "norm" in dict(device.kernel_bandwidth)]
    assert dict(typical.kernel_bandwidth)["norm"] == median(norms)


def test_attention_is_compared_by_the_part_of_the_peak_that_it_reaches() -> None:
    typical = typical_efficiency()
    reached = [accelerator(name) for name in timed_accelerators()]
    expected = median(device.attention.forward * device.matmul.fraction for device in reached)
    assert abs(typical.attention.forward * typical.matmul.fraction - expected) < 1e-12
    # beside products that are half as near to the peak, attention is stated as twice as near to them
    half = replace(typical.matmul, fraction=typical.matmul.fraction / 2)
    assert abs(typical.scale_attention(half).forward - 2 * typical.attention.forward) < 1e-12


def test_links_wait_as_long_as_the_median_of_fitted_ones() -> None:
    for inside in (True, False):
        fitted = list_fitted_links(inside=inside)
        assert typical_link(inside=inside).latency == median(link.latency for link in fitted)
        assert typical_link(inside=inside).launch == median(link.launch for link in fitted)
