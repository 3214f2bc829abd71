"""Nothing is ideal for want of a word: what a cluster leaves out is typical of what was timed, and results say so."""

import json
from importlib.resources import files
from pathlib import Path
from statistics import median

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.inputs.cluster_file import load_cluster, write_cluster
from meshwise.scenarios.loader import move_to_cluster_file
from meshwise.simulator.catalog import accelerator, accelerator_names, cluster, describe_estimates
from meshwise.simulator.catalog.typical import timed_accelerators, typical_efficiency
from meshwise.simulator.machine.cluster import Cluster

SCENARIO = """\
model: {preset: llama2-7b}
training: {global_batch: 16, sequence: 2048, precision: bf16}
cluster:
  name: box
  nodes: 2
  devices_per_node: 8
  accelerator: {name: chip, peak: {bf16: 400 TFLOP/s}, memory: 80 GiB, memory_bandwidth: 2 TB/s}
  host: {name: host, memory: 64 GiB}
  intra_node: {bandwidth: 300 GB/s}
  inter_node: {bandwidth: 100 Gb/s, latency: 5 us}
plan: {data: 16, zero: 3, recompute: full}
"""
IDEAL = "launch: 0 us, matmul: {}, attention: {}, sustained: 1, kernel_bandwidth_default: 1"


def written(folder: Path, accelerator: str = "", intra_node: str = "", inter_node: str = "") -> Path:
    file, text = folder / "s.yaml", SCENARIO
    for old, new in (
        ("2 TB/s}", f"2 TB/s, {accelerator}}}" if accelerator else "2 TB/s}"),
        ("300 GB/s}", f"300 GB/s{intra_node}}}"),
        ("latency: 5 us}", f"latency: 5 us{inter_node}}}"),
    ):
        text = text.replace(old, new)
    file.write_text(text)
    return file


def cluster_of(file: Path) -> Cluster:
    return load(file).problem.cluster


def fits() -> list[dict[str, dict[str, float]]]:
    """The figures of the catalogue's calibration files, read as they lie there."""
    folder = files("meshwise.simulator.catalog").joinpath("calibration")
    found = [json.loads(file.read_text("utf-8")) for file in folder.iterdir() if file.name != "links.json"]
    return [document["figures"] for document in found]


def test_what_is_not_stated_is_the_median_of_what_was_timed(tmp_path: Path) -> None:
    device = cluster_of(written(tmp_path)).accelerator
    matmuls = [figures["matmul"] for figures in fits()]
    assert len(matmuls) == len(timed_accelerators()) == 7
    assert device.matmul.fraction == sorted(matmul["fraction"] for matmul in matmuls)[3]  # the fourth of seven
    assert device.matmul.half_k == sorted(matmul["half_k"] for matmul in matmuls)[3]
    streamed = [figures["kernel_bandwidth"]["matmul"] for figures in fits()]
    assert dict(device.kernel_bandwidth)["matmul"] == sorted(streamed)[3]
    assert device.sustained == median(accelerator(name).sustained for name in timed_accelerators())


def test_attention_is_never_above_the_peak_whatever_products_are_said_to_reach(tmp_path: Path) -> None:
    typical = typical_efficiency()
    for fraction in (1.0, 0.5, 0.05):
        device = cluster_of(written(tmp_path, f"matmul: {{fraction: {fraction}}}")).accelerator
        reached = typical.attention.forward * typical.matmul.fraction  # of the peak, as the timed ones do
        assert device.attention.forward * fraction == pytest.approx(reached) and reached <= 1


def test_a_machine_that_nobody_timed_is_slower_than_an_ideal_one(tmp_path: Path) -> None:
    times = [load(written(tmp_path, stated)).simulate().step_time for stated in (IDEAL, "like: h100-80gb", "")]
    assert times[0] < times[1] and times[0] < times[2]


def test_like_takes_the_efficiencies_of_that_accelerator_and_no_peak(tmp_path: Path) -> None:
    device, other = cluster_of(written(tmp_path, "like: v100-16gb")).accelerator, accelerator("v100-16gb")
    assert device.peak_flops == (("bf16", 400e12),)
    for name in ("launch", "matmul", "attention", "sustained", "kernel_bandwidth"):
        assert getattr(device, name) == getattr(other, name)


def test_what_is_stated_holds_and_the_rest_is_named(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, "launch: 3 us, sustained: 1.3, kernel_bandwidth: {norm: 0.4}"))
    device = scenario.problem.cluster.accelerator
    assert (device.launch, device.sustained, dict(device.kernel_bandwidth)["norm"]) == (3e-6, 1.3, 0.4)
    assert dict(device.kernel_bandwidth)["softmax"] == dict(typical_efficiency().kernel_bandwidth)["softmax"]
    assert scenario.assumptions[0].startswith(
        "chip: matmul, attention, kernel_bandwidth not stated, taken as the median"
    )


