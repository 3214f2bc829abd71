import dataclasses

import pytest

from meshwise.reports.page.report import Report
from meshwise.reports.page.sections import blocks_text, stage_rows


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((), ""),
        (("head",), "head"),
        (("layers.3", "layers.4", "layers.6"), "layers.3 to 4, layers.6"),
        (("a.1", "b.2", "b.3", "b"), "a.1, b.2 to 3, b"),
        (("layers.2", "layers.1"), "layers.2, layers.1"),
    ],
)
def test_blocks_that_follow_each_other_are_a_range(blocks: tuple[str, ...], text: str):
    assert blocks_text(blocks) == text


def test_sizes_of_a_stage_add_up_to_its_peak_and_ranks_to_all(large: Report):
    rows = stage_rows(large)
    assert len(rows) == 16
    assert sum(row["ranks"] for row in rows) == 16384
    assert all(sum(row["sizes"]) == pytest.approx(row["peak"]) for row in rows)
    assert max(row["peak"] for row in rows) == large.timeline.peak_memory
    layers = [row["blocks"].count("layers") for row in rows]
    assert layers == [1] * 16


def test_kinds_of_ranks_that_hold_the_same_are_one_row(small: Report):
    first, second = small.timeline.rank_classes[:2]
    split = (first._replace(ranks=first.ranks[:1]), first._replace(ranks=first.ranks[1:]), second)
    memory = [small.timeline.memory[i] for i in (0, 0, 1)]
    memory = [dataclasses.replace(profile, rank_class=i) for i, profile in enumerate(memory)]
    timeline = dataclasses.replace(small.timeline, rank_classes=split, memory=memory)
    held = small.result["memory"]
    result = {**small.result, "memory": [held[0], held[0], held[1]]}
    assert stage_rows(dataclasses.replace(small, timeline=timeline, result=result)) == stage_rows(small)
