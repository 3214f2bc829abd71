"""What is asked of a training run: how much is trained, what is made least, and among which machines and batches."""

from dataclasses import dataclass, replace
from math import inf

from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.scenario import Scenario
from meshwise.scenarios.schema.cluster import MAX_DEVICES
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.catalog.power import list_powers
from meshwise.strategies.search.objective import Objective, Rates, RunTerms

MAX_SETUPS = 1000
"""Most setups of one question."""

MAX_TOKENS = 1e18
"""Most tokens of a run: ten thousand times those of any run so far."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario on a number of nodes, with a batch size, and what its machine takes while it runs."""

    nodes: int
    scenario: Scenario
    rates: Rates

    __repr__ = brief_repr("nodes", "rates")

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
        US dollars an hour of one device; ``None`` where it is not known.
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
    compares: bool = False

    def __post_init__(self) -> None:
        needs_price = [
            *(["minimize cost"] if self.objective is Objective.COST else []),
            *(["a budget"] if self.budget < inf else []),
        ]
        if needs_price and self.price is None:
            raise ValueError(f"price: {needs_price[0]} needs the price of a device-hour, met none; as in --price 2.50")
        if self.tokens is None and min(self.deadline, self.budget) < inf:
            name = "deadline" if self.deadline < inf else "budget"
            raise ValueError(
                f"tokens: a {name} is about a whole run and needs its tokens, met none; as in --tokens 15T"
            )
        limits = {"tokens": self.tokens, "critical_batch": self.critical_batch, "deadline": self.deadline}
        for name, value in (limits | {"budget": self.budget, "price": self.price}).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is more than 0, met {value:g}")
        if self.tokens is not None and self.tokens > MAX_TOKENS:
            raise ValueError(f"tokens are at most {MAX_TOKENS:g}, met {self.tokens:g}; nearest: {MAX_TOKENS:g}")

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
        price = None if self.price is None else self.price * cluster.num_devices
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
        return Setup(nodes, scenario, Rates(cluster.num_devices, price, None if unknown_names else power))


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
