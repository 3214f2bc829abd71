from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports.document import Section, write_report

HOSTILE = '<script>alert(1)</script> [x](javascript:y) | `*_ & "quoted"'
SECTIONS = [
    Section(
        HOSTILE, (HOSTILE, "1. no list\n# no heading"), ((HOSTILE, "value"), ("a|b", "2")), "a picture.png", HOSTILE
    ),
    Section("plain", ("One paragraph.",)),
]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_escapes_text_and_asks_for_nothing_from_outside(tmp_path: Path):
    _, page = write_report(tmp_path / "report", title=HOSTILE, sections=SECTIONS)
    reader = Reader()
    reader.feed(page.read_text())
    names = [tag for tag, _ in reader.tags]
    assert "script" not in names and "link" not in names
    assert names.count("section") == 2 and names.count("tr") == 2
    assert [attrs["src"] for tag, attrs in reader.tags if tag == "img"] == ["a%20picture.png"]
    assert reader.text.count(HOSTILE) == 6  # title twice, heading, paragraph, cell, caption
    assert "http" not in page.read_text()


def test_the_markdown_escapes_what_it_would_read(tmp_path: Path):
    markdown, _ = write_report(tmp_path, title="t", sections=SECTIONS)
    text = markdown.read_text()
    assert "\\<script\\>" in text and "<script>" not in text
    assert "\n1\\. no list \\# no heading\n" in text
    assert "| a\\|b | 2 |" in text
    assert "](a%20picture.png)" in text
    assert text.startswith("# t\n\n## ")


def test_the_same_sections_give_the_same_bytes(tmp_path: Path):
    first, second = (write_report(tmp_path / name, title="t", sections=SECTIONS) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("image", ["/etc/x.png", "../x.png", "https://x/y.png", "a/../../b.png", "c\\d.png"])
def test_images_lie_in_the_folder(image: str):
    with pytest.raises(ValueError, match="lies in its folder"):
        Section("x", image=image)


def test_ragged_tables_are_refused():
    with pytest.raises(ValueError, match="equally many cells"):
        Section("x", table=(("a", "b"), ("c",)))
