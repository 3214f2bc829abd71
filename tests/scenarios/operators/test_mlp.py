"""The graph file of the MLP is what capture makes of the module."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_graph_is_what_capture_makes_of_the_module() -> None:
    torch = pytest.importorskip("torch")
    from meshwise.executor.capture.capture import capture, run_factory
    from meshwise.scenarios.inputs.graph_file import dump_graph

    folder = ROOT / "scenarios" / "operators"
    with torch.device("meta"):  # shapes are enough
        module, inputs = run_factory(f"{folder / 'mlp.py'}:mlp")
    assert dump_graph(capture(module, inputs, "mlp").graph) == (folder / "mlp.json").read_text("utf-8")
