"""Runs of search algorithms on the problems of their comparison: all kinds of networks, 8 to 1,024 devices.

Every algorithm runs once per problem, a randomized one once per seed, with the same budget; its history says what it
had after fewer evaluations or seconds. One process makes all runs of a problem in turn. A later run looks up what an
earlier one simulated, and is charged the CPU time that the simulation took. Bounds and memory are computed again, with
the costs of operators at hand.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from time import process_time
from typing import Any, ClassVar, TypeVar, cast

from meshwise.scenarios.loader import load
from meshwise.scenarios.search_journal import compute_cost_model_version
from meshwise.simulator import catalog
from meshwise.simulator.brief import brief_repr
from meshwise.simulator.models.model import build
from meshwise.simulator.models.presets import MODELS
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.evaluation import CostModel, Evaluation, Resource
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.algorithms import LAYOUT_ALGORITHMS
from meshwise.strategies.search.proposals import Proposals, SearchAlgorithm
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import CORE, WIDE, Space, layouts


@dataclass(frozen=True, slots=True)
class Case:
    """A problem by name: a scenario of the library, or a problem of presets and sizes.

    Parameters
    ----------
    kind
        Its distinguishing property, such as ``tight memory``.
    library
        The library scenario, which replaces the fields after it, except ``batch`` where that is not 0.
    batch
        Sequences per step.
    wide
        Whether the space is `WIDE`, which has all that a layout can be, instead of `CORE`.
    """

    name: str
    kind: str
    library: str = ""
    model: str = ""
    cluster: str = ""
    nodes: int = 1
    batch: int = 0
    sequence: int = 2048
    precision: str = "bf16"
    wide: bool = False

    @property
    def space(self) -> Space:
        """The search space."""
        return WIDE if self.wide else CORE

    def problem(self) -> Problem:
        """Return the problem to search a plan for."""
        if self.library:
            library_problem = load(self.library).problem
            batch = self.batch or library_problem.training.global_batch
            return replace(library_problem, training=replace(library_problem.training, global_batch=batch))
        training = Training(self.batch, self.sequence, self.precision)
        graph = build(MODELS[self.model], self.sequence, training.dtype)
        return Problem(graph, catalog.cluster(self.cluster, self.nodes), training)


A100, H100, V100, B200 = "dgx-a100-80gb", "dgx-h100", "dgx-1-v100-32gb", "dgx-b200"
CASES = (
    Case("GPT-3 1.3B, 8 A100", "dense", "", "gpt3-1.3b", A100, 1, 32),
    Case("Llama 3 8B, 8 H100", "dense", "llama3-8b-8-h100", batch=32),
    Case("GPT-3 6.7B, 16 A100", "dense", "", "gpt3-6.7b", A100, 2, 32),
    Case("GPT-3 13B, 32 A100", "dense", "", "gpt3-13b", A100, 4, 32),
    Case("Llama 3 70B, 64 H100", "dense", "llama3-70b-64-h100"),
    Case("Llama 2 70B, 128 H100", "dense", "", "llama2-70b", H100, 16, 128, 4096),
    Case("GPT-3 175B, 256 H100", "dense", "", "gpt3-175b", H100, 32, 64),
    Case("GPT-3 175B, 1,024 A100", "dense", "gpt3-175b-1024-a100", batch=128),
    Case("Megatron 530B, 512 B200", "dense", "", "megatron-530b", B200, 64, 64),
    Case("DeepSeek-V2-Lite, 16 H100", "experts", "deepseek-v2-lite-16-h100", batch=32),
    Case("Mixtral 8x7B, 64 H100", "experts", "mixtral-8x7b-64-h100", batch=64),
    Case("Qwen3 30B-A3B, 32 H100", "experts", "qwen3-30b-a3b-32-h100", batch=32),
    Case("Mixtral 8x22B, 128 H100", "experts", "mixtral-8x22b-128-h100"),
    Case("BERT-large, 8 A100", "encoder", "bert-large-8-a100", batch=64),
    Case("T5-11B, 16 A100", "encoder and decoder", "t5-11b-16-a100", batch=32),
    Case("ViT-H/14, 8 A100", "vision", "vit-h-14-8-a100", batch=64),
    Case("ResNet-50, 8 A100", "vision", "resnet-50-8-a100", batch=64),
    Case("Stable Diffusion, 32 A100", "vision", "stable-diffusion-1.5-32-a100", batch=64),
    Case("DLRM DCNv2, 8 B300", "recommender", "dlrm-dcnv2-8-b300"),
    Case("Llama 2 13B, 8 A100", "tight memory", "", "llama2-13b", A100, 1, 32, 4096),
    Case("GPT-3 6.7B, 8 V100", "tight memory", "", "gpt3-6.7b", V100, 1, 32, precision="fp16"),
    Case("Llama 2 70B, 32 A100", "tight memory", "", "llama2-70b", A100, 4, 32, 4096),
    Case("GPT-3 13B, 32 V100", "slow network", "", "gpt3-13b", V100, 4, 32, precision="fp16"),
    Case("Llama 2 7B, 16 A100 at 100 Gb/s", "slow network", "", "llama2-7b", "gcp-a2-highgpu-8g", 2, 32, 4096),
    Case("Llama 2 70B, 16 H100 and 16 A100", "mixed devices", "llama2-70b-16-h100-16-a100"),
    Case("Llama 2 13B, 32 A100", "straggler", "llama2-13b-32-a100-straggler"),
    Case("Llama 2 13B, 64 TPU v4", "torus", "llama2-13b-64-tpu-v4"),
    Case("Llama 3 8B, 16 H100, 64k tokens", "long context", "", "llama3-8b", H100, 2, 16, 65536),
    Case("Llama 3 70B, 128 H100, 32k tokens", "long context", "", "llama3-70b", H100, 16, 32, 32768),
)
"""From small to large within a kind; the optimum of each is proven within seconds."""

WIDE_CASES = tuple(
    replace(case, wide=True)
    for case in CASES
    if case.name in ("GPT-3 1.3B, 8 A100", "Llama 2 13B, 8 A100", "DeepSeek-V2-Lite, 16 H100", "GPT-3 13B, 32 V100")
)
"""Problems whose wide spaces have 70,000 plans or more: too many for the budget, few enough for a proof."""


BUDGET = 10_000
"""Evaluations of a run."""
SECONDS = 60.0
"""CPU seconds of a run."""
MOST_PLANS = 20_000
"""Largest space, in plans, on which the exhaustive search runs."""
PROVING = "best_first"
"""The algorithm that proves the optimum."""
SLACK = 1e-9
"""Relative difference up to which step times count as equal."""

Point = tuple[int, float, float]
"""Evaluations, CPU seconds, and the best step time so far in s."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchRun:
    """A run of one algorithm on one problem.

    Parameters
    ----------
    seed
        ``None`` for a deterministic algorithm.
    seconds
        CPU time, with that of evaluations that were looked up from another run.
    lower_bound
        Proven lower bound of the step time in seconds; ``None`` without a proof.
    history
        A point for every improvement of the best plan.
    cold_seconds
        CPU time of the same search as the first on its problem, which computes the costs of operators; 0 where it was
        not timed.
    refused
        Why the algorithm does not search this problem; empty where it does.
    """

    case: str
    algorithm: str
    seed: int | None
    evaluations: int
    considered: int
    seconds: float
    lower_bound: float | None
    history: tuple[Point, ...]
    cold_seconds: float = 0.0
    refused: str = ""

    __repr__ = brief_repr()

    @property
    def best(self) -> float:
        """The best step time in s; infinite where no plan was found."""
        return self.history[-1][2] if self.history else inf

    @property
    def proven(self) -> bool:
        """Whether no plan is faster."""
        return self.lower_bound is not None and self.best <= self.lower_bound * (1 + SLACK)

    def best_after(self, limit: float, column: int = 0) -> float:
        """Return the best step time after so many evaluations (column 0) or CPU seconds (column 1)."""
        return min((point[2] for point in self.history if point[column] <= limit), default=inf)


