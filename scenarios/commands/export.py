"""``meshwise export``: a plan as the configuration of a trainer or a launcher."""

from typing import TYPE_CHECKING, Annotated

import typer

from meshwise.executor.device import CPU, CUDA
from meshwise.executor.export.launchers import TARGETS as LAUNCHERS
from meshwise.executor.export.launchers import LaunchRequest as LaunchRequest
from meshwise.executor.job import Job
from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit, note
from meshwise.scenarios.files.errors import suggest_nearest
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.reader import read_document
from meshwise.scenarios.files.results import check_output, write
from meshwise.scenarios.interchange.facts import TrainerRequest
from meshwise.scenarios.interchange.targets import TARGETS as TRAINERS
from meshwise.scenarios.launches import Launch
from meshwise.scenarios.loader import load
from meshwise.scenarios.memory_forecast import forecast_memory
from meshwise.scenarios.scenario import FRAMEWORK_OF
from meshwise.simulator.units import format_count, format_size
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.explanation.uncertainty import format_risk

if TYPE_CHECKING:
    from meshwise.scenarios.scenario import Scenario


def export(
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help="A scenario that has a plan; or with --scenario a plan file, or TARGET:FILE of another trainer.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="torchtitan, megatron, deepspeed, accelerate or nanotron; slurm or kubernetes."
        ),
    ],
    scenario: Annotated[
        str | None, typer.Option(help="The scenario that a plan file is of: model and training.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training steps.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial parameters.")] = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks on a host; default: the devices of the scenario's nodes.")
    ] = None,
    folder: Annotated[str, typer.Option(help="Folder of the run, seen by all hosts.")] = "meshwise-run",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first host to meet on.")] = 29500,
    image: Annotated[str | None, typer.Option(help="kubernetes: image with meshwise and torch.")] = None,
    claim: Annotated[str | None, typer.Option(help="kubernetes: volume claim that all pods can write.")] = None,
    out: Annotated[str | None, typer.Option(help="Write it here instead of stdout.")] = None,
    as_json: Json = False,
) -> None:
    """Say a plan in another system's words; what that system cannot say is refused.

    Trainers get their configuration, in the fields of the version that the file names; `--plan TARGET:FILE` reads it
    back. slurm and kubernetes get a file that runs the plan under torchrun, and `meshwise execute --collect --out
    FOLDER` reads what came of it.
    """
    check_output(out)
    if to not in (*TRAINERS, *LAUNCHERS):
        names = (*TRAINERS, *LAUNCHERS)
        raise ValueError(f"--to is one of {', '.join(names)}, met {to[:60]!r}{suggest_nearest(to, names)}")
    value = _find_scenario(plan, scenario)
    if to in TRAINERS:
        target = TRAINERS[to]
        text = target.to_text(TrainerRequest(value.name, value.spec, value.problem, value.choose_plan(), out))
        document: dict[str, object] = {"version": target.version}
        words = f"for {target.versioned_name}"
    else:
        node_devices, ranks = value.problem.cluster.first_node.devices, value.choose_plan().mesh.num_ranks
        job, ranks_per_host = _build_job(value, steps, seed), processes or min(node_devices, ranks)
        request = LaunchRequest(value.name, job, ranks_per_host, folder, port, image, claim)
        text = LAUNCHERS[to](request)
        document = {"nodes": request.num_nodes, "processes": request.processes, "device": request.job.device}
        words = f"{format_count(request.num_nodes, 'host')}, {format_count(ranks_per_host, 'rank')} on each"
    if out is not None:
        write(out, text)
    if as_json:
        emit({"target": to} | document | {"file": out, "text": text})
    elif out is None:
        print(text, end="")
    else:
        print(f"{out} is written: {words}")
    if out is not None and to in TRAINERS:
        note(_describe_memory(value, to))


def _build_job(value: "Scenario", steps: int, seed: int) -> Job:
    device = CPU if value.problem.cluster.first_node.accelerator.computes_collectives else CUDA
    return Job(value.to_executable_spec(), value.problem.training, value.choose_plan(), steps, seed, device=device)


def _describe_memory(value: "Scenario", trainer: str) -> str:
    """Return in words whether a scenario's plan fits in a trainer, by whose conventions, and its risk.

    The figures equal those of `meshwise.scenarios.launches.list_launches`, which judges every trainer and takes longer
    to import.
    """
    if value.framework is None and trainer not in FRAMEWORK_OF:
        return Launch(trainer).describe()

    problem, plan = value.to_target_problem(trainer), value.choose_plan()
    costs = SimulatedCost(problem)
    peak, forecast = costs.peak_memory(plan), forecast_memory(costs, plan)
    verb = "fits" if forecast.fits else "does not fit"
    conventions = "its conventions" if value.framework is None else f"the conventions of {value.framework}"
    risk = format_risk(forecast.out_of_memory)
    return f"the plan {verb} in {trainer}: {format_size(peak)} by {conventions}, {risk}"


def _find_scenario(plan: str, scenario: str | None) -> "Scenario":
    """Return the scenario with the plan to export.

    Raises
    ------
    ValueError
        Where a plan file comes without the scenario that it belongs to.
    """
    if scenario is not None:
        return load(scenario, plan)
    document = read_document(find_scenario(plan)).data
    if isinstance(document, dict) and "model" not in document:
        raise ValueError(f"{plan}: a plan says nothing of model and training; name what it is of: --scenario SCENARIO")
    return load(plan)
