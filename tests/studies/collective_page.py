"""The page of errors of collectives, and the error of nccl-tests' sources that gave nothing to what predicts them.

Run ``python -m tests.studies.collective_page ROWS.jsonl [FILE]`` (two minutes) to write the page, by default
``docs/collective_accuracy.md``, and to print for sources that a device's clock timed, as nccl-tests and rccl-tests do,
the mean error of large and of all messages inside a node and between nodes. Every source counts once, and is left out
of the figures that predict it.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from meshwise.scenarios.console import BAD_INPUT, note, print_table
from meshwise.scenarios.files.results import write
from meshwise.simulator.calibration.collective_report import report
from meshwise.simulator.calibration.collective_rows import CollectiveRow, Timing, read_rows
from meshwise.simulator.calibration.link_fits import LinkError, measure_held_out

PAGE = "docs/collective_accuracy.md"
HEAD = ("place", "sources", "large messages", "all messages")


def list_lines(rows: Sequence[CollectiveRow], errors: Iterable[LinkError]) -> Iterator[tuple[str, ...]]:
    """Yield the rows under `HEAD`: means over the sources of each place, and of all of them."""
    sizes = ("large", "*")
    found = {(error.source, error.size): error.mean for error in errors if error.collective == "*"}
    nodes = {row.source: row.nodes for row in rows if row.timing is Timing.DEVICE}
    places: dict[str, list[str]] = defaultdict(list)
    for source, num_nodes in nodes.items():
        if (source, "*") in found:
            places["in a node" if num_nodes == 1 else "between nodes"].append(source)
    places["all"] = [source for sources in places.values() for source in sources]
    for place, sources in places.items():
        columns = ([found[source, size] for source in sources if (source, size) in found] for size in sizes)
        yield place, str(len(sources)), *(f"{100 * fmean(values):.1f} %" if values else "-" for values in columns)


def main(arguments: Sequence[str]) -> int:
    """Write the page and print the errors; return the exit code."""
    if len(arguments) not in (1, 2):
        note("usage: python -m tests.studies.collective_page ROWS.jsonl [FILE]")
        return BAD_INPUT
    try:
        rows, skipped = read_rows(Path(arguments[0]).read_text("utf-8").splitlines())
        print_table(HEAD, list(list_lines(rows, measure_held_out(rows))))
        write(arguments[1] if len(arguments) > 1 else PAGE, report(rows, skipped))
    except (OSError, ValueError) as error:
        note(f"{arguments[0]}: {error!s}")
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
