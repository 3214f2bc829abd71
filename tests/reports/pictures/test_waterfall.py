"""The bars of a waterfall lead from the predicted step to the measured one."""

from collections.abc import Callable
from pathlib import Path

from meshwise.reports.difference import difference
from meshwise.reports.pictures.timeline import MOST_WATERFALL_BARS as MOST
from meshwise.reports.pictures.timeline import draw_comparison, waterfall_bars
from meshwise.simulator.program import RankClass, StreamKind, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline


def stages(seconds: int) -> Timeline:
    """Return a rank that runs a forward of each of ten stages, stage i for i + ``seconds`` seconds."""
    ends = [sum(stage + seconds for stage in range(last + 1)) for last in range(10)]
    spans = [
        Span(0, StreamKind.COMPUTE, TaskKind.FORWARD, stage, 0, "", end - stage - seconds, end)
        for stage, end in enumerate(ends)
    ]
    return Timeline("measured", (RankClass("all", tuple(range(10)), (0,)),), spans, (), ends[-1], "gloo")


def test_bars_add_up_to_the_error_and_the_small_ones_share_one() -> None:
    found = difference(stages(1), stages(3))  # 2 s more for each of ten stages
    *shown, rest = waterfall_bars(found)
    assert found.error == 20
    assert [cost for *_, cost in shown] == [2] * MOST
    assert rest == ("", "3 others", "", 6)


def test_equal_steps_have_no_bars_and_are_drawn(step: Callable[..., Timeline], tmp_path: Path) -> None:
    assert waterfall_bars(difference(step(), step())) == []
    draw_comparison(step(), step(source="measured"), tmp_path / "same.png")
    assert (tmp_path / "same.png").stat().st_size > 5000
