"""The journal of a search: a file of all its trials, from which a search that was killed continues.

It has one JSON object a line: the first identifies the search, the others are its trials in order::

    {"journal": "meshwise search", "version": 1, "algorithm": "mcmc", "options": {"seed": 0}, "problem": "5f..", ...}
    {"plan": "0c..", "step_time": 16.832741189139, "peak_memory": 80530636800.0, "fits": true, "elapsed": 3.1}

A plan is identified by the SHA-256 digest of its fields. Numbers are exact: Python writes the shortest text that reads
back as the same float. The step time of a plan that does not fit is null. Every line is appended in one write, so a
killed process leaves whole lines and at most one partial line, the last, which is dropped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.files.results import write
from meshwise.simulator.brief import to_full_text
from meshwise.simulator.files import JsonError, parse_json
from meshwise.strategies.evaluation import Evaluation, Trial
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.search.space import Space

if TYPE_CHECKING:
    from meshwise.strategies.search.proposals import SearchAlgorithm

VERSION = 1
MAX_LINE_BYTES = 2**16
MAX_TRIALS = 10_000_000
_REQUIREMENTS = {
    "journal": "a journal that `meshwise search --resume` writes",
    "version": "a version that this program reads",
    "algorithm": "the journal of the same algorithm",
    "options": "the journal of the same options and seed",
    "problem": "the journal of the same model, training step and cluster",
    "space": "the journal of the same limits and pins",
    "cost_model": "the journal of the same version of the simulator and the searches",
}
"""What a search that continues requires, by key of the first line."""
_TRIAL_KEYS = {"plan", "step_time", "peak_memory", "fits", "elapsed"}


class SearchJournal(AbstractContextManager["SearchJournal"]):
    """The trials in a file, to which more can be appended; the file is created if it is missing or empty.

    ``algorithm``, ``problem`` and ``space`` are those of the search that it belongs to.

    Raises
    ------
    ScenarioError
        Where the file is the journal of another search, or no journal.
    """

    def __init__(self, path: str | Path, algorithm: "SearchAlgorithm", problem: Problem, space: Space) -> None:
        self.path = Path(path)
        head = _build_head(algorithm, problem, space)
        num_bytes, self._trials = _read_journal(self.path, head)
        if num_bytes == 0:
            write(self.path, json.dumps(head) + "\n")
        try:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by __exit__
            if num_bytes:  # the next trial must not be appended to a partial last line
                self._file.truncate(num_bytes)
        except OSError as error:
            raise _build_unusable_error(self.path, error) from None

    def find_trial(self, plan: Plan) -> Trial | None:
        """Return the trial of ``plan`` that was in the file when it was opened, or ``None``."""
        entry = self._trials.get(_digest(plan))
        return None if entry is None else Trial(plan, *entry)

    def keep_trial(self, trial: Trial) -> None:
        """Append a trial; once this returns, the trial outlives the process."""
        evaluation = trial.evaluation
        line = {
            "plan": _digest(trial.plan).hex(),
            "step_time": evaluation.step_time if isfinite(evaluation.step_time) else None,
            "peak_memory": evaluation.peak_memory,
            "fits": evaluation.fits,
            "elapsed": trial.elapsed,
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._trials)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _build_head(algorithm: "SearchAlgorithm", problem: Problem, space: Space) -> dict[str, Any]:
    """Return the first line of the journal of a search."""
    options = asdict(algorithm)  # type: ignore[call-overload]
    return {
        "journal": "meshwise search",
        "version": VERSION,
        "algorithm": algorithm.name,
        "options": json.loads(json.dumps(options, default=str)),
        "problem": _digest(problem).hex(),
        "space": _digest(space).hex(),
        "cost_model": compute_cost_model_version(),
    }


def _digest(value: object) -> bytes:
    """Return the SHA-256 digest of all fields of a frozen value."""
    return sha256(to_full_text(value).encode()).digest()


@cache
def compute_cost_model_version() -> str:
    """Return the digest of all sources that determine evaluations and the order of trials: simulator and searches."""
    digest = sha256()
    for package in ("meshwise.simulator", "meshwise.strategies"):
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read_journal(path: Path, head: Mapping[str, Any]) -> tuple[int, dict[bytes, tuple[Evaluation, float]]]:
    """Return the number of bytes of whole lines of a journal, and its trials; 0 and none where the file is missing."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        with open(path, "rb") as file:
            return read_trials(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), str(path), head)
    except FileNotFoundError:
        return 0, {}
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ScenarioError) else _build_unusable_error(path, error) from None


