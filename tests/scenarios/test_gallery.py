"""The gallery: every scenario is simulated and fits, and every technique does what it is for."""

import math
import time
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.files import library
from meshwise.scenarios.files.reader import Document, read_document
from meshwise.scenarios.loader import read_scenario
from meshwise.scenarios.simulation import Simulation
from meshwise.simulator.memory import CATEGORIES
from meshwise.simulator.program import Category

NAMES = [name for name in library.list_names() if name.startswith("gallery/")]
MAX_TASKS = 65_000
"""Tasks of one step that a core simulates in about a second."""

BEYOND = {
    "context-all-gather": "counts the whole square of attention, of which the kernel computes half",
    "context-ulysses": "counts the whole square of attention, of which the kernel computes half",
    "dlrm-dcnv2-8-b300": "sums all tables over the devices",
}
"""Why the model FLOP/s of some are not 5 to 65 % of the peak."""


@cache
def simulated(name: str) -> Simulation:
    return load(name).simulate()


def variant(name: str, fields: Mapping[str, Any]) -> Simulation:
    """Return the step of a scenario with some fields, by dotted path, of other values."""
    document = read_document(library.find_scenario(name))
    data = deepcopy(document.data)
    for path, value in fields.items():
        *sections, last = path.split(".")
        table = data
        for section in sections:
            table = table[section]
        table[last] = value
    return read_scenario(Document(document.file, data)).simulate()


def exposed(result: Simulation, kind: str) -> float:
    return dict(result.exposed_communication)[f"{kind} communication"]


def test_the_gallery_has_both_rooms() -> None:
    rooms = [name.split("/")[1] for name in NAMES]
    assert rooms.count("techniques") >= 30
    assert rooms.count("models") >= 15


def test_a_bare_name_means_one_scenario_of_the_library() -> None:
    bare = [name.rsplit("/", 1)[-1] for name in library.list_names()]
    assert sorted(bare) == sorted(set(bare))


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_of_the_gallery_is_quick_fits_and_is_finite(name: str, record_property: Any) -> None:
    start = time.process_time()
    result = simulated(name)
    record_property("cpu_seconds", time.process_time() - start)
    assert result.fits
    assert 0 < result.step_time < math.inf
    assert all(0 < stage.peak < math.inf for stage in result.memory)
    assert result.tasks <= MAX_TASKS
    bare = name.rsplit("/", 1)[-1]
    assert (0.05 <= result.mfu <= 0.65) is (bare not in BEYOND)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_of_the_gallery_says_where_it_comes_from(name: str) -> None:
    comment = [row for row in library.find_scenario(name).read_text().splitlines() if row.startswith("#")]
    assert any(word in row for row in comment for word in ("# Source: ", "# Model: "))
    assert ("techniques" in name) <= any(row.startswith("# Look at: ") for row in comment)


USUAL = ["pipeline", "data", "tensor"]
EVEN_4, EVEN_8 = [8, 8, 8, 7], [4, 4, 4, 4, 4, 4, 4, 3]
ONE_CHUNK = {"plan.chunks": 1, "plan.stages": EVEN_4}
TWO_CHUNKS = {"plan.chunks": 2, "plan.stages": EVEN_8}
ONE_ROW = {"plan.tensor": 16, "plan.tensor_rows": 1}
ONE_GRID = {"plan.data": 1, "plan.tensor": 8, "plan.tensor_rows": 8, "plan.microbatch": 16}
QUIET = [
    {
        "name": "another job",
        "devices": [*range(8, 16), *range(24, 32)],
        "collective": "all_reduce",
        "size": "1 B",
        "period": "1000 s",
    }
]

