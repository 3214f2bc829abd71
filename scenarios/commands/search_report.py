"""A search as commands tell of it: the result as JSON-ready data and on a page, and why nothing was found."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshwise.scenarios.commands.page import write_page
from meshwise.scenarios.memory_forecast import forecast_plan
from meshwise.scenarios.scenario import Scenario
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.search.algorithms import PINNED_ALGORITHMS
from meshwise.strategies.search.driver import BUDGET, OUT_OF_TIME, SearchResult

if TYPE_CHECKING:
    from meshwise.strategies.evaluation import Trial
    from meshwise.strategies.plan.plan import Plan
    from meshwise.strategies.plan.problem import Problem

MOST_STAGES = 8
"""Stages whose cuts or layers are shown."""

NEGLIGIBLE = 1e-6
"""Largest gap that is shown as a proven optimum: solvers in floating point leave as much."""


def to_json(result: SearchResult, problem: "Problem") -> dict[str, Any]:
    """Return a search result as JSON-ready data."""
    proof = result.certificate
    return {
        "algorithm": result.algorithm,
        "best": _trial_to_json(result.best, problem),
        "nearest": _trial_to_json(result.nearest, problem),
        "evaluations": result.evaluations,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
        "scope": None if result.scope is None else asdict(result.scope),
        "certificate": None if proof is None else asdict(proof),
        "wall_time": result.wall_time,
        "interrupted": result.interrupted,
        "end": result.end,
        "history": [{"evaluations": n, "elapsed": elapsed, "best": best} for n, elapsed, best in result.history],
    }


def _trial_to_json(trial: "Trial | None", problem: "Problem") -> dict[str, Any] | None:
    if trial is None:
        return None
    fields = ("step_time", "peak_memory", "fits")
    evaluation = {name: getattr(trial.evaluation, name) for name in fields}
    forecast = forecast_plan(problem, trial.plan)
    evaluation["fits"] = trial.evaluation.fits and forecast.fits
    evaluation["out_of_memory"] = forecast.out_of_memory
    return {"plan": trial.plan.to_json(), "evaluation": evaluation, "elapsed": trial.elapsed}


def write_search_page(path: str, value: Scenario, results: list[SearchResult], chosen: "Plan | None" = None) -> None:
    """Write the page of ``chosen``, by default the fastest plan found, with all searches; nothing where none fits."""
    best_trials = [result.best for result in results if result.best is not None]
    if best_trials:
        plan = chosen or min(best_trials, key=lambda trial: trial.evaluation.step_time).plan
        write_page(path, value, value.simulate(plan), searches=[to_json(result, value.problem) for result in results])


def explain_failure(result: SearchResult) -> str:
    """Return why a search found no plan, for a search that leaves open whether one fits."""
    num_plans = f"{result.considered:,} plan{'' if result.considered == 1 else 's'}"
    if result.nearest is not None and result.nearest.evaluation.fits:
        return f"{result.algorithm} evaluated no plan that fits; one that does is {result.nearest.plan.describe()}"
    ends = {OUT_OF_TIME: "time ran out", BUDGET: "the budget was used"}
    if result.end in ends:
        return f"{ends[result.end]} after {num_plans} before one was found that fits; whether one does is not known"

    search_extent = f"{num_plans} of one stage" if result.algorithm in PINNED_ALGORITHMS else num_plans
    return f"{result.algorithm} looked at {search_extent} and found none that fits; whether another does is not known"


def describe_gap(gap: float | None) -> str:
    """Return in words by how much a plan may be slower than the best one; ``None`` where nothing is known."""
    if gap is None:
        return "none known"
    return "proven optimal" if gap <= NEGLIGIBLE else f"{gap:.1%}"


def describe_division(problem: "Problem", plan: "Plan") -> str | None:
    """Return in words the layers of every stage and the devices that run it; ``None`` where stages are even and alike.

    Of a plan with many different stages the first `MOST_STAGES` are told.
    """
    layers = {name for name, block in problem.graph.occurrences if block.layer}
    counts = [sum(name in layers for name in stage.blocks) for stage in plan.stages]
    cluster, positions = problem.cluster, plan.mesh.coordinates(PIPELINE)
    ranks = plan.placement or range(plan.mesh.num_ranks)
    names: list[dict[str, None]] = [{} for _ in range(plan.pipeline)]
    for position, device in zip(positions.tolist(), ranks, strict=True):
        names[position][cluster.accelerator_of(int(device)).name] = None
    if (max(counts) - min(counts) <= 1 and len(cluster.accelerators) == 1) or len(counts) == 1:
        return None
    words = [str(count) for count in counts]
    if len(cluster.accelerators) > 1:
        words = [
            f"{count} on {' and '.join(names[position])}"
            for count, position in zip(counts, plan.positions, strict=True)
        ]
    rest = f" and {len(words) - MOST_STAGES} more stages" if len(words) > MOST_STAGES else ""
    return f"{', '.join(words[:MOST_STAGES])}{rest}, from the first stage on"
