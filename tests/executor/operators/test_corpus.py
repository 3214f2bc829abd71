"""Modules as users write them: each is executed and equal to one process on the whole batch, or refused with its line.

`corpus/laws.py` has what a module may do, ten lines each; `corpus/users.py` networks that nobody wrote for this one.
A comment `# refused` names the line that must be told, `# refused with 2 microbatches` one that runs with a single one;
after a colon stands the factory that it is of, where others of the same class run.
"""

import inspect
import re
from dataclasses import replace
from functools import cache
from importlib import util
from pathlib import Path
from random import Random
from types import FunctionType
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from tiny_jobs import cluster  # noqa: E402

from meshwise.executor.capture.capture import capture, run_factory  # noqa: E402
from meshwise.executor.capture.captured import CapturedModule, CaptureError  # noqa: E402
from meshwise.executor.check.verification import TOLERANCE, Verification  # noqa: E402
from meshwise.executor.launch.launcher import launch_ranks  # noqa: E402
from meshwise.executor.operators.job import OperatorJob, expect, verdict  # noqa: E402
from meshwise.executor.operators.run import WORKER, refuse  # noqa: E402
from meshwise.executor.operators.trainer import train  # noqa: E402
from meshwise.simulator.operator_graph import OperatorGraph  # noqa: E402
from meshwise.strategies.operators.choices import list_choices  # noqa: E402
from meshwise.strategies.operators.operator_plan import build_operator_plan  # noqa: E402
from meshwise.strategies.plan.mesh import TENSOR  # noqa: E402
from meshwise.strategies.plan.partition import Stage  # noqa: E402
from meshwise.strategies.plan.plan import Plan  # noqa: E402
from meshwise.strategies.plan.problem import Problem, Training  # noqa: E402
from meshwise.strategies.plan.sharding import OperatorSharding  # noqa: E402

from ...examples import LONG  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"
BATCH = 8
MARK = re.compile(r"# refused( with 2 microbatches)?(?:: (\w+))?$")
AT_FIRST = {
    "laws": (
        *("detached", "detached_view", "without_gradient", "part_without_gradient", "data_of_tensor", "calls"),
        *("running_read", "normed", "valid", "ignored", "nothing_ignored", "balanced", "zero_first", "sums", "dropped"),
        *("contrasted", "matched"),
        *("in_place", "input_in_place", "branching", "selected", "straight_through", "hooked", "halved", "half_way"),
    ),
    "users": ("dqn", "moe_balanced"),
}
"""The modules that are run at every change; all are with ``--hypothesis-profile long`` (``bash .ci/long``)."""


class Case(NamedTuple):
    """A factory, and the microbatches that its module is trained in."""

    file: str
    factory: str
    microbatches: int

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return f"{CORPUS / self.file}.py:{self.factory}"


def cases() -> list[Case]:
    found = []
    for file, chosen in AT_FIRST.items():
        spec = util.spec_from_file_location(file, CORPUS / f"{file}.py")
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, value in vars(module).items():
            own = isinstance(value, FunctionType) and value.__module__ == file and not name.startswith("_")
            if own and not value.__code__.co_argcount and (LONG or name in chosen):
                found += [Case(file, name, 2)]
    return found


CASES = cases()


@cache
def line(case: Case) -> int | None:
    """Return the line that must be told of; None where the module must run."""
    module, _ = run_factory(case.name)
    for each in module.modules():
        forward = inspect.unwrap(type(each).forward)
        source, first = inspect.getsourcelines(forward)
        for place, text in enumerate(source, first):
            mark = MARK.search(text.rstrip())
            if mark and (not mark[1] or case.microbatches == 2) and mark[2] in (None, case.factory):
                return place
    return None


RUNNING = [case for case in CASES if line(case) is None]
RUNNING += [
    case._replace(microbatches=1) for case in CASES if line(case) and line(case._replace(microbatches=1)) is None
]


@cache
def problem(case: Case) -> tuple[Problem, CapturedModule]:
    torch.manual_seed(0)
    captured = capture(*run_factory(case.name))
    training = Training(BATCH, captured.graph.sequence, "fp32", "adamw", framework="torch")
    return Problem(captured.graph, cluster(2), training), captured


