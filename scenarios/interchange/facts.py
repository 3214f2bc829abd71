"""What is said of a run in another trainer's words: fields of the scenario by their dotted names."""

from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any

from scenarios.scenario import layout_of
from simulator.models.experts import Experts
from simulator.models.latent_attention import LatentAttention
from simulator.models.model import Model
from simulator.models.transformer import Transformer
from strategies.completion import complete
from strategies.layout import Layout
from strategies.mesh import AXES
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.training import Training

Facts = dict[str, Any]
"""Values by field: ``plan.tensor``, ``training.sequence``, ``model.layers``."""

PLAN = tuple(f"plan.{field.name}" for field in fields(Layout))
TRAINING = tuple(f"training.{field.name}" for field in fields(Training))
MODEL = tuple(f"model.{field.name}" for field in fields(Transformer))
FIELDS = (*PLAN, *TRAINING, *MODEL)
"""All that a target has to say, to do always or to leave to the user's script."""


@dataclass(frozen=True, slots=True)
class Request:
    """A plan, what it is of and how it is called."""

    name: str
    spec: Model
    problem: Problem
    plan: Plan

    @property
    def title(self) -> str:
        """The plan in one printable line."""
        text = f"{self.name}: {self.plan.describe()}"
        return "".join(character if character.isprintable() else " " for character in text)

    @property
    def hosts(self) -> tuple[int, int]:
        """Hosts, and ranks on each: as many as its devices where that divides the ranks."""
        ranks, devices = self.plan.mesh.num_ranks, self.problem.cluster.first.devices
        each = ranks if ranks <= devices else gcd(ranks, devices)
        return ranks // each, each


def facts_of(request: Request) -> Facts:
    """Return every field of a request.

    Raises
    ------
    ValueError
        Where the model is no decoder transformer, or the plan says more than a layout can.
    """
    if not isinstance(request.spec, Transformer):
        met = f"{request.spec.name}: {request.spec.summary}"
        raise ValueError(f"model: the model is a decoder transformer, met {met}")
    return _plan(request) | training_facts(request.problem.training) | model_facts(request)


def _plan(request: Request) -> Facts:
    problem, plan = request.problem, request.plan
    layout = layout_of(problem, plan)
    if complete(problem, layout) != plan:
        raise ValueError("plan: what the fields of a plan mean, met a plan that cuts operators in ways of its own")
    result = {f"plan.{field.name}": getattr(layout, field.name) for field in fields(layout)}
    free = problem.cluster.free_devices
    every = () if len(free) == problem.cluster.num_devices else free
    return result | {
        "plan.order": AXES if layout.order == tuple(name for name in AXES if name in layout.order) else layout.order,
        "plan.placement": () if plan.placement == every else plan.placement,
        "plan.attention": layout.attention if layout.context > 1 else None,
    }


def training_facts(training: Training) -> Facts:
    """Return the fields of a training step, the precision of gradients as it is."""
    result = {f"training.{name}": value for name, value in asdict(training).items()}
    if not training.frozen:
        wide = training.gradient_bytes > training.parameter_bytes or training.dtype == "fp32"
        result["training.gradient_precision"] = "fp32" if wide else "same"
    return result


def model_facts(request: Request) -> Facts:
    """Return the fields of a transformer, each default as what it means; the load of experts is the simulation's."""
    spec = request.spec
    assert isinstance(spec, Transformer)
    plain = spec.ffn_kind == "gelu"
    known = {f"model.{field.name}": getattr(spec, field.name) for field in fields(spec)}
    return known | {
        "model.experts": spec.experts and replace(spec.experts, imbalance=1.0),
        "model.kv_channels": None if spec.latent else spec.head_dim,
        "model.max_positions": spec.max_positions or request.problem.training.sequence,
        "model.norm": spec.norm or ("layer" if plain else "rms"),
        "model.biases": spec.biases or ("all" if plain else "none"),
    }


def plan_document(facts: Facts) -> dict[str, Any]:
    """Return the plan of facts as the plain data of a plan file; fields that they lack are left out."""
    result = {}
    for name in PLAN:
        if (value := facts.get(name)) is None:
            continue
        value = value.document if hasattr(value, "document") else value
        result[name.removeprefix("plan.")] = list(value) if isinstance(value, tuple) else value
    return result


def plainly(value: Any) -> str:
    """Return a value of a field in words for a message."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Experts | LatentAttention):
        return ", ".join(f"{name} {each}" for name, each in asdict(value).items())
    if isinstance(value, tuple):
        return str(list(value) if len(value) <= 16 else [*value[:16], "..."])
    return str(value) or "nothing"
