"""The reference in the documentation is what the docstrings say."""

from meshwise.scenarios.studies.reference import build_pages as reference_pages

from ...pages import ROOT

GENERATED = ROOT / "docs" / "reference"


def test_the_reference_is_what_the_docstrings_say() -> None:
    kept = {path.name: path.read_text("utf-8") for path in GENERATED.glob("*.md")}
    assert kept == reference_pages(), "run `python -m meshwise.scenarios.studies.reference docs/reference`"
