"""The bound of a step: sound on every program (see test_engine), and near for pipelines."""

from meshwise.simulator.engine import step_bound
from meshwise.simulator.engine.longest_path import finish_times
from meshwise.simulator.program import Task, TaskKind

from ..programs import program
from .pipelines import pipeline


def test_work_of_a_stream_and_what_is_around_it() -> None:
    # stream 1 works 4 + 5, after 3 on stream 0 and before 2 there: 3 + 9 + 2
    rows = [((0,), 3, ()), ((1,), 4, (0,)), ((1,), 5, ()), ((0,), 2, (2,))]
    assert step_bound(program([Task(TaskKind.FORWARD, *row) for row in rows], 2)) == 14


def test_the_first_task_of_a_stream_waits_for_all_before_its_predecessor() -> None:
    # stream 1 starts after 3 + 4 on stream 0 and does 5 + 6; the 2 that wait for its 5 are done before
    rows = [((0,), 3, ()), ((0,), 4, ()), ((1,), 5, (1,)), ((1,), 6, ()), ((0,), 2, (2,))]
    assert step_bound(program([Task(TaskKind.FORWARD, *row) for row in rows], 2)) == 3 + 4 + 5 + 6


def test_a_rendezvous_is_reached_over_any_of_its_streams() -> None:
    # the first task of stream 1 also holds stream 0, where 6 is done before: 6 + 1 + 8
    rows = [((0,), 6), ((0, 1), 1), ((1,), 8)]
    assert step_bound(program([Task(TaskKind.FORWARD, *row) for row in rows], 2)) == 15


def test_a_uniform_pipeline_is_met_exactly() -> None:
    # 1F1B without transfers: (microbatches + stages - 1) passes of 10 + 20, on the last stage's stream
    step = pipeline(stages=4, microbatches=12, forward=[10] * 4, backward=[20] * 4, send=0)
    assert step_bound(step) == finish_times(step)[1].max() == (12 + 3) * 30


def test_a_pipeline_with_a_slow_last_stage_is_met_exactly() -> None:
    # 16 passes of 13 + 26 there, after 3 forwards of 9 and 3 sends of 3, before 3 backwards of 18 and 3 sends
    step = pipeline(stages=4, microbatches=16, forward=[9, 9, 9, 13], backward=[18, 18, 18, 26], send=3)
    assert step_bound(step) == finish_times(step)[1].max() == 16 * 39 + 3 * (9 + 3) + 3 * (18 + 3)


def test_a_cycle_gets_some_bound_and_no_endless_search() -> None:
    tasks = [Task(TaskKind.FORWARD, (index,), 1, (1 - index,)) for index in range(2)]
    assert step_bound(program(tasks, 2)) > 0
