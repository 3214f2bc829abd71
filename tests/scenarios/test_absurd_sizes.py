"""Inputs as large as a file may be: each is read or refused in about a second, for no work grows with their square."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ..endurance.fuzzing import corpus
from ..endurance.fuzzing.parsers import PARSERS
from ..pace import least_cpu

SECONDS = 2.5
"""Of CPU at the pace of a quiet machine; each of these once took 4 to 100 and more."""
GRAPH = json.loads(corpus.graphs()[0])
SMALL: dict[str, Any] = {
    "model": {"transformer": {"layers": 8, "hidden": 64, "heads": 8, "ffn": 128, "vocab": 128}},
    "training": {"global_batch": 16, "sequence": 64, "precision": "fp32"},
    "cluster": {"preset": "local-cpu", "nodes": 1, "devices_per_node": 8},
    "plan": {"data": 8},
}


def scenario(**sections: Any) -> str:
    return json.dumps({key: value | sections.get(key, {}) for key, value in SMALL.items()})


def graph(**fields: Any) -> str:
    """Return a graph file whose first operator or tensor has other fields."""
    found = json.loads(json.dumps(GRAPH))
    block = found["blocks"][0]
    (block["tensors"][0] if "shape" in fields else block["operators"][0]).update(fields)
    return json.dumps(found)


LARGE: dict[str, tuple[str, str]] = {
    "fields that are none": ("scenario", json.dumps(SMALL | {f"k{i}": 1 for i in range(49_000)})),
    "slow links of a large machine": (
        "scenario",
        scenario(cluster={"nodes": 100_000, "link_speeds": {f"nic {i} out": 0.5 for i in range(20_000)}}),
    ),
    "a written schedule of as many ranks as actions": (
        "schedule",
        "\n".join(f"{i}F0 {i}B0" for i in range(15_000)),
    ),
    "a written schedule that is too long": ("schedule", " ".join(f"0F{i} 0B{i}" for i in range(200_000))),
    "names of no tensor": ("graph", graph(inputs=[f"x{i}" for i in range(100_000)])),
    "dims of no operator": ("graph", graph(reduced=["nothing"] * 100_000)),
    "a shape of many dims": ("graph", graph(dims=["a"] * 60_000, shape=[2**62] * 60_000)),
    "a name stated twice after many": (
        "hf_config",
        "{" + ",".join(f'"k{i}":1' for i in range(60_000)) + ',"k59999":1}',
    ),
    "a question of commas": ("question", "," * 100_000),
    "an alias bomb": ("yaml", "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(50_000))),
    "open brackets": ("yaml", "[" * 4_000_000),
    "one long word": ("yaml", "a: " + "1" * 4_000_000),
}


@pytest.mark.parametrize("name", LARGE)
def test_work_grows_with_the_size_of_the_input_alone(name: str, tmp_path: Path) -> None:
    kind, text = LARGE[name]
    read, errors = PARSERS[kind].reader(tmp_path), PARSERS[kind].errors
    # What reads a file is imported when the first one is read; that is no work of the large one.
    with suppress(*errors):
        read(json.dumps(SMALL).encode())

    def read_large() -> None:
        try:
            read(text.encode())
        except errors as error:
            assert len(str(error)) < 20_000

    assert least_cpu(read_large, SECONDS) < SECONDS
