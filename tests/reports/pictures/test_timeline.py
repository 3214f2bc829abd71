"""Pictures of timelines, and the waterfall from the predicted step to the measured one."""

import dataclasses
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwise.reports.difference import difference
from meshwise.reports.lanes import Bar, Row
from meshwise.reports.pictures.panel import Window, outline_steps, place_numbers
from meshwise.reports.pictures.timeline import MAX_WATERFALL_BARS as MOST
from meshwise.reports.pictures.timeline import (
    choose_close_ups,
    draw_comparison,
    draw_timeline,
    list_waterfall_bars,
    summarize_step,
)
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import LinkUse, Timeline

HOSTILE = '</text><script>alert("$x^{")</script> & \x00\x1b[31m \n]]> --> \u202e名'


def pixels_of(path: Path) -> np.ndarray:
    from matplotlib import image

    return image.imread(path)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_timeline_gives_the_same_bytes(step, tmp_path: Path, suffix: str):
    first, second = (tmp_path / f"{name}{suffix}" for name in "ab")
    for path in (first, second):
        draw_timeline(step(recompute=0.005, tensor=True, layers=2), path, title="a title")
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 5000
    assert b"<dc:date>" not in first.read_bytes()


def test_the_last_close_up_holds_what_follows_the_last_pass(step):
    timeline = step("1f1b", 8, 48)
    tail = dataclasses.replace(timeline, step_time=timeline.step_time + 0.3 * choose_close_ups(timeline)[1].duration)
    assert choose_close_ups(tail)[1].end == tail.step_time
    longer = dataclasses.replace(timeline, step_time=timeline.step_time + 2 * choose_close_ups(timeline)[1].duration)
    last_pass = max(span.end for span in timeline.spans if span.microbatch >= 0)
    assert last_pass < choose_close_ups(longer)[1].end < longer.step_time


def test_a_long_step_has_close_ups_and_a_picture_of_full_size(step, tmp_path: Path):
    timeline = step("interleaved", 4, 64, 2, tensor=True, layers=2)
    first, last = choose_close_ups(timeline)
    assert first.start == 0.0
    assert first.duration == pytest.approx(last.duration)
    assert first.end < last.start < last.end <= timeline.step_time
    draw_timeline(timeline, tmp_path / "long.png")
    assert pixels_of(tmp_path / "long.png").shape[:2] == (900, 1600)


def test_a_short_step_needs_no_close_up(step):
    assert choose_close_ups(step("1f1b", 2, 4)) == ()


@pytest.mark.parametrize("microbatches", range(8, 64, 8))
def test_close_ups_are_drawn_only_where_they_magnify(step, microbatches: int):
    timeline = step("1f1b", 4, microbatches)
    assert all(2.5 * window.duration < timeline.step_time for window in choose_close_ups(timeline))


def test_every_send_is_seen_however_short_it_is(step, tmp_path: Path):
    """A microsecond of a step of 0.2 s is 0.01 pixels; there are 4 sends forward and 4 back, at different times."""
    draw_timeline(step("gpipe", 2, 4, send=1e-6, data=0.0), tmp_path / "sends.png")
    strips = pixels_of(tmp_path / "sends.png")[142 + 100 : 142 + 130, 216:-24, :3] * 255
    orange = (np.abs(strips - (207, 74, 22)).max(axis=2) < 60).any(axis=0)
    assert np.count_nonzero(np.diff(orange.astype(int)) == 1) == 8


def test_copies_and_launches_of_the_host_have_strips_and_a_legend(step, tmp_path: Path):
    fields = {"launch": 0.002, "host_copy": 0.02, "tensor": True, "layers": 2}
    draw_timeline(step("1f1b", 4, 8, **fields), tmp_path / "host.png")
    picture = pixels_of(tmp_path / "host.png")[..., :3] * 255
    for colour in ((217, 217, 107), (138, 138, 138)):
        rows = (np.abs(picture - colour).max(axis=2) < 3).sum(axis=1)
        strips = rows[142:] > 10
        assert np.count_nonzero(np.diff(strips.astype(int)) == 1) == 4
        assert rows[90:130].max() > 10


def test_very_thin_bars_are_drawn_as_shares(step, tmp_path: Path):
    draw_timeline(step("1f1b", 16, 160, data=0.0), tmp_path / "thin.png")
    assert pixels_of(tmp_path / "thin.png")[..., :3].std() > 0.1


