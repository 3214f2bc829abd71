"""Traces on the command line: Chakra's replay takes the step's own time, sizes are said, wrong names are refused."""

import json
import re
from pathlib import Path

import pytest

from meshwise import load
from meshwise.reports.traces.chakra_reader import ReadNode, read_chakra, read_nodes
from meshwise.scenarios.commands.main import run
from meshwise.simulator.engine import simulate
from meshwise.strategies.schedules.schedule import build_schedule

SCENARIO = """\
model: {{transformer: {{layers: {layers}, hidden: 512, heads: 8, ffn: 2048, vocab: 4096{model}}}}}
training: {{global_batch: 8, sequence: 512, precision: bf16}}
cluster: {{preset: {cluster}}}
plan: {{{plan}}}
"""
NODE = "dgx-a100-80gb, nodes: 1, devices_per_node: 8"
PLANS = {
    "data in buckets": (NODE, "data: 8", ""),
    "pipeline and tensor": (NODE, "data: 2, tensor: 2, pipeline: 2, sequence_parallel: true", ""),
    "interleaved": (NODE, "data: 4, pipeline: 2, schedule: interleaved, chunks: 2", ""),
    "turning pipeline": (NODE, "data: 4, pipeline: 2, schedule: zbv, chunks: 2", ""),
    "overlapping passes": (NODE, "data: 2, tensor: 2, pipeline: 2, schedule: dualpipev, chunks: 2", ""),
    "sharded parameters": (NODE, "data: 8, zero: 3", ""),
    "ring of context": (NODE, "data: 2, context: 4, attention: ring", ""),
    "ring of two": (NODE, "data: 4, context: 2, attention: ring", ""),
    "all-to-all of context": (NODE, "data: 2, context: 4, attention: ulysses", ""),
    "experts": (NODE, "data: 8, expert: 4", ", experts: {count: 8, top_k: 2, ffn: 2048}"),
    "phases over nodes": ("dgx-a100-80gb, nodes: 4, devices_per_node: 4", "data: 8, tensor: 2, zero: 1", ""),
    "replicas": ("dgx-a100-80gb, nodes: 2, devices_per_node: 4", "data: 8, zero: 2, zero_shards: 4", ""),
    "offload": (NODE, "data: 4, pipeline: 2, offload: [optimizer, activations]", ""),
    "straggler": (NODE + ", speeds: {3: 0.5}", "data: 4, pipeline: 2", ""),
    "grid of tensors": (NODE, "data: 2, tensor: 2, tensor_rows: 2, microbatch: 2", ""),
    "server of parameters": (NODE, "data: 8, gradient_reduction: parameter_server", ""),
}


def scenario(path: Path, cluster: str, plan: str, model: str, layers: int = 4) -> Path:
    path.write_text(SCENARIO.format(cluster=cluster, plan=plan, model=model, layers=layers))
    return path


@pytest.mark.parametrize("name", PLANS)
def test_a_step_written_and_read_takes_exactly_its_own_time(name: str, tmp_path: Path) -> None:
    """Every duration is the one that was simulated, so that the longest path through the same graph is as long."""
    file = scenario(tmp_path / "s.yaml", *PLANS[name])
    assert run(["simulate", str(file), "--chakra", str(tmp_path / "et"), "--json"]) == 0
    program = read_chakra(tmp_path / "et")
    value = load(file)
    assert simulate(program).step_time == simulate(program, "longest_path").step_time == value.simulate().step_time
    assert len(program.rank_classes) == value.choose_plan().mesh.num_ranks


@pytest.fixture
def nodes(tmp_path: Path) -> list[list[ReadNode]]:
    file = scenario(tmp_path / "s.yaml", *PLANS["pipeline and tensor"])
    assert run(["simulate", str(file), "--chakra", str(tmp_path / "et"), "--json"]) == 0
    return [read_nodes(tmp_path / "et" / f"step.{rank}.et") for rank in range(8)]


