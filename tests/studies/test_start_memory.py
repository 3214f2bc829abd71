"""A rank that starts with the function of a module has less than the module in memory, and the same loss."""

import pytest

pytest.importorskip("torch")

from .start_memory import measure

LAYERS, RANKS, WIDTH = 12, 2, 512


@pytest.mark.skipif("sys.platform != 'linux'")
def test_the_function_of_a_module_needs_less_memory_than_the_module() -> None:
    whole, built = (measure(kind, LAYERS, RANKS, WIDTH) for kind in ("whole", "built"))
    size = whole["bytes"]
    assert built["bytes"] == size > 160e6
    assert built["given"] < 0.1 * size and whole["given"] > 0.9 * size
    # half of it is the rank's own; blocks of about 12 MB are whole, some at a time
    assert built["start"] < 0.9 * size and whole["start"] > 1.2 * size
    assert built["step"] < whole["step"] - 0.4 * size
