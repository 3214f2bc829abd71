"""Links that nccl-tests measured, before the rest of a machine is fitted to steps."""

from dataclasses import replace

import pytest

from meshwise.scenarios.machine_fit.measured_links import LEAST_DEVIATION, measure_links
from meshwise.scenarios.machine_fit.posterior import load_prior
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.machine.factors import FACTORS

from .small_runs import ROW

HEADER = """# nThread 1 nGpus 8 minBytes 67108864 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
"""
DEVICES = "#  Rank {rank:2d} Group  0 Pid  100 on node{node} device  {device} [0x07] NVIDIA A100-SXM4-80GB\n"
COLUMNS = """#   size     count     type   redop  root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#    (B)  (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def write_table(path, rate: float, nodes: int) -> str:
    """Write all-reduces of 8 devices a node that reach a bus bandwidth of ``rate`` GB/s; return the path."""
    ranks = 8 * nodes
    lines = [HEADER, *(DEVICES.format(rank=rank, node=rank // 8, device=rank % 8) for rank in range(ranks)), COLUMNS]
    for exponent in range(26, 31):
        size = 2**exponent
        microseconds = size * 2 * (ranks - 1) / ranks / (rate * 1e9) * 1e6
        bandwidth = size / microseconds * 1e-3
        columns = f"{microseconds:.1f} {bandwidth:.2f} {rate:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {columns} {columns}\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize(("nodes", "kind"), [(1, "intra"), (2, "inter")])
def test_only_the_measured_links_move_and_are_known(tmp_path, nodes: int, kind: str) -> None:
    run, prior = build_run(ROW), load_prior()
    assert run.scenario is not None
    path = write_table(tmp_path / "table.txt", 60.0, nodes)
    (moved_run,), measured_prior, _ = measure_links([run], prior, path)
    assert moved_run.scenario is not None
    node, measured_node = run.scenario.problem.cluster.first_node, moved_run.scenario.problem.cluster.first_node
    # a third of what the catalogue expects inside a node and between nodes
    assert (measured_node.network != node.network) == (kind == "intra")
    assert (measured_node.nic != node.nic) == (kind == "inter")
    table = list(zip(FACTORS, prior.deviations, measured_prior.deviations, measured_prior.means, strict=True))
    known = [(before, after, mean) for name, before, after, mean in table if name.startswith(kind)]
    assert all(min(before, LEAST_DEVIATION) <= after <= before and mean == 0 for before, after, mean in known)
    assert all(before == after for name, before, after, _ in table if not name.startswith(kind))


def test_runs_on_other_accelerators_keep_their_links(tmp_path) -> None:
    path = write_table(tmp_path / "table.txt", 60.0, 1)
    runs = [build_run(ROW), replace(build_run(ROW | {"accelerator": "H100 SXM"}), row_id="other")]
    moved_runs, *_ = measure_links([runs[0], runs[0], runs[1]], load_prior(), path)
    assert moved_runs[2] == runs[1] and moved_runs[0] != runs[0]


def test_runs_that_cannot_be_simulated_have_no_machine(tmp_path) -> None:
    path = write_table(tmp_path / "table.txt", 60.0, 1)
    with pytest.raises(ValueError, match="met no run that can be simulated"):
        measure_links([build_run({"row_id": "empty"})], load_prior(), path)
