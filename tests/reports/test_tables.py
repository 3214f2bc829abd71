from functools import partial
from io import StringIO

from rich.console import Console

from meshwise.reports.tables import format_gap, print_accuracy, print_memory, print_result

GIB = 2**30


def printed(function, *arguments) -> str:
    console = Console(file=StringIO(), width=220, color_system=None)
    function(console, *arguments)
    return console.file.getvalue()


def test_a_result_is_printed_in_units_for_people():
    result = {
        "step_time": 0.812, "mfu": 0.5, "fits": True, "peak_memory": 40 * GIB, "memory_capacity": 80 * GIB,
        "bubble": 0.0625, "exposed_communication": {"tensor communication": 0.05}, "assumptions": ["[red]x[/red]"],
        "memory": [{"stage": 0, "parameters": 2 * GIB, "peak": 40 * GIB, "host_peak": 0.0}], "wall_time": float("nan"),
    }  # fmt: skip
    text = printed(print_result, result)
    for words in (
        "812 ms",
        "50 %",
        "40 GiB",
        "6.25 %",
        "exposed tensor communication",
        "50 ms",
        "assumed: [red]x[/red]",
    ):
        assert words in text
    assert "nan" not in text
    assert "whole host" not in text


def test_of_many_assumptions_five_are_printed_unless_all_are_wanted():
    result = {"assumptions": [f"number {number}" for number in range(7)]}
    few, every = printed(print_result, result), printed(partial(print_result, verbose=True), result)
    assert few.count("assumed: ") == 5 and "... and 2 more assumed (--verbose or --json shows all)" in few
    assert every.count("assumed: ") == 7 and "more assumed" not in every
    exact = {"assumptions": result["assumptions"][:5]}
    assert printed(print_result, exact) == printed(partial(print_result, verbose=True), exact)


def link(name: str, utilisation: float, count: int = 1) -> dict:
    return {"name": name, "count": count, "bandwidth": 24e9, "bytes": 2.0**30, "utilisation": utilisation}


def test_the_busiest_link_of_each_kind_is_listed_and_no_more_than_six():
    links = [link("nic 0 out", 0.2), link("nic 16 in", 0.43, 1024), link("memory 0.1 in", 0.3), link("torus 3 x-", 0.1)]
    links += [link(f"{name} 0 up", 0.01) for name in ("leaf", "pod", "rail", "[b]x[/b]")]
    text = printed(print_result, {"bottleneck": links[1], "links": links})
    assert "nic 16 in (x1024), 43 % of 24 GB/s" in text
    rows = text.split("utilisation")[1]
    assert rows.index("nic 16 in") < rows.index("memory 0.1 in") < rows.index("torus 3 x-") < rows.index("leaf 0 up")
    assert "1,024" in rows
    assert "1 GiB" in rows
    assert "nic 0 out" not in rows
    assert "[b]x[/b]" not in rows  # the seventh kind


def test_a_result_without_traffic_names_no_link():
    text = printed(print_result, {"bottleneck": None, "links": []})
    assert "busiest links" not in text
    assert text.split("busiest link")[1].split("\n")[0].strip(" │") == "-"


def test_stages_that_are_alike_are_one_row_and_hosts_a_column():
    stages = [{"stage": stage, "peak": 40 * GIB, "host_peak": 786 * GIB} for stage in (0, 1, 0, 1)]
    text = printed(print_memory, stages)
    assert text.count("40 GiB") == 2
    assert "whole host" in text
    assert "786 GiB" in text


def test_the_fullest_rank_is_named_by_what_is_usable_of_its_own_device():
    small = {"stage": 1, "stages": [1, 3, 5, 7], "rank": 8, "ranks": 4, "peak": 35 * GIB, "usable": 36 * GIB}
    large = {"stage": 0, "stages": [0, 2, 4, 6], "rank": 0, "ranks": 8, "peak": 60 * GIB, "usable": 72 * GIB}
    moment = {"peak_time": 0.5, "peak_operator": "backward of microbatch 1, head: loss"}
    text = " ".join(printed(print_memory, [large | moment, small | moment], 36 * GIB).split())
    assert "of 36 GiB or 72 GiB usable" in text
    assert "fullest: rank 8 and 3 alike, stages 1, 3, ... 7, at 500 ms, in backward of microbatch 1, head: loss" in text
    assert "0, 2, ... 6" in text


def test_stages_beyond_capacity_are_red():
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system="standard")
    print_memory(console, [{"stage": 0, "peak": 90 * GIB}, {"stage": 1, "peak": 10 * GIB}], 80 * GIB)
    lines = console.file.getvalue().splitlines()
    assert [("\x1b[31m" in line) for line in lines if "90 GiB" in line or "10 GiB" in line] == [True, False]


def test_a_gap_of_zero_is_a_proof():
    assert format_gap(0.0) == "proven optimal" and format_gap(0.25) == "25 %"


def test_accuracy_has_a_row_a_source():
    errors = {"mape": 0.101, "median": 0.09, "max": 0.25, "bias": -0.02}
    text = printed(
        print_accuracy, {"[x]": {"rows": 10, "predicted": 8, "step_time": errors, "memory": errors}, "all": errors}
    )
    for words in ("[x]", "10.1 %", "-2 %", "all"):
        assert words in text
