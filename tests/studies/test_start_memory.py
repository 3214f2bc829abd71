"""A rank that starts with the function of a module has its parts and about one parameter more, not the module."""

import pytest

pytest.importorskip("torch")

from .start_memory import WORDS, measure

LAYERS, RANKS, WIDTH = 12, 2, 512


@pytest.mark.skipif("sys.platform != 'linux'")
def test_the_function_of_a_module_needs_less_memory_than_the_module() -> None:
    options = {"layers": LAYERS, "ranks": RANKS, "width": WIDTH}
    whole, built = (measure(kind, f"data={RANKS},zero=3", **options) for kind in ("whole", "built"))
    size = whole["bytes"]
    assert built["bytes"] == size > 160e6
    assert built["given"] < 0.1 * size and whole["given"] > 0.9 * size
    # half of it is the rank's own; blocks of about 12 MB are whole, some at a time
    assert built["start"] < 0.9 * size and whole["start"] > 1.2 * size
    assert built["step"] < whole["step"] - 0.4 * size


@pytest.mark.skipif("sys.platform != 'linux'")
@pytest.mark.parametrize(
    ("plan", "layers", "width"),
    [
        ("pipeline=2,num_microbatches=2", LAYERS, WIDTH),
        pytest.param("tensor=2", 6, 1024, marks=pytest.mark.slow),  # too large for a comparison with its program
    ],
)
def test_a_rank_has_its_parts_and_about_one_parameter(plan: str, layers: int, width: int) -> None:
    row = measure("built", plan, layers=layers, ranks=RANKS, width=width)
    table = 4 * WORDS * width  # the largest parameter
    assert row["bytes"] > 160e6 and row["own"] < 0.7 * row["bytes"]
    assert row["start"] < row["own"] + 2 * table < 0.9 * row["bytes"]
