"""What is done once for many: passes alike in a skeleton, and steps that differ in microbatches alone."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.strategies.lowering.cuts import Cuts, Granularity
from meshwise.strategies.lowering.residents import schedule_updates
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.lowering.step_shape import step_shape
from meshwise.strategies.lowering.tasks.shape import PartShape, StageShape
from meshwise.strategies.lowering.tasks.skeleton import Skeleton
from meshwise.strategies.lowering.tasks.step import Chain, StepBuilder
from meshwise.strategies.lowering.tasks.unflushed import _UnflushedBuilder
from meshwise.strategies.lowering.volumes import Volumes
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.schedules.schedule import Action

from ...plans import Case, any_cases
from ...problems import problem


class OneByOne(StepBuilder):
    """Adds every part of every pass as if it were the only one of its kind."""

    def add_action(self, action: Action, chain: Chain, *, is_single: bool) -> Iterator[None]:
        return super().add_action(action, chain, is_single=False)


class StepsOneByOne(OneByOne, _UnflushedBuilder):
    """The same of steps in a row."""


def told(tasks: Skeleton) -> tuple[object, ...]:
    """Return what a skeleton says, edges in order."""
    edges = sorted(
        zip(tasks.edge_sources.tolist(), tasks.edge_targets.tolist(), tasks.edge_positions.tolist(), strict=True)
    )
    step_of = None if tasks.step_of is None else tasks.step_of.tolist()
    return tasks.templates, tasks.template_of.tolist(), tasks.microbatch_of.tolist(), edges, step_of


@settings(max_examples=120, deadline=None)
@given(any_cases())
def test_passes_added_at_once_are_those_added_part_by_part(case: Case) -> None:
    small, plan = case.build()
    costs = StageCosts(small)
    for granularity in Granularity:
        cuts = Cuts(costs, plan, costs.machine(plan), granularity)
        shape = step_shape(cuts, Volumes(costs, plan, cuts.sharing, cuts.buckets))
        if plan.asynchronous:
            when = schedule_updates(costs, plan)
            assert told(_UnflushedBuilder(shape, when, 3).build()) == told(StepsOneByOne(shape, when, 3).build())
        else:
            assert told(StepBuilder(shape).build()) == told(OneByOne(shape).build())


PARTS = st.builds(
    PartShape, st.integers(0, 2), st.booleans(), st.booleans(), st.booleans(), overlaps_next=st.just(False)
)
BESIDE = st.builds(
    PartShape, st.integers(1, 2), st.just(True), st.just(False), st.booleans(), overlaps_next=st.just(True)
)
PASSES = st.builds(lambda some, last: (*some, last), st.lists(PARTS | BESIDE, max_size=4), PARTS)


@settings(max_examples=100, deadline=None)
@given(st.tuples(*[PASSES] * 6), st.booleans())
def test_it_holds_wherever_parts_run_beside_others(passes: tuple[tuple[PartShape, ...], ...], hosts_wait: bool) -> None:
    small = problem(devices=2, layers=2, batch=4)
    plan = complete(small, Layout(pipeline=2, schedule="1f1b"))
    costs = StageCosts(small)
    cuts = Cuts(costs, plan, costs.machine(plan), Granularity.CHAIN)
    shape = step_shape(cuts, Volumes(costs, plan, cuts.sharing, cuts.buckets))
    assert all(not stage.buckets for stage in shape.stages)
    stages = tuple(
        StageShape(*passes[3 * at : 3 * at + 3], (), units=stage.units) for at, stage in enumerate(shape.stages)
    )
    shape = shape._replace(stages=stages, hosts_wait=hosts_wait)
    assert told(StepBuilder(shape).build()) == told(OneByOne(shape).build())


def test_of_two_that_overlap_each_goes_on_beneath_the_collectives_of_the_other() -> None:
    small = problem(devices=2, layers=4, batch=8)
    plan = complete(small, Layout(pipeline=2, schedule="dualpipev", chunks=2))
    costs = StageCosts(small)
    cuts = Cuts(costs, plan, costs.machine(plan), Granularity.CHAIN)
    shape = step_shape(cuts, Volumes(costs, plan, cuts.sharing, cuts.buckets))
    own, collective = PartShape(0, False, False), PartShape(1, False, False)
    parts = (own, collective, own)
    stages = tuple(
        stage._replace(forward=parts, backward=parts, last_backward=parts, buckets=()) for stage in shape.stages
    )
    shape = shape._replace(stages=stages)
    assert told(StepBuilder(shape).build()) == told(OneByOne(shape).build())