FASTER: list[tuple[str, dict[str, Any]]] = [
    ("data-parallel-buckets", {"plan.overlap_gradients": False}),
    ("zero-1-optimizer", {"plan.zero": 0}),
    ("zero-3-zero-bubble", {"plan.schedule": "1f1b"}),
    ("sequence-parallel", {"plan.sequence_parallel": False}),
    ("gpt3-175b-512-h100", {"plan.overlap_tensor": False}),
    ("pipeline-gpipe", {"plan.schedule": "naive"}),
    ("pipeline-1f1b", {"plan.schedule": "naive"}),
    ("pipeline-interleaved", {"plan.schedule": "1f1b"} | ONE_CHUNK),
    ("pipeline-looped-bfs", {"plan.schedule": "gpipe"} | ONE_CHUNK),
    ("pipeline-zb1p", {"plan.schedule": "1f1b"}),
    ("pipeline-zb2p", {"plan.schedule": "zb1p"}),
    ("pipeline-interleaved-zero-bubble", {"plan.schedule": "interleaved"}),
    ("pipeline-interleaved-zero-bubble", {"plan.schedule": "zb1p"} | ONE_CHUNK),
    ("pipeline-zbv", {"plan.schedule": "1f1b"} | ONE_CHUNK),
    ("pipeline-zbv", {"plan.schedule": "interleaved_zero_bubble"}),
    ("pipeline-dualpipev", {"plan.schedule": "zbv"}),
    ("pipeline-dualpipev", {"plan.schedule": "1f1b", "plan.chunks": 1}),
    ("pipeline-2bw", {"plan.schedule": "1f1b"}),
    ("pipeline-custom-order", {"plan.schedule": "1f1b"}),
    ("uneven-stages", {"plan.stages": "even"}),
    ("mixed-devices", {"plan.stages": "even"}),
    *(("uneven-batches", {"plan.microbatch": size}) for size in (1, 2, 4, 7)),
    ("tensor-parallel-2.5d", ONE_GRID),
    ("partial-optimizer-offload", {"plan.offload": ["optimizer"]}),
]
"""A scenario, and fields with which its step takes longer."""

SLOWER: list[tuple[str, dict[str, Any]]] = [
    ("data-parallel-no-overlap", {"plan.overlap_gradients": True}),
    ("parameter-server", {"cluster.algorithms": {}}),
    ("straggler", {"cluster.speeds": {}}),
    ("shared-network", {"cluster.tenants": QUIET}),
    ("bad-placement", {"plan.order": USUAL}),
    ("recompute-selective", {"plan.recompute": "none"}),
    ("recompute-full", {"plan.recompute": "selective"}),
    ("optimizer-offload", {"plan.offload": []}),
    ("partial-optimizer-offload", {"plan.offload": []}),
    ("parameter-offload", {"plan.offload": []}),
    ("zero-3-zero-bubble", {"plan.zero": 1}),
    ("expert-imbalance", {"model.transformer.experts.imbalance": 1.0}),
]
"""A scenario, and fields without which its step is shorter: a hindrance, or the price of memory."""

LEANER: list[tuple[str, dict[str, Any]]] = [
    ("tensor-parallel", {"plan.tensor": 1, "plan.data": 8, "plan.microbatch": 1}),
    ("tensor-parallel-2d", ONE_ROW),
    ("sequence-parallel", {"plan.sequence_parallel": False}),
    ("zero-1-optimizer", {"plan.zero": 0}),
    ("zero-3-zero-bubble", {"plan.zero": 1}),
    ("zero-3-zero-bubble", {"plan.schedule": "1f1b"}),
    ("recompute-selective", {"plan.recompute": "none"}),
    ("recompute-full", {"plan.recompute": "selective"}),
    ("optimizer-offload", {"plan.offload": []}),
    ("optimizer-offload", {"plan.offload": {"optimizer": {"step": "device"}}}),
    ("partial-optimizer-offload", {"plan.offload": []}),
    ("activation-offload", {"plan.offload": []}),
    ("parameter-offload", {"plan.offload": ["optimizer"]}),
    ("pipeline-naive", {"plan.schedule": "1f1b"}),
    ("pipeline-1f1b", {"plan.schedule": "gpipe"}),
    ("pipeline-interleaved", {"plan.schedule": "looped_bfs"}),
    ("pipeline-zb1p", {"plan.schedule": "zb2p"}),
    ("pipeline-zbv", {"plan.schedule": "1f1b"} | ONE_CHUNK),
    ("expert-parallel", {"plan.expert": 1}),
    ("expert-tensor-parallel", {"plan.tensor": 1, "plan.data": 8, "plan.sequence_parallel": False}),
    *(
        (f"context-{how}", {"plan.context": 1, "plan.data": 8, "training.global_batch": 8})
        for how in ("ring", "all-gather", "ulysses")
    ),
]
"""A scenario, and fields with which its fullest device holds more."""


@pytest.mark.parametrize(("name", "fields"), FASTER)
def test_a_technique_saves_time(name: str, fields: dict[str, Any]) -> None:
    assert simulated(name).step_time < 0.999 * variant(name, fields).step_time


@pytest.mark.parametrize(("name", "fields"), SLOWER)
def test_a_hindrance_costs_time(name: str, fields: dict[str, Any]) -> None:
    assert simulated(name).step_time > 1.01 * variant(name, fields).step_time


