import pytest

from meshwise.scenarios.published import words
from meshwise.scenarios.published.row import Row
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention


@pytest.mark.parametrize(
    ("stated", "chunks", "expected"),
    [
        ("1F1B", 1, ("1f1b", 1)),
        ("1F1B", 4, ("interleaved", 4)),
        ("interleaved 1F1B", 4, ("interleaved", 4)),
        ("(interleaved) 1F1B", 1, ("interleaved", 2)),
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
