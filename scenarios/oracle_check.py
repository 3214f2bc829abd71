"""Compares the simulator with the executor's own model: memory and communications of one rank of every kind.

Both follow the same plan with torch's conventions. The oracle, `meshwise.executor.check.oracle`, knows nothing of the
simulator.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

from meshwise.executor.job import Job
from meshwise.executor.supported import find_unsupported
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import Category, Program
from meshwise.strategies.lowering.communications import Communication, communications
from meshwise.strategies.lowering.lower import lower
from meshwise.strategies.plan.mesh import DATA, PIPELINE, REPLICA, list_data_ranks
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

PEAK = "peak"
"""The category of the line about the peak of a rank's memory."""
PEAK_TOLERANCE = 0.03
"""The largest difference of peaks, as a part of the oracle's: the simulator counts no norms' statistics, no scalars."""
SCALAR = 8
"""Messages of up to so many bytes are left out: sums of squares of a norm, which ranks may sum axis by axis."""
FRAMEWORK = "execute"
"""The framework whose conventions the executor follows."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes of a category on one rank, and the largest difference that is allowed."""

    category: str
    simulated: float
    oracle: float
    allowed: float

    @property
    def equal(self) -> bool:
        """Whether the difference is allowed."""
        return abs(self.simulated - self.oracle) <= self.allowed


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """Communications of a kind among ranks along some axes: their number, and their bytes in all.

    ``counted`` is false where torch chooses the pieces in which gradients and parameters move among data ranks: stages,
    or buckets that DistributedDataParallel fills in the order of the gradients in its first step.
    """

    kind: str
    axes: tuple[str, ...]
    simulated: int
    oracle: int
    simulated_bytes: float
    oracle_bytes: float
    counted: bool = True

    @property
    def equal(self) -> bool:
        """Whether the bytes are equal and, where ``counted``, the numbers."""
        is_same_count = self.simulated == self.oracle or not self.counted
        return is_same_count and self.simulated_bytes == self.oracle_bytes


@dataclass(frozen=True, slots=True)
class RankCheck:
    """The comparison of one rank, which stands for all ranks that do the same."""

    rank: int
    stages: tuple[int, ...]
    memory: tuple[MemoryLine, ...]
    traffic: tuple[TrafficLine, ...]

    __repr__ = brief_repr()

    @property
    def equal(self) -> bool:
        """Whether every line is equal."""
        return all(line.equal for line in self.memory) and all(line.equal for line in self.traffic)

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON-ready data."""
        return {
            "rank": self.rank,
            "stages": list(self.stages),
            "memory": [asdict(line) | {"equal": line.equal} for line in self.memory],
            "collectives": [asdict(line) | {"axes": list(line.axes), "equal": line.equal} for line in self.traffic],
            "equal": self.equal,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of a plan: one rank of every kind."""

    ranks: tuple[RankCheck, ...]

    __repr__ = brief_repr()

    @property
    def equal(self) -> bool:
        """Whether every rank is equal."""
        return all(rank.equal for rank in self.ranks)

    @property
    def peak(self) -> float:
        """The peak of the fullest rank in bytes, by the oracle."""
        return max(line.oracle for rank in self.ranks for line in rank.memory if line.category == PEAK)

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON-ready data."""
        return {
            "equal": self.equal,
            "peak_tolerance": PEAK_TOLERANCE,
            "framework": FRAMEWORK,
            "ranks": [rank.to_json() for rank in self.ranks],
        }


def check_plan(
    spec: Transformer, problem: Problem, plan: Plan, progress: Callable[[str], None] = lambda text: None
) -> Check:
    """Return the comparison of simulator and oracle, for the first rank of every kind.

    ``progress`` is called with the rank that comes next, as text.

    Raises
    ------
    ValueError
        Where the executor cannot build the plan, with every reason, the model has experts, or torch is missing.
    """
    if find_spec("torch") is None:
        raise ValueError("a check needs torch, which is not installed; pip install 'meshwise[exec]'")
    if reasons := find_unsupported(spec, problem.training, plan):
        raise ValueError("the executor cannot build this plan: " + "; ".join(reasons))
    if spec.experts is not None:
        raise ValueError(
            "a check takes a model without experts, met one with them: tensors without data do not say how many tokens "
            "an expert gets; nearest: the same model with a dense feed-forward layer"
        )
    problem = replace(problem, training=replace(problem.training, framework=FRAMEWORK))
    plan = to_torch_plan(plan)
    job, ranks = Job(spec, problem.training, plan, steps=1), list_roles(plan)
    program = lower(problem, plan)
    predictions = communications(problem, plan, ranks)
    profiles = _simulate_memory(program)
    checks = []
    for number, rank in enumerate(ranks, 1):
        progress(f"rank {rank}, {number} of {len(ranks)}")
        checks.append(_check_rank(job, program, rank, profiles[rank], predictions[rank]))
    return Check(tuple(checks))


def to_torch_plan(plan: Plan) -> Plan:
    """Return the plan as torch's ``fully_shard`` runs it, which shards states with ZeRO 2 and 3.

    With ZeRO 2 it also has only shards of parameters between steps: this is ZeRO 3 without resharding after forward. It
    gathers and reduces beneath computing, whatever the plan asks for.
    """
    if plan.zero < 2 or plan.shards == 1:
        return plan
    reshard = plan.zero == 3 and plan.reshard_after_forward
    return replace(plan, zero=3, reshard_after_forward=reshard, overlap_gradients=True)


def list_roles(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of every kind: for each pipeline position, size of microbatch, and whether it is a server.

    Nothing else decides what a rank does.
    """
    batches = list_data_ranks(plan.mesh)
    first_ranks: dict[tuple[int, int, bool], int] = {}
    for rank in range(plan.mesh.num_ranks):
        batch = int(batches[rank])
        size = plan.microbatch[batch] if isinstance(plan.microbatch, tuple) else plan.microbatch
        is_server = plan.gradient_reduction != "all_reduce" and batch == 0
        first_ranks.setdefault((plan.mesh.coordinate(rank, PIPELINE), size, is_server), rank)
    return tuple(sorted(first_ranks.values()))


