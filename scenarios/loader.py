"""From an input file to a `Scenario`: all faults of the file are found before anything runs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwise.scenarios.files.checking import check, sound_sections
from meshwise.scenarios.files.errors import Fault, ScenarioError, shown
from meshwise.scenarios.files.fields import Table
from meshwise.scenarios.files.library import find
from meshwise.scenarios.files.reader import Document, FieldPath, content_of, read
from meshwise.scenarios.inputs.cluster_file import (
    FieldError,
    cluster_in,
    cluster_table,
    load_cluster,
    resized,
    to_cluster,
    with_conditions,
)
from meshwise.scenarios.inputs.graph_file import load_graph
from meshwise.scenarios.inputs.named_files import load_model, referenced, with_schedule
from meshwise.scenarios.inputs.plan_table import layout_in, rule_violations, to_pins
from meshwise.scenarios.inputs.remarks import assumptions, unusual
from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.scenario import Measured, Scenario, SearchSettings
from meshwise.scenarios.schema.model import ModelTable, TransformerTable
from meshwise.scenarios.schema.plan import PlanDocument, PlanTable
from meshwise.scenarios.schema.scenario import (
    FileCluster,
    PresetCluster,
    RunTable,
    ScenarioTable,
    SearchTable,
    TrainingTable,
)
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model, build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.operators.choices import resolved
from meshwise.strategies.operators.operator_plan import cuts_operators, operator_violations
from meshwise.strategies.plan.completion import complete, layout_of
from meshwise.strategies.plan.layout import DECISIONS, STEP_DECISIONS, Violation
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training

if TYPE_CHECKING:
    from meshwise.scenarios.interchange.target import Target
    from meshwise.scenarios.long_run import RunSettings

T = TypeVar("T")
Faults = list[Fault]


def load(path: str | Path, plan: str | Path | None = None) -> Scenario:
    """Return the scenario of a file, or of a name in the library.

    Parameters
    ----------
    path
        A YAML or JSON file, or a library name such as ``gpt3-175b-1024-a100``.
    plan
        A plan file that replaces the scenario's own plan; ``TARGET:FILE`` for a file of another trainer, as
        ``meshwise export --to TARGET`` writes it. Where the scenario names no framework, the plan is then priced by
        the trainer's conventions.

    Raises
    ------
    ScenarioError
        Where a file has faults; it lists all of them, each with file, line and column.
    """
    if plan is not None and (foreign := find_target(str(plan))) is not None:
        target, file = foreign
        document, facts = target.plan(content_of(file), file)
        result = scenario_in(read(find(path)), document)
        target.check(facts, result, file)
        return replace(result, problem=result.priced_for(target.name))
    return scenario_in(read(find(path)), read(plan) if plan is not None else None)


def move_to_cluster_file(scenario: Scenario, path: str | Path) -> Scenario:
    """Return a scenario moved to as many devices of the machine in a cluster file, with the remarks about that file.

    Raises
    ------
    ScenarioError
        Where the file has faults; it lists all of them.
    """
    document = read(path)
    moved = scenario.on(cluster_in(document), unusual(cluster_table(document), document))
    return replace(moved, assumptions=(*moved.assumptions, f"cluster.file {path} has the figures of that file"))


def find_target(plan: str) -> "tuple[Target, str] | None":
    """Return the trainer and the file that ``TARGET:FILE`` names; None for a plan file of this program."""
    name, _, file = plan.partition(":")
    if not file or Path(plan).exists():
        return None
    from meshwise.scenarios.interchange.targets import TARGETS  # the field maps of all trainers, for no other plan

    return (TARGETS[name], file) if name in TARGETS else None


def scenario_in(document: Document, plan_document: Document | None = None) -> Scenario:
    """Return the scenario of a document; ``plan_document`` replaces its plan."""
    document = with_schedule(document)
    table, faults = check(ScenarioTable, document)
    parts = dict(table) if table is not None else sound_sections(ScenarioTable, document, faults)
    plan_table: PlanTable | PlanDocument | None = parts.get("plan")
    plan_path: FieldPath = ("plan",)
    if plan_document is not None:
        plan_table, plan_path = plan_in(plan_document, faults), ()
    # every part is built even where others have faults, so that one attempt reports all of them
    spec = _spec(parts.get("model"), document, faults)
    training = _training(parts.get("training"), document, faults)
    cluster = _cluster(parts.get("cluster"), document, faults)
    search = _search(parts.get("search"), document, faults)
    problem = plan = None
    if spec and training and cluster:
        problem = _problem(spec, training, cluster, document, faults)
        if problem is not None and search is not None and search.pin:
            _check_pins(problem, search, document, faults)
        if problem is not None and plan_table is not None:
            plan = _plan(plan_table, problem, plan_document or document, plan_path, faults)
    if faults or spec is None or problem is None or table is None or search is None:
        raise ScenarioError(tuple(faults))
    measured = Measured(table.measured.step_time, table.measured.source) if table.measured else None
    name = table.name or Path(document.file).stem
    warnings = (*unusual(table, document), *_of_cluster_file(table.cluster, document))
    lines = (*problem.cluster.estimated, *(f"{fault.field} {fault.message}" for fault in warnings))
    lines += assumptions(table, spec, plan_table, problem.cluster)
    framework = table.training.framework if "framework" in table.training.model_fields_set else None
    return Scenario(
        name,
        document.file,
        problem,
        spec,
        plan,
        search,
        measured,
        lines,
        _run(table.run),
        warnings,
        framework,
    )


def _of_cluster_file(table: Any, document: Document) -> tuple[Fault, ...]:
    """Return remarks on unusual figures in the cluster file that a scenario names, with places in that file."""
    if not isinstance(table, FileCluster):
        return ()
    stated = read(referenced(document, ("cluster", "file"), table.file))
    return unusual(cluster_table(stated), stated)


def plan_in(document: Document, faults: Faults) -> PlanTable | PlanDocument | None:
    """Return the table of a plan file, a complete plan or a layout as users write it; add its faults to ``faults``."""
    document = with_schedule(document, ())
    kind: type[PlanTable] | type[PlanDocument] = PlanDocument if "version" in _keys(document) else PlanTable
    table, found = check(kind, document)
    faults.extend(found)
    return table


def _blame(document: Document, path: FieldPath, fields: Any, error: ValueError) -> Fault:
    """Return a fault at the field of ``fields`` that a constructor's message names first, else at ``path``."""
    word = next((word for word in re.findall(r"\w+", str(error)) if word in fields), None)
    return document.fault((*path, word) if word else path, str(error))