@pytest.mark.parametrize(("name", "fields"), LEANER)
def test_a_technique_saves_memory(name: str, fields: dict[str, Any]) -> None:
    assert simulated(name).peak_memory < 0.99 * variant(name, fields).peak_memory


def test_gpipe_and_1f1b_have_the_same_bubble_and_it_is_the_published_one() -> None:
    # 4 stages, 16 microbatches: (p - 1) / (m + p - 1) = 3 / 19; besides the optimizer's step and the embeddings
    gpipe, steady = simulated("pipeline-gpipe"), simulated("pipeline-1f1b")
    assert gpipe.step_time == pytest.approx(steady.step_time, rel=1e-3)
    assert 3 / 19 < steady.bubble < 3 / 19 + 0.02


def test_pipelines_without_a_flush_have_no_bubble_but_for_sends_and_updates() -> None:
    # where 1F1B has 3 / 19; embeddings and the head make stages uneven by some 2 %
    for name in ("pipeline-pipedream", "pipeline-2bw"):
        assert simulated(name).bubble < 0.04


def test_pipedream_keeps_a_version_of_the_weights_for_every_microbatch_in_flight() -> None:
    # 4, 3, 2 and 1 versions of the bf16 weights; what 1F1B keeps once
    flushed = variant("pipeline-pipedream", {"plan.schedule": "1f1b"}).memory
    versions = [
        own.parameters / one.parameters
        for own, one in zip(simulated("pipeline-pipedream").memory, flushed, strict=True)
    ]
    assert versions == [4, 3, 2, 1]
    double = variant("pipeline-pipedream", {"plan.schedule": "pipedream_2bw"})
    assert [own.parameters / one.parameters for own, one in zip(double.memory, flushed, strict=True)] == [2] * 4


def test_pipedream_updates_its_weights_sixteen_times_a_step() -> None:
    # 15 more updates than with 2BW, each at least 30 bytes (4 of the gradient, 2 of the weight, 2 * 12 of the states)
    # of the 1.6 billion parameters of a stage, at the 2.04 TB/s of the memory
    stashed, double = simulated("pipeline-pipedream"), variant("pipeline-pipedream", {"plan.schedule": "pipedream_2bw"})
    assert 15 * 30 * 1.6e9 / 2.04e12 < stashed.step_time - double.step_time < 3 * 15 * 30 * 1.6e9 / 2.04e12


def test_an_order_of_ones_own_runs_as_it_is_written() -> None:
    # eager 1F1B: 2 (p - rank) - 1 forwards before the first backward
    first = simulated("pipeline-custom-order").timeline.order(0)
    assert [kind.value for kind, _, _ in first[:8]] == ["forward"] * 7 + ["backward"]
    lean = variant("pipeline-custom-order", {"plan.schedule": "1f1b"})
    assert simulated("pipeline-custom-order").memory[0].activations > 1.6 * lean.memory[0].activations


def test_a_naive_pipeline_works_on_one_device_at_a_time() -> None:
    # 3 of 4 devices are idle, but for the optimizer's step
    assert 0.7 < simulated("pipeline-naive").bubble < 0.75


def test_two_chunks_halve_the_bubble() -> None:
    # 3 / 19 of the step or 3 / 16 of the work with one chunk; 3 / 32 of the work, 3 / 35 of the step, with two
    for name in ("pipeline-interleaved", "pipeline-looped-bfs"):
        assert 3 / 35 < simulated(name).bubble < 3 / 35 + 0.02


def test_a_straggler_takes_no_longer_than_it_is_slow() -> None:
    healthy = simulated("data-parallel-buckets").step_time
    assert 1.2 * healthy < simulated("straggler").step_time <= 1.25 * healthy


def test_samples_of_any_length_wait_less_in_balance_and_pad_less_packed() -> None:
    arrival = simulated("varying-lengths").loads
    balanced, packed = (
        variant("varying-lengths", fields).loads
        for fields in ({"training.sequence_order": "balance"}, {"training.packing": "pack"})
    )
    assert arrival and balanced and packed
    # lengths of 128, 512, 1,024 and 2,048 tokens at shares of 0.3, 0.4, 0.2 and 0.1 have 653 tokens on average. The
    # longest of four has 1 - 0.9^4 times 2,048, 0.9^4 - 0.7^4 times 1,024, 0.7^4 - 0.3^4 times 512, and else 128
    longest = 2048 * (1 - 0.9**4) + 1024 * (0.9**4 - 0.7**4) + 512 * (0.7**4 - 0.3**4) + 128 * 0.3**4
    assert arrival.padding == pytest.approx(1 - 653 / longest, abs=0.02)
    (waiting,), (balanced_waiting,) = (dict(loads.waiting).values() for loads in (arrival, balanced))
    assert balanced_waiting < waiting / 5
    assert packed.padding is not None and packed.padding < 0.01
    # packed, a step computes as many tokens as one of full sequences, with less attention
    assert packed.high < simulated("varying-lengths").step_time
    assert packed.tokens_per_second > 2.5 * arrival.tokens_per_second


