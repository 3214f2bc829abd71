"""Fits of accelerators and links to files of published timings, of kernels or collectives, and tables of errors."""

import datetime
import json
from collections.abc import Callable, Sequence

from meshwise.scenarios.files.errors import Fault, ScenarioError, suggest_nearest
from meshwise.simulator.calibration.collective_rows import CollectiveRow
from meshwise.simulator.calibration.collective_rows import Skipped as SkippedCollective
from meshwise.simulator.calibration.collective_rows import read_rows as read_collective_rows
from meshwise.simulator.calibration.evidence import (
    Agreement,
    DataSheets,
    Evidence,
    HoldOut,
    find_agreements,
    to_document,
)
from meshwise.simulator.calibration.kernel_rows import MAX_ROW_BYTES, Row, RowError, Skipped, read_rows
from meshwise.simulator.calibration.link_fits import LinkError, LinkFits, fit_links, measure_errors
from meshwise.simulator.calibration.noise import NoiseFloor
from meshwise.simulator.catalog import data_sheet_accelerator

INTRODUCTION = """# Kernels: predicted against measured

Written by `meshwise calibrate --from measured_kernels.jsonl --report docs/kernel_accuracy.md`. An error is
predicted over measured time, minus 1: its size's mean, median and 90 % quantile, and its median as bias.

- *fitted*: the publisher's rows took part in the fit.
- *left out*: parameters, and the factor between a burst and sustained work, are fitted to all other publishers of all
  accelerators; the publisher is predicted with nothing of its own. A dash: nobody else has such kernels.
- All rows count, the smallest too.

What is not reached, and why (floors are those of the next table):

- H100 products without ai-dynamo/aiconfigurator: what is left is one serving profiler in steps of 1 us, and 58 products
  timed from the host. On the same shapes they are as far from the publisher left out; kernels below 10 us, a fifth of
  the rows, are 40 % off.
- B200 products without MooreThreads/SimuMax: nothing else was timed for longer than clocks take to sink, and the
  nearest accelerator's factor (1.17) is taken for 1.42. The same holds for experts.
- B200 products in fp8: no other publisher has any.
- Attention of ai-dynamo/aiconfigurator: a serving stack's call, with its cache in pages. Times that are of one kernel
  to the model, and differ in the stack, in heads of keys, or in 4 sequences of 8 heads for 1 of 32 (1.4 times as long
  at 1024 tokens for the same bytes), scatter by 9 to 12 % among themselves.
- V100 products: clouds of the same name differ by a constant factor (1.14 and 1.31 on the same shapes).
- Memory-bound kernels: publishers run different implementations under one name: torch's LayerNorm reaches 0.52 of the
  bandwidth, Triton's 0.82. Tensors that stay in the L2 between runs explain little of it: torch's addition of 50 MB
  reaches 0.88 to 0.93 (A100) and 1.00 to 1.07 (H100), of 200 MB 0.88 and 0.96.
- Activations compute, and are apart from additions, copies and casts: GELU reaches 0.74 forward and 0.60 backward of
  the A100's bandwidth, 0.84 and 0.66 of the V100's, 0.51 and 0.51 of a GH200's of 96 GB, the H100's GPU at 4 TB/s.

What is no measurement of a kernel, and is not used (`skipped` in the JSON):

- Products of Megatron's tensor groups that are all-reduced in the time measured, up to 4.7 times the product.
- Products, attention and backward kernels that wait for the host that launches them: SimuMax's products take at least
  14 us and its attention of 4 and of 8 heads the same 90 us; Liger's backward 125 to 130 us for any size to 168 MB.
- Norms, activations and rotary embeddings of a serving stack, which reach 0.3 to 0.5 where those of training reach 0.7.
- Gradients of experts' weights where the dtype of their sum is not stated: the same experts take 1.0 or 1.8 times as
  long, and the faster ones would move more bytes than the data sheet has.

Clocks sink after about 10 ms of the same work: a publisher's rows count as a burst below that.

The mean error on each publisher left out of every fit, and on how many kernels:
"""

FLOOR = """For each publisher left out, how far another publisher's times of the same kernels are from it: their mean
error as predictions, *raw*, and after division by one factor for all of them (clocks, power). Between two sizes of the
other publisher, at most 4 times apart, its time is interpolated along logarithms; *same* are those that need it not.
A model that knows the other publisher without error makes the raw error; *model* is that of the model without the
publisher, on the same kernels. *itself*: a publisher's times of what is the same kernel to the model, against their
median.
"""

AGREEMENT = """Times of the second publisher over those of the first on the very same kernels, at the 10 %, 50 % and
90 % quantiles. No model can be nearer to both than they are to each other.
"""

