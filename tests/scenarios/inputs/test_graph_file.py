"""Graph files: read back as written, simulated without torch, and every fault one message with its place."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise import load
from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.inputs.graph_file import build_graph, build_graph_document, dump_graph, load_graph
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.operator_graph import OperatorGraph

ROOT = Path(__file__).parents[3]

SCENARIO = """
model: {graph: ./graph.json}
training: {global_batch: 16, sequence: 8, precision: bf16}
cluster: {preset: dgx-a100-80gb, nodes: 1}
"""


def document() -> dict[str, Any]:
    """Return two layers ``y = x * weight`` between an input and a loss, small enough to be written by hand."""
    x = {"name": "x", "dims": ["batch", "sequence", "hidden"], "shape": [1, 8, 4], "dtype": "fp32"}
    weight = {"name": "weight", "dims": ["hidden"], "shape": [4], "dtype": "fp32"}
    scale = {
        "name": "scale",
        "kind": "elementwise",
        "dims": ["batch", "sequence", "hidden"],
        "sizes": [1, 8, 4],
        "inputs": ["x"],
        "outputs": ["y"],
        "parameters": ["weight"],
        "saved": ["x"],
    }
    layer = {
        "name": "layers",
        "repeat": 2,
        "layer": True,
        "inputs": ["x"],
        "outputs": ["y"],
        "tensors": [x, weight, x | {"name": "y"}],
        "operators": [scale],
    }
    data = x | {"name": "data"}
    first = {"name": "first", "inputs": [], "outputs": ["y"], "tensors": [data, x | {"name": "y"}, weight]}
    begin = scale | {"inputs": ["data"], "saved": ["data"]}
    loss = {"name": "loss", "dims": [], "shape": [], "dtype": "fp32"}
    total = {"name": "total", "kind": "elementwise", "dims": scale["dims"], "sizes": scale["sizes"]}
    total |= {"inputs": ["x"], "outputs": ["loss"], "reduced": ["batch", "sequence", "hidden"]}
    last = {"name": "last", "inputs": ["x"], "outputs": ["loss"], "tensors": [x, loss], "operators": [total]}
    return {
        "version": 1,
        "name": "scales",
        "sequence": 8,
        "precision": "fp32",
        "blocks": [first | {"operators": [begin]}, layer, last],
    }


def plain(graph: OperatorGraph) -> OperatorGraph:
    """Return a graph without what capture never finds: sums of statistics, and kernels by name."""
    blocks = []
    for block in graph.blocks:
        operators = (replace(each, statistics=(), kernel="") for each in block.operators)
        blocks.append(replace(block, operators=tuple(operators)))
    return replace(graph, blocks=tuple(blocks))


@pytest.mark.parametrize("name", ["gpt3-125m", "resnet-50", "dlrm-criteo", "vit-b-16"])
def test_a_graph_is_read_back_equal(name: str) -> None:
    graph = plain(MODELS[name].graph(8, "fp32"))
    text = dump_graph(graph)
    assert build_graph(parse_document(text.encode())).operator_graph == graph
    assert dump_graph(build_graph(parse_document(text.encode())).operator_graph) == text
    assert json.loads(text) == build_graph_document(graph)


def test_the_graph_of_a_document() -> None:
    model = build_graph(parse_document(json.dumps(document()).encode()))
    graph = model.graph(8, "bf16")
    assert graph.num_parameters == 3 * 4  # one weight of 4 in the first block and in each of two layers
    assert {tensor.dtype for block in graph.blocks for tensor in block.tensors} == {"bf16"}
    assert [name for name, _ in graph.occurrences] == ["first", "layers.0", "layers.1", "last"]


def test_it_is_simulated_and_searched_without_torch(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(document()))
    (tmp_path / "s.yaml").write_text(SCENARIO + "plan: {data: 4, pipeline: 2, zero: 1, recompute: full}\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from meshwise import load\n"
        f"scenario = load({str(tmp_path / 's.yaml')!r})\n"
        "assert scenario.simulate().step_time > 0\n"
        "assert scenario.search(budget=3).best is not None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_assumptions_say_what_the_graph_means(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(document()))
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (line,) = [line for line in load(tmp_path / "s.yaml").assumptions if line.startswith("model.graph")]
    assert line == "model.graph ./graph.json means 4 blocks, 12 parameters, 0 FLOP a sample, as captured"


def test_samples_have_the_length_that_was_captured(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(document()))
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("sequence: 8", "sequence: 16"))
    with pytest.raises(ScenarioError, match="sequence is 8 for samples of scales, met 16; nearest: 8"):
        load(tmp_path / "s.yaml")


Change = Callable[[dict[str, Any]], None]


def change(path: str, value: Any) -> Change:
    """Return what puts a value at a dotted path of a document."""

    def apply(data: Any) -> None:
        *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parts:
            data = data[part]
        data[last] = value

    return apply


LAYER = "blocks.1"
SCALE = f"{LAYER}.operators.0"
FAULTS: dict[str, tuple[Change, str]] = {
    "version": (change("version", 2), "version: holds one of 1, met 2"),
    "kind": (change(f"{SCALE}.kind", "matmull"), f"{SCALE}.kind: holds one of matmul, "),
    "dtype": (change("blocks.0.tensors.0.dtype", "float32"), "blocks.0.tensors.0.dtype: holds one of fp64, "),
    "unknown field": (change(f"{LAYER}.colour", "red"), f"{LAYER}.colour: "),
    "no blocks": (change("blocks", []), "blocks: has at least 1 items, met 0"),
    "size": (change("blocks.0.tensors.0.shape", [1, 0, 4]), "blocks.0.tensors.0.shape.1: is at least 1, met 0"),
    "one tensor too large": (
        change("blocks.0.tensors.0.shape", [1, 2**61, 4]),
        "blocks.0.tensors.0.shape: a product of sizes is below 2**60, met more than 2**63",
    ),
    "a size beyond": (change("blocks.0.tensors.0.shape", [1, 2**70, 4]), "is at most"),
    "all parameters too large": (
        lambda data: (
            [change(f"blocks.{each}.tensors.{at}.shape", [2**59])(data) for each, at in ((0, 2), (1, 1))],
            change(f"{LAYER}.repeat", 1000)(data),
        )[0],
        "parameters have fewer than 2**63 elements, met more than 2**68",
    ),
    "a tensor twice": (change("blocks.0.tensors.1.name", "data"), "a tensor has a name of its own, met data a second"),
    "a block twice": (change("blocks.2.name", "layers"), "blocks.2.name: a block has a name of its own, met layers"),
    "a missing tensor": (
        change(f"{SCALE}.saved", ["wieght"]),
        f"{SCALE}.saved.0: names one of the tensors of the block, met wieght; nearest: weight",
    ),
    "no such dim": (
        change(f"{SCALE}.uncut", ["hiden"]),
        "names one of the operator's dims, met hiden; nearest: hidden",
    ),
    "dims and sizes": (change(f"{SCALE}.sizes", [1, 8]), f"{SCALE}.sizes: has one size a dim(3), met 2"),
    "a dim of two sizes": (
        change(f"{SCALE}.sizes", [1, 8, 5]),
        f"{SCALE}.sizes: the size of hidden is 4, the one of the dim in this block, met 5",
    ),
    "a batch of two": (change("blocks.0.tensors.0.shape", [2, 8, 4]), "the size of batch is 1, one sample, met 2"),
    "a cycle": (change("blocks.0.operators.0.inputs", ["y"]), "without cycles; met y, which itself makes"),
    "made twice": (change(f"{SCALE}.outputs", ["x"]), f"{SCALE}.outputs.0: a tensor is made once, met x again"),
    "made by nobody": (
        change("blocks.0.outputs", ["data"]),
        "blocks.0.outputs.0: an output is made by the block or comes into it, met data",
    ),
    "a boundary of two": (change("blocks.2.inputs", []), f"{LAYER}.outputs: outputs are the inputs of last(0), met 1"),
    "a boundary of another shape": (
        change("blocks.2.tensors.0.dtype", "bf16"),
        f"{LAYER}.outputs.0: last reads bf16 of shape [1, 8, 4] in its place, met fp32 of shape [1, 8, 4]",
    ),
    "tied to nothing": (
        change("tied", [[["first", "weight"], ["last", "weight"]]]),
        "tied.0: names parameters of blocks, met weight of last",
    ),
    "half a product": (
        change("blocks.2.operators.0.kind", "matmul"),
        "a matmul multiplies an input by a parameter or another input, met 1 operands",
    ),
    "a table without rows": (change("blocks.2.operators.0.kind", "embedding"), "an embedding has a table whose first"),
    "attention without keys": (change(f"{SCALE}.kind", "attention"), "attention reads queries and keys"),
    "no result": (change(f"{SCALE}.outputs", []), f"{SCALE}.outputs: an operator makes a tensor, met none"),
    "more than can be executed": (change(f"{SCALE}.executed_fraction", 2.0), "is at most 1"),
    "FLOP without end": (change(f"{SCALE}.flops_per_point", 1e300), "is at most 1e+18"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_message_with_its_place(name: str, tmp_path: Path) -> None:
    data = document()
    FAULTS[name][0](data)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ScenarioError) as caught:
        load_graph(file)
    assert FAULTS[name][1] in str(caught.value)
    assert all(line.startswith(f"{file}:1:") for line in str(caught.value).splitlines())


def test_a_cycle_of_two_names_both() -> None:
    data = document()
    block = data["blocks"][1]
    one, other = (dict(block["operators"][0]) for _ in range(2))
    one |= {"name": "one", "inputs": ["z"]}
    other |= {"name": "other", "inputs": ["y"], "outputs": ["z"]}
    block["operators"] = [one, other]
    block["tensors"].append(block["tensors"][0] | {"name": "z"})
    with pytest.raises(ScenarioError, match="met z, which other makes later"):
        build_graph(parse_document(json.dumps(data).encode()))


def test_all_faults_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = document()
    for name in ("a missing tensor", "no such dim", "tied to nothing", "a batch of two"):
        FAULTS[name][0](data)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data, indent=1))
    assert run(["validate", str(file)]) == 2
    told = capsys.readouterr().err
    assert all(FAULTS[name][1] in told for name in ("a missing tensor", "no such dim", "tied to nothing"))
    assert len({line.split(":")[1] for line in told.strip().splitlines()}) >= 4  # each on a line of its own


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[" * 100_000, "values nest at most 32 deep"),
        (b'{"version": 1, "version": 1}', "a key occurs once"),
        (b"\x80\x03}", "UTF-8"),
        (b"", "the file holds a mapping"),
        (b'{"blocks": null}', "blocks: holds a list, met nothing"),
        (b"{blocks: 1e999}", "finite"),
    ],
)
def test_what_is_no_graph_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        build_graph(parse_document(content))


def test_a_scenario_says_where_its_graph_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    assert run(["simulate", str(tmp_path / "s.yaml")]) == 2
    assert "graph.json: the file cannot be read" in capsys.readouterr().err
    data = document()
    data["blocks"][0]["operators"][0]["inputs"] = ["y"]
    (tmp_path / "graph.json").write_text(json.dumps(data))
    assert run(["simulate", str(tmp_path / "s.yaml")]) == 2
    assert "graph.json:1:" in capsys.readouterr().err


def test_a_graph_is_validated_and_has_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jsonschema

    (tmp_path / "graph.json").write_text(json.dumps(document()))
    assert run(["validate", str(tmp_path / "graph.json")]) == 0
    assert "a graph without errors" in capsys.readouterr().out
    assert run(["schema", "graph"]) == 0
    jsonschema.validate(document(), json.loads(capsys.readouterr().out))