def test_ranks_send_to_the_next_stage_and_groups_are_those_of_the_mesh(
    nodes: list[list[ReadNode]], tmp_path: Path
) -> None:
    """Ranks are [pipeline 2, data 2, tensor 2] in row-major order: rank 1 sends to 5, sums with 0, with 3, and with 5.

    The last is the sum of gradients of the embedding, which both stages hold.
    """
    groups = json.loads((tmp_path / "et" / "comm_group.json").read_text())
    tensor, data = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(map(sorted, groups.values())) == sorted([*tensor, *data, [0, 4], [1, 5], [2, 6], [3, 7]])
    sent = {(n.numbers["comm_src"], n.numbers["comm_dst"]) for n in nodes[1] if n.type == 5}
    received = {(n.numbers["comm_src"], n.numbers["comm_dst"]) for n in nodes[1] if n.type == 6}
    assert (sent, received) == ({(1, 5)}, {(5, 1)})
    # 8 sequences over 2 data ranks in microbatches of 1: 4 transfers of 512 x 512 bf16, half of it a tensor rank's
    assert [n.numbers["comm_size"] for n in nodes[1] if n.type == 5] == [512 * 512 * 2 // 2] * 4
    assert {tuple(groups[str(int(n.texts["pg_name"]))]) for n in nodes[1] if n.type == 7} == {(0, 1), (1, 3), (1, 5)}


def test_an_all_gather_counts_the_shard_and_a_reduce_scatter_the_whole(nodes: list[list[ReadNode]]) -> None:
    """As ASTRA-sim does; with sequence parallelism both move a microbatch's 512 x 512 bf16 over two tensor ranks."""
    whole = 512 * 512 * 2
    sizes = {
        n.numbers["comm_type"]: n.numbers["comm_size"]
        for n in nodes[0]
        if n.type == 7 and "tensor" in n.texts["stream"] and ("all_gather" in n.name or "reduce_scatter" in n.name)
    }
    assert (sizes[2], sizes[7]) == (whole // 2, whole)


def test_times_are_in_whole_microseconds_too(nodes: list[list[ReadNode]]) -> None:
    assert all(abs(n.micros * 10**6 - n.numbers["ticks"]) <= 500_000 for each in nodes for n in each)


def test_replay_prints_what_the_step_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario(tmp_path / "s.yaml", *PLANS["pipeline and tensor"])
    run(["simulate", str(file), "--chakra", str(tmp_path / "et"), "--json"])
    said = json.loads(capsys.readouterr().out)
    trace = tmp_path / "replayed.pftrace"
    assert run(["replay", str(tmp_path / "et"), "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step_time"], found["ranks"]) == (said["step_time"], 8)
    assert found["exposed_communication"] == pytest.approx(said["exposed_communication"])
    assert trace.stat().st_size > 1000
    (tmp_path / "et" / "step.3.et").write_bytes(b"\x07")
    assert run(["replay", str(tmp_path / "et")]) == 2
    assert "step.3.et" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--trace", "t.json"), ("--trace", "t.pftrace"), ("--kineto", "k")])
def test_sizes_are_said_before_they_are_written_and_bounded(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = scenario(tmp_path / "s.yaml", *PLANS["data in buckets"])
    command = ["simulate", str(file), option, str(tmp_path / name), "--ranks", "0-3", "--json"]
    assert run(command) == 0
    told = capsys.readouterr()
    assert re.search(rf"{name}: about [0-9.]+ [KM]iB, 4 processes", told.err)
    json.loads(told.out)
    monkeypatch.setattr("meshwise.scenarios.commands.traces.MAX_JSON", 1000)
    monkeypatch.setattr("meshwise.scenarios.commands.traces.MAX_TRACE", 1000)
    assert run(command) == 2
    assert "1e+03 B at most; name fewer" in capsys.readouterr().err.replace("1000 B", "1e+03 B")


def test_measured_traces_are_compared_by_collective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario(tmp_path / "s.yaml", *PLANS["pipeline and tensor"])
    run(["simulate", str(file), "--kineto", str(tmp_path), "--ranks", "1,6", "--json"])
    capsys.readouterr()
    measured = [word for rank in (1, 6) for word in ("--measured", str(tmp_path / f"rank.{rank}.json"))]
    assert run(["simulate", str(file), *measured, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["difference"]
    assert abs(found["error"]) < 1e-9
    words = {row["operation"] for row in found["operations"]}
    assert words == {"compute", "all_gather", "reduce_scatter", "all_reduce", "send and receive", "waiting"}
    assert all(abs(row["difference"]) < 1e-7 for row in found["operations"])
    assert run(["simulate", str(file), "--measured", str(file)]) == 2
    assert "no JSON" in capsys.readouterr().err


def test_a_schedule_is_written_and_read_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario(tmp_path / "s.yaml", NODE, "data: 2, pipeline: 4, schedule: zb1p", "")
    assert run(["simulate", str(file), "--schedule-csv", str(tmp_path / "order.csv"), "--json"]) == 0
    assert (tmp_path / "order.csv").read_text().splitlines()[3].startswith("3F0,3I0")
    named = load(file).simulate().step_time
    scenario(file, NODE, "data: 2, pipeline: 4, schedule: order.csv", "")
    written = load(file)
    assert written.simulate().step_time == named
    assert str(written.choose_plan().schedule) == str(build_schedule("zb1p", 4, 4))
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1X0\n")
    assert run(["simulate", str(file)]) == 2
    assert "order.csv:2:1: schedule: an action is" in capsys.readouterr().err
    (tmp_path / "order.csv").unlink()
    assert run(["validate", str(file)]) == 2
    assert "s.yaml:4:" in capsys.readouterr().err
