import subprocess
import sys

import pytest

from meshwise.reports.document import clean_text
from meshwise.reports.pictures.figure import choose_size_unit, choose_time_unit


@pytest.mark.parametrize(
    ("seconds", "name"), [(30.0, "s"), (2.0, "s"), (1.9, "ms"), (0.002, "ms"), (0.0019, "us"), (0.0, "us")]
)
def test_a_time_axis_has_a_unit_that_keeps_its_numbers_short(seconds: float, name: str):
    assert choose_time_unit(seconds)[1] == name


def test_a_memory_axis_has_a_binary_unit():
    assert choose_size_unit(3 * 2.0**20) == (2.0**20, "MiB")
    assert choose_size_unit(0.0) == (1.0, "B")


def test_text_is_cut_to_one_printable_line():
    assert clean_text("a\x00\n\tb\u202e c") == "a b c"
    assert clean_text("abcdef", 4) == "abc…"


@pytest.mark.parametrize(
    "module", ["meshwise.reports.tables", "meshwise.reports.traces.chrome", "meshwise.reports.document"]
)
def test_what_draws_nothing_starts_without_plot_and_table_libraries(module: str):
    code = f"import sys, {module}; print(sorted({{'matplotlib', 'pandas'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_drawing_never_touches_pyplot():
    modules = ", ".join(f"meshwise.reports.pictures.{name}" for name in ("timeline", "memory", "search", "accuracy"))
    code = f"import sys, {modules}; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
