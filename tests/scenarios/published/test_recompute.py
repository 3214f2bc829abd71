import pytest

from meshwise.scenarios.published.recompute import read_recompute
from meshwise.scenarios.published.row import Row
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

FULL, SELECTIVE, NONE = Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE


@pytest.mark.parametrize(
    ("stated", "detail", "expected"),
    [
        ("none", "--recompute-granularity full --recompute-num-layers 0", NONE),
        (False, None, NONE),
        ("full", "--activations-checkpoint-method uniform", FULL),
        (True, None, FULL),
        ("full (block, 3 layers)", None, FirstLayers(FULL, 3)),
        ("full", "recompute_method=block recompute_num_layers=5", FirstLayers(FULL, 5)),
        ("full 50%", None, FirstLayers(FULL, 6)),
        ("every 2 layers", None, FirstLayers(FULL, 6)),
        ("selective 3", None, FirstLayers(SELECTIVE, 4)),
        ("1/2 layers", None, FirstLayers(FULL, 6)),
        ("block 3", None, FirstLayers(FULL, 3)),
        ("w/o checkpointing", None, NONE),
        ("not used", None, NONE),
        ("nothing_saveable", None, FULL),
        ("everything_saveable", None, NONE),
        ("12 of 24 layers", None, FirstLayers(FULL, 6)),
        ("selective (attention core)", None, SELECTIVE),
        ("selective (minimal: save matmul outputs)", "remat_policy=minimal", SELECTIVE),
        ("full except qkv offloaded to host", "remat_policy=qkv_proj_offloaded", FULL),
        ("selective/partial: recompute=False select=True", None, SELECTIVE),
        ("selective/partial: recompute=[6, 3, 2, 3] select=False", None, FirstLayers(FULL, 4)),  # mean 3.5
        ("selective/partial: recompute=False select=[10, 8, 6, 4, 2, 0, 0, 0]", None, FirstLayers(SELECTIVE, 4)),
        ("activation checkpointing", None, FULL),
        (None, None, None),
        ("", None, None),
    ],
)
def test_recomputation_of_stages_of_12_layers(stated: object, detail: str | None, expected: object) -> None:
    assert read_recompute(Row({"recompute": stated, "recompute_detail": detail}), 12) == expected


@pytest.mark.parametrize(
    ("derived", "expected"),
    [
        ("vocab/recompute/schedule from src/config.py defaults (use_checkpoint=true)", None),
        ("tokens/s; recompute from launcher script", FULL),
        ("recompute from launcher script; vocab the default", FULL),
    ],
)
def test_a_recomputation_that_is_a_default_is_not_stated(derived: str, expected: Recompute | None) -> None:
    row = Row({"recompute": "full", "derived_fields": derived})
    assert read_recompute(row, 4) == expected
    assert bool(row.assumed) == (expected is None)
