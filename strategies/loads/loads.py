"""What varies from step to step, and the seeded draws of it."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from meshwise.simulator.brief import brief_repr
from meshwise.strategies.loads.assignment import ORDERS
from meshwise.strategies.loads.lengths import Lengths, count_pairs
from meshwise.strategies.loads.packing import Sequences, fill_sequences
from meshwise.strategies.loads.spread import Spread, draw_spread

PACKINGS = ("none", "pack", "fixed")
"""What a sequence holds: one sample padded to the longest of its microbatch; several samples packed; one sample padded
to the whole sequence."""

DEFAULT_DRAWS = 32
DEFAULT_QUANTILE = 0.95
"""The quantile by which plans are chosen: steps that take longer are one in twenty."""


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Devices that are slow in one step and not in another.

    Parameters
    ----------
    share
        The probability that a device is slow in a step; devices are slow independently of one another.
    slowdown
        The time of a slow device over its own time otherwise, at least 1.
    """

    share: float
    slowdown: Spread

    __repr__ = brief_repr()


@dataclass(frozen=True, slots=True)
class Loads:
    """What varies from step to step.

    Parameters
    ----------
    lengths
        Lengths of samples; None where every sequence is full.
    packing
        One of `PACKINGS`.
    order
        How sequences come to data ranks, one of `meshwise.strategies.loads.assignment.ORDERS`.
    imbalance
        Load of the most loaded expert over the mean, one value for all layers of a step; None where it does not vary.
    stragglers
        Slow devices, or None.
    draws
        Steps that are drawn.
    seed
        Of the draws.
    quantile
        The share of steps that are faster than the step time by which plans are compared.
    """

    lengths: Lengths | None = None
    packing: str = "none"
    order: str = "arrival"
    imbalance: Spread | None = None
    stragglers: Stragglers | None = None
    draws: int = DEFAULT_DRAWS
    seed: int = 0
    quantile: float = DEFAULT_QUANTILE

    __repr__ = brief_repr()

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS or self.order not in ORDERS:
            raise ValueError(f"packing is one of {PACKINGS} and order one of {ORDERS}, met {self}")
        if self.draws < 1 or not 0 < self.quantile < 1:
            raise ValueError(f"draws are at least 1 and a quantile lies between 0 and 1, met {self}")


@dataclass(frozen=True, eq=False, slots=True)
class Draw:
    """What one step has to do: its sequences, the load of its most loaded expert, and its slow devices.

    ``imbalance`` is None where it is the model's own, and ``slowdowns`` are pairs (device, factor on its time).
    """

    sequences: Sequences | None
    imbalance: float | None
    slowdowns: tuple[tuple[int, float], ...]


def draw_steps(
    loads: Loads, num_sequences: int, sequence: int, num_devices: int, window: int | None = None
) -> tuple[Draw, ...]:
    """Return the drawn steps of ``num_sequences`` sequences of ``sequence`` tokens each.

    Each part has a generator of its own, so that what one part draws does not depend on whether others vary.
    """
    generators = [np.random.default_rng((loads.seed, part)) for part in range(3)]
    imbalances: list[float | None] = [None] * loads.draws
    if loads.imbalance is not None:
        imbalances = [*draw_spread(loads.imbalance, generators[1], loads.draws)]
    return tuple(
        Draw(
            _draw_sequences(loads, generators[0], num_sequences, sequence, window),
            imbalance,
            _draw_slowdowns(loads.stragglers, generators[2], num_devices),
        )
        for imbalance in imbalances
    )


def _draw_sequences(
    loads: Loads, generator: np.random.Generator, num_sequences: int, sequence: int, window: int | None
) -> Sequences | None:
    if loads.lengths is None:
        return None
    lengths = loads.lengths.cut(sequence)
    if loads.packing != "pack":
        tokens = lengths.draw(generator, num_sequences)
        return Sequences(tokens, count_pairs(tokens, window))
    # a packed sequence holds no more samples than the shortest would fill it with
    most_samples = num_sequences * (sequence // lengths.lengths[0])
    likely_samples = ceil(1.5 * num_sequences * sequence / lengths.mean) + 64
    stream = lengths.draw(generator, min(most_samples, likely_samples) + 1)
    while len(stream) <= most_samples and int(stream.sum()) < num_sequences * sequence:  # rarely long samples came late
        stream = np.concatenate([stream, lengths.draw(generator, likely_samples)])
    packed = fill_sequences(stream, sequence, num_sequences, window)
    # packing lists sequences of long samples first, and loaders shuffle what is packed
    arrival = generator.permutation(num_sequences)
    return Sequences(packed.tokens[arrival], packed.pairs[arrival])


def _draw_slowdowns(
    stragglers: Stragglers | None, generator: np.random.Generator, num_devices: int
) -> tuple[tuple[int, float], ...]:
    if stragglers is None:
        return ()
    devices = np.flatnonzero(generator.random(num_devices) < stragglers.share).tolist()
    factors = [max(stragglers.slowdown.find_quantile(share), 1.0) for share in generator.random(len(devices))]
    return tuple(zip(devices, factors, strict=True))
