"""The scenario of one setup as a file, so that its plan can be simulated, explained and exported like any other."""

from pathlib import Path
from typing import Any

from meshwise.scenarios.choices.question import PARSERS, Setup
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.reader import dump_yaml, read_document
from meshwise.scenarios.inputs.cluster_document import build_cluster_document
from meshwise.scenarios.inputs.named_files import resolve_reference
from meshwise.scenarios.loader import load
from meshwise.simulator.units import format_count

SUFFIX = ".scenario.yaml"


def name_setup_file(plan: str | Path) -> Path:
    """Return the path of the scenario beside a plan.

    >>> name_setup_file("plans/best.json").name
    'best.scenario.yaml'
    """
    path = Path(plan)
    return path.with_name(path.stem + SUFFIX)


def build_setup_files(setup: Setup, path: Path) -> dict[Path, str]:
    """Return the text of the scenario of a setup by its path, and of the files that it names, beside it.

    It is the scenario's own file on the setup's nodes and batch, without its own plan, a measured step time and the
    question that was asked. A machine of a cluster file is written out; a framework that the search took by its target
    is named, so that the plan is priced alike.
    """
    scenario = setup.scenario
    document = read_document(find_scenario(scenario.file))
    data: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in document.data.items()
        if name not in ("plan", "measured")
    }
    problem, own_problem, files = scenario.problem, load(scenario.file).problem, {}
    data["name"] = scenario.name
    own_sizes = own_problem.cluster.num_nodes, own_problem.training.global_batch
    if (setup.nodes, problem.training.global_batch) != own_sizes:
        # the name that the scenario has may say another size
        data["name"] += f": {format_count(setup.nodes, 'node')}, batch {problem.training.global_batch}"
    data["training"]["global_batch"] = problem.training.global_batch
    if scenario.framework is None and scenario.asked_target is not None:
        data["training"]["framework"] = problem.training.framework
    if "preset" in data["cluster"] and _is_own_machine(setup):
        data["cluster"]["nodes"] = setup.nodes
    else:
        data["cluster"] = build_cluster_document(problem.cluster)
    for name in ("hf_config", "graph"):
        if isinstance(data["model"].get(name), str):
            source = resolve_reference(document, ("model", name), data["model"][name])
            target = path.with_name(f"{path.name.removesuffix(SUFFIX)}.{name}{source.suffix}")
            files[target] = source.read_text("utf-8")
            data["model"][name] = target.name
    if isinstance(data.get("search"), dict):
        data["search"] = {name: value for name, value in data["search"].items() if name not in PARSERS}
        if not data["search"]:
            del data["search"]
    return {**files, path: dump_yaml(data)}


def _is_own_machine(setup: Setup) -> bool:
    """Return whether a setup's machine is that of its scenario's file, on another number of nodes at most."""
    cluster, own_cluster = setup.scenario.problem.cluster, load(setup.scenario.file).problem.cluster
    return cluster == (own_cluster if setup.nodes == own_cluster.num_nodes else own_cluster.with_size(setup.nodes))
