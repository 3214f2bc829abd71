import base64
import dataclasses
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from meshwise.reports.page.sections import Columns
from meshwise.reports.page.sections import timeline_document as page_step
from meshwise.simulator.spans import TASK_KINDS
from meshwise.simulator.timeline import Timeline


class Packed:
    """A step as a page holds it."""

    def __init__(self, timeline: Timeline) -> None:
        columns = Columns()
        self.step = page_step(timeline, "predicted", columns)
        self.data = zlib.decompress(base64.b64decode(columns.to_text()))

    def column(self, where: dict[str, Any]) -> Any:
        return np.frombuffer(self.data, f"<{where['type']}", where["count"], where["at"])

    def moments(self, where: dict[str, Any]) -> Any:
        return np.cumsum(self.column(where), dtype=np.uint32).astype(np.int64)

    def spans(self) -> Iterator[tuple[Any, ...]]:
        """Yield rank class, stream, kind, stage, microbatch, operators, start and end in units, bytes."""
        spans = self.step["spans"]
        names = ("kind", "stage", "microbatch", "operators", "duration", "bytes")
        kind, stage, microbatch, operators, duration, size = (self.column(spans[name]).tolist() for name in names)
        start = self.moments(spans["start"]).tolist()
        slices = (self.column(spans[f"slice_{name}"]).tolist() for name in ("class", "stream", "start"))
        classes, streams, starts = slices
        for of, stream, first, end in zip(classes, streams, starts, starts[1:], strict=False):
            for i in range(first, end):
                what = (spans["streams"][stream], TASK_KINDS[kind[i]], stage[i], microbatch[i])
                yield of, *what, spans["names"][operators[i]], start[i], start[i] + duration[i], size[i]


FINE = {"tensor": True, "layers": 3, "recompute": 0.003, "launch": 0.001, "host_copy": 0.01}


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "gpipe"])
def test_every_span_comes_back_with_its_times_to_the_nanosecond(step, name: str):
    timeline = step(name, 4, 8, **FINE)
    expected = Counter(
        (s.rank_class, str(s.stream), s.kind, s.stage, s.microbatch, s.operators, round(s.start * 1e9),
         round(s.end * 1e9), s.bytes)
        for s in timeline.spans
    )  # fmt: skip
    assert Counter(Packed(timeline).spans()) == expected


def test_spans_of_a_simulated_plan_come_back(small):
    ticks = small.timeline.columns.start.tolist()  # picoseconds
    spans = zip(small.timeline.spans, ticks, strict=True)
    expected = sorted((s.rank_class, s.kind, s.operators, s.bytes, start) for s, start in spans)
    found = sorted((s[0], s[2], s[5], s[8], 1000 * s[6]) for s in Packed(small.timeline).spans())
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    assert all(abs(one[4] - two[4]) <= 501 for one, two in zip(found, expected, strict=True))  # half a nanosecond


def test_a_long_step_has_a_coarser_unit_in_which_spans_that_touch_still_touch(step):
    timeline = step("1f1b", 2, 4, forward=1.1, backward=2.2, send=0.0)
    packed = Packed(timeline)
    assert timeline.length > 2**32 * 1e-9
    assert packed.step["unit"] == 1e-8
    before = {s.end for s in timeline.spans} & {s.start for s in timeline.spans}
    starts, ends = ({row[i] for row in packed.spans()} for i in (6, 7))
    assert len(before) > 4
    assert {round(moment / 1e-8) for moment in before} <= starts & ends


def test_every_rank_is_of_the_class_that_stands_for_it(large):
    packed = Packed(large.timeline)
    of = packed.column(packed.step["class_of"])
    assert len(of) == 16384
    for index, members in enumerate(large.timeline.rank_classes):
        assert np.flatnonzero(of == index).tolist() == sorted(members.ranks)


def test_ranks_alike_are_stored_once(step):
    one, many = (len(Packed(step("1f1b", 16, 32, group=group, layers=4)).data) for group in (1, 1024))
    ranks = 16 * 1024 - 16
    assert many - one == 4 * ranks  # bytes: the class of each rank and nothing else


def test_numbers_that_are_no_rank_are_of_no_class(step):
    timeline = step()
    second = timeline.rank_classes[1]._replace(ranks=(5,))
    timeline = dataclasses.replace(timeline, rank_classes=(timeline.rank_classes[0], second))
    packed = Packed(timeline)
    assert packed.column(packed.step["class_of"]).tolist() == [0, -1, -1, -1, -1, 1]


def test_memory_comes_back_byte_by_byte(small):
    packed = Packed(small.timeline)
    for profile, told in zip(small.timeline.memory, packed.step["memory"], strict=True):
        usage = np.stack([np.cumsum(packed.column(where)) for where in told["usage"]], axis=1)
        assert np.array_equal(usage, np.asarray(profile.usage))
        moments = packed.moments(told["times"]) * packed.step["unit"]
        assert np.allclose(moments, np.asarray(profile.times), rtol=0, atol=0.5e-9)
        assert told["capacity"] == profile.capacity
