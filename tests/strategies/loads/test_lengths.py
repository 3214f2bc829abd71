"""Histograms of lengths: hand-computed shares, means that stay, draws that follow the shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.strategies.loads.lengths import MAX_LENGTHS, Lengths, count_pairs

COUNTS = st.dictionaries(st.integers(1, 5000), st.integers(1, 9), min_size=1, max_size=40)


def test_lengths_are_cut_as_trainers_truncate() -> None:
    # of 10 samples 2 have 8 tokens, 3 have 20 and 5 have 40: cut to 16, 0.2 * 8 + 0.8 * 16 = 14.4 on average
    lengths = Lengths.from_counts({40: 5, 8: 2, 20: 3})
    assert lengths.mean == pytest.approx(0.2 * 8 + 0.3 * 20 + 0.5 * 40)
    assert lengths.cut(16).lengths == (8, 16)
    assert lengths.cut(16).mean == pytest.approx(14.4)
    assert lengths.find_share_above(16) == pytest.approx(0.8)


@given(COUNTS)
def test_the_mean_is_that_of_the_samples(counts: dict[int, int]) -> None:
    samples = np.repeat(list(counts), list(counts.values()))
    assert Lengths.from_counts(counts).mean == pytest.approx(samples.mean())


def test_many_lengths_are_joined_and_keep_their_mean() -> None:
    samples = np.random.default_rng(5).lognormal(6, 1, 20_000).astype(int) + 1
    values, counts = np.unique(samples, return_counts=True)
    assert len(values) > MAX_LENGTHS
    lengths = Lengths.from_counts(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    assert len(lengths.lengths) <= MAX_LENGTHS
    assert abs(lengths.mean - samples.mean()) <= 0.5
    # what attention computes is a mean of squares, of which groups of alike lengths lose next to nothing
    squares = sum(share * length**2 for length, share in lengths.rows)
    assert squares == pytest.approx(float((samples.astype(float) ** 2).mean()), rel=0.02)


def test_draws_follow_the_shares() -> None:
    drawn = Lengths.from_counts({4: 1, 9: 3}).draw(np.random.default_rng(0), 20_000)
    # the share of 9 is 3/4, with a standard error of sqrt(3/16 / 20000) = 0.003
    assert abs((drawn == 9).mean() - 0.75) < 0.015
    assert set(drawn.tolist()) == {4, 9}


@pytest.mark.parametrize("window", [None, 3, 8, 32])
def test_pairs_are_those_of_attention_in_a_graph(window: int | None) -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 8, "vocab": 8}
    spec = Transformer(**sizes, window=window, positions="rotary")  # type: ignore[arg-type]

    def count_flops(sequence: int) -> float:
        operators = spec.graph(sequence, "bf16").blocks[1].operators
        return sum(operator.flops for operator in operators if operator.kind is OperatorKind.ATTENTION)

    # a pair takes 4 FLOP for each of 8 widths of heads: a multiply and an add in both products
    pairs = count_pairs(np.array([1, 8, 16]), window)
    assert [count_flops(sequence) / (4 * 8) for sequence in (1, 8, 16)] == pytest.approx(pairs.tolist())


@pytest.mark.parametrize("rows", [((4, 2), (0.5, 0.5)), ((0,), (1.0,)), ((4,), (0.5,)), ((), ())])
def test_histograms_that_are_none_are_refused(rows: tuple[tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=r"lengths|shares"):
        Lengths(*rows)


def test_a_share_too_small_for_a_number_is_none() -> None:
    assert Lengths.from_weights([(1, 1e-310), (2, 1e18)]) == Lengths((2,), (1.0,))