def test_copies_of_a_grid_hold_more_than_one_grid_of_all_ranks() -> None:
    # 4 grids of 16 have a 16th of the states where one of 64 has a 64th
    deep, flat = simulated("tensor-parallel-2.5d"), variant("tensor-parallel-2.5d", ONE_GRID)
    assert deep.memory[0].optimizer == pytest.approx(4 * flat.memory[0].optimizer, rel=0.01)


def test_a_pair_of_passes_hides_the_exchange_between_experts() -> None:
    apart = variant("pipeline-dualpipev", {"plan.schedule": "zbv"})
    assert exposed(simulated("pipeline-dualpipev"), "expert") < 0.5 * exposed(apart, "expert")


def test_a_ring_hides_what_a_gather_shows() -> None:
    ring, gather = simulated("context-ring"), simulated("context-all-gather")
    assert exposed(ring, "context") < 0.5 * exposed(gather, "context")


def test_a_parameter_server_is_as_fast_as_its_network_port() -> None:
    # 8 ranks of the other node send all gradients, 4 bytes each, through the server's NIC of 24 GB/s, and get as much
    parameters = load("parameter-server").problem.graph.num_parameters
    assert simulated("parameter-server").step_time > 2 * 8 * 4 * parameters / 24e9


def test_an_offloaded_optimizer_is_on_the_host() -> None:
    # AdamW: 12 bytes a parameter in fp32, once for each of two data-parallel ranks, which share the host
    (stage,) = simulated("optimizer-offload").memory
    parameters = load("optimizer-offload").problem.graph.num_parameters
    assert stage.optimizer == 0
    assert stage.host_peak == pytest.approx(2 * 12 * parameters, rel=0.01)


def test_an_offloaded_layer_keeps_its_input_on_the_host() -> None:
    # 32 layers of 32,768 tokens of 4,096 in bf16: 256 MiB each. The last two of a microbatch stay in the buffers
    layer, kept = 2 * 32_768 * 4_096, variant("activation-offload", {"plan.offload": []})
    result = simulated("activation-offload")
    assert kept.peak_memory - result.peak_memory == (32 - 2) * layer
    assert {stage.host_peak for stage in result.memory} == {8 * (32 - 2) * layer}
    assert result.step_time == pytest.approx(kept.step_time, rel=1e-3)


def test_offloaded_parameters_leave_only_units_on_the_device() -> None:
    # 18 bytes a parameter on the one host: itself, its gradient in fp32, and AdamW's three states
    parameters = load("parameter-offload").problem.graph.num_parameters
    result = simulated("parameter-offload")
    assert all(stage.optimizer == 0 for stage in result.memory)
    assert all(stage.host_peak == pytest.approx(18 * parameters, rel=1e-3) for stage in result.memory)
    (profile,) = result.timeline.memory
    states = [CATEGORIES.index(each) for each in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)]
    assert [profile.usage[-1][each] for each in states] == [0, 0, 0]
    # at any time two units at most: a layer, and the next one or the head of 128,256 rows of 8,192
    layer, head = (parameters - 2 * 128_256 * 8_192) / 80, 128_256 * 8_192
    assert all(stage.parameters <= 2 * 1.2 * (layer + head) for stage in result.memory)


def test_a_bad_placement_is_the_same_plan_elsewhere() -> None:
    # the order of the axes says where ranks are: what a device holds stays
    usual = variant("bad-placement", {"plan.order": USUAL})
    assert simulated("bad-placement").peak_memory == usual.peak_memory
    assert exposed(simulated("bad-placement"), "tensor") > 2 * exposed(usual, "tensor")


def test_the_configuration_beside_a_scenario_is_the_published_model() -> None:
    # TinyLlama: 22 layers of 2 * 2048^2 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048, and 2 * 32000 * 2048 + 2048
    layer = 2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048
    assert load("tinyllama-1.1b-8-a100").problem.graph.num_parameters == 22 * layer + 2 * 32000 * 2048 + 2048
