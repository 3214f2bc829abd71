from pathlib import Path

import pytest

from meshwise.reports.pictures.pareto import draw_fronts

GIB = 2.0**30
MEMORY = [
    {
        "plan": f"data {2**index}, 1f1b",
        "step_time": 10.0 + index,
        "peak_memory": (100 - 20 * index) * GIB,
        "fits": index > 0,
    }
    for index in range(4)
]
DEVICES = [
    {"plan": "data 8", "step_time": 80.0 / count, "devices": count, "fits": True, "cost_per_million_tokens": 1.5}
    for count in (8, 4, 2)
]


@pytest.mark.parametrize("devices", [[], DEVICES, [*DEVICES, {"devices": 1, "fits": False}]])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_front_is_the_same_picture(suffix: str, devices: list[dict[str, object]], tmp_path: Path) -> None:
    for name in ("one", "two"):
        draw_fronts(MEMORY, devices, tmp_path / f"{name}.{suffix}", title="A front")
    pictures = [(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two")]
    assert pictures[0] == pictures[1]
    draw_fronts(MEMORY[1:], devices, tmp_path / f"other.{suffix}", title="A front")
    assert (tmp_path / f"other.{suffix}").read_bytes() != pictures[0]


def test_no_plan_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one plan"):
        draw_fronts([], [], tmp_path / "front.png")
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        draw_fronts(MEMORY, [], tmp_path / "front.gif")
