import dataclasses
from pathlib import Path

import pytest

from meshwise.reports.lanes import used_hosts
from meshwise.reports.pictures.memory import draw_memory, summarize_peak, to_step_arrays
from meshwise.simulator.memory import MemoryProfile

GIB = 2**30


def profile(capacity: float = 10 * GIB) -> MemoryProfile:
    return MemoryProfile(0, capacity, (0.0, 1.0, 3.0), ((GIB, 0, 0, 0, 0), (GIB, 0, 0, 8 * GIB, 0), (GIB, 0, 0, 0, 0)))


def test_the_facts_state_the_peak_its_moment_and_the_capacity():
    assert summarize_peak(profile(), "stage 0") == "peak 9 GiB on stage 0 at 1 s: 90% of 10 GiB usable, fits"
    assert summarize_peak(profile(6 * GIB), "stage 0").endswith("150% of 6 GiB usable, does not fit")
    assert summarize_peak(profile(float("inf")), "stage 0") == "peak 9 GiB on stage 0 at 1 s"


def test_values_hold_until_the_next_moment_and_the_last_to_the_end_of_the_step():
    times, usage = to_step_arrays(profile(), 5.0)
    assert times.tolist() == [0.0, 1.0, 3.0, 5.0]
    assert (usage.sum(axis=1) / GIB).tolist() == [1.0, 9.0, 1.0, 1.0]


@pytest.mark.parametrize("capacity", [80 * GIB, 20 * GIB, 4000 * GIB, float("inf")])
def test_a_picture_is_drawn_whether_or_not_it_fits(step, tmp_path: Path, capacity: float):
    timeline = step("interleaved", 4, 8, 2)
    memory = tuple(dataclasses.replace(p, capacity=capacity) for p in timeline.memory)
    draw_memory(dataclasses.replace(timeline, memory=memory), tmp_path / "memory.png", title="</x> $")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_host_memory_has_a_panel_only_where_it_holds_anything(step, tmp_path: Path):
    plain, used = step(), step(offloaded=100 * GIB)
    for name, timeline in {"none": dataclasses.replace(plain, hosts=()), "empty": plain, "used": used}.items():
        draw_memory(timeline, tmp_path / f"{name}.svg")
    none, empty, with_host = ((tmp_path / f"{name}.svg").read_bytes() for name in ("none", "empty", "used"))
    assert none == empty != with_host


def test_hosts_that_hold_anything_go_by_name_and_number_of_ranks(step):
    assert used_hosts(step()) == {}
    (name, profile), *others = used_hosts(step("1f1b", 2, 4, group=4, offloaded=10)).items()
    assert (name, profile.peak, others) == ("host 0 (8 ranks)", 80, [])


def test_the_fullest_class_is_the_one_nearest_to_its_own_capacity(step, tmp_path: Path, monkeypatch):
    """9 of 20 GiB are 45 %, 7 of 8 GiB are 88 %."""
    said: list[str] = []
    monkeypatch.setattr("meshwise.reports.pictures.memory.header", lambda figure, title, line: said.append(line))
    small = MemoryProfile(1, 8 * GIB, (0.0,), ((7 * GIB, 0, 0, 0, 0),))
    draw_memory(dataclasses.replace(step(), memory=(profile(20 * GIB), small)), tmp_path / "x.svg")
    assert said == ["peak 7 GiB on stage 1 (rank 1) at 0 ns: 88% of 8 GiB usable, fits"]


def test_the_same_memory_gives_the_same_svg(step, tmp_path: Path):
    for name in "ab":
        draw_memory(step(), tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_timeline_without_memory_is_refused(step, tmp_path: Path):
    with pytest.raises(ValueError, match="memory profile"):
        draw_memory(dataclasses.replace(step(), memory=()), tmp_path / "x.png")
