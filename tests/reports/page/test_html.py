import base64
import dataclasses
import hashlib

import pytest

from meshwise.reports.document import clean_text
from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report

from .conftest import HOSTILE


def test_the_same_report_gives_the_same_text(small: Report):
    assert html(small) == html(small)


def test_the_page_asks_for_nothing_from_outside(small: Report, read):
    page = read(html(small))
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not {name for _, attributes in page.tags for name in attributes} & {"src", "href", "style"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_the_policy_allows_the_pages_own_program_and_style_alone(small: Report, read):
    text = html(small)
    policy = next(a["content"] for tag, a in read(text).tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        body = text.rsplit(f"<{tag}>", 1)[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_names_from_files_cannot_end_an_element(hostile: Report, read, unpack):
    text = html(hostile)
    page = read(text)
    assert len(page.scripts) == 3
    assert "img" not in {tag for tag, _ in page.tags}
    assert text.count("</script>") == 3
    document, _ = unpack(text)
    assert document["title"] == HOSTILE == document["assumptions"][0]
    assert set(document["steps"][0]["spans"]["names"]) == {clean_text(HOSTILE)}


@pytest.mark.parametrize("title", ["\ud800", "a\nb\0c", "\u2028", "]]>", "<!--", "${style}"])
def test_odd_titles_are_written_and_read_back(small: Report, unpack, title: str):
    text = html(dataclasses.replace(small, title=title))
    document, _ = unpack(text.encode("utf-8").decode("utf-8"))
    assert document["title"] == clean_text(title)


def test_numbers_that_are_not_finite_are_null(small: Report, unpack):
    endless = [dataclasses.replace(profile, capacity=float("inf")) for profile in small.timeline.memory]
    document, _ = unpack(html(dataclasses.replace(small, timeline=dataclasses.replace(small.timeline, memory=endless))))
    assert {row["capacity"] for row in document["stages"]} == {None}


def test_a_page_of_16384_ranks_is_below_a_megabyte(large: Report):
    assert len(html(large)) < 1e6
