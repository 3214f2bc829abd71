"""The corpus is the same for any plan."""

import numpy as np
import pytest

from meshwise.executor.training.data import batch, corpus, share


def test_targets_are_the_next_byte() -> None:
    tokens, targets = batch(5, 8, 16)
    assert tokens.shape == targets.shape == (8, 16)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    assert corpus().max() < 256


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1), (3, 1), (1, 2, 1)])
def test_shares_are_the_batch_in_order(sizes: tuple[int, ...]) -> None:
    whole = batch(3, 8, 16)
    parts = [share(3, 8, 16, rank, sizes) for rank in range(len(sizes))]
    assert [len(part[0]) for part in parts] == [2 * size for size in sizes]  # 8 sequences are two microbatches of 4
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_steps_and_samples_differ() -> None:
    rows = np.concatenate([batch(step, 8, 64)[0] for step in range(8)])
    assert len(np.unique(rows, axis=0)) == 64


def test_share_must_divide() -> None:
    with pytest.raises(ValueError, match=r"sum\(microbatch\) = 3 divides global_batch\(8\)"):
        share(0, 8, 16, 0, (1, 1, 1))