class SharedCosts(SimulatedCost):
    """The simulated costs of one problem, which several searches share in turn, and the clock that charges each."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._answers: dict[tuple[str, Plan], tuple[Any, float]] = {}
        self._charged = 0.0

    def clock(self) -> float:
        """Return CPU seconds: of this process, plus those that looked-up answers took when they were computed."""
        return process_time() + self._charged

    def _answer_once(self, question: str, plan: Plan, work: Callable[[Plan], T]) -> T:
        if (question, plan) in self._answers:
            answer, duration = self._answers[question, plan]
            self._charged += duration
        else:
            start = process_time()
            answer = work(plan)
            self._answers[question, plan] = answer, process_time() - start
        return cast(T, answer)

    def forget(self) -> None:
        """Forget the answers for plans, and keep the costs of operators."""
        self._answers.clear()

    def evaluate(self, plan: Plan) -> Evaluation:
        """Return step time and memory."""
        return self._answer_once("evaluation", plan, super().evaluate)

    def resource_times(self, plan: Plan) -> dict[Resource, float]:
        """Return the seconds of a step that every resource takes."""
        return self._answer_once("spent", plan, super().resource_times)


@dataclass(frozen=True, slots=True)
class UntilTarget:
    """A randomized algorithm that ends once it has found the proven optimum ``target`` (step time in s)."""

    name: ClassVar[str] = "until"

    algorithm: SearchAlgorithm
    target: float

    def propose(self, problem: Problem, space: Space, costs: CostModel) -> Proposals:
        """Yield the proposals of the algorithm until one reaches the target."""
        proposals = self.algorithm.propose(problem, space, costs)
        answer = cast(Evaluation, None)  # what a generator is first sent
        with closing(proposals):
            while True:
                try:
                    proposal = proposals.send(answer)
                except StopIteration as end:
                    return cast("None", end.value)
                answer = yield proposal
                if isinstance(proposal, Plan) and answer.step_time <= self.target * (1 + SLACK):
                    return None


def run_case(
    case: Case, rounds: int, known_runs: Sequence[SearchRun] = (), names: Sequence[str] = tuple(LAYOUT_ALGORITHMS)
) -> Iterator[SearchRun]:
    """Yield the missing runs of every algorithm on one problem, the proof first, since others end at its optimum.

    Parameters
    ----------
    rounds
        Number of seeds of randomized algorithms.
    """
    known = {(run.algorithm, run.seed): run for run in known_runs if run.case == case.name}
    requested_runs = [
        (name, seed)
        for name in sorted(names, key=lambda name: name != PROVING)
        for seed in (range(rounds) if draws_seeds(name) else (None,))
    ]
    if all(run_key in known for run_key in requested_runs):
        return
    problem = case.problem()
    is_small = sum(1 for _ in islice(layouts(problem, case.space), MOST_PLANS + 1)) <= MOST_PLANS
    costs, target = SharedCosts(problem), 0.0
    start = process_time()
    search(
        LAYOUT_ALGORITHMS[PROVING](), problem, case.space, costs=costs
    )  # so that no run pays for the costs of operators
    costs.forget()
    cold_seconds = round(process_time() - start, 6)
    for name, seed in requested_runs:
        run = known.get((name, seed))
        if run is None and (is_small or name != "exhaustive"):
            run = _run_search(case, name, seed, problem, costs, target)
            yield replace(run, cold_seconds=cold_seconds) if name == PROVING else run
        if name == PROVING and run is not None and run.proven:
            target = run.best


def draws_seeds(name: str) -> bool:
    """Return whether an algorithm draws, and so has a seed."""
    return "seed" in {field.name for field in fields(LAYOUT_ALGORITHMS[name])}


def make_algorithm(name: str, seed: int | None) -> SearchAlgorithm:
    """Return an algorithm with its defaults; without a seed one that does not draw."""
    make = cast("Callable[..., SearchAlgorithm]", LAYOUT_ALGORITHMS[name])
    return make() if seed is None else make(seed=seed)


def _run_search(
    case: Case, name: str, seed: int | None, problem: Problem, costs: SharedCosts, target: float
) -> SearchRun:
    algorithm = make_algorithm(name, seed)
    if seed is not None:
        algorithm = UntilTarget(algorithm, target)
    limits: Any = {"budget": BUDGET, "seconds": None if name == PROVING else SECONDS}
    empty = partial(SearchRun, case.name, name, seed)
    try:
        result = search(algorithm, problem, case.space, costs=costs, clock=costs.clock, **limits)
    except ValueError as error:
        return empty(0, 0, 0.0, None, (), refused=str(error))
    if result.interrupted:
        raise KeyboardInterrupt
    points = tuple((count, round(elapsed, 6), time) for count, elapsed, time in result.history)
    return empty(result.evaluations, result.considered, round(result.wall_time, 6), result.lower_bound, points)


def read_runs(path: Path) -> list[SearchRun]:
    """Return the runs in a file; lines of other versions of the program and incomplete lines are dropped."""
    if not path.is_file():
        return []
    runs = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row.pop("version") == compute_cost_model_version():
                runs.append(SearchRun(**row | {"history": tuple(map(tuple, row["history"]))}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return runs


def to_line(run: SearchRun) -> str:
    """Return a run as one line of JSON."""
    return json.dumps({"version": compute_cost_model_version()} | asdict(run)) + "\n"
