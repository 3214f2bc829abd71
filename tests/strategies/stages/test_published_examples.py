"""What planners publish on their own cost tables: plans of their repositories, and where these are no optimum.

Of each table the figures that decide are here, with the file that has them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil, log2

import numpy as np
import pytest

from meshwise.strategies.stages.block_division import _find_path, divide_blocks
from meshwise.strategies.stages.device_allocation import Allocation, DevicePools, allocate_devices
from meshwise.strategies.stages.division import FloatArray

LONG_RUN = 10**6
"""Microbatches of a run so long that the slowest stage alone counts, as in PipeDream and nnScaler."""


# PipeDream: msr-fiddle/pipedream at 7db6a1c

VGG16 = (
    (0.235590, 411_041_792, 154_880),
    (0.145473, 205_520_896, 885_760),
    (0.133175, 102_760_448, 5_901_312),
    (0.107882, 51_380_224, 23_599_104),
    (0.039478, 51_380_224, 28_317_696),
    (0.000787, 12_845_056, 0),
    (0.007457, 2_097_152, 411_058_176),
    (0.001752, 2_097_152, 67_125_248),
    (0.000941, 512_000, 16_388_000),
)
"""VGG-16 at 64 images: seconds, bytes of the result, bytes of parameters.

Rows are the groups of convolutions with the pooling behind them, of the last group apart, and the three products with
what follows them: sums over ``profiler/image_classification/profiles/vgg16/graph.txt`` without its input.
"""
BANDWIDTH = 1e9
"""Bytes a second, the default of the optimizer."""


def vgg16_times(replicas: tuple[int, ...]) -> FloatArray:
    """Return the seconds of an image batch on every span of rows as every stage, on so many replicas.

    As ``compute_partitioning`` of ``optimizer/optimizer_graph_hierarchical.py``: m replicas share compute and the sum
    of gradients, ``(compute + 4 (m - 1) / m * parameters / bandwidth) / m``, and every stage but the first also waits
    for its share of what comes in and what goes out, ``2 * bytes / (bandwidth m)``.
    """
    compute, parameters = ([0.0, *accumulate(row[column] for row in VGG16)] for column in (0, 2))
    times = np.full((len(replicas), len(VGG16) + 1, len(VGG16) + 1), np.inf)
    for stage, count in enumerate(replicas):
        for first in range(len(VGG16)):
            for end in range(first + 1, len(VGG16) + 1):
                gradients = 4 * (count - 1) / count * (parameters[end] - parameters[first]) / BANDWIDTH
                parts = [(compute[end] - compute[first] + gradients) / count]
                if stage:
                    parts += [2 * VGG16[row][1] / (BANDWIDTH * count) for row in (first - 1, end - 1)[: 1 + (end < 9)]]
                times[stage, first, end] = max(parts)
    return times


def list_replicas(workers: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    yield (workers,)
    if most_stages > 1:
        for count in range(1, workers):
            yield from ((count, *rest) for rest in list_replicas(workers - count, most_stages - 1))


def find_slowest(times: FloatArray, ends: tuple[int, ...]) -> float:
    return max(
        float(times[stage, first, end]) for stage, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
    )


@pytest.mark.parametrize(
    ("workers", "most_stages", "replicas", "ends", "seconds"),
    [
        # printed by `optimizer_graph_hierarchical.py -f .../vgg16/graph.txt -n 4 --activation_compression_ratio 1`, and
        # README: `--stage_to_num_ranks 0:3,1:1`; the boundary's 2 * 102,760,448 bytes are the slowest
        (4, 4, (3, 1), (3, 9), 0.205520896),
        # with `-n 16`: layers 0 to 24 on 13 workers, to 31 on 2, to 40 on 1; the first stage is slowest:
        # (0.62212 + 4 * 12 / 13 * 0.030541056) / 13
        (16, 3, (13, 2, 1), (4, 6, 9), 0.05652976738461539),
    ],
)
def test_pipedream_finds_the_workers_and_layers_of_its_optimizer(
    workers: int, most_stages: int, replicas: tuple[int, ...], ends: tuple[int, ...], seconds: float
) -> None:
    found = {}
    for candidate in list_replicas(workers, most_stages):
        times = vgg16_times(candidate)
        division = divide_blocks(times, LONG_RUN)
        if division is not None:
            found[candidate] = find_slowest(times, division.ends), division.ends
    best = min(found, key=found.__getitem__)
    assert (best, found[best][1]) == (replicas, ends)
    assert found[best][0] == pytest.approx(seconds, rel=1e-9)


def test_the_published_15_to_1_plan_of_vgg16_is_near_the_optimum_and_far_from_data_parallel() -> None:
    """The runs of SOSP 2019 are 15 workers for convolutions and 1 for products (``models/vgg16/gpus=16``).

    By the formula 15 workers take (0.662385 + 4 * 14 / 15 * 0.058858752) / 15 s, 4 % more than the optimizer's own plan
    on the published profile; all 16 alike take (0.672535 + 4 * 15 / 16 * 0.553430176) / 16 s.
    """
    published = find_slowest(vgg16_times((15, 1)), (6, 9))
    assert published == pytest.approx((0.662385 + 4 * 14 / 15 * 0.058858752) / 15, rel=1e-9)
    assert published == pytest.approx(1.04 * 0.05652976738461539, rel=2e-3)
    # "Throughput increase (compared to (16)-machine DP): 3.038109706546221", of the optimizer's own plan
    data_parallel = find_slowest(vgg16_times((16,)), (9,))
    assert data_parallel / 0.05652976738461539 == pytest.approx(3.038109706546221, rel=1e-9)


# Alpa: alpa-projects/alpa, tests/pipeline_parallel/test_dynamic_programming.py at 969de4f


def list_meshes(devices: int) -> Iterator[tuple[int, ...]]:
    """Return every row of submeshes of 1, 2, 4 or 8 devices, by number, that has so many devices."""
    if not devices:
        yield ()
    for number, size in enumerate((1, 2, 4, 8)):
        if size <= devices:
            yield from ((number, *rest) for rest in list_meshes(devices - size))


def test_alpa_finds_the_stages_and_meshes_of_its_own_program() -> None:
    """The table of Alpa's unit test: 8 layers, 8 devices, 16 microbatches, 4 submeshes, 5 configurations, seed 42.

    ``dp`` of ``stage_construction.py`` at 01d71eb returns 0.29528505 for it, in 32-bit numbers: layers 0 to 4 and 4 to
    8, each on 4 devices.
    """
    random = np.random.RandomState(42)
    spans = np.where(np.triu(np.ones((8, 8), bool))[:, :, None], random.rand(8, 8, 4, 5).min(axis=3), np.inf)
    found = {}
    for meshes in list_meshes(8):
        times = np.full((len(meshes), 9, 9), np.inf)
        for stage, mesh in enumerate(meshes):
            times[stage, :8, 1:] = spans[:, :, mesh]
        division = divide_blocks(times, 16)
        if division is not None:
            found[meshes] = division
    best = min(found, key=lambda meshes: found[meshes].time)
    assert (best, found[best].ends) == ((2, 2), (4, 8))
    assert found[best].time == pytest.approx(0.29528505, rel=1e-7)


# Piper: msr-fiddle/piper at d7fc8cf

_SOME_LAYERS = (30474, 30479, 30452, 30484, 30372, 30345, 30307, 30394, 30361, 30290, 30285, 30307, 30304, 30324, 30288)
BERT_LAYERS = tuple(ticks * 1e-6 for ticks in (30492, *_SOME_LAYERS, *_SOME_LAYERS, 30324))
"""Seconds of a sample in the 32 layers of ``inputs/bert32a100.json``, without recomputation."""
EMBEDDING_SECONDS, PIPER_BANDWIDTH = 0.001116, 25.0 * 2**30
LAYER_MEMORY, FRONT_MEMORY, POOLER_MEMORY = (
    (606_478_336, 353_994_240),
    (18_776_064, 401_648_640),
    (31_457_280, 29_498_880),
)
"""Bytes for every sample that a stage keeps, and besides: of a layer, of what is before the layers, of the pooler."""
MASK, HIDDEN = 31_457_280, 16_777_216
"""Bytes that go from the mask to every layer but the first, and from a layer to the next."""


def bert_times(num_stages: int, limit: float) -> FloatArray:
    """Return the seconds of a sample on every span of the 32 layers as every stage; infinite where it does not fit.

    As ``getTPSForResult`` of ``algo.cpp``: compute, and twice the bytes of all edges in and out. The first stage has
    the embedding and the mask, the last one the pooler. A stage keeps as many samples as there are stages from it on.
    """
    times = np.full((num_stages, 33, 33), np.inf)
    for stage in range(num_stages):
        for first in range(32):
            for end in range(first + 1, 33):
                parts = [LAYER_MEMORY] * (end - first) + [FRONT_MEMORY] * (first == 0) + [POOLER_MEMORY] * (end == 32)
                alive = num_stages - stage
                if sum(alive * by_sample + fixed for by_sample, fixed in parts) > limit:
                    continue
                num_masks = 32 - end if first == 0 else end - first
                sent = MASK * num_masks + HIDDEN * ((first > 0) + (end < 32))
                compute = sum(BERT_LAYERS[first:end]) + (EMBEDDING_SECONDS if first == 0 else 0.0)
                times[stage, first, end] = compute + 2 * sent / PIPER_BANDWIDTH
    return times


@pytest.mark.parametrize(
    ("gibibytes", "seconds"), [(40, 0.16451575), (16, 0.16572875), (15, 0.16608775), (14, 0.16635075)]
)
def test_piper_finds_the_time_per_sample_of_its_own_program(gibibytes: int, seconds: float) -> None:
    """``runDP`` on 8 devices, one a stage and without recomputation, prints these: less memory, slower stages."""
    found = [_find_path(bert_times(num_stages, gibibytes * 2.0**30), np.maximum) for num_stages in range(1, 9)]
    assert min(path.time for path in found if path is not None) == pytest.approx(seconds, rel=1e-9)


# nnScaler: microsoft/nnscaler, tests/autodist/test_pipeline_nstages.py at 1585c15, test_small


def test_nnscaler_divides_its_small_model_behind_the_second_product() -> None:
    """Six nodes of 0, 0.2, 0.2, 0.2, 0 and 0.3, and 0.1 a stage; stages begin at products, nodes 1 to 3.

    Expected there: ``min(T[1,..,3] = tp_info[..,3,5], tp_info[..,0,2])``, nodes 0 to 2 and 3 to 5: 0.5 and 0.6.
    """
    totals = np.array([0.0, *accumulate((0.0, 0.2, 0.2, 0.2, 0.0, 0.3))])
    times = 0.1 + totals[None, :] - totals[:, None]
    times[[4, 5], :] = np.inf
    division = divide_blocks(np.stack([times, times]), LONG_RUN)
    assert division is not None and division.ends == (3, 6)
    assert find_slowest(np.stack([times, times]), division.ends) == pytest.approx(0.6)


# Metis: SamsungLabs/Metis at 4b24046

METIS_LAYERS = (1.7201900482177734, *(32.2415828704834,) * 8, 0.469207763671875)
"""Milliseconds of a microbatch of 2 on two A100: ``profile_data_samples/DeviceType.A100_tp2_bs2.json``."""


def test_metis_divides_its_profile_in_the_middle() -> None:
    """Plan 5 of ``results/hetero_cost_model``: two groups of 8, (4, 2) each, 16 microbatches, layers [0, 5, 10].

    The plan has the same cost in both orders of the device types, so that both take the times of this profile. By the
    formula, sum and slowest stage for every further microbatch: 130.686521529541 + 129.435539245605 and 15 times the
    first.
    """
    totals = np.array([0.0, *accumulate(METIS_LAYERS)])
    times = totals[None, :] - totals[:, None]
    division = divide_blocks(np.stack([times, times]), 16)
    assert division is not None and division.ends == (5, 10)
    assert division.time == pytest.approx(130.686521529541 + 129.435539245605 + 15 * 130.686521529541, rel=1e-9)


# Sailor: eth-easl/sailor at cf2c8e3

OPT_PARAMETERS = (53_608_448, *(12_596_224,) * 24, 51_513_344)
"""Elements by layer of OPT-350M, of 4 bytes: ``sailor/Planner/llm_info.json``."""
OPT_OUTPUT = 2_097_152
"""Elements of what a layer but the last sends on for a sequence: the same file."""
OPT_BATCH = 1024
"""Sequences of a step: ``simulations/configs/training_config_opt_350.json``."""


def opt_times(embedding: float, first: float, layer: float, head: float) -> FloatArray:
    """Return the seconds before each of the 26 layers: forward and backward of ``sailor_planner/profiles/OPT-350``."""
    return np.array([0.0, *accumulate((embedding, first, *(layer,) * 23, head))])


A100_PAIR = opt_times(0.000426 + 3e-6, 0.004599 + 0.011627, 0.004169 + 0.011628, 0.00814 + 0.007615)
"""An A100-40 with microbatches of 2."""
V100_PAIR = opt_times(0.001167 + 3e-6, 0.005471 + 0.010172, 0.005193 + 0.010241, 0.00958 + 0.016181)
"""Four tensor-parallel V100-16 with microbatches of 2."""
A100_EIGHT = opt_times(0.001559 + 4e-6, 0.005914 + 0.013353, 0.005634 + 0.013383, 0.008446 + 0.008591)
"""Four tensor-parallel A100-40 with microbatches of 8; the optimizer's step takes 0.938 ms a layer."""

