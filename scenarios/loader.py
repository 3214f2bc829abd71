"""From an input file to a `Scenario`: all faults of the file are found before anything runs."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwise.scenarios.files.checking import check_table, read_sound_sections
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.fields import Table
from meshwise.scenarios.files.library import find_scenario
from meshwise.scenarios.files.reader import Document, FieldPath, read_content, read_document
from meshwise.scenarios.inputs.cluster_file import (
    FieldError,
    build_cluster,
    load_cluster,
    read_cluster_table,
    resize_cluster,
    to_cluster,
    with_conditions,
)
from meshwise.scenarios.inputs.graph_file import GraphModel, load_graph
from meshwise.scenarios.inputs.loads import build_loads
from meshwise.scenarios.inputs.named_files import load_model, resolve_reference, with_schedule
from meshwise.scenarios.inputs.plan_table import (
    PLAN_KEYS,
    build_layout,
    list_plan_violations,
    list_rule_violations,
    to_pins,
)
from meshwise.scenarios.inputs.remarks import list_assumptions, list_unusual
from meshwise.scenarios.intervals import with_margin
from meshwise.scenarios.scenario import Measured, Scenario, SearchSettings
from meshwise.scenarios.schema.loads import build_spread
from meshwise.scenarios.schema.model import ExpertsTable, ModelTable, TransformerTable
from meshwise.scenarios.schema.plan import PlanDocument, PlanTable
from meshwise.scenarios.schema.scenario import (
    FileCluster,
    PresetCluster,
    RunTable,
    ScenarioTable,
    SearchTable,
    TrainingTable,
    build_training,
)
from meshwise.simulator.catalog import cluster
from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.dlrm import Dlrm
from meshwise.simulator.models.encoders import T5, Bert
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model, build
from meshwise.simulator.models.presets import MODELS
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.operators.choices import resolve_pins
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import ENTRIES
from meshwise.strategies.plan.layout import Violation
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
    if plan is not None and (target_file := find_target(str(plan))) is not None:
        target, file = target_file
        document, facts = target.read_plan(read_content(file), file)
        result = read_scenario(read_document(find_scenario(path)), document)
        target.check_scenario(facts, result, file)
        return replace(result, problem=result.to_target_problem(target.name))
    return read_scenario(read_document(find_scenario(path)), read_document(plan) if plan is not None else None)


def move_to_cluster_file(scenario: Scenario, path: str | Path) -> Scenario:
    """Return a scenario moved to as many devices of the machine in a cluster file, with the remarks about that file.

    Raises
    ------
    ScenarioError
        Where the file has faults; it lists all of them.
    """
    document = read_document(path)
    moved_scenario = scenario.on(build_cluster(document), list_unusual(read_cluster_table(document), document))
    return replace(
        moved_scenario, assumptions=(*moved_scenario.assumptions, f"cluster.file {path} has the figures of that file")
    )


def find_target(plan: str) -> "tuple[Target, str] | None":
    """Return the trainer and the file that ``TARGET:FILE`` names; None for a plan file of this program."""
    name, _, file = plan.partition(":")
    if not file or Path(plan).exists():
        return None
    from meshwise.scenarios.interchange.targets import TARGETS  # the field maps of all trainers, for no other plan

    return (TARGETS[name], file) if name in TARGETS else None


def read_scenario(document: Document, plan_document: Document | None = None) -> Scenario:
    """Return the scenario of a document; ``plan_document`` replaces its plan."""
    document = with_schedule(document)
    table, faults = check_table(ScenarioTable, document)
    parts = dict(table) if table is not None else read_sound_sections(ScenarioTable, document, faults)
    plan_table: PlanTable | PlanDocument | None = parts.get("plan")
    plan_path: FieldPath = ("plan",)
    if plan_document is not None:
        plan_table, plan_path = read_plan_table(plan_document, faults), ()
    # every part is built even where others have faults, so that one attempt reports all of them
    spec = _build_spec(parts.get("model"), document, faults)
    training_table = _with_sequence(parts.get("training"), spec, document, faults)
    if table is not None and training_table is not None:
        table = table.model_copy(update={"training": training_table})
    training = _build_training(training_table, document, faults)
    cluster = _build_cluster(parts.get("cluster"), document, faults)
    if cluster and training and training_table:
        cluster = _with_launch(cluster, training_table)
    default_algorithm = "joint" if isinstance(spec, GraphModel) else "auto"
    search = _build_search(parts.get("search"), document, faults, default_algorithm)
    loads = build_loads(parts, spec, document, faults)
    problem = plan = None
    if spec and training and cluster:
        problem = _build_problem(spec, training, cluster, document, faults)
        if problem is not None and search is not None and search.pin:
            _check_pins(problem, search, document, faults)
        if problem is not None and plan_table is not None:
            plan = _build_plan(plan_table, problem, plan_document or document, plan_path, faults)
    if faults or spec is None or problem is None or table is None or search is None:
        raise ScenarioError(tuple(faults))
    measured = Measured(table.measured.step_time, table.measured.source) if table.measured else None
    name = table.name or Path(document.file).stem
    warnings = (*list_unusual(table, document), *_list_cluster_remarks(table.cluster, document))
    lines = (*problem.cluster.estimated, *(f"{fault.field} {fault.message}" for fault in warnings))
    lines += list_assumptions(table, spec, plan_table, problem.cluster)
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
        _build_run(table.run),
        warnings,
        framework,
        kernels=table.training.kernels,
        loss=table.training.loss,
        loads=loads,
    )


def _list_cluster_remarks(table: Any, document: Document) -> tuple[Fault, ...]:
    """Return remarks on unusual figures in the cluster file that a scenario names, with places in that file."""
    if not isinstance(table, FileCluster):
        return ()
    file_document = read_document(resolve_reference(document, ("cluster", "file"), table.file))
    return list_unusual(read_cluster_table(file_document), file_document)


def read_plan_table(document: Document, faults: Faults) -> PlanTable | PlanDocument | None:
    """Return the table of a plan file, a complete plan or a layout as users write it; add its faults to ``faults``."""
    document = with_schedule(document, ())
    kind: type[PlanTable] | type[PlanDocument] = PlanDocument if "version" in _list_keys(document) else PlanTable
    table, table_faults = check_table(kind, document)
    faults.extend(table_faults)
    return table


@contextmanager
def _collect_faults(document: Document, path: FieldPath, faults: Faults, fields: Iterable[str] = ()) -> Iterator[None]:
    """Turn errors inside into faults: of other files, of the field that an error names first, else at ``path``."""
    try:
        yield
    except ScenarioError as error:
        faults.extend(error.faults)
    except ValueError as error:
        word = next((word for word in re.findall(r"\w+", str(error)) if word in fields), None)
        inner_path = error.path if isinstance(error, FieldError) else (word,) if word else ()
        faults.append(document.fault((*path, *inner_path), str(error)))


def _build_spec(table: ModelTable | None, document: Document, faults: Faults) -> Model | None:
    if table is None:
        return None
    if table.preset is not None:
        return _with_popularity(MODELS[table.preset], table, document, faults)
    if table.dlrm is not None:
        spec = _build_value(Dlrm, dict(table.dlrm), document, ("model", "dlrm"), faults)
        return spec and _with_popularity(spec, table, document, faults)
    if table.transformer is not None:
        return _build_transformer(table.transformer, document, faults)
    with _collect_faults(document, ("model",), faults):
        if table.graph is not None:
            return load_graph(resolve_reference(document, ("model", "graph"), table.graph))
        assert table.hf_config is not None  # the schema asks for one of the five
        return load_model(resolve_reference(document, ("model", "hf_config"), table.hf_config))
    return None


def _with_popularity(spec: Model, table: ModelTable, document: Document, faults: Faults) -> Model:
    """Return a recommender with the stated popularity of rows; add a fault where another model states one."""
    if table.popularity is None:
        return spec
    if isinstance(spec, Dlrm):
        return replace(spec, popularity=table.popularity)
    message = f"is that of rows of a recommender's tables, {spec.name} has none; nearest: leave it out"
    faults.append(document.fault(("model", "popularity"), message))
    return spec


def _build_transformer(table: TransformerTable, document: Document, faults: Faults) -> Transformer | None:
    path: FieldPath = ("model", "transformer")
    num_faults = len(faults)
    experts = _build_experts(table.experts, document, (*path, "experts"), faults)
    latent = _build_part(LatentAttention, table.latent, document, (*path, "latent"), faults)
    if len(faults) > num_faults:
        return None
    parts = {"kv_heads": table.kv_heads or table.heads, "experts": experts, "latent": latent}
    return _build_value(Transformer, dict(table) | parts, document, path, faults)


def _build_experts(table: ExpertsTable | None, document: Document, path: FieldPath, faults: Faults) -> Experts | None:
    """Return the experts of a table; an imbalance that varies counts with its median."""
    if table is None:
        return None
    imbalance = build_spread(table.imbalance).find_quantile(0.5)
    return _build_value(Experts, dict(table) | {"imbalance": imbalance}, document, path, faults)


def _build_part(kind: type[T], table: Table | None, document: Document, path: FieldPath, faults: Faults) -> T | None:
    return None if table is None else _build_value(kind, dict(table), document, path, faults)


def _build_value(
    kind: type[T], fields: dict[str, Any], document: Document, path: FieldPath, faults: Faults
) -> T | None:
    """Return ``kind(**fields)``; where the constructor refuses them, add a fault and return None."""
    with _collect_faults(document, path, faults, fields):
        return kind(**fields)
    return None


def _with_sequence(
    table: TrainingTable | None, spec: Model | None, document: Document, faults: Faults
) -> TrainingTable | None:
    """Return a training table with the tokens of a sequence; a model whose samples are of one size has them.

    Returns ``None``, with a fault, where the model takes sequences of any length.
    """
    if table is None or table.sequence is not None:
        return table
    if isinstance(spec, Transformer | Bert | T5):
        faults.append(document.fault(("training", "sequence"), "this field is required"))
    if spec is None or isinstance(spec, Transformer | Bert | T5):
        return None
    return table.model_copy(update={"sequence": build(spec, 1, "fp32").sequence})


def _build_training(table: TrainingTable | None, document: Document, faults: Faults) -> Training | None:
    if table is None:
        return None
    with _collect_faults(document, ("training",), faults, type(table).model_fields):
        return build_training(table)
    return None


def _with_launch(cluster: Cluster, table: TrainingTable) -> Cluster:
    """Return a cluster whose hosts launch the kernels of an operator in the time that a training step states."""
    if table.launch is None:
        return cluster
    launch = ENTRIES[table.framework].defaults.launch if table.launch == "framework" else table.launch
    return cluster.with_nodes(lambda node: replace(node, host=replace(node.host, launch=launch)))


def _build_cluster(table: Any, document: Document, faults: Faults) -> Cluster | None:
    if table is None:
        return None
    with _collect_faults(document, ("cluster",), faults, type(table).model_fields):
        return _build_named_cluster(table, document)
    return None


def _build_named_cluster(table: Any, document: Document) -> Cluster:
    if isinstance(table, PresetCluster):
        return with_conditions(cluster(table.preset, table.nodes, table.devices_per_node), table)
    if isinstance(table, FileCluster):
        file_cluster = load_cluster(resolve_reference(document, ("cluster", "file"), table.file))
        keeps_fabric = table.fabric is None
        return with_conditions(
            resize_cluster(file_cluster, table.nodes, table.devices_per_node, keeps_fabric=keeps_fabric), table
        )
    return to_cluster(table)


def _build_problem(
    spec: Model, training: Training, cluster: Cluster, document: Document, faults: Faults
) -> Problem | None:
    with _collect_faults(document, ("training", "precision"), faults):
        for dtype in dict.fromkeys((training.precision, training.dtype)):
            cluster.accelerator.peak(dtype)  # raises where the device has no such dtype
    graph = None
    with _collect_faults(document, ("training", "sequence"), faults):
        graph = build(spec, training.sequence, training.dtype)
    if graph is None:
        return None
    if graph.sequence != training.sequence:
        message = f"sequence is {graph.sequence} for samples of {spec.name}, met {training.sequence}"
        faults.append(document.fault(("training", "sequence"), f"{message}; nearest: {graph.sequence}"))
        return None
    return with_margin(Problem(graph, cluster, training))


def _build_plan(table: Any, problem: Problem, document: Document, path: FieldPath, faults: Faults) -> Plan | None:
    if isinstance(table, PlanDocument):
        return _read_plan_document(problem, document, path, faults)
    layout = build_layout(table)
    plan_faults = [
        _build_violation_fault(document, path, violation, {}) for violation in list_rule_violations(problem, layout)
    ]
    faults.extend(plan_faults)
    return None if plan_faults else complete(problem, layout)


def _build_violation_fault(
    document: Document, path: FieldPath, violation: Violation, fields: Mapping[str, str]
) -> Fault:
    """Return the fault of a broken rule at its field, or at a part or line of it.

    ``fields`` has the document's key for each field of another name.
    """
    field, *parts = violation.field.split(".")
    rest_path = (int(part) if part.isdigit() else part for part in parts)
    return document.fault((*path, fields.get(field, field), *rest_path), violation.message)


def _read_plan_document(problem: Problem, document: Document, path: FieldPath, faults: Faults) -> Plan | None:
    """Return the plan of a plan document; add faults and return None where it is not a plan of this problem."""
    data = document.data
    for key in path:
        data = data[key]
    num_faults = len(faults)
    with _collect_faults(document, path, faults, PlanDocument.model_fields):
        plan = Plan.from_json(data)
        violations = list_plan_violations(problem, plan)
    if len(faults) > num_faults:
        return None
    faults.extend(_build_violation_fault(document, path, violation, PLAN_KEYS) for violation in violations)
    return None if violations else plan


def _build_search(
    table: SearchTable | None, document: Document, faults: Faults, default_algorithm: str
) -> SearchSettings | None:
    if table is None:
        return SearchSettings(default_algorithm) if "search" not in _list_keys(document) else None
    limits = {table.space: True} if isinstance(table.space, str) else dict(table.space)
    space = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in limits.items()
        if value is not None
    )
    pins, pin_errors = to_pins(table.pin) if table.pin else ((), [])
    faults.extend(document.fault(("search", "pin", name), message) for name, message in pin_errors)
    options, asked = tuple(table.options.items()), _list_asked(table, document, faults)
    algorithm = table.algorithm if "algorithm" in table.model_fields_set else default_algorithm
    settings = SearchSettings(algorithm, table.budget, table.seconds, options, space, pins, asked)
    if table.model_fields_set:
        # to import an algorithm takes time: only its options need it, its name does not
        with _collect_faults(document, ("search", "options"), faults, dict(settings.options)):
            settings.make_algorithm() if settings.options else settings.find_algorithm()
        with _collect_faults(document, ("search", "space"), faults, dict(settings.space)):
            settings.make_space()
    return settings


_PLAN_FIELDS = ("algorithm", "budget", "seconds", "options", "space", "pin")
"""Fields of ``search`` that say how a plan is looked for; the others ask for the machine of a run."""


def _list_asked(table: SearchTable, document: Document, faults: Faults) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a search that ask for the machine of a run; add a fault where one lacks another."""
    values = {name: value for name, value in table if name not in _PLAN_FIELDS and value is not None}
    if values:
        from meshwise.scenarios.choices.question import make_question  # imports a search, of which few files ask

        try:
            make_question(values)
        except ValueError as error:
            name = re.split(r"\W", str(error), maxsplit=1)[0]  # every message of a question begins with its field
            message = str(error).removeprefix(name).removeprefix(":").lstrip()
            faults.append(document.fault(("search", name), message))
    return tuple(values.items())


def _check_pins(problem: Problem, settings: SearchSettings, document: Document, faults: Faults) -> None:
    """Add a fault for the first pin that does not match the model, or for all pins where no mesh satisfies them."""
    from meshwise.strategies.search.operator_search import check_pins  # lowers operators, of which few files say any

    for pin in settings.pin:
        num_faults = len(faults)
        with _collect_faults(document, ("search", "pin", pin.operator), faults):
            resolve_pins(problem.graph, (pin,))
        if len(faults) > num_faults:
            return
    with _collect_faults(document, ("search", "pin"), faults):
        check_pins(problem, settings.make_space())


def _build_run(table: RunTable | None) -> "RunSettings | None":
    if table is None:
        return None
    from meshwise.scenarios.long_run import RunSettings  # simulates failures, of which few files say any

    return RunSettings(table)


def _list_keys(document: Document) -> Any:
    return document.data if isinstance(document.data, dict) else {}
