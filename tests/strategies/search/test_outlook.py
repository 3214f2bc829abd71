from math import inf

import pytest

from meshwise.strategies.plan.completion import complete
from meshwise.strategies.search import layouts
from meshwise.strategies.search.decisions import Outlooks

from .small_problems import FakeCost, small_problem

PROBLEM = small_problem()


class Asked(FakeCost):
    """Memory of four times what the device has, and how often it was asked for."""

    times = 0

    def peak_memory(self, plan: object) -> float:
        self.times += 1
        return 4e9

    def fits(self, plan: object) -> bool:
        return False


def test_a_shortfall_by_hand() -> None:
    outlooks, layout = Outlooks(PROBLEM, costs := Asked()), next(layouts(PROBLEM))
    assert outlooks[layout].shortfall == pytest.approx(0.75)  # 1e9 of 4e9 bytes are there: 3/4 are missing
    assert not outlooks[layout].fits
    assert costs.times == 1


def test_what_fits_lacks_nothing_and_has_its_bound() -> None:
    costs = FakeCost(capacity=0.5)
    outlooks = Outlooks(PROBLEM, costs)
    for layout in layouts(PROBLEM):
        plan = complete(PROBLEM, layout)
        assert outlooks[layout].fits == costs.fits(plan)
        assert outlooks[layout] == ((costs.bound(plan), 0) if costs.fits(plan) else (inf, 0))  # 1e9 bytes are there
