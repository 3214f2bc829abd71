"""Stages of a plan, which name blocks of the captured graph, begin at the modules of these blocks."""

import os
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import capture_batch, make_example
from meshwise.executor.cut_modules.plan_stages import list_stage_starts
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.stages.cuts import choose_cuts, list_operators
from meshwise.executor.stages.export import export_step, list_paths
from meshwise.executor.stages.supported_modules import find_module_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.executor.user_training.run import verify_job
from meshwise.scenarios.commands.train import choose_cuts_of_job
from meshwise.scenarios.inputs.operator_cuts import choose_cuts as cut_operators
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan
from tests.executor.user_training import zoo

ZOO = Path(zoo.__file__)
BATCH = next(iter(torch.utils.data.DataLoader(zoo.Samples(zoo.words), batch_size=4)))


@lru_cache
def capture_tied() -> CapturedModule:
    """Return the tied module, captured."""
    torch.manual_seed(0)
    return capture_batch(zoo.Tied(), make_example(BATCH, 1), None, nearest="none")


@lru_cache
def cut_tied() -> Plan:
    """Return the plan that cuts the operators of the tied module over two ranks."""
    return cut_operators(capture_tied().graph, data=1, tensor=2, samples=4, num_microbatches=2)


def build_plan(sizes: tuple[int, ...], *, tensor: int = 1) -> tuple[Plan, tuple[str, ...]]:
    """Return a plan for the tied module with so many blocks in each stage, and the names of all blocks."""
    captured = capture_tied()
    blocks = tuple(name for name, _ in captured.graph.occurrences)
    plan = cut_tied()
    ends = [sum(sizes[:count]) for count in range(len(sizes))] + [len(blocks)]
    stages = tuple(Stage(blocks[start:end]) for start, end in pairwise(ends))
    axes = (Axis("pipeline", len(sizes)), Axis("data", 1), Axis("tensor", tensor))
    shardings = plan.shardings if tensor > 1 else ()
    return replace(plan, mesh=Mesh(axes), stages=stages, shardings=shardings), blocks


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(1, 4), min_size=1, max_size=3))
def test_stages_begin_at_the_modules_of_their_first_blocks(ends: set[int]) -> None:
    captured, step = capture_tied(), export_step(zoo.Tied(), None, BATCH)
    sizes = [0, *sorted(ends)]
    plan, blocks = build_plan((*(end - start for start, end in pairwise(sizes)), 1))
    starts = list_stage_starts(captured, plan)
    assert list(starts) == [plan.stages[place].blocks[0] for place in range(1, len(plan.stages))], blocks
    # a module exported on its own is cut at these names, and there every operator of a block is behind its cut
    operators = list_operators(step)
    cuts = choose_cuts(step, operators, len(plan.stages), starts, frozenset())
    for cut, start in zip(cuts, starts, strict=True):
        assert start in list_paths(operators[cut])
        assert not any(start in list_paths(node) for node in operators[:cut])


@pytest.mark.parametrize(("sizes", "tensor"), [((2, 3), 1), ((1, 4), 2)])
def test_a_plan_with_stages_runs_as_one_process_does(
    sizes: tuple[int, ...], tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", "tied")
    plan, _ = build_plan(sizes, tensor=tensor)
    job = choose_cuts_of_job(TrainJob(str(ZOO), find_module_layout(plan), steps=3))
    assert job.layout.cuts == (plan.stages[1].blocks[0],)
    difference = verify_job(job, tmp_path)
    assert difference.is_equal, difference


def test_a_plan_of_another_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "recurrent")
    plan, _ = build_plan((2, 3))
    with pytest.raises(ValueError, match="plan: its blocks are those of the module"):
        choose_cuts_of_job(TrainJob(str(ZOO), find_module_layout(plan), steps=3))
    assert os.environ["KIND"] == "recurrent"
    assert find_module_layout(plan) == ModuleLayout(pipeline=2, num_microbatches=2, plan=plan)
