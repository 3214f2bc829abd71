"""The page in a real browser. One browser is started for all tests; they are skipped where there is none."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest

from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report
from meshwise.simulator.program import TaskKind
from meshwise.simulator.spans import Span

from .browser import Browser
from .conftest import HOSTILE

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine: chromium, google-chrome")
GUTTER = 168  # pixels of the page left of its time axis
PIXEL = f"""(() => {{
  const lanes = document.getElementById('lanes');
  const [x, y] = [{GUTTER} + (lanes.clientWidth - {GUTTER}) * 0.3, 8].map((at) => at * devicePixelRatio);
  return [...lanes.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3);
}})()"""
"""The colour of the first lane in a span that is opened by `around`."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(str(BINARY), tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, small: Report, large: Report, hostile: Report) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, report in (("small", small), ("large", large), ("hostile", hostile)):
        (folder / name).with_suffix(".html").write_text(html(report), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in ("small", "large", "hostile")}


def state(browser: Browser) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(browser.value("location.hash").lstrip("#")).items()}


def window(browser: Browser, report: Report) -> tuple[float, float]:
    found = state(browser)
    return float(found.get("from", 0)), float(found.get("to", report.timeline.length))


def tooltip(browser: Browser) -> str:
    found = "document.getElementById('tooltip')"
    return str(browser.value(f"{found}.hidden ? '' : {found}.innerText"))


def box(browser: Browser, name: str) -> dict[str, float]:
    return json.loads(browser.value(f"JSON.stringify(document.getElementById('{name}').getBoundingClientRect())"))


def longest(report: Report, kind: TaskKind) -> Span:
    """The longest span of a kind on rank 0."""
    own = (s for s in report.timeline.spans if s.kind is kind and 0 in report.timeline.rank_classes[s.rank_class].ranks)
    return max(own, key=lambda span: span.duration)


def around(span: Span) -> str:
    """The address at which a span fills the middle half of the plot."""
    return f"from={span.start - span.duration / 2:.9g}&to={span.end + span.duration / 2:.9g}"


@pytest.mark.parametrize("name", ["small", "large", "hostile"])
def test_a_page_draws_itself_without_a_complaint_or_a_request(browser: Browser, pages, name: str):
    browser.open(pages[name])
    for view in ("layout", "difference", "timeline"):
        browser.value(f"location.hash = '#view={view}'")
        browser.settle()
    assert browser.complaints == []
    assert [url.split("#")[0] for url in browser.requests if url != "about:blank"] == [pages[name].as_uri()]


def test_names_from_files_are_text_and_nothing_else(browser: Browser, pages):
    browser.open(pages["hostile"], "#view=layout")
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.querySelector('h1').textContent") == HOSTILE
    assert browser.value("document.querySelector('#layout li').textContent") == HOSTILE