# coefficients of GB/s in the logarithm to base 2 of MB, of sailor/providers/multizone_bandwidths_het.json: by devices
A100_LINK = (-0.0024414231124647644, 0.1408627339370467, 1.116822757126346)
"""From one A100 in us-central1-a, to another and to four V100."""
V100_LINK = (-0.008450897567554275, 0.32345407867588116, 3.446937175278422)
"""From four V100 in us-central1-a to four others."""
CENTRAL_LINK = (-0.0353261480177884, 0.43788861164496024, 4.71786208814546)
"""From four A100 in us-central1-f to four others."""
WEST_LINK = (0.0016951734632110955, 0.04241774303771205, 0.32693814219166867)
"""From four A100 in us-central1-f to four in us-west1-b."""
BUCKET = 5e8
"""Bytes of gradients that are summed at once (``MEMORY_BUCKET_DEEPSPEED_SIZE``)."""


def link_time(size: float, link: tuple[float, ...]) -> float:
    """Return the seconds in which bytes cross a link (``get_time_on_config``)."""
    return size / 1e9 / float(np.polyval(link, log2(size / 1e6)))


def sum_time(elements: int, replicas: int, link: tuple[float, ...]) -> float:
    """Return the seconds of a ring over replicas, bucket by bucket (``get_ar_time_with_buckets``)."""
    size = 4 * elements
    buckets = [min(BUCKET, size - first) for first in np.arange(0, size, BUCKET)]
    return sum(2 * (replicas - 1) * link_time(int(bucket / replicas), link) for bucket in buckets if replicas > 1)


