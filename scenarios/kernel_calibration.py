"""Accelerators fitted to a file of published kernel timings: reading it, choosing what to fit, and tables."""

import datetime
import json
from collections.abc import Callable, Sequence

from scenarios.errors import Fault, ScenarioError
from simulator.calibration.document import to_document
from simulator.calibration.evidence import Agreement, Devices, Evidence, Held, agreements
from simulator.calibration.rows import MAX_ROW_BYTES, Refused, Row, Skipped, read_rows
from simulator.catalog import data_sheet

INTRODUCTION = """# Kernels: predicted against measured

Written by `meshwise calibrate --from measured_kernels.jsonl --report docs/kernel_accuracy.md`. An error is
predicted over measured time, minus 1: its size's mean, median and 90 % quantile, and its median as bias.

- *fitted*: the publisher's rows took part in the fit.
- *left out*: parameters, and the factor between a burst and sustained work, are fitted to all other publishers of all
  accelerators; the publisher is predicted with nothing of its own. A dash: nobody else has such kernels.
- All rows count, the smallest too.

What is not reached, and why (the ratios are those of the last table):

- B200 products: its two publishers differ by 1.4 on the same shapes, one timing short bursts and one a sustained loop.
  Without the second, the nearest accelerator's factor is taken, which is smaller; without the first, nothing tells a
  burst from sustained work.
- H100 products without ai-dynamo/aiconfigurator: what is left is one serving profiler in steps of 1 us, whose small
  kernels take up to 1.4 times as long on the same shapes.
- Products of eth-easl/sailor and microsoft/SuperScaler: eager calls timed from the host, which scatter by as much on
  shapes that others timed.
- Memory-bound kernels: publishers run different implementations under one name. The same RMSNorm takes 2.0 (A100) and
  2.2 (H100) times as long unfused (vidur) as fused (Liger).

The mean error on each publisher left out of every fit, and on how many kernels:
"""

AGREEMENT = """Times of the second publisher over those of the first on the very same kernels, at the 10 %, 50 % and
90 % quantiles. No model can be nearer to both than they are to each other.
"""

GROUPS = ("products", "products fp8", "experts", "attention", "memory-bound")

SUMMARY_HEAD = ("accelerator", "publisher left out", *GROUPS)

AGREEMENT_HEAD = ("accelerator", "kernels", "first", "second", "number", "10 %", "median", "90 %")

HEAD = ("publisher", "kernels", "rows", "fitted mean", "median", "left out mean", "median", "90 %", "bias")


def read(path: str) -> tuple[list[Row], list[Skipped]]:
    """Return the rows of a file that can be predicted and the others; `ScenarioError` names the line that is none."""
    try:
        with open(path, "rb") as file:
            used, skipped = read_rows(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""))
    except Refused as error:
        line, _, message = str(error).partition(": ")
        raise ScenarioError((Fault(path, int(line), 1, "", message),)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(path, 0, 0, "", f"the file cannot be read: {reason}"),)) from None
    if not used:
        count, why = len(skipped), skipped[0].reason
        message = f"a file of kernels has rows that can be used, met none; {count} skipped: {why}"
        raise ScenarioError((Fault(path, skipped[0].line, 1, "", message),))
    return used, skipped


def fit_accelerators(
    rows: Sequence[Row], names: Sequence[str], left_out: Sequence[str], progress: Callable[[str], None]
) -> list[Evidence]:
    """Return accelerators fitted to ``rows``.

    Parameters
    ----------
    names
        In the catalogue; all that have rows where empty.
    left_out
        Sources or publishers that take no part in the fits.
    """
    known = sorted({row.device for row in rows})
    _check("accelerator", names, known)
    _check("leave-out", left_out, sorted({row.publisher for row in rows} | {row.source for row in rows}))
    devices = Devices({name: data_sheet(name) for name in known})
    found = []
    for name in names or known:
        progress(f"fitting {name}")
        found.append(devices.evidence(name, rows, left_out))
    return found


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"--{option} is one of {', '.join(known)}, met {name[:100]}")


def to_json(found: Sequence[Evidence], skipped: Sequence[Skipped]) -> str:
    """Return the parameter file: of one accelerator as the catalogue holds it, of several a table of those."""
    today = datetime.date.today().isoformat()
    documents = {each.name: to_document(each, skipped, today) for each in found}
    whole = next(iter(documents.values())) if len(documents) == 1 else documents
    return json.dumps(whole, indent=1) + "\n"


def lines(found: Evidence) -> list[tuple[str, ...]]:
    """Return the errors of an accelerator as lines of a table, a publisher's kernels of a family each."""
    return [(held.publisher, held.family, *_cells(held)) for held in found.held]


def _cells(held: Held) -> tuple[str, ...]:
    some = held.fitted or held.left_out
    assert some is not None
    fitted = (f"{held.fitted.mean:.1%}", f"{held.fitted.median:.1%}") if held.fitted else ("-", "-")
    if held.left_out is None:
        return str(some.rows), *fitted, "-", "-", "-", "-"
    out = held.left_out
    return str(some.rows), *fitted, f"{out.mean:.1%}", f"{out.median:.1%}", f"{out.high:.1%}", f"{out.bias:+.1%}"


def to_markdown(found: Sequence[Evidence], rows: Sequence[Row]) -> str:
    """Return the errors of accelerators, and how publishers agree among themselves, as a page."""
    parts = [INTRODUCTION, _table(SUMMARY_HEAD, [line for each in found for line in _summary(each)])]
    for each in found:
        sustained = each.calibration.sustained
        parts.append(f"## {each.name}\n")
        parts.append(
            f"Sustained work takes {sustained.factor:.2f} times a burst ({sustained.low:.2f} to {sustained.high:.2f}, "
            f"{sustained.pairs} shapes timed both ways).\n"
        )
        parts.append(_table(HEAD, lines(each)))
    parts.append("## Publishers against each other\n")
    parts.append(AGREEMENT)
    names = {each.name for each in found}
    parts.append(_table(AGREEMENT_HEAD, [_agreement(each) for each in agreements(rows) if each.device in names]))
    return "\n".join(parts)


def _summary(found: Evidence) -> list[tuple[str, ...]]:
    """Return a line a publisher: its kernels' mean error without it, by group, each row counting the same."""
    publishers = sorted({held.publisher for held in found.held})
    return [(found.name, publisher, *(_group(found, publisher, group) for group in GROUPS)) for publisher in publishers]


def _group(found: Evidence, publisher: str, group: str) -> str:
    of_it = [held.left_out for held in found.held if held.publisher == publisher and _grouped(held.family) == group]
    known = [each for each in of_it if each is not None]
    count = sum(each.rows for each in known)
    return f"{sum(each.mean * each.rows for each in known) / count:.1%} of {count}" if count else "-"


def _grouped(family: str) -> str:
    first = family.split()[0]
    if first in ("matmul", "batched"):
        return "products fp8" if family.endswith("fp8") else "products"
    return first if first in ("experts", "attention") else "memory-bound"


def _agreement(each: Agreement) -> tuple[str, ...]:
    ratios = (f"{value:.2f}" for value in (each.low, each.median, each.high))
    return each.device, each.family, *each.publishers, str(each.kernels), *ratios


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    drawn = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in drawn)
