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
from meshwise.executor.supported import unsupported
from meshwise.simulator.brief import brief
from meshwise.simulator.collective import Collective
from meshwise.simulator.engine import simulate
from meshwise.simulator.memory import CATEGORIES, MemoryProfile
from meshwise.simulator.models.transformer import Transformer
from meshwise.simulator.program import Category, Program
from meshwise.strategies.lowering import lower
from meshwise.strategies.lowering.communications import Communication, communications
from meshwise.strategies.plan.mesh import DATA, PIPELINE, REPLICA, data_ranks
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

PEAK = "peak"
"""The category of the line about the peak of a rank's memory."""
PEAK_TOLERANCE = 0.03
"""The largest difference of peaks, as a part of the oracle's: the simulator counts no norms' statistics, no scalars."""
SCALAR = 8
"""Messages of up to so many bytes are left out: sums of squares of a norm, which ranks may sum axis by axis."""
FRAMEWORK = "torch"
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
        same = self.simulated == self.oracle or not self.counted
        return same and self.simulated_bytes == self.oracle_bytes


@dataclass(frozen=True, slots=True)
class RankCheck:
    """The comparison of one rank, which stands for all ranks that do the same."""

    rank: int
    stages: tuple[int, ...]
    memory: tuple[MemoryLine, ...]
    traffic: tuple[TrafficLine, ...]

    __repr__ = brief()

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

    __repr__ = brief()

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


def check(
    spec: Transformer, problem: Problem, plan: Plan, progress: Callable[[str], None] = lambda text: None
) -> Check:
    """Return the comparison of simulator and oracle, for the first rank of every kind.

    Parameters
    ----------
    progress
        Called with the rank that comes next, as text.

    Raises
    ------
    ValueError
        Where the executor cannot build the plan, with every reason, the model has experts, or torch is missing.
    """
    if find_spec("torch") is None:
        raise ValueError("a check needs torch, which is not installed; pip install 'meshwise[exec]'")
    if reasons := unsupported(spec, problem.training, plan):
        raise ValueError("the executor cannot build this plan: " + "; ".join(reasons))
    if spec.experts is not None:
        raise ValueError(
            "a check takes a model without experts, met one with them: tensors without data do not say how many tokens "
            "an expert gets; nearest: the same model with a dense feed-forward layer"
        )
    problem = replace(problem, training=replace(problem.training, framework=FRAMEWORK))
    plan = as_run(plan)
    job, chosen = Job(spec, problem.training, plan, steps=1), roles(plan)
    program = lower(problem, plan)
    told = communications(problem, plan, chosen)
    profiles = _profiles(program)
    found = []
    for number, rank in enumerate(chosen, 1):
        progress(f"rank {rank}, {number} of {len(chosen)}")
        found.append(_rank_check(job, program, rank, profiles[rank], told[rank]))
    return Check(tuple(found))


def as_run(plan: Plan) -> Plan:
    """Return the plan as torch's ``fully_shard`` runs it, which shards states with ZeRO 2 and 3.

    With ZeRO 2 it also has only shards of parameters between steps: this is ZeRO 3 without resharding after forward. It
    gathers and reduces beneath computing, whatever the plan asks for.
    """
    if plan.zero < 2 or plan.shards == 1:
        return plan
    kept = plan.zero == 3 and plan.reshard_after_forward
    return replace(plan, zero=3, reshard_after_forward=kept, overlap_gradients=True)


def roles(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of every kind: for each pipeline position, size of microbatch, and whether it is a server.

    Nothing else decides what a rank does.
    """
    batches = data_ranks(plan.mesh)
    first: dict[tuple[int, int, bool], int] = {}
    for rank in range(plan.mesh.num_ranks):
        batch = int(batches[rank])
        size = plan.microbatch[batch] if isinstance(plan.microbatch, tuple) else plan.microbatch
        serves = plan.gradient_reduction != "all_reduce" and batch == 0
        first.setdefault((plan.mesh.coordinate(rank, PIPELINE), size, serves), rank)
    return tuple(sorted(first.values()))


def _profiles(program: Program) -> dict[int, MemoryProfile]:
    timeline = simulate(program, "longest_path")
    return {r: timeline.memory[i] for i, each in enumerate(timeline.rank_classes) for r in each.ranks}


def _rank_check(
    job: Job, program: Program, rank: int, profile: MemoryProfile, told: Counter[Communication]
) -> RankCheck:
    from meshwise.executor.check.oracle import rank_oracle  # imports torch

    found = rank_oracle(job, rank)
    members = next(rank_class for rank_class in program.rank_classes if rank in rank_class.ranks)
    kept = dict(zip(CATEGORIES, profile.usage[-1], strict=True))  # as the step ends
    memory = found.memory
    lines = (
        MemoryLine("parameters", kept[Category.PARAMETERS], memory.parameters, 0.0),
        MemoryLine("gradients", kept[Category.GRADIENTS], memory.gradients, 0.0),
        MemoryLine("optimizer", kept[Category.OPTIMIZER], memory.optimizer, 0.0),
        MemoryLine(PEAK, profile.peak, memory.peak, PEAK_TOLERANCE * memory.peak),
    )
    measured = Counter(
        Communication(message.kind, along(job.plan, message.ranks), float(message.size)) for message in found.messages
    )
    return RankCheck(rank, members.stages, lines, tuple(_traffic(told, measured, by_unit=job.plan.zero == 3)))


def along(plan: Plan, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the axes of the mesh along which the given ranks differ."""
    members = list(ranks)
    names = (axis.name for axis in plan.mesh.axes)
    return tuple(name for name in names if len({plan.mesh.coordinate(rank, name) for rank in members}) > 1)


def _traffic(
    simulated: Mapping[Communication, int], oracle: Mapping[Communication, int], *, by_unit: bool
) -> Iterator[TrafficLine]:
    """Yield a line for every kind of communication and every group; groups of one rank move nothing."""
    told, found = _totals(simulated), _totals(oracle)
    for kind, axes in sorted({*told, *found}):
        (number, size), (made, moved) = (each.get((kind, axes), (0, 0.0)) for each in (told, found))
        counted = by_unit or not {DATA, REPLICA} & set(axes)
        yield TrafficLine(kind, axes, number, made, size, moved, counted)


def _totals(found: Mapping[Communication, int]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Return the number of communications, and their bytes in all, by kind and group.

    A shift counts as a send: each rank sends to the next.
    """
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for each, count in found.items():
        if each.axes and each.size > SCALAR:
            kind = Collective.SEND if each.kind == Collective.SHIFT else each.kind
            before, size = totals.get((kind, each.axes), (0, 0.0))
            totals[kind, each.axes] = before + count, size + count * each.size
    return totals
