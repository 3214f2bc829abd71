"""Output of nccl-tests and rccl-tests in its formats, broken and hostile text too."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.simulator.calibration.nccl_tests import looks_like_nccl_tests, read_nccl_tests

NEW_HEAD = "#       size         count      type   redop    root" + "     time   algbw   busbw #wrong" * 2
OLD_HEAD = "#       size         count      type   redop" + "     time   algbw   busbw  error" * 2
ROW = (
    "     1048576        262144     float     sum      -1    50.00   20.97   31.46      0    40.00   26.2   39.3    N/A"
)


def list_devices(nodes: int, per_node: int, name: str = "NVIDIA H100 80GB HBM3", *, group: str = "Group  0 ") -> str:
    return "\n".join(
        f"#  Rank {rank:2d} {group}Pid {1000 + rank:6d} on   host-{rank // per_node} device {rank % per_node:2d} "
        f"[0000:1b:00] {name}"
        for rank in range(nodes * per_node)
    )


def write_run(nodes: int = 2, per_node: int = 2, program: str = "all_reduce", rows: str = ROW) -> str:
    return "\n".join(
        [
            f"$ mpirun -np {nodes * per_node} -N {per_node} ./build/{program}_perf -b 1M -e 1M -f 2 -g 1",
            "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20",
            "#",
            "# Using devices",
            list_devices(nodes, per_node),
            "NCCL version 2.21.5+cuda12.4",
            NEW_HEAD,
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)",
            rows,
            "# Out of bounds values : 0 OK",
            "# Avg bus bandwidth    : 31.4",
        ]
    )


def test_a_run_of_two_nodes() -> None:
    (run,), skipped = read_nccl_tests(write_run())
    assert not skipped
    assert (run.operation, run.ranks, run.nodes, run.devices_per_node) == ("all_reduce", 4, 2, 2)
    assert (run.accelerator, run.library) == ("NVIDIA H100 80GB HBM3", "NCCL 2.21.5")
    ((size, seconds, in_place),) = run.messages
    assert (size, seconds, in_place) == (2.0**20, pytest.approx(50e-6), pytest.approx(40e-6))


def test_several_runs_in_one_text() -> None:
    text = write_run() + "\n" + write_run(1, 8, "alltoall") + "\n" + write_run(1, 2, "sendrecv")
    runs, skipped = read_nccl_tests(text)
    assert not skipped
    assert [(run.operation, run.ranks, run.nodes) for run in runs] == [
        ("all_reduce", 4, 2),
        ("all_to_all", 8, 1),
        ("sendrecv", 2, 1),
    ]


def test_the_columns_of_old_versions() -> None:
    rows = "     1048576        262144     float     sum    50.00   20.97   31.46  1e-07    40.00   26.2   39.3  0e+00"
    text = write_run(rows=rows).replace(NEW_HEAD, OLD_HEAD).replace("Group  0 ", "")
    ((run,), _) = read_nccl_tests(text)
    assert run.messages[0].seconds == pytest.approx(50e-6) and run.messages[0].in_place_seconds == pytest.approx(40e-6)
    # an all-gather of old versions has neither redop nor root
    old = text.replace(OLD_HEAD, "# size count type time algbw busbw error time algbw busbw error").replace("sum", "")
    ((run,), _) = read_nccl_tests(old.replace("all_reduce", "all_gather"))
    assert (run.operation, run.messages[0].seconds) == ("all_gather", pytest.approx(50e-6))


def test_rccl_prints_its_own_version_lines() -> None:
    text = write_run().replace("NCCL version 2.21.5+cuda12.4", "RCCL version : 2.22.3-HEAD:7d8d67c\nHIP version  : 6.4")
    ((run,), _) = read_nccl_tests(text.replace("NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"))
    assert (run.library, run.accelerator) == ("RCCL 2.22.3", "AMD Instinct MI300X")


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "0: ", "> ", "    "])
def test_tags_of_launchers(tag: str) -> None:
    ((run,), _) = read_nccl_tests("\n".join(tag + line for line in write_run().splitlines()))
    assert (run.ranks, len(run.messages)) == (4, 1)


def test_tags_between_the_columns_of_a_line() -> None:
    rows = (
        "[0]     1048576        262144     float     sum      -1[0]    50.00   20.97   31.46      0[0]  40.00  26 39 0"
    )
    ((run,), _) = read_nccl_tests(write_run(rows=rows))
    assert run.messages[0].time == pytest.approx(50e-6)


def test_variables_and_the_network_that_debug_lines_tell() -> None:
    text = write_run().replace("./build", "-x NCCL_ALGO=Ring -x NCCL_PROTO=Simple ./build")
    text = text.replace("NCCL version", "host-0:7:7 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]\nNCCL version")
    ((run,), _) = read_nccl_tests(text)
    assert (run.algorithm, run.protocol, run.network) == ("Ring", "Simple", "RoCE")


def test_what_comment_lines_state() -> None:
    ((run,), _) = read_nccl_tests("# inter_node_link: 8 x 400 Gb/s InfiniBand\n" + write_run())
    assert dict(run.stated) == {"inter_node_link": "8 x 400 Gb/s InfiniBand"}


def test_a_list_of_devices_that_is_cut_takes_the_command_for_it() -> None:
    lines = write_run(4, 8).splitlines()
    cut = [line for line in lines if " Rank" not in line or int(line.split()[2]) < 12]
    ((run,), _) = read_nccl_tests("\n".join(cut))
    assert (run.ranks, run.nodes, run.devices_per_node) == (32, 4, 8)
    assert "the list of devices has 12" in run.assumptions[0]


def test_without_devices_and_command_bandwidths_tell_the_ranks() -> None:
    # 2 (n - 1) / n = 1.875 for 16 ranks
    rows = (
        "  2147483648     536870912     float     sum      -1  5784.75  371.23  696.06  0  5728.40  374.88  702.91  0"
    )
    ((run,), _) = read_nccl_tests("# Collective test starting: all_reduce_perf\n" + NEW_HEAD + "\n" + rows)
    assert (run.ranks, run.nodes, run.accelerator) == (16, 2, "")


def test_an_operation_that_no_line_names_follows_from_its_bandwidths() -> None:
    text = write_run().replace("all_reduce_perf", "test")
    ((run,), _) = read_nccl_tests(text)  # 31.46 / 20.97 = 1.5 = 2 * 3 / 4
    assert run.operation == "all_reduce" and "no program named" in run.assumptions[-1]


def test_processes_that_measured_alone_are_told() -> None:
    text = write_run().replace("Rank  1", "Rank  0").replace("Rank  2", "Rank  0").replace("Rank  3", "Rank  0")
    runs, ((_, reason),) = read_nccl_tests(text)
    assert not runs and "built without MPI" in reason


def test_a_program_that_is_not_modelled_is_told() -> None:
    runs, ((_, reason),) = read_nccl_tests(write_run(program="hypercube"))
    assert not runs and reason.startswith("hypercube_perf is not modelled; modelled are all_reduce, ")


def test_a_text_that_is_none_is_told() -> None:
    runs, ((line, reason),) = read_nccl_tests("nothing\nat all")
    assert not runs and line == 1 and "a table of size, count, type and time" in reason
    assert not looks_like_nccl_tests("nothing")


@pytest.mark.parametrize("stop", range(0, 1400, 97))
def test_text_that_ends_early_never_raises(stop: int) -> None:
    runs, skipped = read_nccl_tests(write_run()[:stop])
    assert runs or skipped


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_text_with_any_damage_never_raises(data: st.DataObject) -> None:
    text = write_run()
    place = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(max_size=60))
    length = data.draw(st.integers(0, 80))
    runs, _ = read_nccl_tests(text[:place] + junk + text[place + length :])
    for run in runs:
        assert run.ranks >= 1 and run.nodes >= 1 and all(message.time > 0 for message in run.messages)