def test_the_policy_stops_scripts_and_requests_of_a_page_that_was_tampered_with(browser: Browser, pages):
    browser.open(pages["small"])
    add = "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    browser.value(f"(() => {{ {add} }})()")
    assert browser.value("window.hacked") is None
    assert browser.value("fetch('http://127.0.0.1:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert any("Content Security Policy" in json.dumps(each) for each in browser.complaints)


def test_a_link_opens_the_rank_and_the_moment_that_it_names(browser: Browser, pages, large: Report):
    moment = 0.4 * large.timeline.length
    browser.open(pages["large"], f"#rank=1234&at={moment:.9g}&from=1&to=2")
    shown = browser.value("document.getElementById('inspector').innerText")
    assert "Rank 1234" in shown
    index = next(i for i, members in enumerate(large.timeline.rank_classes) if 1234 in members.ranks)
    profile = large.timeline.memory[index]
    held = profile.totals[int(np.searchsorted(np.asarray(profile.times), moment, "right")) - 1]
    capacity = profile.capacity
    assert f"in all\t{held / 2**30:.3g} GiB ({100 * held / capacity:.3g} %)" in shown
    assert window(browser, large) == (1, 2)


def test_a_rank_that_is_asked_for_is_shown(browser: Browser, pages):
    browser.open(pages["large"])
    browser.key("/")
    for letter in "16383":
        browser.key(letter)
    browser.key("Enter")
    assert "Rank 16383" in browser.value("document.getElementById('inspector').innerText")
    assert state(browser)["rank"] == "16383"


def test_wheel_drag_and_keys_zoom_and_move(browser: Browser, pages, small: Report):
    browser.open(pages["small"])
    lanes = box(browser, "lanes")
    middle = (lanes["x"] + GUTTER + (lanes["width"] - GUTTER) / 2, lanes["y"] + 20)
    browser.mouse("mouseWheel", *middle, deltaX=0, deltaY=-500)
    low, high = window(browser, small)
    assert high - low < 0.6 * small.timeline.length
    assert (low + high) / 2 == pytest.approx(small.timeline.length / 2, rel=0.02)  # the pointer's moment stays
    browser.mouse("mousePressed", *middle, button="left", clickCount=1)
    browser.mouse("mouseMoved", middle[0] + 100, middle[1], button="left")
    browser.mouse("mouseReleased", middle[0] + 100, middle[1], button="left", clickCount=1)
    moved = window(browser, small)
    perpixel = (high - low) / (lanes["width"] - GUTTER)
    assert moved == pytest.approx((low - 100 * perpixel, high - 100 * perpixel), rel=0.02)
    assert "at" not in state(browser)  # a drag is no click
    browser.key("0")
    assert window(browser, small) == (0, small.timeline.length)


def test_a_span_under_the_pointer_tells_operator_bytes_and_group(browser: Browser, pages, small: Report):
    span = longest(small, TaskKind.TENSOR_COMMUNICATION)
    browser.open(pages["small"], f"#rank=0&{around(span)}")
    lanes = box(browser, "lanes")
    for y in range(2, 92, 3):  # the strip of tensor communication lies somewhere in the first lane
        browser.mouse("mouseMoved", lanes["x"] + GUTTER + (lanes["width"] - GUTTER) / 2, lanes["y"] + y)
        found = tooltip(browser)
        if found.startswith("tensor communication"):
            break
    assert f"operator\t{span.operators}" in found
    assert f"bytes\t{span.bytes / 2**10:.3g} KiB" in found
    assert "tensor group\t2 ranks: 0, 1" in found
    assert f"microbatch\t{span.microbatch}" in found


def test_a_span_has_the_colour_of_its_kind_until_the_kind_is_hidden(browser: Browser, pages, small: Report):
    span = longest(small, TaskKind.FORWARD)
    browser.open(pages["small"], f"#rank=0&{around(span)}")
    assert browser.value(PIXEL) == [0xF0, 0xB4, 0x29]
    browser.open(pages["small"], f"#rank=0&{around(span)}&hide=forward")
    assert browser.value(PIXEL) == [0xF1, 0xF1, 0xF1]  # idle


def test_all_but_the_critical_path_fades(browser: Browser, pages, small: Report):
    assert small.path is not None
    stage_of = [each.stages[0] for each in small.timeline.rank_classes]
    others = [(first, last) for of, first, last in small.path.list_stretches() if stage_of[of] != 0]
    first, last = (moment / small.timeline.columns.per_second for moment in max(others, key=lambda at: at[1] - at[0]))
    kinds = TaskKind.FORWARD, TaskKind.BACKWARD
    span = next(  # rank 0 computes while the path is elsewhere
        s for s in small.timeline.spans if s.kind in kinds and s.stage == 0 and first < s.start and s.end < last
    )
    browser.open(pages["small"], f"#rank=0&{around(span)}")
    colour = browser.value(PIXEL)
    browser.value("document.querySelector('#path button').click()")
    browser.settle()
    assert state(browser)["path"] == "critical"
    pale = [round(0.3 * each + 0.7 * 0xFF) for each in colour]
    assert browser.value(PIXEL) == pytest.approx(pale, abs=2) != colour
    browser.value("document.querySelector('#path button').click()")
    browser.settle()
    assert browser.value(PIXEL) == colour
    assert "path" not in state(browser)
