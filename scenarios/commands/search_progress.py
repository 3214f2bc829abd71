"""The progress of a search on stderr: a line that overwrites itself, or one JSON document a line."""

import json
import sys
from collections.abc import Callable
from typing import Any

from meshwise.scenarios.choices.question import Setup
from meshwise.scenarios.console import Ticker
from meshwise.simulator.units import format_duration, format_time
from meshwise.strategies.search.driver import Progress
from meshwise.strategies.search.objective import Bill

JSON = "json"


def check_progress(value: str | None) -> None:
    """Raise ``ValueError`` where ``--progress`` has another value than json."""
    if value not in (None, JSON):
        raise ValueError(f"--progress is json, or left out for a line on a terminal; met {value:.40}")


def follow_search(ticker: Ticker) -> Callable[[Progress], None]:
    """Return a callback that shows the progress of a search: the best plan so far, what is proven, and the time."""

    def follow(progress: Progress) -> None:
        ticker(describe_progress(progress))

    return follow


def describe_progress(progress: Progress) -> str:
    """Return the progress of a search in one line."""
    words = [format_time(progress.best.evaluation.step_time) if progress.best else "none fits yet"]
    if progress.lower_bound is not None:
        words.append(f"bound {format_time(progress.lower_bound)}")
    if progress.gap is not None:
        words.append(f"gap {progress.gap:.1%}")
    remaining_text = f" ({progress.seconds_left:.0f} s left)" if progress.seconds_left is not None else ""
    plans_text = f"{progress.considered:,} plans, {progress.evaluations:,} simulated"
    return f"best {', '.join(words)}; {plans_text}, {progress.elapsed:.1f} s{remaining_text}"


def print_json(progress: Progress) -> None:
    """Print the progress of a search as one line of JSON on stderr."""
    _print_line(to_document(progress))


def to_document(progress: Progress) -> dict[str, Any]:
    """Return the progress of a search as JSON-ready data; ``share`` is the fraction of its time or budget."""
    left = progress.seconds_left
    return {
        "phase": "first plan" if progress.best is None else "proof" if progress.lower_bound else "plans",
        "elapsed": progress.elapsed,
        "best": None if progress.best is None else progress.best.evaluation.step_time,
        "plan": None if progress.best is None else progress.best.plan.describe(),
        "bound": progress.lower_bound,
        "gap": progress.gap,
        "share": None if left is None else progress.elapsed / max(progress.elapsed + left, 1e-9),
        "considered": progress.considered,
        "simulated": progress.evaluations,
    }


def print_end(document: dict[str, Any]) -> None:
    """Print the last line, which says how a search ended."""
    _print_line({"phase": "end"} | document)


def _print_line(document: dict[str, Any]) -> None:
    print(json.dumps(document), file=sys.stderr, flush=True)


def tell_setup(kind: str | None, ticker: Ticker) -> Callable[[Setup, Bill | None, Progress], None]:
    """Return a callback that tells which setup is searched, and how far; times are those of the setup's search."""

    def tell(setup: Setup, best: Bill | None, progress: Progress) -> None:
        batch = setup.scenario.problem.training.global_batch
        if kind == JSON:
            figures = None if best is None else {"devices": best.devices, "seconds": best.seconds, "cost": best.cost}
            _print_line({"nodes": setup.nodes, "global_batch": batch, "best_setup": figures} | to_document(progress))
        else:
            best_text = (
                "" if best is None else f", best so far {best.devices:,} devices, {format_duration(best.seconds)}"
            )
            ticker(f"{setup.nodes:,} nodes, batch {batch:,}: {describe_progress(progress)}{best_text}")

    return tell