def _simulate_memory(program: Program) -> dict[int, MemoryProfile]:
    timeline = simulate(program, "longest_path")
    return {
        rank: timeline.memory[index]
        for index, rank_class in enumerate(timeline.rank_classes)
        for rank in rank_class.ranks
    }


def _check_rank(
    job: Job, program: Program, rank: int, profile: MemoryProfile, predictions: Counter[Communication]
) -> RankCheck:
    from meshwise.executor.check.oracle import rank_oracle  # imports torch

    oracle = rank_oracle(job, rank)
    own_class = next(rank_class for rank_class in program.rank_classes if rank in rank_class.ranks)
    usage = dict(zip(CATEGORIES, profile.usage[-1], strict=True))  # as the step ends
    memory = oracle.memory
    lines = (
        MemoryLine("parameters", usage[Category.PARAMETERS], memory.parameters, 0.0),
        MemoryLine("gradients", usage[Category.GRADIENTS], memory.gradients, 0.0),
        MemoryLine("optimizer", usage[Category.OPTIMIZER], memory.optimizer, 0.0),
        MemoryLine(PEAK, profile.peak, memory.peak, PEAK_TOLERANCE * memory.peak),
    )
    oracle_messages = Counter(
        Communication(message.kind, find_axes(job.plan, message.ranks), float(message.size))
        for message in oracle.messages
    )
    return RankCheck(
        rank, own_class.stages, lines, tuple(_compare_traffic(predictions, oracle_messages, by_unit=job.plan.zero == 3))
    )


def find_axes(plan: Plan, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the axes of the mesh along which the given ranks differ."""
    members = list(ranks)
    names = (axis.name for axis in plan.mesh.axes)
    return tuple(name for name in names if len({plan.mesh.coordinate(rank, name) for rank in members}) > 1)


def _compare_traffic(
    simulated: Mapping[Communication, int], oracle: Mapping[Communication, int], *, by_unit: bool
) -> Iterator[TrafficLine]:
    """Yield a line for every kind of communication and every group; groups of one rank move nothing."""
    predicted_totals, oracle_totals = _sum_totals(simulated), _sum_totals(oracle)
    for kind, axes in sorted({*predicted_totals, *oracle_totals}):
        (simulated_count, simulated_bytes), (oracle_count, oracle_size) = (
            totals.get((kind, axes), (0, 0.0)) for totals in (predicted_totals, oracle_totals)
        )
        is_counted = by_unit or not {DATA, REPLICA} & set(axes)
        yield TrafficLine(kind, axes, simulated_count, oracle_count, simulated_bytes, oracle_size, is_counted)


def _sum_totals(counts: Mapping[Communication, int]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Return the number of communications, and their bytes in all, by kind and group.

    A shift counts as a send: each rank sends to the next.
    """
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for communication, count in counts.items():
        if communication.axes and communication.size > SCALAR:
            kind = Collective.SEND if communication.kind == Collective.SHIFT else communication.kind
            total_count, size = totals.get((kind, communication.axes), (0, 0.0))
            totals[kind, communication.axes] = total_count + count, size + count * communication.size
    return totals
