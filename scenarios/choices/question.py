"""What is asked of a training run: how much is trained, what is made least, and among which machines and batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from meshwise.scenarios.choices.spot import Reclaims
from meshwise.scenarios.files.amounts import (
    MAX_COUNTS,
    parse_amount,
    parse_counts,
    parse_dollars,
    parse_duration,
    parse_price,
)
from meshwise.scenarios.files.errors import suggest_nearest
from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.catalog.power import list_powers
from meshwise.strategies.search.objective import Machines, Objective, Rates, RunTerms

MAX_SETUPS = MAX_COUNTS
"""Most setups of one question."""

LEAST_GOODPUT = 1e-6
"""A run that fails before every checkpoint never ends; so that its bill has numbers, it ends after a million times."""

MAX_TOKENS = 1e18
"""Most tokens of a run: ten thousand times those of any run so far."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario on a number of nodes, with a batch size, and what its machine takes while it runs.

    ``offers`` are the rates at which the machine can be paid for: on demand, as spot machines, or both.
    """

    nodes: int
    scenario: Scenario
    offers: tuple[Rates, ...]

    __repr__ = brief_repr("nodes", "offers")

    @property
    def devices(self) -> int:
        """Devices that are paid for."""
        return self.offers[0].devices

    @property
    def batch(self) -> float:
        """Tokens of a batch."""
        training = self.scenario.problem.training
        return float(training.global_batch * training.sequence)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Parameters
    ----------
    objective
        What is made least.
    nodes
        Numbers of nodes to choose among; empty for the scenario's own.
    batches
        Global batch sizes in sequences to choose among; empty for the scenario's own.
    tokens
        Tokens that are trained with the scenario's batch; ``None`` for those of one step.
    critical_batch
        Tokens of the critical batch (`meshwise.strategies.search.objective.RunTerms`).
    deadline
        Seconds that the run may take.
    budget
        US dollars that it may cost.
    price
        US dollars an hour of one device on demand; ``None`` where it is not known.
    spot
        US dollars an hour of one device of a spot machine; ``None`` where none is offered.
    reclaim_every
        Mean time in s between reclaims of one spot node.
    compares
        Whether the best plan of every setup is asked for, and not the best setup alone.
    """

    objective: Objective = Objective.TIME
    nodes: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    tokens: float | None = None
    critical_batch: float = inf
    deadline: float = inf
    budget: float = inf
    price: float | None = None
    spot: float | None = None
    reclaim_every: float | None = None
    compares: bool = False

    def __post_init__(self) -> None:
        needs_price = [
            *(["minimize cost"] if self.objective is Objective.COST else []),
            *(["a budget"] if self.budget < inf else []),
        ]
        if needs_price and self.price is None and self.spot is None:
            raise ValueError(f"price: {needs_price[0]} needs the price of a device-hour, met none; as in 2.50")
        if self.spot is not None and self.reclaim_every is None:
            raise ValueError(
                "reclaim_every: spot machines are reclaimed, and their bill needs the mean time between reclaims of "
                "one node, met none; as in 8h"
            )
        if self.spot is None and self.reclaim_every is not None:
            raise ValueError("spot: reclaims are of spot machines and need their price, met none; as in 0.80")
        if self.tokens is None and min(self.deadline, self.budget) < inf:
            name = "deadline" if self.deadline < inf else "budget"
            raise ValueError(f"tokens: a {name} is about a whole run and needs its tokens, met none; as in 15T")
        limits = {"tokens": self.tokens, "critical_batch": self.critical_batch, "deadline": self.deadline}
        limits |= {"budget_usd": self.budget, "price": self.price}
        for name, value in (limits | {"spot": self.spot, "reclaim_every": self.reclaim_every}).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is more than 0, met {value:g}")
        if self.tokens is not None and self.tokens > MAX_TOKENS:
            raise ValueError(f"tokens is at most {MAX_TOKENS:g}, met {self.tokens:g}; nearest: {MAX_TOKENS:g}")

    def make_terms(self, scenario: Scenario) -> RunTerms:
        """Return the terms of the run that a scenario trains."""
        training = scenario.problem.training
        batch = float(training.global_batch * training.sequence)
        tokens = batch if self.tokens is None else self.tokens
        if tokens < batch:
            raise ValueError(f"tokens are at least those of a batch, {batch:,.0f}, met {tokens:,.0f}")
        return RunTerms(tokens, batch, self.critical_batch, self.deadline, self.budget)

    def list_setups(self, scenario: Scenario) -> tuple[Setup, ...]:
        """Return the setups to choose among.

        Raises
        ------
        ValueError
            Where the machine has a size of its own, or energy is asked of an accelerator without a figure of power.
        """
        num_setups = max(len(self.nodes), 1) * max(len(self.batches), 1)
        if num_setups > MAX_SETUPS:
            raise ValueError(f"nodes and batches make at most {MAX_SETUPS} setups, met {num_setups:,}")
        cluster = scenario.problem.cluster
        own_nodes, devices = cluster.num_nodes, cluster.first_node.devices
        most_nodes = max(self.nodes, default=own_nodes)
        if most_nodes != own_nodes and most_nodes * devices > MAX_DEVICES:
            raise ValueError(
                f"nodes: {most_nodes:,} of {devices} devices are more than {MAX_DEVICES:,}; "
                f"nearest: {MAX_DEVICES // devices:,}"
            )
        return tuple(
            self._make_setup(resize(scenario, nodes, batch), nodes)
            for nodes in self.nodes or (own_nodes,)
            for batch in self.batches or (scenario.problem.training.global_batch,)
        )

    def _make_setup(self, scenario: Scenario, nodes: int) -> Setup:
        cluster = scenario.problem.cluster
        powers = list_powers()
        watts = [powers.get(node.accelerator.name) for node, _ in cluster.nodes]
        unknown_names = [node.accelerator.name for node, _ in cluster.nodes if node.accelerator.name not in powers]
        if unknown_names and self.objective is Objective.ENERGY:
            raise ValueError(
                f"minimize energy: the catalog has no power of {unknown_names[0]}; it has those of {', '.join(powers)}"
            )
        power = sum(
            (watt or 0.0) * node.devices * count for watt, (node, count) in zip(watts, cluster.nodes, strict=True)
        )
        return Setup(nodes, scenario, tuple(self._list_offers(scenario, None if unknown_names else power)))

    def _list_offers(self, scenario: Scenario, power: float | None) -> Iterator[Rates]:
        """Yield the rates on demand, unless spot machines alone have a price, and those of spot machines."""
        devices = scenario.problem.cluster.num_devices
        if self.price is not None or self.spot is None:
            yield Rates(devices, None if self.price is None else self.price * devices, power)
        if self.reclaims is not None and self.spot is not None:
            goodput = max(self.reclaims.find_most_goodput(scenario), LEAST_GOODPUT)
            yield Rates(devices, self.spot * devices, power, Machines.SPOT, goodput)

    @property
    def reclaims(self) -> Reclaims | None:
        """The reclaims of spot machines; ``None`` where none are offered."""
        return None if self.reclaim_every is None else Reclaims(self.reclaim_every)


