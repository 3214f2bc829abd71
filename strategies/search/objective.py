"""What a training run takes at a step time, and the figure that a choice of machine makes least.

References
----------
.. [1] McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training", arXiv 1812.06162, equation 2.11:
   ``(S / S_min - 1) (E / E_min - 1) = 1`` for ``S`` steps and ``E`` samples to the same loss; with samples
   ``E = B S`` and the critical batch ``E_min / S_min`` the samples are ``E_min (1 + B / critical)``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KILOWATT_HOUR = 3.6e6
_ROUNDED_UP = 1 + 1e-12
"""A run that takes just what its terms allow keeps them, whatever the last digit."""


class Machines(StrEnum):
    """How machines are paid for: those on demand stay, those on the spot market may be reclaimed."""

    ON_DEMAND = "on demand"
    SPOT = "spot"


class Objective(StrEnum):
    """What is made least."""

    TIME = "time"
    COST = "cost"
    DEVICES = "devices"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine takes while it runs.

    Parameters
    ----------
    devices
        The number of devices that are paid for, idle ones too.
    price
        US dollars an hour for all of them; ``None`` where no price is known.
    power
        Watt of all of them; ``None`` where no figure is known.
    machines
        How they are paid for.
    goodput
        The fraction of its time that reclaims leave to training at most: no run on them has a higher goodput.
    """

    devices: int
    price: float | None = None
    power: float | None = None
    machines: Machines = Machines.ON_DEMAND
    goodput: float = 1.0


@dataclass(frozen=True, slots=True)
class Bill:
    """What a training run takes: seconds, devices, US dollars and kilowatt-hours.

    ``goodput`` is the fraction of the seconds that failures and checkpoints leave to training.
    """

    step_time: float
    steps: float
    seconds: float
    devices: int
    cost: float | None
    energy: float | None
    goodput: float = 1.0
    machines: Machines = Machines.ON_DEMAND

    def find_value(self, objective: Objective) -> float:
        """Return the figure that an objective makes least; of devices, the number."""
        if objective is Objective.TIME:
            return self.seconds
        if objective is Objective.DEVICES:
            return float(self.devices)
        value = self.cost if objective is Objective.COST else self.energy
        assert value is not None, "rates were checked for what the objective needs"
        return value

    def rank(self, objective: Objective) -> tuple[float, float]:
        """Return a key by which bills are sorted: the objective, then the seconds."""
        return self.find_value(objective), self.seconds


@dataclass(frozen=True, slots=True)
class RunTerms:
    """How much is trained, and what that may take.

    Parameters
    ----------
    tokens
        Tokens that are trained with batches of ``stated_batch`` tokens.
    stated_batch
        Tokens of the batch for which ``tokens`` are stated.
    critical_batch
        Tokens of the batch at which twice the tokens are needed of what small batches need [1]_; infinite where the
        size of a batch changes nothing.
    deadline
        Seconds that the run may take.
    budget
        US dollars that it may cost.
    """

    tokens: float
    stated_batch: float
    critical_batch: float = inf
    deadline: float = inf
    budget: float = inf

    def count_steps(self, batch: float) -> float:
        """Return the steps of a run with batches of ``batch`` tokens, which need not be whole.

        Twice the critical batch needs ``(1 + 2) / (1 + 1)`` of the tokens of the critical batch:

        >>> RunTerms(tokens=1e9, stated_batch=1e6, critical_batch=1e6).count_steps(2e6)
        750.0
        """
        penalty = (1 + batch / self.critical_batch) / (1 + self.stated_batch / self.critical_batch)
        return self.tokens * penalty / batch

    def write_bill(self, rates: Rates, batch: float, step_time: float, goodput: float | None = None) -> Bill:
        """Return what the run takes at a step time in seconds; ``goodput`` is by default the most of the rates.

        8 devices of 2 dollars an hour for 1000 steps of 3.6 s, an hour:

        >>> RunTerms(tokens=1e6, stated_batch=1e3).write_bill(Rates(8, price=16.0), 1e3, 3.6).cost
        16.0
        """
        steps, goodput = self.count_steps(batch), rates.goodput if goodput is None else goodput
        seconds = steps * step_time / goodput
        return Bill(
            step_time=step_time,
            steps=steps,
            seconds=seconds,
            devices=rates.devices,
            cost=None if rates.price is None else rates.price * seconds / SECONDS_PER_HOUR,
            energy=None if rates.power is None else rates.power * seconds / JOULES_PER_KILOWATT_HOUR,
            goodput=goodput,
            machines=rates.machines,
        )

    def is_met(self, bill: Bill) -> bool:
        """Return whether a bill keeps the deadline and the budget."""
        return bill.seconds <= _ROUNDED_UP * self.deadline and (bill.cost or 0.0) <= _ROUNDED_UP * self.budget

    def find_excess(self, bill: Bill) -> float:
        """Return by which factor a bill is above the deadline or the budget, whichever it misses by more."""
        return max(bill.seconds / self.deadline, (bill.cost or 0.0) / self.budget)

    def choose_bill(self, bills: Iterable[Bill], objective: Objective) -> Bill:
        """Return the best of several bills that keep the terms; where none does, the one that comes nearest."""
        known_bills = list(bills)
        kept_bills = [bill for bill in known_bills if self.is_met(bill)]
        if kept_bills:
            return min(kept_bills, key=lambda bill: bill.rank(objective))
        return min(known_bills, key=self.find_excess)

    def find_cutoff(self, rates: Rates, batch: float, objective: Objective, best: Bill | None) -> float:
        """Return the step time in seconds from which no plan keeps the terms or is better than the best bill so far.

        No goodput is above that of the rates, so that a plan that is slower than this with it is so with any other.
        """
        unit = self.write_bill(rates, batch, 1.0)  # what a run of steps of one second takes; all figures are linear
        cutoff = _ROUNDED_UP * self.deadline / unit.seconds
        if unit.cost:
            cutoff = min(cutoff, _ROUNDED_UP * self.budget / unit.cost)
        if best is None:
            return cutoff
        if objective is Objective.DEVICES:
            if rates.devices != best.devices:
                return cutoff if rates.devices < best.devices else 0.0
            return min(cutoff, best.seconds / unit.seconds)
        return min(cutoff, best.find_value(objective) / unit.find_value(objective))
