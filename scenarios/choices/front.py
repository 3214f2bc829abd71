"""The front of setups: those that no other beats in time, devices, money and memory at once.

A setup stands for its fastest plan, once for each way to pay for its machine. Where that plan is not proven to be the
fastest, a plan that nobody found may be as fast as the bound and need any memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from meshwise.scenarios.choices.setup_choice import Choice, SetupAnswer
from meshwise.scenarios.intervals import find_step_interval
from meshwise.strategies.search.objective import Bill

Figures = tuple[float, ...]
"""What is to be small: seconds, devices, US dollars and bytes."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A setup with one of its bills.

    Parameters
    ----------
    peak_memory
        Bytes of the fullest device.
    is_on_front
        Whether no other point is at least as good in all figures and better in one.
    is_proven
        Whether no plan that was not found can change that.
    interval
        Seconds of the run between which 90 % of runs like it are.
    """

    answer: SetupAnswer
    bill: Bill
    peak_memory: float
    is_on_front: bool
    is_proven: bool
    interval: tuple[float, float]

    @property
    def money_interval(self) -> tuple[float, float] | None:
        """What it costs at the ends of that interval, in US dollars."""
        low, high = self.interval
        rate = None if self.bill.cost is None else self.bill.cost / self.bill.seconds
        return None if rate is None else (rate * low, rate * high)


def dominates(figures: Figures, other: Figures) -> bool:
    """Return whether figures are nowhere larger than others, and somewhere smaller.

    >>> dominates((1.0, 8.0), (2.0, 8.0)), dominates((1.0, 8.0), (1.0, 8.0)), dominates((1.0, 9.0), (2.0, 8.0))
    (True, False, False)
    """
    return all(a <= b for a, b in zip(figures, other, strict=True)) and figures != other


def list_front_points(choice: Choice) -> tuple[FrontPoint, ...]:
    """Return a point for every bill that keeps the terms, by time; those on the front are marked."""
    rows = [
        (answer, bill, peak, _list_figures(bill, peak))
        for answer in choice.answers
        if answer.best is not None
        for bill, peak in ((bill, answer.best.evaluation.peak_memory) for bill in answer.bills)
        if choice.terms.is_met(bill)
    ]
    possible = list(_list_possible_figures(choice))
    points = []
    for answer, bill, peak, figures in rows:
        is_on_front = not any(dominates(other, figures) for *_, other in rows)
        # a point that another beats is off the front, whatever is found, if its own plan is the fastest
        is_open = is_on_front and any(other is not answer and dominates(least, figures) for other, least in possible)
        interval = _find_interval(answer, bill)
        points.append(FrontPoint(answer, bill, peak, is_on_front, answer.is_proven and not is_open, interval))
    return tuple(sorted(points, key=lambda point: (point.bill.seconds, point.bill.devices, point.bill.cost or 0.0)))


def _list_figures(bill: Bill, peak_memory: float) -> Figures:
    return bill.seconds, float(bill.devices), bill.cost or 0.0, peak_memory


def _list_possible_figures(choice: Choice) -> Iterator[tuple[SetupAnswer, Figures]]:
    """Yield the least figures of plans of setups whose fastest plan is not proven: nothing is known of their memory."""
    for answer in choice.answers:
        if answer.bound < inf and not answer.is_proven:
            for bill in choice.list_possible_bills(answer):
                yield answer, _list_figures(bill, 0.0)


def _find_interval(answer: SetupAnswer, bill: Bill) -> tuple[float, float]:
    scenario = answer.setup.scenario
    low, high = find_step_interval(scenario.problem, bill.step_time, scenario.assumptions)
    return bill.seconds * low / bill.step_time, bill.seconds * high / bill.step_time
