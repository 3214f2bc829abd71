"""What a notebook shows of results: figures, a timeline, and text as text."""

import meshwise as mw

RESULT = mw.load("local/dp2").simulate()


def test_a_notebook_shows_the_figures_and_the_timeline() -> None:
    text = RESULT._repr_html_()
    assert "<table>" in text and "step time" in text and "data:image/png;base64," in text
    assert len(repr(RESULT)) < 500


def test_what_is_shown_is_escaped() -> None:
    from meshwise.simulator.notebook import to_html

    assert "<script>" not in to_html("<script>", [("<script>", "<script>")])
