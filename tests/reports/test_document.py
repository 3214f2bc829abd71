import pytest

from meshwise.reports.document import Section, to_markdown

HOSTILE = '<script>alert(1)</script> [x](javascript:y) | `*_ & "quoted"'
SECTIONS = [
    Section(
        HOSTILE, (HOSTILE, "1. no list\n# no heading"), ((HOSTILE, "value"), ("a|b", "2")), "a picture.png", HOSTILE
    ),
    Section("plain", ("One paragraph.",)),
]


def test_the_markdown_escapes_what_it_would_read():
    text = to_markdown("t", SECTIONS)
    assert "\\<script\\>" in text and "<script>" not in text
    assert "\n1\\. no list \\# no heading\n" in text
    assert "| a\\|b | 2 |" in text
    assert "](a%20picture.png)" in text
    assert text.startswith("# t\n\n## ")


@pytest.mark.parametrize("image", ["/etc/x.png", "../x.png", "https://x/y.png", "a/../../b.png", "c\\d.png"])
def test_images_lie_in_the_folder(image: str):
    with pytest.raises(ValueError, match="lies in its folder"):
        Section("x", image=image)


def test_ragged_tables_are_refused():
    with pytest.raises(ValueError, match="equally many cells"):
        Section("x", table=(("a", "b"), ("c",)))