def allocate_opt(
    stages: int,
    data: int,
    microbatch: int,
    devices: tuple[int, ...],
    regions: tuple[int, ...],
    widths: tuple[int, ...],
    layers: Sequence[FloatArray],
    links: Sequence[Sequence[tuple[float, ...]]],
) -> Allocation | None:
    """Return the allocation of OPT-350M on even stages, of which the last have more layers (``get_stages``)."""
    count, rest = divmod(26, stages)
    ends = [0, *accumulate(count + (stage >= stages - rest) for stage in range(stages))]
    spans = list(pairwise(ends))
    crossing = [[link_time(4 * microbatch * OPT_OUTPUT, link) for link in row] for row in links]
    elements = [sum(OPT_PARAMETERS[first:end]) for first, end in spans]
    pools = DevicePools(
        counts=devices,
        regions=regions,
        widths=np.array([widths] * stages),
        times=np.array([[totals[end] - totals[first] for totals in layers] for first, end in spans]),
        send_times=np.array([crossing] * (stages - 1)).reshape(stages - 1, len(devices), len(devices)),
        sync_times=np.array([[sum_time(size, data, row[pool]) for pool, row in enumerate(links)] for size in elements]),
    )
    return allocate_devices(pools, data, ceil(OPT_BATCH / (microbatch * data)))