def _spec(table: ModelTable | None, document: Document, faults: Faults) -> Model | None:
    if table is None:
        return None
    if table.preset is not None:
        return MODELS[table.preset]
    if table.transformer is not None:
        return _transformer(table.transformer, document, faults)
    try:
        if table.graph is not None:
            return load_graph(referenced(document, ("model", "graph"), table.graph))
        assert table.hf_config is not None  # the schema asks for one of the four
        return load_model(referenced(document, ("model", "hf_config"), table.hf_config))
    except ScenarioError as error:
        faults.extend(error.faults)
        return None


def _transformer(table: TransformerTable, document: Document, faults: Faults) -> Transformer | None:
    path: FieldPath = ("model", "transformer")
    before = len(faults)
    experts = _part(Experts, table.experts, document, (*path, "experts"), faults)
    latent = _part(LatentAttention, table.latent, document, (*path, "latent"), faults)
    if len(faults) > before:
        return None
    parts = {"kv_heads": table.kv_heads or table.heads, "experts": experts, "latent": latent}
    return _made(Transformer, dict(table) | parts, document, path, faults)


def _part(kind: type[T], table: Table | None, document: Document, path: FieldPath, faults: Faults) -> T | None:
    return None if table is None else _made(kind, dict(table), document, path, faults)


def _made(kind: type[T], fields: dict[str, Any], document: Document, path: FieldPath, faults: Faults) -> T | None:
    """Return ``kind(**fields)``; where the constructor refuses them, add a fault and return None."""
    try:
        return kind(**fields)
    except ValueError as error:
        faults.append(_blame(document, path, fields, error))
        return None


def _training(table: TrainingTable | None, document: Document, faults: Faults) -> Training | None:
    if table is None:
        return None
    return _made(Training, table.model_dump(), document, ("training",), faults)


def _cluster(table: Any, document: Document, faults: Faults) -> Cluster | None:
    if table is None:
        return None
    try:
        return _named_cluster(table, document)
    except ScenarioError as error:
        faults.extend(error.faults)
    except FieldError as error:
        faults.append(document.fault(("cluster", *error.path), str(error)))
    except ValueError as error:
        faults.append(_blame(document, ("cluster",), type(table).model_fields, error))
    return None


def _named_cluster(table: Any, document: Document) -> Cluster:
    if isinstance(table, PresetCluster):
        return with_conditions(cluster(table.preset, table.nodes, table.devices_per_node), table)
    if isinstance(table, FileCluster):
        stated = load_cluster(referenced(document, ("cluster", "file"), table.file))
        keeps_fabric = table.fabric is None
        return with_conditions(resized(stated, table.nodes, table.devices_per_node, keeps_fabric=keeps_fabric), table)
    return to_cluster(table)


def _problem(spec: Model, training: Training, cluster: Cluster, document: Document, faults: Faults) -> Problem | None:
    try:  # peak() raises where the device has no such dtype
        for dtype in dict.fromkeys((training.precision, training.dtype)):
            cluster.accelerator.peak(dtype)
    except ValueError as error:
        faults.append(document.fault(("training", "precision"), str(error)))
    try:
        graph = build(spec, training.sequence, training.dtype)
    except ValueError as error:
        faults.append(document.fault(("training", "sequence"), str(error)))
        return None
    if graph.sequence != training.sequence:
        message = f"sequence is {graph.sequence} for samples of {spec.name}, met {training.sequence}"
        faults.append(document.fault(("training", "sequence"), f"{message}; nearest: {graph.sequence}"))
        return None
    return with_margin(Problem(graph, cluster, training))


