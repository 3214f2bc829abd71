from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.cluster_file import cluster_document, cluster_in, exact, load_cluster, write_cluster
from scenarios.errors import ScenarioError
from scenarios.reader import parse
from scenarios.yaml_text import dump
from simulator import units
from simulator.catalog import cluster, cluster_names
from simulator.cluster import Accelerator, Cluster, Collective, CollectiveCurve, Host, Link, MatmulModel
from simulator.units import Dimension

POSITIVE = st.floats(1e-12, 1e15)
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=12)
LINKS = st.builds(Link, latency=st.floats(0, 1), bandwidth=POSITIVE, launch=st.floats(0, 1))
CURVES = st.builds(
    CollectiveCurve,
    collective=st.sampled_from(Collective),
    ranks=st.integers(1, 1024),
    points=st.dictionaries(st.floats(1, 1e9), POSITIVE, min_size=1, max_size=3).map(
        lambda points: tuple(sorted(points.items()))
    ),
)
ACCELERATORS = st.builds(
    Accelerator,
    name=NAMES,
    peak_flops=st.just((("fp32", 1e12), ("bf16", 2.5e14))),
    memory=POSITIVE,
    memory_bandwidth=POSITIVE,
    launch=st.floats(0, 1),
    matmul=st.builds(
        MatmulModel,
        fraction=st.floats(0.01, 1),
        half_k=st.floats(0, 1e6),
        tile=st.just((128, 256)),
        units=st.integers(0, 200),
    ),
    kernel_bandwidth=st.just((("norm", 0.4), ("optimizer", 1.7))),
    kernel_bandwidth_default=st.floats(0.01, 1),
    reserved=st.floats(0, 1e10),
)
HOSTS = st.builds(
    Host, name=NAMES, memory=POSITIVE, memory_bandwidth=POSITIVE | st.just(float("inf")), cores=st.integers(1, 99)
)
CLUSTERS = st.builds(
    Cluster,
    name=NAMES,
    accelerator=ACCELERATORS,
    host=st.builds(
        Host, name=NAMES, memory=POSITIVE, memory_bandwidth=POSITIVE | st.just(float("inf")), cores=st.integers(1, 99)
    ),
    nodes=st.integers(1, 1000),
    devices_per_node=st.integers(1, 16),
    intra_node=LINKS,
    inter_node=LINKS,
    nics_per_node=st.integers(1, 8),
    collectives=st.lists(CURVES, max_size=2).map(tuple),
)


@given(CLUSTERS)
def test_a_cluster_reads_back_equal(value: Cluster) -> None:
    assert cluster_in(parse(dump(cluster_document(value)).encode())) == value


@pytest.mark.parametrize("name", cluster_names())
def test_the_catalogue_reads_back_equal_from_a_file(name: str, tmp_path) -> None:
    value = cluster(name, 3)
    write_cluster(value, tmp_path / "c.yaml", "two\nlines")
    assert load_cluster(tmp_path / "c.yaml") == value
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (80 * 2.0**30, Dimension.SIZE, "80 GiB"),
        (25e9, Dimension.BANDWIDTH, "25 GB/s"),
        (312e12, Dimension.COMPUTE_RATE, "312 TFLOP/s"),
    ],
)
def test_round_figures_stay_readable(value: float, dimension: Dimension, text: str) -> None:
    assert exact(value, dimension) == text


@given(POSITIVE, st.sampled_from(Dimension))
def test_figures_are_exact(value: float, dimension: Dimension) -> None:
    assert units.parse(exact(value, dimension), dimension) == value


def faults_of(text: str) -> list[tuple[str, str]]:
    with pytest.raises(ScenarioError) as caught:
        cluster_in(parse(text.encode()))
    return [(fault.field, fault.message) for fault in caught.value.faults]


def test_a_bare_number_is_an_error_that_shows_a_unit() -> None:
    text = dump(cluster_document(cluster("local-cpu", 1))).replace("memory: 8 GiB", "memory: 8")
    assert faults_of(text) == [
        ("accelerator.memory", "a size has a unit, met 8; write a number and a unit, as in '80 GiB'")
    ]


def test_a_preset_accelerator_stands_for_the_whole() -> None:
    document = cluster_document(cluster("dgx-a100-80gb", 2))
    text = dump(document | {"accelerator": {"preset": "a100-80gb"}})
    assert cluster_in(parse(text.encode())) == cluster("dgx-a100-80gb", 2)
    both = dump(document | {"accelerator": {"preset": "a100-80gb", "launch": "1 us"}})
    assert faults_of(both) == [("accelerator", "holds preset alone or everything written out, met preset and launch")]


def test_points_that_do_not_rise_are_refused() -> None:
    curve = {"collective": "all_reduce", "ranks": 2, "points": [[2, "1 us"], [1, "1 us"]]}
    text = dump(cluster_document(cluster("local-cpu", 1)) | {"collectives": [curve]})
    assert "sizes rise" in faults_of(text)[0][1]


def test_an_unwritable_place_leaves_nothing(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        write_cluster(replace(cluster("local-cpu", 1)), tmp_path / "none" / "c.yaml")
    with pytest.raises(ValueError, match="directory"):
        write_cluster(cluster("local-cpu", 1), tmp_path)
    assert list(tmp_path.iterdir()) == []