def list_replica_counts(microbatch: int, most: int) -> list[int]:
    """Return the least replicas for each number of microbatches (``mbs_dp_vector``)."""
    counts: dict[int, int] = {}
    for data in range(1, most + 1):
        counts.setdefault(ceil(OPT_BATCH / (microbatch * data)), data)
    return list(counts.values())


MIXED_OPT = {"microbatch": 2, "regions": (0, 0), "widths": (1, 4), "layers": (A100_PAIR, V100_PAIR)} | {
    "links": ((A100_LINK, A100_LINK), (A100_LINK, V100_LINK))
}
"""Replicas of one A100 or of four V100, the tensor degrees that the planner gives them with microbatches of 2."""


def test_sailor_puts_both_kinds_on_the_first_stage() -> None:
    """The first case of ``simulations/configs/gpu_trace_heterogeneous_imbalanced.csv``: 32 A100 and 96 V100.

    The published planner, built from that commit without its Python binding and run on its files, answers 5.259695449 s
    with microbatches of 2: 13 layers on 3 A100 and 24 times four V100, and 13 on 27 A100. By its formula it does not
    matter how many of the 27 replicas of the mixed stage have which kind. Of A100 alone it answers 8.097314105 s, of
    V100 alone 9.041468505 s.
    """
    allocations = {
        (stages, data): allocate_opt(stages, data, devices=(32, 96), **MIXED_OPT)  # type: ignore[arg-type]
        for stages in range(1, 9)
        for data in list_replica_counts(2, 56 // stages)
    }
    times = {key: allocation.time for key, allocation in allocations.items() if allocation is not None}
    assert min(times, key=times.__getitem__) == (2, 27)
    best = allocations[2, 27]
    assert best is not None and best.time == pytest.approx(5.259695449, rel=1e-9)
    mixed_stage, fast_stage = best.replicas
    assert min(mixed_stage) >= 3 and mixed_stage[1] <= 24 and fast_stage == (27, 0)
    assert best.time < 8.097314105


def test_sailor_keeps_one_allocation_of_equal_devices_where_another_is_faster_in_the_end() -> None:
    """Of the same case the published planner answers 5.669352617 s for three stages with 18 replicas.

    Its recursion keeps one answer for the stages behind, the fastest for them alone, and what is fastest in all has a
    slower one: 14 A100 and 4 times four V100, 18 times four V100, 18 A100.
    """
    allocation = allocate_opt(3, 18, devices=(32, 96), **MIXED_OPT)  # type: ignore[arg-type]
    assert allocation is not None and allocation.replicas == ((14, 4), (0, 18), (18, 0))
    assert allocation.time == pytest.approx(5.576629617, rel=1e-9) and allocation.time < 5.669352617


def test_sailor_leaves_the_other_region_idle() -> None:
    """The first case of ``gpu_trace_multizone.csv``: 32 A100 in each of four zones of us-central1, and in us-west1-b.

    The published planner answers 2.464151005 s: one stage of 32 replicas of four A100, 8 in each zone of us-central1,
    with microbatches of 8. One stage also has the step of the optimizer, 26 times 0.938 ms.
    """
    links = ((CENTRAL_LINK, WEST_LINK), (WEST_LINK, CENTRAL_LINK))
    times = {}
    for stages in range(1, 6):
        for data in list_replica_counts(8, 40 // stages):
            allocation = allocate_opt(stages, data, 8, (128, 32), (0, 1), (4, 4), (A100_EIGHT,) * 2, links)
            if allocation is not None:
                times[allocation.replicas] = allocation.time
    best = min(times, key=times.__getitem__)
    assert best == ((32, 0),)
    assert times[best] + 26 * 0.000938 == pytest.approx(2.464151005, rel=1e-9)
    # stages in both regions wait for a link of a tenth of the bandwidth
    assert min(time for replicas, time in times.items() if any(row[1] for row in replicas)) > 1.6 * times[best]
