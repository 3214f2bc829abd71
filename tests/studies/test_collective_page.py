"""The summary of errors of sources left out: means over sources, by place."""

import pytest

from meshwise.simulator.calibration.collective_rows import CollectiveRow, Timing
from meshwise.simulator.calibration.link_fits import LinkError
from meshwise.simulator.collective import Collective

from .collective_page import list_lines, main


def row(source: str, nodes: int, timing: Timing = Timing.DEVICE) -> CollectiveRow:
    return CollectiveRow(source, "dgx-h100", nodes, 8 * nodes, Collective.ALL_REDUCE, 1e8, 1e-3, timing=timing)


def error(source: str, size: str, mean: float, collective: str = "*") -> LinkError:
    return LinkError(source, collective, size, 10, mean, mean, mean)


def test_every_source_of_a_device_clock_counts_once() -> None:
    rows = [row("one", 1), row("one", 1), row("two", 1), row("far", 2), row("host", 1, Timing.HOST)]
    errors = [error("one", "large", 0.04), error("one", "*", 0.2), error("two", "large", 0.08), error("two", "*", 0.1)]
    errors += [error("far", "*", 0.3), error("host", "*", 0.9), error("one", "*", 0.7, "all_reduce")]
    assert list(list_lines(rows, errors)) == [
        ("in a node", "2", "6.0 %", "15.0 %"),
        ("between nodes", "1", "-", "30.0 %"),
        ("all", "3", "6.0 %", "20.0 %"),  # (0.2 + 0.1 + 0.3) / 3
    ]


@pytest.mark.parametrize("arguments", [[], ["nowhere.jsonl"]])
def test_wrong_use_is_one_line_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
