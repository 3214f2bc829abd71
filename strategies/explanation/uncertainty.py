"""The uncertainty of predictions, as probabilities.

The error of a step time is a factor whose logarithm is normal, as wide as the calibrated interval requires for its
coverage; and so is the error of the memory of tensors.
"""

from dataclasses import dataclass
from math import exp, inf, log
from statistics import NormalDist

from meshwise.simulator.machine.cluster import Cluster

NORMAL = NormalDist()

NUM_QUANTILES = 201
"""Number of quantiles of the memory error over which a probability is averaged."""


def format_risk(probability: float) -> str:
    """Return the probability that a device lacks memory in words.

    >>> format_risk(0.031)
    'out of memory with probability 3.1%'
    """
    return f"out of memory with probability {probability:.1%}"


def format_limit(limit: float | None) -> str:
    """Return in words the largest allowed probability that a device lacks memory; ``None`` for any."""
    return "--brave: no limit" if limit is None else f"at most {limit:.0%} is allowed"


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The uncertainty of predicted step times and peak memory.

    ``coverage`` is the fraction of runs inside the intervals, whose half widths are in natural logarithms;
    ``replay_width`` is that of what a replay says is reserved. ``reserved_ratios`` are bytes that a caching allocator
    reserves over bytes of tensors: the least, median and largest measured ratio. Between them the distribution is taken
    to be linear.
    """

    coverage: float
    step_time_width: float
    peak_memory_width: float
    reserved_ratios: tuple[float, float, float]
    replay_width: float = 0.0

    def estimate_replay_risk(self, needed: float, room: float) -> float:
        """Return the probability that a device whose allocator may have ``room`` bytes lacks memory.

        ``needed`` are the least bytes with which a replay of the step runs.

        >>> Uncertainty(0.9, 0.1, 0.1, (1.0, 1.0, 1.0), replay_width=0.1).estimate_replay_risk(70e9, 70e9)
        0.5
        """
        if room <= 0:
            return 1.0
        excess = log(max(needed, 1.0) / room)
        sigma = self._find_sigma(self.replay_width)
        return NORMAL.cdf(excess / sigma) if sigma else float(excess > 0)

    def step_time_quantile(self, step_time: float, quantile: float) -> float:
        """Return the ``quantile`` quantile of the step time of runs, in seconds."""
        if quantile >= 1:
            return inf
        return step_time * exp(self._find_sigma(self.step_time_width) * NORMAL.inv_cdf(quantile))

    def estimate_memory_risk(self, peak: float, device_memory: float, framework_bytes: float = 0.0) -> float:
        """Return the probability that a device with ``device_memory`` bytes lacks memory for a predicted peak.

        ``framework_bytes`` of the peak are taken before the first tensor and exact. All that the allocator reserves
        counts as needed, so that the probability is rather too high.
        """
        sigma = self._find_sigma(self.peak_memory_width)
        # the midpoint rule over the quantiles of the error
        errors = (exp(sigma * NORMAL.inv_cdf((point + 0.5) / NUM_QUANTILES)) for point in range(NUM_QUANTILES))
        room = (device_memory - framework_bytes) / max(peak - framework_bytes, 1.0)
        return sum(1 - self._find_probability_below(room / error) for error in errors) / NUM_QUANTILES

    def estimate_cluster_risk(self, cluster: Cluster, peak: float) -> float:
        """Return the probability that the smallest device of a cluster lacks memory for a predicted peak, in bytes."""
        device = min(cluster.accelerators, key=lambda accelerator: accelerator.memory)
        return self.estimate_memory_risk(peak, device.memory, device.reserved)

    def memory_margin(self, risk: float) -> float:
        """Return the bytes of device memory per predicted byte at which memory is lacking with probability ``risk``.

        The probability that `estimate_memory_risk` returns depends on this ratio alone and falls as it grows. So a peak
        that fits with this margin has at most that probability, and one that does not fit has more.
        """
        low, high = 0.0, 16.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if self.estimate_memory_risk(1e6, 1e6 * middle) > risk:
                low = middle
            else:
                high = middle
        return high

    def _find_sigma(self, half_width: float) -> float:
        return half_width / NORMAL.inv_cdf((1 + self.coverage) / 2)

    def _find_probability_below(self, ratio: float) -> float:
        """Return the probability that an allocator reserves at most ``ratio`` times the bytes of tensors."""
        least, median, largest = self.reserved_ratios
        if ratio < median:
            return max(0.0, 0.5 * (ratio - least) / (median - least)) if median > least else 0.0
        return min(1.0, 0.5 + 0.5 * (ratio - median) / (largest - median)) if largest > median else 1.0