def resize(scenario: Scenario, nodes: int, batch: int) -> Scenario:
    """Return a scenario on another number of nodes, with another global batch; its own plan is for its own size."""
    problem = scenario.problem
    if (nodes, batch) == (problem.cluster.num_nodes, problem.training.global_batch):
        return scenario
    try:
        cluster = problem.cluster if nodes == problem.cluster.num_nodes else problem.cluster.with_size(nodes)
    except ValueError as error:
        raise ValueError(f"nodes: {error}; its own: {problem.cluster.num_nodes}") from None
    resized_problem = replace(problem, cluster=cluster, training=replace(problem.training, global_batch=batch))
    if problem.memory_margin != 1.0:
        resized_problem = with_margin(resized_problem)
    return replace(scenario, problem=resized_problem, plan=None)


def _parse_objective(value: Any) -> Objective:
    names = [str(objective) for objective in Objective]
    if value not in names:
        raise ValueError(f"is one of {', '.join(names)}, met {value!s:.40}{suggest_nearest(str(value)[:40], names)}")
    return Objective(value)


PARSERS: dict[str, tuple[str, Any]] = {
    "minimize": ("objective", _parse_objective),
    "nodes": ("nodes", parse_counts),
    "batch": ("batches", parse_counts),
    "tokens": ("tokens", parse_amount),
    "critical_batch": ("critical_batch", parse_amount),
    "deadline": ("deadline", parse_duration),
    "budget_usd": ("budget", parse_dollars),
    "price": ("price", parse_price),
    "spot": ("spot", parse_price),
    "reclaim_every": ("reclaim_every", parse_duration),
}
"""By the name of a field of files, an option and a keyword: the field of a question, and what reads its text."""


def make_question(values: dict[str, Any], *, compares: bool = False) -> Question | None:
    """Return the question that fields of a file, options or keywords ask, by their names in `PARSERS`.

    Values are text as people write it, or numbers: of times in s. ``compares`` asks for the best plan of every setup,
    as it is asked where nothing is to be made least. ``None`` where no field has a value.

    Raises
    ------
    ValueError
        Where a field has no value of its kind, or needs another; the message begins with the name of the field.
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        field, parser = PARSERS[name]
        is_seconds = parser is parse_duration and isinstance(value, int | float) and not isinstance(value, bool)
        try:
            fields[field] = float(value) if is_seconds else parser(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if not fields and not compares:
        return None
    return Question(**fields, compares=compares or "objective" not in fields)
