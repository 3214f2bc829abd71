"""What is simulated long can be ended by who started it; who does not end it sees no difference."""

import pytest

from meshwise.simulator.deadline import check_deadline, set_check
from meshwise.simulator.engine import step_time
from meshwise.simulator.engine.discrete_event import EVENTS_PER_CHECK, Environment


class Over(Exception):
    pass


def end() -> None:
    raise Over


def test_nobody_watches_after_the_watched_part_or_before() -> None:
    check_deadline()
    with pytest.raises(Over), set_check(end):
        check_deadline()
    check_deadline()


def test_events_are_ended_within_so_many() -> None:
    happened: list[int] = []
    environment, checks = Environment(), iter([None, None, Over])

    def check() -> None:
        if next(checks) is Over:
            raise Over

    def again(number: int) -> None:
        happened.append(number)
        environment.call(1, again, number + 1)  # for ever

    environment.call(0, again, 0)
    with pytest.raises(Over), set_check(check):
        environment.run()
    assert happened == list(range(2 * EVENTS_PER_CHECK))


def test_a_check_that_ends_nothing_changes_nothing() -> None:
    from meshwise.strategies.lowering.lower import lower

    from ..strategies.plans import any_case

    case = any_case(lambda among: list(among)[-1], 8)
    with set_check(lambda: None):
        watched = step_time(lower(*case.build()))
    assert watched == step_time(lower(*case.build()))