GROUPS = ("products", "products fp8", "experts", "attention", "memory-bound")

SUMMARY_HEAD = ("accelerator", "publisher left out", *GROUPS)

FLOOR_HEAD = (
    "accelerator",
    "kernels",
    "left out",
    "other",
    "number",
    "same",
    "factor",
    "raw",
    "without factor",
    "model",
)

AGREEMENT_HEAD = ("accelerator", "kernels", "first", "second", "number", "10 %", "median", "90 %")

KERNEL_HEAD = ("publisher", "kernels", "rows", "fitted mean", "median", "left out mean", "median", "90 %", "bias")


def read_kernels(path: str) -> tuple[list[Row], list[Skipped]]:
    """Return the rows of a file of kernels that can be predicted, and the skipped ones.

    Raises
    ------
    ScenarioError
        At the first line that is not a row, or where no row can be predicted.
    """
    try:
        with open(path, "rb") as file:
            used_rows, skipped_rows = read_rows(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""))
    except RowError as error:
        line, _, message = str(error).partition(": ")
        raise ScenarioError((Fault(path, int(line), 1, "", message),)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(path, 0, 0, "", f"the file cannot be read: {reason}"),)) from None
    if not used_rows:
        count, skip_reason = len(skipped_rows), skipped_rows[0].reason
        message = f"a file of kernels has rows that can be used, met none; {count} skipped: {skip_reason}"
        raise ScenarioError((Fault(path, skipped_rows[0].line, 1, "", message),))
    return used_rows, skipped_rows


def fit_accelerators(
    rows: Sequence[Row], names: Sequence[str], excluded_sources: Sequence[str], progress: Callable[[str], None]
) -> list[Evidence]:
    """Return accelerators fitted to ``rows``, with their errors.

    Parameters
    ----------
    names
        Accelerators of the catalogue; if empty, all that have rows.
    excluded_sources
        Sources or publishers without part in the fits.
    """
    known_names = sorted({row.device for row in rows})
    _check_names("accelerator", names, known_names)
    _check_names("leave-out", excluded_sources, sorted({row.publisher for row in rows} | {row.source for row in rows}))
    devices = DataSheets({name: data_sheet_accelerator(name) for name in known_names})
    evidence = []
    for name in names or known_names:
        progress(f"fitting {name}")
        evidence.append(devices.gather_evidence(name, rows, excluded_sources))
    return evidence


def _check_names(option: str, names: Sequence[str], known_names: Sequence[str]) -> None:
    for name in names:
        if name not in known_names:
            nearest = suggest_nearest(name, known_names)
            raise ValueError(f"--{option} is one of {', '.join(known_names)}, met {name[:100]}{nearest}")


def to_json(accelerators: Sequence[Evidence], skipped: Sequence[Skipped]) -> str:
    """Return the text of a parameter file: of one accelerator as in the catalogue, of several as a mapping by name."""
    today = datetime.date.today().isoformat()
    documents = {accelerator.name: to_document(accelerator, skipped, today) for accelerator in accelerators}
    document = next(iter(documents.values())) if len(documents) == 1 else documents
    return json.dumps(document, indent=1) + "\n"


def list_kernel_lines(evidence: Evidence) -> list[tuple[str, ...]]:
    """Return the errors of an accelerator as lines of a table, one for each publisher and family of kernels."""
    return [
        (kernel_errors.publisher, kernel_errors.family, *_format_cells(kernel_errors))
        for kernel_errors in evidence.hold_outs
    ]


def _format_cells(kernel_errors: HoldOut) -> tuple[str, ...]:
    fitted, left_out = kernel_errors.fitted_errors, kernel_errors.left_out_errors
    any_errors = fitted or left_out
    assert any_errors is not None
    fitted_cells = (f"{fitted.mean:.1%}", f"{fitted.median:.1%}") if fitted else ("-",) * 2
    left_out_cells: tuple[str, ...] = ("-",) * 4
    if left_out is not None:
        errors = (left_out.mean, left_out.median, left_out.high)
        left_out_cells = (*(f"{error:.1%}" for error in errors), f"{left_out.bias:+.1%}")
    return str(any_errors.rows), *fitted_cells, *left_out_cells


