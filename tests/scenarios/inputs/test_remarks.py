"""Figures that are probably mistyped are remarked on, and no machine or scenario that is published is."""

import json
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files import library
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.inputs.cluster_document import build_cluster_document, format_exact
from meshwise.scenarios.inputs.cluster_file import read_cluster_table
from meshwise.scenarios.inputs.remarks import list_unusual
from meshwise.simulator import units
from meshwise.simulator.catalog import cluster, cluster_names
from meshwise.simulator.units import Dimension, format_bandwidth, format_compute_rate

SCENARIO = """\
model: {transformer: {layers: 4, hidden: 48, heads: 6, ffn: 192, vocab: 256}}
training: {global_batch: 16, sequence: 64, precision: fp32}
cluster:
  name: box
  nodes: 2
  devices_per_node: 1
  accelerator: {name: chip, peak: {fp32: 1 TFLOP/s}, memory: 8 GiB, memory_bandwidth: 200 GB/s}
  host: {name: host, memory: 64 GiB}
  intra_node: {bandwidth: 10 GB/s}
  inter_node: {bandwidth: 100 Gb/s, latency: 5 us}
plan: {data: 2}
"""


def remarks(tmp_path: Path, old: str, new: str) -> list[str]:
    assert old in SCENARIO
    file, text = tmp_path / "s.yaml", SCENARIO.replace(old, new)
    many = "data: 2, microbatch: 100" if "global" in new else "data: 2"  # a step has at most 100,000 microbatches
    file.write_text(text.replace("data: 2", many))
    return [str(fault).removeprefix(f"{file}:") for fault in load(file).warnings]


@pytest.mark.parametrize(
    ("old", "new", "remark"),
    [
        (
            "bandwidth: 100 Gb/s",
            "bandwidth: 400 GB/s",  # 8 * 400 = 3200 Gb/s; as Gb/s it is 400 / 8 = 50 GB/s
            "10:16: cluster.inter_node.bandwidth: is unusual beside the machine's other figures: 400 GB/s, "
            "the catalogue's machines have 1 GB/s to 84 GB/s; probably 400 Gb/s, which are 50 GB/s",
        ),
        (
            "memory: 8 GiB",
            "memory: 80 B",
            "7:54: cluster.accelerator.memory: is unusual: 80 B, usual are 1 GiB to 1 TiB",
        ),
        (
            "fp32: 1 TFLOP/s",
            "fp32: 1 FLOP/s",
            "7:36: cluster.accelerator.peak.fp32: is unusual: 1 FLOP/s, usual are 1 GFLOP/s to 100 PFLOP/s",
        ),
        (
            "latency: 5 us",
            "latency: 5 s",
            "10:37: cluster.inter_node.latency: is unusual: 5 s, usual is less",
        ),
        (
            "global_batch: 16",
            "global_batch: 1e7",
            "2:12: training.global_batch: is unusual: 10,000,000, usual are 1 to 1,000,000",
        ),
    ],
)
def test_a_figure_far_from_what_is_usual_is_remarked_on(old: str, new: str, remark: str, tmp_path: Path) -> None:
    assert remarks(tmp_path, old, new) == [remark]


def test_tokens_of_a_step_are_counted(tmp_path: Path) -> None:
    """10^6 sequences are not too many, and yet 10^6 * 1024 = 1.02e9 tokens are."""
    (remark,) = remarks(tmp_path, "global_batch: 16, sequence: 64", "global_batch: 1000000, sequence: 1024")
    assert remark.endswith("global_batch * sequence is unusual: 1.02e+09 tokens a step, usual are up to 1e+09")


def test_no_machine_of_the_catalogue_is_unusual() -> None:
    for name in cluster_names():
        document = parse_document(json.dumps(build_cluster_document(cluster(name))).encode(), name)
        assert list_unusual(read_cluster_table(document), document) == ()


def test_no_scenario_of_the_library_is_unusual() -> None:
    assert {name for name in library.list_names() if load(name).warnings} == set()