def _plan(table: Any, problem: Problem, document: Document, path: FieldPath, faults: Faults) -> Plan | None:
    if isinstance(table, PlanDocument):
        return _whole_plan(problem, document, path, faults)
    layout = layout_in(table)
    found = [_violated(document, path, each, {}) for each in rule_violations(problem, layout)]
    faults.extend(found)
    return None if found else complete(problem, layout)


def _violated(document: Document, path: FieldPath, violation: Violation, fields: Mapping[str, str]) -> Fault:
    """Return the fault of a broken rule at its field, or at a part or line of it.

    ``fields`` has the document's key for each field of another name.
    """
    field, *parts = violation.field.split(".")
    within = (int(part) if part.isdigit() else part for part in parts)
    return document.fault((*path, fields.get(field, field), *within), violation.message)


_DOCUMENT_FIELDS = dict.fromkeys(DECISIONS, "mesh") | {item.name: item.key for item in STEP_DECISIONS}
_DOCUMENT_FIELDS["stages"] = "stages"
"""The key of a plan document by decision of a layout."""


def _whole_plan(problem: Problem, document: Document, path: FieldPath, faults: Faults) -> Plan | None:
    """Return the plan of a plan document; add faults and return None where it is not a plan of this problem."""
    data = document.data
    for key in path:
        data = data[key]
    try:
        plan = Plan.from_json(data)
        if cuts_operators(problem, plan):
            return _operator_plan(problem, plan, document, path, faults)
        layout = layout_of(problem, plan)
    except ValueError as error:
        faults.append(_blame(document, path, PlanDocument.model_fields, error))
        return None
    broken = rule_violations(problem, layout)
    if broken:
        faults.extend(_violated(document, path, each, _DOCUMENT_FIELDS) for each in broken)
        return None
    # a file may have been edited, or be of another model: every field has to follow from its layout and the problem
    expected = complete(problem, layout)
    same = True
    for name in Plan.__dataclass_fields__:
        wanted, met = getattr(expected, name), getattr(plan, name)
        if wanted != met:
            same = False
            key = _DOCUMENT_FIELDS.get(name, name)
            faults.append(document.fault((*path, key), _not_of_this_problem(key, wanted, met)))
    return plan if same else None


def _operator_plan(problem: Problem, plan: Plan, document: Document, path: FieldPath, faults: Faults) -> Plan | None:
    """Return a plan that cuts single operators; add faults and return None where it breaks the rules of such plans."""
    broken = list(operator_violations(problem, plan))
    faults.extend(_violated(document, path, each, _DOCUMENT_FIELDS) for each in broken)
    return None if broken else plan


def _not_of_this_problem(name: str, expected: Any, met: Any) -> str:
    if isinstance(met, int | str):
        return f"{name} follows from the scenario: {shown(expected)}, met {shown(met)}"
    return f"{name} is that of the scenario's model and mesh; met one of another model or mesh"


def _search(table: SearchTable | None, document: Document, faults: Faults) -> SearchSettings | None:
    if table is None:
        return SearchSettings() if "search" not in _keys(document) else None
    limits = {table.space: True} if isinstance(table.space, str) else dict(table.space)
    space = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in limits.items()
        if value is not None
    )
    pins, wrong = to_pins(table.pin) if table.pin else ((), [])
    faults.extend(document.fault(("search", "pin", name), message) for name, message in wrong)
    settings = SearchSettings(table.algorithm, table.budget, table.seconds, tuple(table.options.items()), space, pins)
    if table.model_fields_set:
        # to import an algorithm takes time: only its options need it, its name does not
        named = settings.make_algorithm if settings.options else settings.algorithm_name
        _try(named, ("search", "options"), dict(settings.options), document, faults)
        _try(settings.make_space, ("search", "space"), dict(settings.space), document, faults)
    return settings


def _try(make: Callable[[], Any], path: FieldPath, fields: Any, document: Document, faults: Faults) -> None:
    try:
        make()
    except ValueError as error:
        faults.append(_blame(document, path, fields, error))


def _check_pins(problem: Problem, settings: SearchSettings, document: Document, faults: Faults) -> None:
    """Add a fault for the first pin that does not match the model, or for all pins where no mesh satisfies them."""
    from meshwise.strategies.search.operator_search import check_pins  # lowers operators, of which few files say any

    for pin in settings.pin:
        try:
            resolved(problem.graph, (pin,))
        except ValueError as error:
            faults.append(document.fault(("search", "pin", pin.operator), str(error)))
            return
    try:
        check_pins(problem, settings.make_space())
    except ValueError as error:
        faults.append(document.fault(("search", "pin"), str(error)))


def _run(table: RunTable | None) -> "RunSettings | None":
    if table is None:
        return None
    from meshwise.scenarios.long_run import to_run  # simulates failures, of which few files say any

    return to_run(table)


def _keys(document: Document) -> Any:
    return document.data if isinstance(document.data, dict) else {}
