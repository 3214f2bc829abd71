"""Loads that vary, from the tables of a scenario and from files of measured lengths beside it.

A file of lengths has one length of a sample a line: a CSV file with a number in each line, or with a header that has
the columns ``length`` and perhaps ``count``; or JSON lines, objects with the same names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise.scenarios.files.errors import Fault, ScenarioError, format_value
from meshwise.scenarios.files.reader import MAX_FAULTS, Document, FieldPath
from meshwise.scenarios.inputs.named_files import resolve_reference
from meshwise.scenarios.schema.loads import MAX_SEQUENCE, LoadsTable, build_spread
from meshwise.scenarios.schema.model import ModelTable
from meshwise.scenarios.schema.scenario import TrainingTable
from meshwise.simulator.files import JsonError, parse_json
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.loads.lengths import Lengths
from meshwise.strategies.loads.levels import has_lengths
from meshwise.strategies.loads.loads import Loads, Stragglers
from meshwise.strategies.loads.spread import Spread

MAX_LENGTH_BYTES = 64 * 2**20
"""Most bytes of a file of lengths: some ten million samples."""
MAX_COUNT = 10**15
LENGTH, COUNT = "length", "count"
_FIELD: FieldPath = ("training", "sequence_lengths")


def build_loads(parts: dict[str, Any], spec: Model | None, document: Document, faults: list[Fault]) -> Loads | None:
    """Return what varies in a scenario, None where nothing does; add faults to ``faults``.

    ``parts`` are the tables of the scenario by field, as far as they are sound.
    """
    training: TrainingTable | None = parts.get("training")
    table: LoadsTable = parts.get("loads") or LoadsTable()
    num_faults = len(faults)
    lengths = None if training is None else _build_lengths(training, spec, document, faults)
    imbalance = _build_imbalance(parts.get("model"), spec, document, faults)
    stragglers = table.stragglers
    is_even = lengths is None and imbalance is None and stragglers is None
    if len(faults) > num_faults or (is_even and parts.get("loads") is None):
        return None
    if is_even:
        what = "training.sequence_lengths, an imbalance of experts as a distribution, or stragglers"
        faults.append(document.fault(("loads",), f"draws need a load that varies: {what}; met none"))
        return None
    return Loads(
        lengths=lengths,
        packing=(training and training.packing) or "none",
        order=(training and training.sequence_order) or "arrival",
        imbalance=imbalance,
        stragglers=None if stragglers is None else Stragglers(stragglers.share, build_spread(stragglers.slowdown)),
        draws=table.draws,
        seed=table.seed,
        quantile=table.quantile,
    )


def _build_lengths(
    training: TrainingTable, spec: Model | None, document: Document, faults: list[Fault]
) -> Lengths | None:
    stated = training.sequence_lengths
    if stated is None:
        return None
    if spec is not None and not has_lengths(spec):
        message = f"lengths need a model of sequences of any length, met {spec.name}; nearest: leave it out"
        faults.append(document.fault(_FIELD, message))
        return None
    if not isinstance(stated, str):
        return Lengths.from_weights((row.length, row.share) for row in stated)
    try:
        return read_lengths(resolve_reference(document, _FIELD, stated))
    except ScenarioError as error:
        faults.extend(error.faults)
    return None


def _build_imbalance(
    table: ModelTable | None, spec: Model | None, document: Document, faults: list[Fault]
) -> Spread | None:
    experts = table.transformer.experts if table is not None and table.transformer is not None else None
    if experts is None or isinstance(experts.imbalance, float) or not isinstance(spec, Transformer):
        return None
    spread = build_spread(experts.imbalance)
    most, highest = experts.count / experts.top_k, spread.find_quantile(0.95)
    if highest > most:
        message = f"95 % of loads are at most count({experts.count}) / top_k({experts.top_k}) = {most:g}, met "
        path: FieldPath = ("model", "transformer", "experts", "imbalance")
        faults.append(document.fault(path, f"{message}{highest:g}; nearest: {most:g}"))
    return spread


def read_lengths(path: Path) -> Lengths:
    """Return the lengths of samples in a CSV file or in JSON lines.

    Raises
    ------
    ScenarioError
        Where the file cannot be read, or lines have no length; it names the first `MAX_FAULTS` of them.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_LENGTH_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None
    if len(content) > MAX_LENGTH_BYTES:
        raise ScenarioError((Fault(str(path), 0, 0, "", f"a file has at most {MAX_LENGTH_BYTES} bytes, met more"),))
    lines = text.splitlines()
    is_json = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    counts: dict[int, float] = {}
    faults: list[Fault] = []
    for number, values in (_read_json_lines if is_json else _read_csv)(lines):
        row: list[int] = []
        for name, value, most in (
            (LENGTH, values.get(LENGTH), MAX_SEQUENCE),
            (COUNT, values.get(COUNT, 1), MAX_COUNT),
        ):
            try:
                row.append(_check_whole(name, value, most))
            except ValueError as error:
                faults.append(Fault(str(path), number, 1, "", str(error)))
        if len(faults) >= MAX_FAULTS:
            break
        if len(row) == 2:
            length, count = row
            counts[length] = counts.get(length, 0) + count
    if faults:
        raise ScenarioError(tuple(faults))
    if not counts:
        raise ScenarioError((Fault(str(path), 0, 0, "", "a file of lengths has one length a line, met none"),))
    return Lengths.from_counts(counts)


def _read_json_lines(lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of every line that is not empty, with its values."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = parse_json(line)
            except JsonError:
                value = line
            yield number, value if isinstance(value, dict) else {LENGTH: value}


def _read_csv(lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the same of a file with one length a line, or with the columns that its first line names."""
    names: list[str] = []
    for number, line in enumerate(lines, 1):
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if names:
            if any(cells):
                yield number, dict(zip(names, cells, strict=False))
        elif LENGTH in cells:
            names = cells
        elif any(cells):
            names = [LENGTH]
            yield number, {LENGTH: line.strip()}


def _check_whole(name: str, value: Any, most: int) -> int:
    """Return a value as a whole number from 1 to ``most``."""
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= most:
        columns = f" under a header with the column {LENGTH}" if name == LENGTH else ""
        raise ValueError(f"{name} is a whole number from 1 to {most}{columns}, met {format_value(value)}")
    return int(text)
