"""What a page tells: a step with spans, and what else is known of it."""

import dataclasses
import json

import pytest

from meshwise.reports.page.html import html
from meshwise.reports.page.report import Report
from meshwise.simulator.timeline import Timeline


def test_search_explanation_and_measurement_are_told_where_they_are_known(small: Report, unpack):
    best = {"plan": small.plan.to_json(), "evaluation": {"step_time": 2.0}}
    history = [
        {"evaluations": 1, "elapsed": 0.1, "best": float("inf")},
        {"evaluations": 2, "elapsed": 0.2, "best": 2.0},
    ]
    search = {
        "algorithm": "best_first", "best": best, "history": history, "lower_bound": 1.6, "gap": 0.25,
        "evaluations": 3, "wall_time": 0.5,
    }  # fmt: skip
    explanation = {"critical_path": {"seconds": {"forward": 1.0}, "pipeline_rank": 0, "stages": [0]}}
    more = dataclasses.replace(
        small, searches=(search,), explanation=explanation, measured=small.timeline,
        run={"step_time": 4.0, "predicted_step_time": 5.0},
    )  # fmt: skip
    document, _ = unpack(html(more))
    assert document["searches"][0]["history"] == [[2, 0.2, 2.0]]  # what does not fit is no step time
    assert document["searches"][0]["gap"] == "25 %"
    assert document["explanation"][0]["heading"].startswith("critical path (1 s")
    assert ["measured", "4 s", "the prediction is +25.0%"] in document["facts"]  # 5 / 4
    assert {row[4] for row in document["difference"]["rows"]} == {0.0}  # the step against itself
    assert json.dumps(document["difference"]) != json.dumps(unpack(html(small))[0]["difference"])


def test_a_step_without_spans_is_refused(small: Report):
    empty = Timeline("simulated", small.timeline.rank_classes, (), (), 1.0, "x")
    with pytest.raises(ValueError, match="needs spans"):
        dataclasses.replace(small, timeline=empty)