def test_validate_says_it_and_is_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.replace("8 GiB", "80 B"))
    assert run(["validate", str(file), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert (warning["line"], warning["column"], warning["field"]) == (7, 54, "cluster.accelerator.memory")
    assert run(["validate", str(file)]) == 0
    assert f"{file}:7:54: cluster.accelerator.memory: is unusual: 80 B" in capsys.readouterr().err


def test_simulate_says_it_among_what_the_result_rests_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SCENARIO.replace("bandwidth: 100 Gb/s", "bandwidth: 400 GB/s"))
    assert run(["simulate", str(file), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["assumptions"]
    assert any(
        line.startswith("cluster.inter_node.bandwidth is unusual beside the machine's other figures: 400 GB/s")
        for line in lines
    )


def test_a_cluster_file_is_remarked_on_in_its_own_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = SCENARIO.replace("100 Gb/s", "400 GB/s").splitlines()
    (tmp_path / "c.yaml").write_text("\n".join(line[2:] for line in lines[3:10]) + "\n")
    file = tmp_path / "s.yaml"
    file.write_text("\n".join([*lines[:2], "cluster: {file: c.yaml}", lines[10]]) + "\n")
    (remark,) = load(file).warnings
    assert str(remark).startswith(f"{tmp_path / 'c.yaml'}:7:14: inter_node.bandwidth: is unusual beside")
    assert run(["validate", str(tmp_path / "c.yaml")]) == 0
    assert "inter_node.bandwidth: is unusual beside" in capsys.readouterr().err


RATES = (("accelerator", "memory_bandwidth"), ("intra_node", "bandwidth"), ("inter_node", "bandwidth"))


@pytest.mark.parametrize("scale", [1000, 1 / 1000])
@pytest.mark.parametrize("name", cluster_names())
def test_a_unit_off_by_a_thousand_is_told_on_every_rate_of_every_machine(name: str, scale: float) -> None:
    """The remark is on that very figure, and what it says is probably meant is what the catalogue has."""
    peaks = build_cluster_document(cluster(name))["accelerator"]["peak"]
    for path in (*RATES, *(("accelerator", "peak", dtype) for dtype in peaks)):
        data = build_cluster_document(cluster(name))
        *above, last = path
        table = data
        for key in above:
            table = table[key]
        dimension = Dimension.COMPUTE_RATE if "peak" in path else Dimension.BANDWIDTH
        value = units.parse(table[last], dimension)
        table[last] = format_exact(value * scale, dimension)
        document = parse_document(json.dumps(data).encode(), name)
        (fault,) = list_unusual(read_cluster_table(document), document)
        words = format_compute_rate if "peak" in path else format_bandwidth
        assert fault.field == ".".join(path)
        assert fault.message.endswith(f"; probably {words(value)}")


def test_assumptions_name_what_was_left_out_and_nothing_else() -> None:
    lines = load("local/dp2").assumptions
    assert "plan.zero is 0 (default)" in lines
    assert "model.transformer.kv_heads is 4 (default)" in lines
    assert "training.gradient_precision is same (default)" in lines
    assert "training.gradient_clipping is false (default)" in lines
    assert not any(
        line.startswith(
            ("plan.data", "training.precision", "training.optimizer", "model.transformer.layers", "plan.context")
        )
        for line in lines
    )
    assert any(
        line.startswith("model.preset gpt3-175b means layers 96") for line in load("gpt3-175b-1024-a100").assumptions
    )


@pytest.mark.parametrize(
    ("zero", "named"), [(0, ()), (1, ("zero_shards",)), (3, ("zero_shards", "reshard_after_forward"))]
)
def test_assumptions_name_what_matters_at_a_zero_stage(zero: int, named: tuple[str, ...], tmp_path) -> None:
    (tmp_path / "plan.yaml").write_text(f"{{data: 4, pipeline: 2, zero: {zero}}}\n")
    lines = load("local/dp2-tp2-pp2", tmp_path / "plan.yaml").assumptions
    every = ("zero_shards", "reshard_after_forward")
    assert tuple(name for name in every if any(line.startswith(f"plan.{name} ") for line in lines)) == named


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, []),
        ({"sequence_parallel": True}, ["plan.overlap_tensor is false (default)"]),
        ({"sequence_parallel": True, "overlap_tensor": True}, ["chunks of a product beside tensor communication"]),
    ],
)
def test_assumptions_speak_of_overlap_where_there_is_something_to_overlap(
    fields: dict[str, bool], found: list[str], tmp_path
) -> None:
    (tmp_path / "plan.yaml").write_text(json.dumps({"data": 2, "tensor": 2, "pipeline": 2} | fields))
    lines = load("local/dp2-tp2-pp2", tmp_path / "plan.yaml").assumptions
    met = [line for line in lines if line.startswith(("plan.overlap_tensor ", "chunks of a product"))]
    assert len(met) == len(found) and all(line.startswith(start) for line, start in zip(met, found, strict=True))