def test_forward_and_backward_take_the_ink_that_their_time_asks_for(step, tmp_path: Path):
    """One rank, no communication: backward takes twice the time of forward, and all but the optimizer is busy."""
    draw_timeline(step("gpipe", 1, 2, send=0.0, data=0.0, optimizer=0.0), tmp_path / "one.png")
    lane = pixels_of(tmp_path / "one.png")[160, 216:-24, :3] * 255
    forward, backward = (
        int((np.abs(lane - colour).max(axis=1) < 3).sum()) for colour in ((240, 180, 41), (29, 91, 150))
    )
    assert backward / forward == pytest.approx(2.0, abs=0.1)
    assert (forward + backward) / len(lane) > 0.94


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_hostile_names_are_text(step, tmp_path: Path, suffix: str):
    timeline = step()
    classes = tuple(RankClass(HOSTILE, (0,), (0, 1)) for _ in timeline.rank_classes)
    path = tmp_path / f"x{suffix}"
    draw_timeline(dataclasses.replace(timeline, rank_classes=classes, engine=HOSTILE), path, title=HOSTILE)
    if suffix == ".svg":
        document = xml.dom.minidom.parse(str(path))
        assert document.getElementsByTagName("script") == []


def test_numbers_are_written_where_they_fit():
    def bar(microbatch: int, start: float, end: float) -> Bar:
        return Bar(0, Row.COMPUTE, TaskKind.FORWARD, 0, microbatch, start, end, end - start)

    found = list(place_numbers([bar(1, 0, 10), bar(200, 10, 20), bar(3, 20, 60)], Window(0, 40), 1.0, 9.0))
    assert [(b.microbatch, place) for b, place in found] == [(1, 5.0), (3, 30.0)]


def test_a_staircase_follows_the_shares():
    outline = outline_steps(np.array([0.0, 1.0, 2.0]), np.zeros(2), np.array([0.5, 1.0]), (0.0, 10.0))
    assert outline[:4].tolist() == [[0, 10], [1, 10], [1, 10], [2, 10]]
    assert outline[4:].tolist() == [[2, 0], [1, 0], [1, 5], [0, 5]]


def test_a_comparison_is_drawn_on_one_axis(step, tmp_path: Path):
    measured = step(forward=0.012, backward=0.021, source="measured", engine="gloo")
    draw_comparison(step(), measured, tmp_path / "both.svg")
    assert (tmp_path / "both.svg").stat().st_size > 5000


def test_the_facts_state_step_time_bubble_ranks_and_source(step):
    timeline = step("gpipe", 1, 1, send=0.0, data=0.0, optimizer=0.0, group=16)
    assert summarize_step(timeline) == "step 30 ms, bubble 0.0%, 16 ranks, simulated (discrete event)"
    links = (LinkUse("nic 0 out", 16, 1e9, 3e6, 0.1), LinkUse("leaf 0 up", 1, 1e9, 9e6, 0.3))
    assert ", busiest link leaf 0 up (30%), " in summarize_step(dataclasses.replace(timeline, links=links))


def test_a_timeline_without_spans_is_refused(tmp_path: Path):
    empty = Timeline("simulated", (RankClass("a", (0,), (0,)),), (), (), 0.0, "discrete_event")
    with pytest.raises(ValueError, match="needs spans"):
        draw_timeline(empty, tmp_path / "x.png")


def test_other_suffixes_are_refused_with_the_nearest(step, tmp_path: Path):
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg, met 'x\.gif'; nearest: x\.png"):
        draw_timeline(step(), tmp_path / "x.gif")


def stages(seconds: int) -> Timeline:
    """Return a rank that runs a forward of each of ten stages, stage i for i + ``seconds`` seconds."""
    ends = [sum(stage + seconds for stage in range(last + 1)) for last in range(10)]
    spans = [
        Span(0, StreamKind.COMPUTE, TaskKind.FORWARD, stage, 0, "", end - stage - seconds, end)
        for stage, end in enumerate(ends)
    ]
    return Timeline("measured", (RankClass("all", tuple(range(10)), (0,)),), spans, (), ends[-1], "gloo")


def test_bars_add_up_to_the_error_and_the_small_ones_share_one() -> None:
    found = difference(stages(1), stages(3))  # 2 s more for each of ten stages
    *shown, rest = list_waterfall_bars(found)
    assert found.error == 20
    assert [cost for *_, cost in shown] == [2] * MOST
    assert rest == ("", "3 others", "", 6)


def test_equal_steps_have_no_bars_and_are_drawn(step: Callable[..., Timeline], tmp_path: Path) -> None:
    assert list_waterfall_bars(difference(step(), step())) == []
    draw_comparison(step(), step(source="measured"), tmp_path / "same.png")
    assert (tmp_path / "same.png").stat().st_size > 5000
