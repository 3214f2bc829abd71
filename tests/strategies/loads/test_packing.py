"""Packing: first-fit decreasing as it is written in books, beside brute force, and full steps."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.loads.packing import fill_sequences, pack_first_fit

SAMPLES = st.lists(st.integers(1, 16), min_size=1, max_size=40)


def pack_one_by_one(samples: list[int], sequence: int) -> list[list[int]]:
    """Return samples packed one after another, the longest first, each into the first sequence with room."""
    rows: list[list[int]] = []
    for sample in sorted(samples, reverse=True):
        row = next((row for row in rows if sum(row) + sample <= sequence), None)
        if row is None:
            rows.append([sample])
        else:
            row.append(sample)
    return rows


@given(SAMPLES)
def test_packing_by_length_is_first_fit_decreasing(samples: list[int]) -> None:
    rows = pack_one_by_one(samples, 16)
    packed = pack_first_fit(np.array(samples), 16)
    assert packed.tokens.tolist() == list(map(sum, rows))
    # block-diagonal attention: the sum of the squares of the samples in each sequence
    assert packed.pairs.tolist() == [sum(sample**2 for sample in row) for row in rows]


def find_least(samples: list[int], sequence: int) -> int:
    """Return the least number of sequences by trying every assignment."""
    for count in range(1, len(samples) + 1):
        for places in product(range(count), repeat=len(samples)):
            tokens = np.bincount(places, samples, count)
            if tokens.max() <= sequence:
                return count
    raise AssertionError("every sample has room in a sequence of its own")


@settings(max_examples=40)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=6))
def test_packing_needs_at_most_eleven_ninths_of_the_least(samples: list[int]) -> None:
    least = find_least(samples, 12)
    assert least <= len(pack_first_fit(np.array(samples), 12).tokens) <= 11 / 9 * least + 6 / 9


@given(st.lists(st.integers(1, 16), min_size=80, max_size=160), st.integers(1, 4))
def test_a_step_takes_samples_until_no_more_go_in(samples: list[int], count: int) -> None:
    stream = np.array(samples)
    filled = fill_sequences(stream, 16, count)
    num_taken = int(np.searchsorted(np.cumsum(stream), filled.tokens.sum()) + 1)
    assert len(filled.tokens) == count
    assert filled.tokens.max() <= 16
    assert int(stream[:num_taken].sum()) == filled.tokens.sum()  # the first samples of the stream, none left out
    assert len(pack_first_fit(stream[: num_taken + 1], 16).tokens) > count
