"""Plans: complete documents that read back equal, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators

from ..problems import problem

PROBLEM = problem()

LAYOUTS = st.sampled_from(
    [
        Layout(data=8, microbatch=2, zero=1),
        Layout(tensor=8, sequence_parallel=True, recompute=Recompute.SELECTIVE),
        Layout(tensor=8, sequence_parallel=True, overlap_tensor=True),
        Layout(pipeline=4, data=2, schedule="interleaved", chunks=2, recompute=Recompute.FULL),
        Layout(pipeline=4, tensor=2, schedule="gpipe", stages=(3, 2, 2, 1)),
        Layout(data=8, zero=3, zero_shards=4, reshard_after_forward=False),
        Layout(data=8, gradient_reduction="parameter_server"),
        Layout(data=8, recompute=FirstLayers(Recompute.FULL, 3)),
        Layout(data=8, recompute=FirstLayers(Recompute.SELECTIVE, 8)),
        Layout(data=8, recompute=SomeOperators(("attention", "activation"))),
    ]
)


@given(LAYOUTS)
def test_json_round_trip(layout: Layout) -> None:
    plan = complete(PROBLEM, layout)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_documents_from_before_a_choice_existed_have_its_default() -> None:
    plan = complete(PROBLEM, Layout(data=8))
    later = ("scatter_gather", "placement", "offload", "gradient_reduction", "overlap_tensor")
    document = {key: value for key, value in plan.to_json().items() if key not in later}
    assert Plan.from_json(document) == plan


@pytest.mark.parametrize("change", [{"version": 9}, {"mesh": 3}, {"stages": [{}]}, {"recompute": "some"}])
def test_a_broken_document_is_a_value_error(change: dict[str, object]) -> None:
    document = complete(PROBLEM, Layout(data=8)).to_json() | change
    with pytest.raises(ValueError):
        Plan.from_json(document)
