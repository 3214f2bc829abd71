"""What a run of a user's module can follow: a search asks layouts what a run asks plans, and both say the same."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwise.executor.stages.supported_modules import find_module_layout, list_refusals, list_rules
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators

from ...strategies.problems import problem

PROBLEM = problem(devices=4, layers=4, batch=16)


@settings(max_examples=150, deadline=None)
@given(
    degrees=st.sampled_from(((4, 1), (2, 2), (1, 4), (1, 2), (4, 1))),
    microbatch=st.sampled_from((1, 2)),
    schedule=st.sampled_from(("1f1b", "gpipe", "zb1p", "pipedream", "interleaved")),
    zero=st.integers(0, 3),
    reshard=st.booleans(),
    recompute=st.sampled_from(
        (Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE, FirstLayers(Recompute.FULL, 1), SomeOperators(("up",)))
    ),
    offload=st.sampled_from([offloading(names) for names in ((), ("optimizer",), ("parameters",), ("activations",))]),
    server=st.booleans(),
)
def test_rules_of_layouts_are_those_of_plans(
    degrees: tuple[int, int],
    microbatch: int,
    schedule: str,
    zero: int,
    reshard: bool,
    recompute: Recompute,
    offload: object,
    server: bool,
) -> None:
    data, pipeline = degrees
    decisions = {"zero": zero, "recompute": recompute, "offload": offload, "reshard_after_forward": reshard}
    decisions["gradient_reduction"] = "parameter_server" if server else "all_reduce"
    chunks = 2 if schedule == "interleaved" else 1
    try:
        layout = Layout(data=data, pipeline=pipeline, microbatch=microbatch, schedule=schedule, chunks=chunks)
        layout = replace(layout, **decisions)
        plan = complete(replace(PROBLEM, cluster=PROBLEM.cluster), layout)
    except ValueError:
        return
    reasons = [reason for rule in list_rules(PROBLEM.training) for reason in rule(layout)]
    assert set(reasons) == set(list_refusals(PROBLEM.training, plan))
    if not reasons:
        found = find_module_layout(plan)
        assert (found.data, found.pipeline, found.zero, found.schedule) == (data, pipeline, zero, schedule) or (
            pipeline == 1 and found.schedule == "1f1b"
        )
        assert found.reshard_after_forward is (reshard or zero < 3)
        assert found.plan == (plan if pipeline > 1 else None)
    else:
        with pytest.raises(ValueError, match="a user's module does not run so"):
            find_module_layout(plan)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(data=2, context=2, microbatch=4), "context: met 2; nearest: 1"),
        (Layout(data=2, pipeline=2, microbatch=4, schedule="pipedream"), "a step ends before the next begins"),
        (Layout(data=2, pipeline=2, microbatch=4, schedule="zb1p", zero=1), "need whole states, met zb1p with zero 1"),
        (Layout(data=4, microbatch=4, recompute=Recompute.SELECTIVE), "computed again whole or not at all"),
    ],
)
def test_a_refusal_says_what_is_nearest(layout: Layout, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_module_layout(complete(PROBLEM, layout))