def job(case: Case, plan: Plan | None = None) -> OperatorJob:
    own, _ = problem(case)
    plan = plan or build_operator_plan(own, {}, BATCH // 2 // case.microbatches, data=2)
    return OperatorJob(case.name, plan, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.factory)
def test_a_module_is_accepted_or_refused_with_its_line(case: Case) -> None:
    expected = line(case)
    if expected is None:
        tolerances(case)
        return
    with pytest.raises(CaptureError) as told:
        refuse(job(case), *_of(case))
    text = str(told.value)
    assert re.match(rf"\S*{case.file}\.py:{expected}: ", text), text
    assert "met" in text and "nearest: " in text and "\n" not in text


@cache
def tolerances(case: Case) -> float:
    return refuse(job(case), *_of(case))


def _of(case: Case) -> tuple[OperatorGraph, Training]:
    own, captured = problem(case)
    return captured.graph, own.training


def _drawn(case: Case, random: Random) -> list[OperatorSharding]:
    """Return a legal cut of every operator along two ranks, but of those that share a parameter."""
    _, captured = problem(case)
    tied = {parameter for pair in captured.graph.tied for parameter in pair}
    result = []
    for block in captured.graph.blocks:
        for operator in block.operators:
            legal = list_choices(block.name, block, operator, {TENSOR: 2}, BATCH)
            shares = any((block.name, name) in tied for name in operator.parameters)
            result.append(legal[0] if shares else random.choice(legal))
    return result


def _cut(case: Case) -> Plan:
    own, _ = problem(case)
    return build_operator_plan(own, {TENSOR: 2}, BATCH // case.microbatches, _drawn(case, Random(0)))


def _staged(case: Case) -> Plan:
    """Return a plan of two pipeline stages: values without gradients cross from one to the other."""
    own, captured = problem(case)
    names = [name for name, _ in captured.graph.occurrences]
    half = len(names) // 2
    small = replace(own, cluster=cluster(1))
    whole = build_operator_plan(small, {}, BATCH // case.microbatches)
    stages = Stage(tuple(names[:half])), Stage(tuple(names[half:]))
    mesh = build_operator_plan(replace(own, cluster=cluster(2)), {}, BATCH // case.microbatches, stages=stages)
    return replace(whole, mesh=mesh.mesh, stages=stages, schedule=mesh.schedule)


WITHOUT_GRADIENTS = ("detached", "without_gradient", "part_without_gradient", "dqn", "gan", "vqvae")
"""Factories of modules in which a gradient ends, which are also cut and put in stages."""


PLANS = {"on data ranks": lambda case: None, "cut": _cut, "in stages": _staged}
RUNS = {
    f"{case.factory}, {case.microbatches}, {how}": (case, how)
    for case in RUNNING
    for how in PLANS
    if how == "on data ranks" or (case.factory in WITHOUT_GRADIENTS and case.microbatches == 2)
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verification]:
    """Return how far the ranks are from one process in one step of every job, all in one set of processes."""
    folder, checks = tmp_path_factory.mktemp("corpus"), []
    for number, (name, (case, how)) in enumerate(RUNS.items()):
        own, place = job(case, PLANS[how](case)), folder / str(number)
        check = replace(own, double=True, dump=True, profile=False)
        expect(place, *train(check), tolerances(case))
        checks.append((name, check, place))
    paths = [str(check.write(place).resolve()) for _, check, place in reversed(checks)]  # the last one runs first
    launch_ranks(WORKER, paths, checks[-1][2], 2, timeout=300)
    return {name: verdict(check, place) for name, check, place in checks}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_compute_what_one_process_computes_of_the_whole_batch(
    name: str, verdicts: dict[str, Verification]
) -> None:
    found = verdicts[name]
    assert found.equal, found
    assert found.tolerance == TOLERANCE or name.split(",")[0] in ("half_way", "llama", "llama_padded"), (
        "what is fp32 in an fp64 module"
    )
