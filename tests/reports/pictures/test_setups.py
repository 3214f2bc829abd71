from pathlib import Path

import pytest

from meshwise.reports.pictures.setups import draw_setups

POINTS = [
    {
        "nodes": nodes, "devices": 8 * nodes, "global_batch": 512, "machines": machines, "seconds": 1e6 / nodes,
        "cost": price * 8e6 / 3600 * nodes**0.2, "on_front": nodes != 3, "proven": nodes != 2,
        "seconds_interval": [0.9e6 / nodes, 1.2e6 / nodes],
    }
    for nodes in (4, 3, 2, 1)
    for machines, price in (("on demand", 2.0), ("spot", 0.8))
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("priced", [True, False])
def test_the_same_setups_are_the_same_picture(suffix: str, priced: bool, tmp_path: Path) -> None:
    points = [point if priced else point | {"cost": None} for point in POINTS]
    for name in ("one", "two"):
        draw_setups(points, tmp_path / f"{name}.{suffix}", title="Setups")
    pictures = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two")]
    assert pictures[0] == pictures[1]
    draw_setups(points[1:], tmp_path / f"other.{suffix}", title="Setups")
    assert (tmp_path / f"other.{suffix}").read_bytes() != pictures[0]


def test_no_setup_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one with a plan"):
        draw_setups([], tmp_path / "setups.png")
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw_setups(POINTS, tmp_path / "setups.gif")
