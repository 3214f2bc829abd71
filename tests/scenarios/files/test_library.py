import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwise import load
from meshwise.scenarios.files import library
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.published.runs import build_run
from meshwise.simulator.machine.cluster import Cluster
from meshwise.strategies.plan.framework import ENTRIES

NAMES = library.list_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_has_a_plan_that_fills_its_cluster(name: str) -> None:
    scenario = load(name)
    plan = scenario.choose_plan()
    ranks = plan.data * plan.context * plan.tensor_rows * plan.tensor * plan.pipeline
    assert ranks == len(scenario.problem.cluster.free_devices)
    each = plan.data * plan.microbatch if isinstance(plan.microbatch, int) else sum(plan.microbatch)
    assert each * plan.num_microbatches == scenario.problem.training.global_batch


def test_the_library_is_complete() -> None:
    folders = [name.split("/")[0] for name in NAMES if "/" in name]
    assert folders.count("megatron") == 10
    assert folders.count("korthikanti") == 8
    assert folders.count("machines") == 6
    assert {"gpt3-175b-1024-a100", "megatron/gpt-145b-1536-a100", "local/dp2-tp2-pp2", "starter"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("machines/")])
def test_scenarios_of_machines_fit(name: str) -> None:
    result = load(name).simulate()
    assert result.fits
    assert result.bottleneck is not None


def test_the_host_of_the_offload_scenario_holds_all_optimizer_states() -> None:
    """Of every parameter a device keeps 2 bytes, the one host 12: AdamW's main weight and two moments in fp32."""
    memory = load("gpt-70b-16-v100-offload").simulate().memory
    assert [stage.optimizer for stage in memory] == [0, 0]
    on_devices = 8 * sum(stage.parameters for stage in memory)
    assert [stage.host_peak for stage in memory] == [6 * on_devices] * 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [("1.7b-32", 1.7), ("3.6b-64", 3.6), ("7.5b-128", 7.5), ("18b-256", 18.4), ("39b-512", 39.1), ("76b-1024", 76.1),
     ("145b-1536", 145.6), ("310b-1920", 310.1), ("530b-2520", 529.6), ("1t-3072", 1008.0)],
)  # fmt: skip
def test_megatron_models_have_the_parameters_of_table_1(name: str, billions: float) -> None:
    assert load(f"megatron/gpt-{name}-a100").problem.graph.num_parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_the_145b_row_is_that_of_the_paper() -> None:
    scenario = load("gpt-145b-1536-a100")
    plan = scenario.choose_plan()
    assert (plan.data, plan.tensor, plan.pipeline, plan.chunks, plan.microbatch) == (24, 8, 8, 2, 2)
    assert scenario.problem.cluster.num_devices == 1536
    assert scenario.measured is not None
    # 96 B s l h^2 (1 + s/6h + V/16lh) FLOP at 148 TFLOP/s on each of 1536 devices
    batch, sequence, layers, hidden, vocab = 2304, 2048, 80, 12288, 51200
    flops = 96 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    assert scenario.measured.step_time == pytest.approx(flops / (148e12 * 1536), rel=0.004)


def test_a_published_row_and_its_scenario_are_the_same_problem_and_plan() -> None:
    row = {
        "row_id": "r", "source_id": "s", "arch": "gpt", "n_layers": 80, "hidden": 12288, "n_heads": 96,
        "ffn_hidden": 49152, "vocab": 51200, "seq_len": 2048, "precision": "fp16", "accelerator": "A100 SXM",
        "accel_mem_gb": 80, "n_devices": 1536,
        "devices_per_node": 8, "dp": 24, "tp": 8, "pp": 8, "vpp": 2, "sequence_parallel": False, "zero_stage": 0,
        "recompute": "full", "micro_batch": 2, "global_batch": 2304, "schedule": "interleaved 1F1B",
        "tied_embeddings": True,
        "framework": "Megatron-LM (April 2021)", "step_time_s": 24.8174,
    }  # fmt: skip
    run, scenario = build_run(row), load("gpt-145b-1536-a100")
    assert run.skipped == ""
    assert run.scenario is not None
    assert run.scenario.plan == scenario.plan
    # a row's hosts launch as its framework does; those of a preset launch as fast as devices run
    ((node, count),) = run.scenario.problem.cluster.nodes
    assert node.host.launch == ENTRIES[scenario.problem.training.framework].defaults.launch > 0
    cluster = replace(
        run.scenario.problem.cluster, nodes=((replace(node, host=replace(node.host, launch=0.0)), count),)
    )
    assert replace(run.scenario.problem, cluster=cluster) == scenario.problem


def test_a_bare_name_an_explicit_name_and_a_path_are_one_file() -> None:
    path = library.find_root() / "local" / "dp2.yaml"
    assert library.find_scenario("dp2") == library.find_scenario("local/dp2") == library.find_scenario(path) == path


def test_a_name_that_is_none_proposes_the_nearest() -> None:
    with pytest.raises(ScenarioError, match="nearest: gpt3-175b-1024-a100"):
        library.find_scenario("gpt3-175b-1024-a10")


def test_json_is_a_scenario_too(tmp_path: Path) -> None:
    from meshwise.scenarios.files.reader import read_document

    data = read_document(library.find_scenario("local/dp2")).data
    (tmp_path / "dp2.json").write_text(json.dumps(data))
    assert load(tmp_path / "dp2.json").problem == load("local/dp2").problem


def test_local_scenarios_can_be_executed() -> None:
    supported = pytest.importorskip("meshwise.executor.supported")
    for name in NAMES:
        if name.startswith("local/") or name == "starter":
            scenario = load(name)
            assert supported.find_unsupported(scenario.spec, scenario.problem.training, scenario.choose_plan()) == ()
            assert isinstance(scenario.problem.cluster, Cluster)