def test_links_have_the_delays_of_timed_ones_where_none_are_stated(tmp_path: Path) -> None:
    node = cluster_of(written(tmp_path)).first_node
    links = json.loads(files("meshwise.simulator.catalog").joinpath("calibration/links.json").read_text("utf-8"))
    inside = sorted(float(links[f"nvlink{number}"]["latency"].removesuffix(" us")) for number in (2, 3, 4, 5))
    assert node.network.link.latency == pytest.approx((inside[1] + inside[2]) / 2 * 1e-6)
    assert node.nic.latency == pytest.approx(5e-6) and node.nic.launch > 0
    assert (node.network.link.bandwidth, node.nic.bandwidth) == (300e9, 12.5e9)


def test_a_result_says_it_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    assert run(["simulate", str(file)]) == 0
    header, *remarks = capsys.readouterr().out.splitlines()[:4]
    assert header.startswith("scenario")
    assert [line.split()[1] for line in remarks] == ["chip:", "intra_node:", "inter_node:"]
    assert run(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumptions"][0].startswith("chip: launch, matmul")


def test_a_machine_that_states_everything_has_nothing_to_remark(tmp_path: Path) -> None:
    delays = ", latency: 2 us, launch: 9 us"
    assert load(written(tmp_path, IDEAL, delays, ", launch: 9 us")).remarks == ()


def test_a_file_that_the_program_writes_keeps_the_remarks(tmp_path: Path) -> None:
    machine = cluster_of(written(tmp_path))
    write_cluster(machine, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == machine
    assert len(machine.estimated) == 3


def test_another_machine_brings_its_own_remarks(tmp_path: Path) -> None:
    scenario = load(written(tmp_path))
    moved = scenario.on(cluster("dgx-a100-80gb", 2))
    assert moved.remarks == () and not set(scenario.remarks) & set(moved.assumptions)
    assert moved.on(scenario.problem.cluster).remarks == scenario.remarks


@pytest.mark.parametrize("command", ["search", "simulate", "explain", "compare"])
def test_the_remarks_are_those_of_the_cluster_file_in_effect(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = written(tmp_path, inter_node=", launch: 2 s")  # unusual, and of a machine that is not in effect
    text = own.read_text().replace("launch: 2 s", "launch: 3 s").replace("name: chip", "name: other")
    machine, quick = text.split("cluster:\n")[1].split("plan:")[0], "search: {space: {core: true, data: [16]}}\n"
    (tmp_path / "machine.yaml").write_text("\n".join(line.removeprefix("  ") for line in machine.splitlines()))
    own.write_text(own.read_text() + quick)
    limits = [] if command == "simulate" else ["--seconds", "5"]
    limits += ["--algorithms", "random", "--budget", "2"] if command == "compare" else []
    assert run([command, str(own), "--cluster", str(tmp_path / "machine.yaml"), *limits]) in (0, 3)
    told = " ".join("".join(capsys.readouterr()).split())
    assert "other: launch, matmul" in told and "inter_node.launch is unusual: 3 s" in told
    assert "chip:" not in told and "2 s, usual" not in told


def test_the_file_of_the_machine_in_effect_is_named(tmp_path: Path) -> None:
    write_cluster(cluster("dgx-a100-80gb", 1), tmp_path / "machine.yaml")
    moved = move_to_cluster_file(load("local/dp2"), tmp_path / "machine.yaml")
    assert f"cluster.file {tmp_path / 'machine.yaml'} has the figures of that file" in moved.assumptions


def test_what_rests_on_the_machine_is_that_of_the_machine_in_effect(tmp_path: Path) -> None:
    scenario, ascend = load("local/dp2"), cluster("atlas-800-910", 1)
    moved = scenario.on(ascend)
    assert not [line for line in moved.assumptions if line.startswith(("cluster.", "CPU core"))]
    assert moved.problem.memory_margin > scenario.problem.memory_margin  # an allocator of an accelerator caches blocks
    assert moved.on(scenario.problem.cluster).problem == scenario.problem


@pytest.mark.parametrize(
    ("table", "missing"),
    [("matmul: {fraction: 0.6}", "half_k, tiles"), ("attention: {forward: 0.6, block: 64}", "backward, half_sequence")],
)
def test_what_a_partly_stated_table_leaves_out_is_told_as_ideal(table: str, missing: str, tmp_path: Path) -> None:
    name = table.split(":")[0]
    delays = ", latency: 2 us, launch: 9 us"
    (remark,) = load(written(tmp_path, IDEAL.replace(f"{name}: {{}}", table), delays, ", launch: 9 us")).remarks
    assert remark.startswith(f"chip: {name} without {missing}") and "ideal" in remark


def test_a_name_that_like_does_not_know_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"accelerator\.like: holds one of .*met 'h100-80g'; nearest: h100-80gb"):
        load(written(tmp_path, "like: h100-80g"))


@pytest.mark.parametrize("name", accelerator_names())
def test_no_accelerator_of_the_catalogue_is_ideal_or_silent(name: str) -> None:
    device = accelerator(name)
    assert device.matmul.fraction < 1 and device.launch > 0
    related = any(accelerator(timed).matmul == device.matmul for timed in timed_accelerators())
    assert related != bool(describe_estimates(name))
