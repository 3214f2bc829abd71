"""A cluster as a file: read back equal, every figure exact and readable."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from meshwise.scenarios.inputs.cluster_document import build_cluster_document, format_exact
from meshwise.scenarios.inputs.cluster_file import load_cluster, write_cluster
from meshwise.scenarios.schema.cluster import WrittenCluster
from meshwise.simulator import units
from meshwise.simulator.catalog import cluster, cluster_names
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.units import Dimension

from ..clusters import POSITIVE, clusters
from .test_cluster_file import read


@given(clusters())
@settings(max_examples=200, deadline=None)
def test_a_cluster_reads_back_equal(value: Cluster) -> None:
    assert read(build_cluster_document(value)) == value


@given(clusters())
@settings(max_examples=50, deadline=None)
def test_what_is_written_keeps_to_the_schema(value: Cluster) -> None:
    schema = TypeAdapter(WrittenCluster).json_schema()
    Draft202012Validator(schema).validate(json.loads(json.dumps(build_cluster_document(value))))


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
    assert format_exact(value, dimension) == text


@given(POSITIVE, st.sampled_from(Dimension))
def test_figures_are_exact(value: float, dimension: Dimension) -> None:
    assert units.parse(format_exact(value, dimension), dimension) == value
