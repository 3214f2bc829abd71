"""Plans: complete documents that read back equal, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.layout import Layout, complete
from strategies.plan import Plan, Recompute

from .problems import problem

PROBLEM = problem()

LAYOUTS = st.sampled_from(
    [
        Layout(data=8, microbatch=2, zero=1),
        Layout(tensor=8, sequence_parallel=True, recompute=Recompute.SELECTIVE),
        Layout(pipeline=4, data=2, schedule="interleaved", chunks=2, recompute=Recompute.FULL),
        Layout(pipeline=4, tensor=2, schedule="gpipe", stages=(3, 2, 2, 1)),
        Layout(data=8, zero=3, zero_shards=4, reshard_after_forward=False),
    ]
)


@given(LAYOUTS)
def test_json_round_trip(layout: Layout) -> None:
    plan = complete(PROBLEM, layout)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("change", [{"version": 9}, {"mesh": 3}, {"stages": [{}]}, {"recompute": "some"}])
def test_a_broken_document_is_a_value_error(change: dict[str, object]) -> None:
    document = complete(PROBLEM, Layout(data=8)).to_json() | change
    with pytest.raises(ValueError):
        Plan.from_json(document)
