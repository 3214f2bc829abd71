"""The division of blocks among stages against all divisions."""

from itertools import combinations
from random import Random

import numpy as np
import pytest

from meshwise.strategies.stages.block_division import divide_blocks


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_faster(seed: int) -> None:
    rng = Random(seed)
    blocks, stages, microbatches = rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 9)
    times = np.array(
        [
            [
                [rng.choice((rng.randint(1, 30), rng.randint(1, 30), np.inf)) for _ in range(blocks + 1)]
                for _ in range(blocks + 1)
            ]
            for _ in range(stages)
        ],
        float,
    )
    crossing = np.array([rng.choice((0, rng.randint(1, 40))) for _ in range(blocks + 1)], float)
    found = divide_blocks(times, microbatches, crossing)
    totals = []
    for inner in combinations(range(1, blocks), stages - 1):
        ends = (*inner, blocks)
        own = [times[stage, first, end] for stage, (first, end) in enumerate(zip((0, *inner), ends, strict=True))]
        own += [crossing[end] for end in inner]
        totals.append(sum(own) + (microbatches - 1) * max(own) if np.inf not in own else np.inf)
    best = min(totals, default=np.inf)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.time == best
        own = [
            times[stage, first, end]
            for stage, (first, end) in enumerate(zip((0, *found.ends), found.ends, strict=False))
        ]
        own += [crossing[end] for end in found.ends[:-1]]
        assert sum(own) + (microbatches - 1) * max(own) == best and found.ends[-1] == blocks


def test_more_stages_than_blocks_is_no_division() -> None:
    assert divide_blocks(np.ones((3, 3, 3)), 2) is None
