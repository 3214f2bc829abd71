from itertools import pairwise

from meshwise.reports.palette import CATEGORY_COLOUR, DARK_COLOUR, IDLE, KIND_COLOUR, lightness, shade_kind, text_colour
from meshwise.simulator.program import Category, TaskKind


def test_every_kind_and_idle_differ_in_lightness_so_that_grey_print_tells_them_apart():
    levels = sorted(lightness(colour) for colour in (IDLE, *KIND_COLOUR.values()))
    assert len(levels) == len(TaskKind) + 1
    assert min(b - a for a, b in pairwise(levels)) > 3


def test_on_a_dark_ground_every_kind_is_seen_and_differs_in_lightness():
    ground = "#262A2F"  # idle time of a dark page
    levels = sorted(lightness(colour) for colour in (ground, *DARK_COLOUR.values()))
    assert levels[0] == lightness(ground)
    assert levels[1] - levels[0] > 20
    assert min(b - a for a, b in pairwise(levels)) > 1.3


def test_neighbours_in_the_memory_stack_differ_in_lightness():
    levels = [lightness(CATEGORY_COLOUR[category]) for category in Category]
    assert all(abs(a - b) > 4 for a, b in pairwise(levels))


def test_chunks_are_shades_from_dark_to_light_that_never_reach_idle():
    levels = [lightness(shade_kind(TaskKind.BACKWARD, chunk, 4)) for chunk in range(4)]
    assert levels == sorted(levels)
    assert len(set(levels)) == 4
    assert lightness(shade_kind(TaskKind.FORWARD, 3, 4)) < lightness(IDLE) - 2


def test_text_is_white_on_dark_and_black_on_light():
    assert text_colour("#000000") == "#FFFFFF"
    assert text_colour("#FFFFFF") != "#FFFFFF"
