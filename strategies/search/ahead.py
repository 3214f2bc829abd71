"""Plans whose order no evaluation changes, told of ahead."""

from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice
from math import inf

from strategies.evaluation import Evaluation
from strategies.plan import Plan
from strategies.search.driver import Upcoming

MOST_AHEAD = 1024
"""Plans that are told of before they are wanted."""


def ahead(plans: Iterator[Plan]) -> Generator[Plan | Upcoming, Evaluation, float]:
    """Yield every plan, and before it those that come after it; return the least step time, infinite without plans.

    No more are told of than were evaluated, so that the first result does not wait and a search that ends early has
    looked at few in vain.
    """
    best, evaluated = inf, 0
    waiting: deque[Plan] = deque()
    while True:
        more = tuple(islice(plans, max(1, min(evaluated, MOST_AHEAD)) - len(waiting)))
        if more:
            yield Upcoming(more)
        waiting.extend(more)
        if not waiting:
            return best
        best = min(best, (yield waiting.popleft()).step_time)
        evaluated += 1
