"""Any legal plan of any module, in stages too: gradients of one process, and what is simulated runs, one by one."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from modules import MODULES, make  # noqa: E402
from tiny_jobs import cluster  # noqa: E402

from meshwise.executor.capture.capture import capture  # noqa: E402
from meshwise.executor.capture.captured import CapturedModule  # noqa: E402
from meshwise.executor.launch.launcher import launch_ranks  # noqa: E402
from meshwise.simulator.collective import Collective  # noqa: E402
from meshwise.simulator.operator_graph import SEQUENCE, OperatorKind  # noqa: E402
from meshwise.strategies.lowering.stage_costs import StageCosts  # noqa: E402
from meshwise.strategies.operators.choices import list_choices  # noqa: E402
from meshwise.strategies.operators.operator_plan import build_operator_plan  # noqa: E402
from meshwise.strategies.plan.mesh import DATA, OPERATOR_AXES, PIPELINE, TENSOR, TENSOR_ROWS, Axis, Mesh  # noqa: E402
from meshwise.strategies.plan.partition import Stage  # noqa: E402
from meshwise.strategies.plan.plan import Plan  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402
from meshwise.strategies.plan.sharding import OperatorSharding  # noqa: E402
from meshwise.strategies.search.algorithms.operators import Frontier  # noqa: E402
from meshwise.strategies.search.simulated_search import search  # noqa: E402

from ...examples import LONG  # noqa: E402
from ...strategies.problems import find_block_cost, find_block_layout  # noqa: E402

Ran = Counter[tuple[str, str, int]]
Sent = Counter[tuple[int, int]]
MESHES: tuple[dict[str, int], ...] = ({TENSOR: 2}, {TENSOR: 4}, {TENSOR_ROWS: 2, TENSOR: 2})
PLANS = 8 if LONG else 1
"""Random plans of each module on each mesh."""


class Staged(NamedTuple):
    """A module in pipeline stages: the first block of each stage but the first, where and in which order they run."""

    module: str
    cuts: tuple[str, ...]
    degrees: dict[str, int]
    schedule: str = "1f1b"


STAGED = (
    Staged("convnet", ("body_norm",), {PIPELINE: 2}),  # the image and what is added to it are both alive
    Staged("unet", ("grow_0",), {PIPELINE: 2}),  # so are two skips, of which the next stage reads one
    Staged("gpt", ("layers.1",), {PIPELINE: 2}),  # the table of tokens is the weight of the logits
    Staged("recommender", ("tables_1",), {PIPELINE: 2}, "gpipe"),  # indices cross, which have no gradient
    Staged("gpt", ("layers.0", "layers.1", "logits"), {PIPELINE: 2}, "interleaved"),
    Staged("unet", ("down_1", "grow_0", "up_1"), {PIPELINE: 4}),  # the third stage only hands a skip on
    Staged("convnet", ("body_norm",), {PIPELINE: 2, TENSOR: 2}),
    Staged("unet", ("grow_0",), {PIPELINE: 2, TENSOR: 2}),
    Staged("gpt", ("layers.1",), {PIPELINE: 2, TENSOR: 2}),
    Staged("moe", ("logits",), {PIPELINE: 2, TENSOR: 2}),
    Staged("vit", ("norm",), {PIPELINE: 2, DATA: 2}),
    Staged("convnet", ("body",), {PIPELINE: 2, DATA: 2}),
    Staged("gpt", ("layers.1",), {PIPELINE: 2, DATA: 2}),
)
MICROBATCHES = 2


class Case(NamedTuple):
    """A module under a plan, and what each rank found of it."""

    module: str
    plan: Plan
    found: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.module} on {self.plan.mesh.axes} in {self.plan.stages}"


@pytest.fixture(scope="module")
def captured() -> dict[str, CapturedModule]:
    return {name: capture(*make(name, dtype=torch.float64)) for name in MODULES}


def problem(of: CapturedModule, plan_ranks: int, microbatches: int = 1) -> Problem:
    training = Training(of.batch * microbatches, of.graph.sequence, "fp64", "sgd", framework="torch")
    return Problem(of.graph, cluster(plan_ranks), training)


def drawn(of: CapturedModule, degrees: dict[str, int], random: Random, sequences: int) -> list[OperatorSharding]:
    """Return a legal sharding for every operator, whole for those that share a parameter and must keep it alike."""
    tied = {parameter for pair in of.graph.tied for parameter in pair}
    result = []
    for block in of.graph.blocks:
        for operator in block.operators:
            legal = list_choices(block.name, block, operator, degrees, sequences)
            shares = any((block.name, name) in tied for name in operator.parameters)
            # a table of positions is simulated as whole on every rank, as frameworks keep it
            positions = any(SEQUENCE in block.tensor[name].dims for name in operator.parameters)
            result.append(legal[0] if shares or positions else random.choice(legal))
    return result


def random_plans(captured: dict[str, CapturedModule], degrees: dict[str, int], random: Random) -> list[Case]:
    ranks, cases = prod(degrees.values()), []
    for name, of in captured.items():
        for _ in range(PLANS):
            plan = build_operator_plan(problem(of, ranks), degrees, of.batch, drawn(of, degrees, random, of.batch))
            cases.append(Case(name, plan, []))
    return cases


def planners_plans(captured: dict[str, CapturedModule]) -> list[Case]:
    cases = []
    for name, of in captured.items():
        best = search(Frontier(), problem(of, 4)).best
        assert best is not None
        cases.append(Case(name, best.plan, []))
    return cases


def staged_plan(of: CapturedModule, staged: Staged, random: Random) -> Plan:
    """Return a plan in stages whose operators are cut at random along the operator axes."""
    degrees = dict(staged.degrees)
    ranks, data = prod(degrees.values()), degrees.get(DATA, 1)
    inside = {axis: degrees.get(axis, 1) for axis in OPERATOR_AXES}
    names = [name for name, _ in of.graph.occurrences]
    bounds = [0, *map(names.index, staged.cuts), len(names)]
    stages = tuple(Stage(tuple(names[start:stop])) for start, stop in pairwise(bounds))
    axes = [Axis(PIPELINE, degrees[PIPELINE]), Axis(DATA, data), Axis(TENSOR, degrees.get(TENSOR, 1))]
    whole = build_operator_plan(problem(of, ranks // degrees[PIPELINE]), inside, of.batch // data, (), data=data)
    return replace(
        whole,
        mesh=Mesh(tuple(axes)),
        stages=stages,
        schedule=staged.schedule,
        chunks=len(stages) // degrees[PIPELINE],
        num_microbatches=MICROBATCHES,
        shardings=tuple(drawn(of, inside, random, of.batch // data)),
    )


def simulated(of: CapturedModule, small: Problem, plan: Plan) -> list[Ran]:
    """Return the collectives of a step at each position as they are simulated; ranks read their own part of data."""
    costs, ran = StageCosts(small), [Counter[tuple[str, str, int]]() for _ in range(plan.pipeline)]
    names = costs.find_keys(plan).cut.kinds.kind_names
    stage_of = {block: at for at, stage in enumerate(plan.stages) for block in stage.blocks}
    crossing = 0
    for occurrence, block in of.graph.occurrences:
        own = {name for operator in block.operators for name in (*operator.outputs, *operator.parameters)}
        own |= set(block.inputs[:crossing])
        crossing = len(block.outputs)
        linear = [each for each in block.operators if each.kind is not OperatorKind.CONVOLUTION]
        first = {name for each in linear if own.isdisjoint(each.inputs) for name in each.parameters}
        steps = find_block_cost(costs, plan, names[occurrence]).work.segments
        # a linear layer that only reads data has no gradient of its input to make, for which its weight would be
        # gathered again; a convolution's weight is kept anyway
        backward = [s for s in steps.backward if not (s.collective is Collective.ALL_GATHER and s.tensor in first)]
        for step in (*steps.forward, *backward):
            if step.collective is not None and step.tensor in own:
                here = ran[plan.positions[stage_of[occurrence]]]
                here[str(step.collective), step.axis, round(step.size)] += plan.num_microbatches
    for position, held in enumerate(costs.plan_parameters(plan).positions):
        for axis, elements in zip(OPERATOR_AXES, held.replicated_elements, strict=True):
            if elements:
                ran[position]["all_reduce", axis, elements * small.training.gradient_bytes] += 1
        if plan.data > 1:
            ran[position]["all_reduce", DATA, held.elements * small.training.gradient_bytes] += 1
    for one, other, elements in costs.list_tied_shares(plan):
        for position in (one, other):
            ran[position]["all_reduce", PIPELINE, elements * small.training.gradient_bytes] += 1
    return ran


def run(cases: list[Case], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks run cases, all of as many, and note what they found."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]))
    documents = [{"module": case.module, "plan": case.plan.to_json()} for case in cases]
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(documents))
    ranks = cases[0].plan.mesh.num_ranks
    launch_ranks("ranks", [str(folder)], folder, ranks, timeout=120)
    for rank in range(ranks):
        for case, found in zip(cases, json.loads((folder / f"found-{rank}.json").read_text()), strict=True):
            case.found.append(found)


@pytest.fixture(scope="module")
def cases(
    captured: dict[str, CapturedModule], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[Case]]]:
    """Every case, run once in as few processes as have enough ranks."""
    random = Random(0)
    found = {
        "random": [case for degrees in MESHES for case in random_plans(captured, degrees, random)],
        "planner": planners_plans(captured),
        "staged": [Case(each.module, staged_plan(captured[each.module], each, random), []) for each in STAGED],
    }
    every = [case for several in found.values() for case in several]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for ranks in (2, 4):
            own = [case for case in every if case.plan.mesh.num_ranks == ranks]
            run(own, tmp_path_factory.mktemp("ranks") / str(ranks), monkeypatch)
    yield found


def counted(found: dict[str, Any]) -> Ran:
    return Counter({tuple(key): count for *key, count in found["ran"]})


def test_random_plans_compute_what_one_process_does_and_run_what_is_simulated(
    captured: dict[str, CapturedModule], cases: dict[str, list[Case]]
) -> None:
    for case in cases["random"]:
        small = problem(captured[case.module], case.plan.mesh.num_ranks)
        (expected,) = simulated(captured[case.module], small, case.plan)
        for found in case.found:
            assert found["error"] <= 1e-10, case
            ran = counted(found)
            assert ran == expected, (str(case), ran - expected, expected - ran, case.plan.shardings)
            assert found["counted"] == sum(ran.values()), case  # by torch's own counter


def test_the_planners_plan_computes_what_one_process_does(cases: dict[str, list[Case]]) -> None:
    for case in cases["planner"]:
        assert all(found["error"] <= 1e-10 for found in case.found), case


def test_stages_compute_what_one_process_does_and_run_what_is_simulated(
    captured: dict[str, CapturedModule], cases: dict[str, list[Case]]
) -> None:
    for case in cases["staged"]:
        plan, of = case.plan, captured[case.module]
        small = problem(of, plan.mesh.num_ranks, plan.num_microbatches)
        expected = simulated(of, small, plan)
        for found in case.found:
            assert found["error"] <= 1e-10, case
            ran, here = counted(found), expected[found["position"]]
            # data ranks sum besides what one process sums over the whole batch: the loss, statistics of norms
            inside = {key for key in ran if key[1] == DATA and key not in here}
            assert Counter({key: ran[key] for key in ran if key not in inside}) == here, (str(case), ran, here)
            assert found["counted"] == sum(ran.values()), case
        module, _ = make(case.module)
        for key, named in (("parameters", module.named_parameters()), ("renewed", module.named_buffers())):
            assert {name for found in case.found for name in found[key]} == {name for name, _ in named}, case


def without_gradient(costs: StageCosts, plan: Plan, stage: int) -> int:
    """Return the bytes that a stage sends of indices, of which nothing comes back: it is simulated as if they did."""
    kind_names = costs.find_keys(plan).cut.kinds.kind_names
    layout = find_block_layout(costs, plan, kind_names[plan.stages[stage].blocks[-1]])
    crossing = [name for name in layout.block.outputs if not layout.block.tensor[name].has_gradient]
    return sum(layout.tensor_bytes(name, layout.produced_layouts[name].without_partial) for name in crossing)


def test_stages_send_what_is_simulated(captured: dict[str, CapturedModule], cases: dict[str, list[Case]]) -> None:
    for case in cases["staged"]:
        plan, of = case.plan, captured[case.module]
        costs, expected = StageCosts(problem(of, plan.mesh.num_ranks, plan.num_microbatches)), Sent()
        for stage, (sender, receiver) in enumerate(pairwise(plan.positions)):
            size = plan.num_microbatches * costs.boundary_bytes(plan, stage)
            expected[sender, receiver] += size
            expected[receiver, sender] += size - plan.num_microbatches * without_gradient(costs, plan, stage)
        for found in case.found:
            sent = {(sender, receiver): size for sender, receiver, size in found["sent"]}
            assert sent == {pair: size for pair, size in expected.items() if pair[0] == found["position"]}, case