def read_trials(
    lines: Iterable[bytes], file: str, head: Mapping[str, Any]
) -> tuple[int, dict[bytes, tuple[Evaluation, float]]]:
    """Return how many bytes of a journal are whole lines, and its trials; ``file`` is what messages call it."""
    trials: dict[bytes, tuple[Evaluation, float]] = {}
    num_bytes = 0
    for number, line in enumerate(lines, start=1):
        if number > 1 and not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
            break  # the partial last line that a killed process leaves
        if len(line) > MAX_LINE_BYTES or number > MAX_TRIALS:
            message = f"a journal has at most {MAX_TRIALS:,} lines of at most {MAX_LINE_BYTES:,} bytes, met more"
            raise ScenarioError((Fault(file, number, 1, "", message),))
        try:
            value = parse_json(line)
        except JsonError:
            value = None
        if number == 1:
            if faults := tuple(_list_head_faults(file, value if line.endswith(b"\n") else None, head)):
                raise ScenarioError(faults)
        elif _is_trial(value):
            step_time = inf if value["step_time"] is None else value["step_time"]
            evaluation = Evaluation(step_time, value["peak_memory"], value["fits"])
            trials.setdefault(bytes.fromhex(value["plan"]), (evaluation, value["elapsed"]))
        else:
            message = f"a line is a trial with {', '.join(sorted(_TRIAL_KEYS))}, met something else"
            raise ScenarioError((Fault(file, number, 1, "", message),))
        num_bytes += len(line)
    return num_bytes, trials


def _build_unusable_error(path: Path, error: Exception) -> ScenarioError:
    reason = getattr(error, "strerror", None) or str(error)
    return ScenarioError((Fault(str(path), 0, 0, "", f"the journal cannot be used: {reason}"),))


def _list_head_faults(file: str, value: Any, head: Mapping[str, Any]) -> Iterator[Fault]:
    if not isinstance(value, dict) or value.get("journal") != head["journal"]:
        yield Fault(file, 1, 1, "", f"to go on from it, a search needs {_REQUIREMENTS['journal']}; name another file")
        return
    for key, expected in head.items():
        if value.get(key) != expected:
            texts = [
                format_value(json.dumps(item) if isinstance(item, dict) else item)
                for item in (expected, value.get(key))
            ]
            is_digest = isinstance(expected, str) and len(expected) == 64
            met_text = "met another" if is_digest else "; met ".join(texts)
            yield Fault(file, 1, 1, key, f"a search goes on from {_REQUIREMENTS[key]}: {met_text}")


def _is_trial(value: Any) -> bool:
    """Return whether a value is a trial as `SearchJournal` writes it."""
    if not isinstance(value, dict) or set(value) != _TRIAL_KEYS or not isinstance(value["fits"], bool):
        return False
    plan, numbers = value["plan"], [value["peak_memory"], value["elapsed"]]
    numbers += [] if value["step_time"] is None else [value["step_time"]]
    return (
        isinstance(plan, str)
        and len(plan) == 64
        and set(plan) <= set("0123456789abcdef")
        and (value["step_time"] is not None or not value["fits"])
        # type() and not isinstance(): true and false are ints to Python
        and all(type(number) in (int, float) and 0 <= number < inf for number in numbers)
    )
