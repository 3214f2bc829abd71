import dataclasses

from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report


def test_stretches_come_back_to_the_nanosecond(small: Report, unpack):
    document, column = unpack(html(small))
    assert small.path is not None
    unit, path = document["steps"][0]["unit"], document["path"]
    start, which, length = column(path["start"]).cumsum(), column(path["class"]), column(path["duration"])
    found = [(int(of), int(at), int(at + ticks)) for of, at, ticks in zip(which, start, length, strict=True)]
    ticks = unit * small.timeline.columns.per_second
    assert found == [(of, round(first / ticks), round(last / ticks)) for of, first, last in small.path.stretches()]
    assert len(found) > 2


def test_every_stretch_is_of_ranks_that_run_something_then(small: Report):
    assert small.path is not None
    spans = list(small.timeline.spans)
    for of, first, last in small.path.stretches():
        begin, end = (moment / small.timeline.columns.per_second for moment in (first, last))
        assert any(span.rank_class == of and span.start < end and begin < span.end for span in spans)


def test_a_page_without_a_path_says_so(hostile: Report, unpack):
    document, _ = unpack(html(dataclasses.replace(hostile, path=None)))
    assert document["path"] is None
