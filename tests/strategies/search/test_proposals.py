"""What an algorithm announces is what it proposes next."""

from meshwise.strategies.evaluation import Evaluation
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.search.proposals import Upcoming, propose_ahead
from meshwise.strategies.search.space import layouts

from ..problems import problem

PROBLEM = problem(layers=2, devices=2, batch=8)
PLANS = tuple(complete(PROBLEM, layout) for layout in layouts(PROBLEM))


def test_what_is_told_of_ahead_is_what_comes_next_and_no_more_than_was_evaluated() -> None:
    proposals = propose_ahead(iter(PLANS))
    told: list[Plan] = []
    asked: list[Plan] = []
    answer = None
    while True:
        try:
            item = next(proposals) if answer is None else proposals.send(answer)
        except StopIteration as end:
            assert end.value == 7.0
            break
        answer = None
        if isinstance(item, Upcoming):
            told.extend(item.plans)
        else:
            asked.append(item)
            assert item in told
            assert len(told) - len(asked) <= len(asked)
            answer = Evaluation(7.0 if len(asked) == 3 else 9.0, 1.0, True)
    assert tuple(told) == tuple(asked) == PLANS
