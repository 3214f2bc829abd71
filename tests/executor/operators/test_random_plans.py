"""Any legal plan of any module: gradients of one process, and the collectives that are simulated, one by one."""

import json
import os
from collections import Counter
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from modules import MODULES, make  # noqa: E402
from tiny_jobs import cluster  # noqa: E402

from executor.capture.capture import capture  # noqa: E402
from executor.capture.captured import Captured  # noqa: E402
from executor.launcher import launch  # noqa: E402
from simulator.collective_kinds import Collective  # noqa: E402
from simulator.operator_graph import SEQUENCE, OperatorKind  # noqa: E402
from strategies.lowering import StageCosts  # noqa: E402
from strategies.mesh import OPERATOR_AXES, TENSOR, TENSOR_ROWS  # noqa: E402
from strategies.operators.choices import choices  # noqa: E402
from strategies.operators.complete import operator_plan  # noqa: E402
from strategies.plan import Plan  # noqa: E402
from strategies.problem import Problem  # noqa: E402
from strategies.search import Frontier, search  # noqa: E402
from strategies.sharding import OperatorSharding  # noqa: E402
from strategies.training import Training  # noqa: E402

Ran = Counter[tuple[str, str, int]]
MESHES: tuple[dict[str, int], ...] = ({TENSOR: 2}, {TENSOR: 4}, {TENSOR_ROWS: 2, TENSOR: 2})
PLANS = 3
"""Random plans of each module on each mesh."""


@pytest.fixture(scope="module")
def captured() -> dict[str, Captured]:
    return {name: capture(*make(name, dtype=torch.float64)) for name in MODULES}


def problem(of: Captured, ranks: int) -> Problem:
    return Problem(of.graph, cluster(ranks), Training(of.batch, of.graph.sequence, "fp64", "sgd", framework="torch"))


def drawn(of: Captured, degrees: dict[str, int], random: Random) -> list[OperatorSharding]:
    """Return a legal sharding for every operator, whole for those that share a parameter and must keep it alike."""
    tied = {parameter for pair in of.graph.tied for parameter in pair}
    result = []
    for block in of.graph.blocks:
        for operator in block.operators:
            legal = choices(block.name, block, operator, degrees, of.batch)
            shares = any((block.name, name) in tied for name in operator.parameters)
            # a table of positions is simulated as whole on every rank, as frameworks keep it
            positions = any(SEQUENCE in block.tensor[name].dims for name in operator.parameters)
            result.append(legal[0] if shares or positions else random.choice(legal))
    return result


def simulated(of: Captured, small: Problem, plan: Plan) -> Ran:
    """Return the collectives of a step as they are simulated; each rank reads its own part of data."""
    costs, ran = StageCosts(small), Counter[tuple[str, str, int]]()
    rank, names = costs.machine(plan).rank(0), costs.blocks.kinds(plan).names
    crossing = 0
    for occurrence, block in of.graph.occurrences:
        own = {name for operator in block.operators for name in (*operator.outputs, *operator.parameters)}
        own |= set(block.inputs[:crossing])
        crossing = len(block.outputs)
        linear = [each for each in block.operators if each.kind is not OperatorKind.CONVOLUTION]
        first = {name for each in linear if own.isdisjoint(each.inputs) for name in each.parameters}
        steps = costs.blocks.cost(plan, names[occurrence], rank).steps
        # a linear layer that only reads data has no gradient of its input to make, for which its weight would be
        # gathered again; a convolution's weight is kept anyway
        backward = [s for s in steps.backward if not (s.collective is Collective.ALL_GATHER and s.tensor in first)]
        for step in (*steps.forward, *backward):
            if step.collective is not None and step.tensor in own:
                ran[str(step.collective), step.axis, round(step.size)] += 1
    (held,) = costs.held(plan).positions
    for axis, elements in zip(OPERATOR_AXES, held.replicated, strict=True):
        if elements:
            ran["all_reduce", axis, elements * small.training.gradient_bytes] += 1
    return ran


def document(sharding: OperatorSharding) -> dict[str, Any]:
    return {"operator": sharding.operator, "cuts": sharding.cuts, "kept": sharding.kept}


def run(cases: list[tuple[str, dict[str, int], Plan]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what the ranks found of every case, all on as many ranks."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]))
    found = []
    for number, (_, group) in enumerate(groupby(cases, key=lambda case: case[2].mesh.num_ranks)):
        of = list(group)
        own = folder / str(number)
        own.mkdir()
        documents = [
            {"module": name, "axes": list(degrees.items()), "shardings": list(map(document, plan.shardings))}
            for name, degrees, plan in of
        ]
        (own / "cases.json").write_text(json.dumps(documents))
        launch("ranks", [str(own)], own, of[0][2].mesh.num_ranks, timeout=120)
        found += json.loads((own / "found.json").read_text())
    return found


def test_random_plans_compute_what_one_process_does_and_run_what_is_simulated(
    captured: dict[str, Captured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, cases = Random(0), []
    for degrees in MESHES:
        ranks = 1
        for degree in degrees.values():
            ranks *= degree
        for name, of in captured.items():
            for _ in range(PLANS):
                plan = operator_plan(problem(of, ranks), degrees, of.batch, drawn(of, degrees, random))
                cases.append((name, degrees, plan))
    for (name, degrees, plan), found in zip(cases, run(cases, tmp_path, monkeypatch), strict=True):
        assert found["error"] <= 1e-10, (name, degrees)
        ran = Counter({tuple(key): count for *key, count in found["ran"]})
        small = problem(captured[name], plan.mesh.num_ranks)
        expected = simulated(captured[name], small, plan)
        assert ran == expected, (name, degrees, ran - expected, expected - ran, plan.shardings)
        assert found["counted"] == sum(ran.values()), (name, degrees)  # by torch's own counter


def test_the_planners_plan_computes_what_one_process_does(
    captured: dict[str, Captured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = []
    for name, of in captured.items():
        best = search(Frontier(), problem(of, 4)).best
        assert best is not None
        degrees = {axis.name: axis.size for axis in best.plan.mesh.axes if axis.size > 1}
        cases.append((name, degrees, best.plan))
    for (name, degrees, _), found in zip(cases, run(cases, tmp_path, monkeypatch), strict=True):
        assert found["error"] <= 1e-10, (name, degrees)