def to_markdown(accelerators: Sequence[Evidence], rows: Sequence[Row]) -> str:
    """Return the errors of accelerators, and the agreement of publishers with each other, as a Markdown page."""
    summary = [line for item in accelerators for line in _summarize_publishers(item)]
    floors = [_format_floor(floor) for item in accelerators for floor in item.floors]
    parts = [INTRODUCTION, _format_table(SUMMARY_HEAD, summary), "## What no model can beat\n", FLOOR]
    parts.append(_format_table(FLOOR_HEAD, floors))
    for item in accelerators:
        sustained = item.calibration.sustained
        parts.append(f"## {item.name}\n")
        parts.append(
            f"Sustained work takes {sustained.factor:.2f} times a burst ({sustained.low:.2f} to {sustained.high:.2f}, "
            f"{sustained.pairs} shapes timed both ways).\n"
        )
        parts.append(_format_table(KERNEL_HEAD, list_kernel_lines(item)))
    names = {item.name for item in accelerators}
    agreements = [_format_agreement(item) for item in find_agreements(rows) if item.device in names]
    parts += ["## Publishers against each other\n", AGREEMENT, _format_table(AGREEMENT_HEAD, agreements)]
    return "\n".join(parts)


def _summarize_publishers(evidence: Evidence) -> list[tuple[str, ...]]:
    """Return one line for each publisher: the mean error over its rows by group, with the publisher left out."""
    publishers = sorted({kernel_errors.publisher for kernel_errors in evidence.hold_outs})
    return [
        (evidence.name, publisher, *(_format_group(evidence, publisher, group) for group in GROUPS))
        for publisher in publishers
    ]


def _format_group(evidence: Evidence, publisher: str, group: str) -> str:
    group_errors = [
        kernel_errors.left_out_errors
        for kernel_errors in evidence.hold_outs
        if kernel_errors.publisher == publisher and _find_group(kernel_errors.family) == group
    ]
    known_errors = [error for error in group_errors if error is not None]
    count = sum(error.rows for error in known_errors)
    return f"{sum(error.mean * error.rows for error in known_errors) / count:.1%} of {count}" if count else "-"


def _find_group(family: str) -> str:
    first_word = family.split()[0]
    if first_word in ("matmul", "batched"):
        return "products fp8" if family.endswith("fp8") else "products"
    return first_word if first_word in ("experts", "attention") else "memory-bound"


def _format_floor(floor: NoiseFloor) -> tuple[str, ...]:
    model = "-" if floor.model_error is None else f"{floor.model_error:.1%}"
    names = floor.hardware, floor.group, floor.predicted_publisher, floor.reference_publisher
    counts = str(floor.num_pairs), str(floor.num_same_sizes), f"{floor.factor:.2f}"
    return *names, *counts, f"{floor.raw_error:.1%}", f"{floor.scaled_error:.1%}", model


def _format_agreement(agreement: Agreement) -> tuple[str, ...]:
    ratios = (f"{value:.2f}" for value in (agreement.low, agreement.median, agreement.high))
    return agreement.device, agreement.family, *agreement.publishers, str(agreement.kernels), *ratios


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


LINK_HEAD = ("source", "collective", "size", "rows", "mean", "median", "bias")

_MAX_FIRST_LINE = 64 * 2**10


def has_collectives(path: str) -> bool:
    """Return whether the first row of a file is about a collective; False where it cannot be read."""
    try:
        with open(path, "rb") as file:
            first_row = json.loads(file.readline(_MAX_FIRST_LINE))  # bounded: any file may come here, of any length
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first_row, dict) and "collective" in first_row


def read_collectives(path: str) -> tuple[Sequence[CollectiveRow], Sequence[SkippedCollective]]:
    """Return the rows of a file of collectives that can be predicted, and the skipped ones.

    Raises
    ------
    ScenarioError
        Where the file cannot be read, or no row can be predicted.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            used_rows, skipped_rows = read_collective_rows(file)
    except OSError as error:
        raise ScenarioError((Fault(path, 0, 0, "", f"the file cannot be read: {error.strerror}"),)) from None
    if not used_rows:
        line, reason = skipped_rows[0]
        message = f"a file of collectives has rows that can be used, met none; {len(skipped_rows)} skipped: {reason}"
        raise ScenarioError((Fault(path, line, 1, "", message),))
    return used_rows, skipped_rows


def fit_links_excluding(
    rows: Sequence[CollectiveRow], excluded_sources: Sequence[str]
) -> tuple[LinkFits, tuple[LinkError, ...]]:
    """Return links fitted to ``rows`` without ``excluded_sources``, and the errors on all rows, excluded ones too."""
    _check_names("leave-out", excluded_sources, sorted({row.source for row in rows}))
    fits = fit_links(rows, excluded_sources)
    return fits, measure_errors(rows, fits)


def list_link_lines(link_errors: Sequence[LinkError]) -> list[tuple[str, ...]]:
    """Return the errors of whole sources as lines of a table."""
    source_errors = [error for error in link_errors if (error.collective, error.size) == ("*", "*")]
    return [
        (error.source, "all", "all", str(error.rows), f"{error.mean:.1%}", f"{error.median:.1%}", f"{error.bias:.1%}")
        for error in source_errors
    ]
