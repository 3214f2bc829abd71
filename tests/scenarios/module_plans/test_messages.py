"""What ranks send in a step of a user's module is what the simulator has them send: kind, group and bytes."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.launch.launcher import launch_ranks
from meshwise.executor.module_measures.first_batch import FirstBatch
from meshwise.executor.modules.layout import CUTS, ModuleLayout, parse_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.inputs.operator_cuts import choose_cuts
from meshwise.scenarios.module_plans.prediction import StepPredictor, build_model
from meshwise.scenarios.oracle_check import find_axes, to_torch_plan
from meshwise.strategies.lowering.communications import Communication, communications
from tests.scenarios.module_plans.token_file import BATCH, FILE, HIDDEN, ROWS

HERE = Path(__file__).parent
RANKS = 4
WORDS = (
    "data=4",
    "data=4,num_microbatches=2",
    "data=4,zero=1",
    "data=4,zero=2,num_microbatches=2",
    "data=4,zero=3",
    "data=4,zero=3,num_microbatches=2",
    "data=4,zero=3,recompute=full",
    "data=4,zero=3,zero_shards=2",
    "pipeline=4,num_microbatches=4",
    "data=2,pipeline=2,num_microbatches=4",
    "data=2,pipeline=2,num_microbatches=4,schedule=gpipe,zero=1",
    "data=2,pipeline=2,num_microbatches=2,zero=2",
    "data=2,pipeline=2,num_microbatches=2,zero=3",
    "data=2,pipeline=2,num_microbatches=4,schedule=interleaved,chunks=2",
    "data=2,pipeline=2,num_microbatches=4,schedule=zb1p",
    "data=2,tensor=2,num_microbatches=2",
    "data=2,tensor=2,zero=1",
    "data=2,tensor=2,zero=3",
    "data=2,tensor=2,recompute=full",
    "pipeline=2,tensor=2,num_microbatches=2",
    "data=2,context=2",
    "data=2,context=2,zero=3",
    "tensor=2,context=2,num_microbatches=2",
)
FIGURES = 64
"""Bytes of a message that has figures of a loss, a norm or checks, at most: the simulator does not count these."""
Traffic = dict[tuple[str, tuple[str, ...]], float]


def count_bytes(sent: Counter[Communication]) -> Traffic:
    """Return the bytes of a step by kind and group."""
    result: Traffic = {}
    for communication, count in sent.items():
        if communication.size > FIGURES and communication.axes:
            place = communication.kind, communication.axes
            result[place] = result.get(place, 0.0) + count * communication.size
    return result


def test_messages_of_a_step_are_those_of_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "mine.py").write_text(FILE)
    graph = FirstBatch(TrainJob(str(tmp_path / "mine.py"), ModuleLayout(RANKS), 3)).capture()
    layouts = []
    for words in WORDS:
        layout = parse_layout(words, ModuleLayout())
        if layout.operator_ranks > 1:
            degrees = {name: getattr(layout, name) for name in ("data", "num_microbatches", *CUTS)}
            layout = replace(layout, plan=choose_cuts(graph, samples=BATCH // layout.data, **degrees))
        layouts.append(layout)
    (tmp_path / "layouts.json").write_text(json.dumps([layout.to_json() for layout in layouts]))
    launch_ranks("message_ranks", [str(tmp_path)], tmp_path, RANKS, timeout=200)
    predictor = StepPredictor(build_model(None, graph, BATCH, "fp32", "cpu"))
    for rank in (0, RANKS - 1):
        sent = json.loads((tmp_path / f"sent-{rank}.json").read_text())
        for words, layout, messages in zip(WORDS, layouts, sent, strict=True):
            problem, plan = predictor.build_case(layout)
            plan = to_torch_plan(plan)
            own = Counter(Communication(kind, find_axes(plan, ranks), float(size)) for kind, ranks, size in messages)
            expected = count_bytes(communications(problem, plan, [rank])[rank])
            if layout.zero == 3 and not layout.is_staged:
                # the table is gathered with the head, and like it once, as backward begins with them
                gathers = "all_gather", ("data",)
                expected[gathers] -= ROWS * HIDDEN * 4 * layout.num_microbatches
            assert count_bytes(own) == expected, (words, rank)
