"""Facts: fields of a scenario by their dotted names, which the files of other trainers express."""

import re
from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from pathlib import Path
from typing import Any

from meshwise.simulator.models.attention import LatentAttention
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import Model
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import build_mesh, complete, recover_layout
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES, Microbatch, normalise_microbatch
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.partition import partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.rules import count_chunks
from meshwise.strategies.schedules.schedule import find_rule

Facts = dict[str, Any]
"""Values by field, such as ``plan.tensor``, ``training.sequence`` or ``model.layers``."""

PLAN = tuple(f"plan.{field.name}" for field in fields(Layout))
TRAINING = tuple(f"training.{field.name}" for field in fields(Training))
MODEL = tuple(f"model.{field.name}" for field in fields(Transformer))
FIELDS = (*PLAN, *TRAINING, *MODEL)
"""All fields: a target has to express each, have one fixed value for it, or leave it to the user's script."""


@dataclass(frozen=True, slots=True)
class TrainerRequest:
    """A plan to express in a trainer's configuration file, with its model, problem and name.

    ``file`` is where the text will be written, which the command in its first line names.
    """

    name: str
    spec: Model
    problem: Problem
    plan: Plan
    file: str | None = None

    @property
    def title(self) -> str:
        """The name and the plan in one printable line."""
        text = f"{self.name}: {self.plan.describe()}"
        return "".join(character if character.isprintable() else " " for character in text)

    def find_file_name(self, default: str) -> str:
        """Return the name of the file as a word of a shell; ``default`` where none is known or it is no plain word."""
        name = Path(self.file or default).name
        return name if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name) else default

    @property
    def hosts(self) -> tuple[int, int]:
        """The number of hosts, and of ranks on each: one rank a device where that divides the ranks."""
        ranks, devices = self.plan.mesh.num_ranks, self.problem.cluster.first_node.devices
        ranks_per_host = ranks if ranks <= devices else gcd(ranks, devices)
        return ranks // ranks_per_host, ranks_per_host


def collect_facts(request: TrainerRequest) -> Facts:
    """Return the facts of a request, for every field.

    Raises
    ------
    ValueError
        Where the model is no decoder transformer, or the plan is not that of a layout.
    """
    spec = check_decoder(request.spec)
    return (
        _collect_plan_facts(request)
        | collect_training_facts(request.problem.training)
        | collect_model_facts(spec, request.problem.training)
    )


def check_decoder(spec: Model) -> Transformer:
    """Return the model if it is a decoder transformer; else raise ``ValueError``."""
    if not isinstance(spec, Transformer):
        raise ValueError(f"model: the model is a decoder transformer, met {spec.name}: {spec.summary}")
    return spec


def _collect_plan_facts(request: TrainerRequest) -> Facts:
    problem, plan = request.problem, request.plan
    layout = recover_layout(problem, plan)
    if complete(problem, layout) != plan:
        raise ValueError("plan: what the fields of a plan mean, met a plan that cuts operators in ways of its own")
    meanings = Meanings(problem)
    return {name: meanings.find_fact(layout, name) for name in PLAN}


class LayoutFacts(dict[str, Any]):
    """Facts of a training step, a model and a layout; those of the layout are computed when they are first read.

    The rules of a search see which fields of the layout a check reads, and so remember its answer.
    """

    def __init__(self, known_facts: Facts, meanings: "Meanings", layout: Layout) -> None:
        super().__init__(known_facts)
        self._meanings, self._layout = meanings, layout

    def __missing__(self, name: str) -> Any:
        value = self[name] = self._meanings.find_fact(self._layout, name)
        return value


class Meanings:
    """The facts of layouts of a problem, in normal form: layouts of the same plan have the same facts."""

    def __init__(self, problem: Problem) -> None:
        self._graph, cluster = problem.graph, problem.cluster
        self._free_devices = () if len(cluster.free_devices) == cluster.num_devices else tuple(cluster.free_devices)
        self._layers = {name for name, block in problem.graph.occurrences if block.layer} or {
            problem.graph.occurrences[0][0]
        }
        self._counts: dict[tuple[int, str], tuple[int, ...]] = {}

    def find_fact(self, layout: Layout, name: str) -> Any:
        """Return the fact of a field of a layout, by its dotted name such as ``plan.tensor``."""
        field = name.removeprefix("plan.")
        method = getattr(self, f"_{field}", None)
        return getattr(layout, field) if method is None else method(layout)

    def _stages(self, layout: Layout) -> tuple[int, ...]:
        division = layout.stages
        if isinstance(division, tuple):
            return division
        key = find_rule(layout.schedule).count_stages(layout.pipeline, layout.chunks), division
        if key not in self._counts:
            stages = partition_layers(self._graph, *key)
            self._counts[key] = tuple(sum(name in self._layers for name in stage.blocks) for stage in stages)
        return self._counts[key]

    def _chunks(self, layout: Layout) -> int:
        return count_chunks(layout, find_rule(layout.schedule))

    def _microbatch(self, layout: Layout) -> Microbatch:
        return normalise_microbatch(layout.microbatch)

    def _attention(self, layout: Layout) -> Attention | None:
        return layout.attention if layout.context > 1 else None

    def _zero_shards(self, layout: Layout) -> int:
        return layout.zero_shards if layout.replica > 1 else 0

    def _order(self, layout: Layout) -> tuple[str, ...]:
        if layout.order == AXES:
            return AXES
        order = tuple(axis.name for axis in build_mesh(layout).axes)
        return AXES if order == tuple(name for name in AXES if name in order) else order

    def _placement(self, layout: Layout) -> tuple[int, ...]:
        return () if layout.placement == self._free_devices else layout.placement


def collect_training_facts(training: Training) -> Facts:
    """Return the facts of a training step; the precision of gradients is the actual one, not None for the default."""
    result = {f"training.{name}": value for name, value in asdict(training).items()}
    if not training.frozen:
        is_wide = training.gradient_bytes > training.parameter_bytes or training.dtype == "fp32"
        result["training.gradient_precision"] = "fp32" if is_wide else "same"
    return result


def collect_model_facts(spec: Transformer, training: Training) -> Facts:
    """Return the facts of a transformer, with the actual value of each default.

    The imbalance of experts is 1 in the facts: it is an assumption of the simulation, not part of the model.
    """
    is_gelu = spec.ffn_kind == "gelu"
    known_facts = {f"model.{field.name}": getattr(spec, field.name) for field in fields(spec)}
    return known_facts | {
        "model.experts": spec.experts and replace(spec.experts, imbalance=1.0),
        "model.kv_channels": None if spec.latent else spec.head_dim,
        "model.max_positions": spec.max_positions or training.sequence,
        "model.norm": spec.norm or ("layer" if is_gelu else "rms"),
        "model.biases": spec.biases or ("all" if is_gelu else "none"),
    }


def build_plan_document(facts: Facts) -> dict[str, Any]:
    """Return the plan of facts as the data of a plan file, without the fields that the facts lack."""
    result = {}
    for name in PLAN:
        if (value := facts.get(name)) is None:
            continue
        value = value.document if hasattr(value, "document") else value
        result[name.removeprefix("plan.")] = list(value) if isinstance(value, tuple) else value
    return result


def format_fact(value: Any) -> str:
    """Return the value of a field in words for a message."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Experts | LatentAttention):
        return ", ".join(f"{name} {item}" for name, item in asdict(value).items())
    if isinstance(value, tuple):
        return str(list(value) if len(value) <= 16 else [*value[:16], "..."])
    return str(value) or "nothing"
