import pytest

from meshwise.scenarios.published import words
from meshwise.scenarios.published.row import Row
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute

FULL, SELECTIVE, NONE = Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE


@pytest.mark.parametrize(
    ("stated", "chunks", "expected"),
    [
        ("1F1B", 1, ("1f1b", 1)),
        ("1F1B", 4, ("interleaved", 4)),
        ("interleaved 1F1B", 4, ("interleaved", 4)),
        ("(interleaved) 1F1B", 1, ("1f1b", 1)),
        ("GPipe", 1, ("gpipe", 1)),
        ("ZB-V", 1, ("zbv", 2)),
        ("DualPipe", 1, ("dualpipev", 2)),
        ("zero bubble (ZB-H1)", 1, ("zb1p", 1)),
        ("ZB-2p", 1, ("zb2p", 1)),
        ("PipeDream-flush", 1, ("1f1b", 1)),
        ("PipeDream-2BW", 1, ("pipedream_2bw", 1)),
        ("breadth-first", 4, ("looped_bfs", 4)),
        ("none (FSDP)", 1, ("1f1b", 1)),
        ("no such word", 1, ("1f1b", 1)),
    ],
)
def test_schedules(stated: str, chunks: int, expected: tuple[str, int]) -> None:
    assert words.read_schedule(Row({"schedule": stated}), 4, chunks) == expected


def test_without_a_pipeline_there_is_one_schedule() -> None:
    assert words.read_schedule(Row({"schedule": "interleaved 1F1B"}), 1, 8) == ("1f1b", 1)


def test_a_replaced_schedule_is_an_assumption() -> None:
    row = Row({"schedule": "DualPipe"})
    words.read_schedule(row, 4, 1)
    assert row.assumed == ["schedule dualpipev (the nearest schedule that is simulated)"]


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
    assert words.read_recompute(Row({"recompute": stated, "recompute_detail": detail}), 12) == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, NO_OFFLOADING),
        ("none", NO_OFFLOADING),
        ("optimizer", Offloading(optimizer=(1.0,))),
        ("50% optimizer states", Offloading(optimizer=(0.5,))),
        ("CPU offload (ZeRO-Offload)", Offloading(optimizer=(1.0,))),
        ("parameters and optimizer to CPU", Offloading(optimizer=(1.0,), parameters=(1.0,))),
        ("activations", Offloading(activations=(1.0,))),
        ("qkv activations", NO_OFFLOADING),
    ],
)
def test_offloading(stated: str | None, expected: Offloading) -> None:
    assert words.read_offload(Row({"offload": stated})) == expected


def test_how_context_ranks_attend() -> None:
    assert words.read_attention(Row({"plan_note": "cef; cp_comm_type a2a"}), 2) is Attention.ULYSSES
    assert words.read_attention(Row({"plan_note": "all-gather KV"}), 2) is Attention.ALL_GATHER
    row = Row({})
    assert words.read_attention(row, 2) is Attention.RING
    assert row.assumed == ["context parallel attention by a ring (not stated)"]


@pytest.mark.parametrize(("name", "frozen"), [("LLAMA2-70B LoRA", True), ("Florance-7B", False)])
def test_frozen_weights(name: str, frozen: bool) -> None:
    assert bool(words.is_frozen(Row({"model": name}))) is frozen


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
    assert words.read_recompute(row, 4) == expected
    assert bool(row.assumed) == (expected is None)
