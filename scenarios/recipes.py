"""Published training recipes, and their plans carried over to other problems.

The table is ``recipes.json``: one record a recipe, with facts and figures of a paper, a repository or a vendor's table,
and the document that states them. It is checked as a scenario file is.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import Fault, ScenarioError
from meshwise.scenarios.files.fields import Size, Table, Text, Time
from meshwise.scenarios.files.library import find_root
from meshwise.scenarios.files.reader import Data, Document, FieldPath, parse_document
from meshwise.scenarios.inputs.plan_table import build_layout, list_rule_violations
from meshwise.scenarios.schema.model import ModelTable
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.scenarios.schema.scenario import AnyCluster, TrainingTable
from meshwise.simulator.files import parse_json
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES
from meshwise.strategies.plan.parallelism import EXPERTS, Attention
from meshwise.strategies.plan.partition import num_layers
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import HALF, FirstLayers, PerStage, Recompute, SomeOperators
from meshwise.strategies.schedules.schedule import SCHEDULES

FILE = "recipes.json"

Rate = Annotated[float, Field(gt=0, le=1e9)]
_SCENARIO_KEYS = ("name", "model", "training", "cluster", "plan")


class SourceTable(Table):
    """The source of a recipe: who published it, and where."""

    publisher: Text
    document: Text = Field(description="A paper, or a repository and the path of a file in it.")
    version: Text = Field(description="The commit, release or date of the document.")
    locator: Text = Field(description="The table, row, line or key that states it.")

    def __str__(self) -> str:
        return f"{self.publisher}, {self.document} ({self.version}), {self.locator}"


class PublishedTable(Table):
    """What the publisher measured; the time of a step is either in seconds or as a rate of tokens."""

    step_time: Time | None = None
    tokens_per_second: Rate | None = Field(default=None, description="Of one device.")
    peak_memory: Size | None = Field(default=None, description="Of the fullest device.")

    @model_validator(mode="after")
    def _check_time(self) -> Self:
        if (self.step_time is None) == (self.tokens_per_second is None):
            raise ValueError("holds one of step_time and tokens_per_second")
        return self

    def find_step_time(self, problem: Problem) -> float:
        """Return the measured seconds of a step of ``problem``; from its tokens where a rate was published."""
        if self.step_time is not None:
            return self.step_time
        assert self.tokens_per_second is not None  # the table holds one of the two
        tokens = problem.training.global_batch * problem.training.sequence
        return tokens / (self.tokens_per_second * problem.cluster.num_devices)


class Recipe(Table):
    """A published recipe, as its record in the table; neither ``ran`` nor ``out_of_memory`` where nobody says."""

    name: Text
    source: SourceTable
    framework: Text = Field(description="What the publisher ran.")
    model: ModelTable
    training: TrainingTable
    cluster: AnyCluster
    device_memory: Size | None = Field(default=None, description="Of a device, where the preset's have another.")
    plan: PlanTable
    ran: bool = Field(description="Whether the publisher says that it ran.")
    out_of_memory: bool = Field(default=False, description="Whether the publisher says that memory did not do.")
    measured: PublishedTable | None = None
    notes: Annotated[list[Text], Field(max_length=16)] = Field(
        default=[], description="What the publisher leaves open or does otherwise, and what stands for it here."
    )

    @model_validator(mode="after")
    def _check_outcome(self) -> Self:
        if self.ran and self.out_of_memory:
            raise ValueError("ran: a recipe that ran is not out_of_memory, met both")
        if self.measured is not None and not self.ran:
            raise ValueError("measured: only what ran was measured, met ran: false")
        return self

    @cached_property
    def layout(self) -> Layout:
        """The published plan."""
        return build_layout(self.plan)

    def __hash__(self) -> int:
        return hash(self.name)  # every recipe has a name of its own

    @property
    def position(self) -> int:
        """Index of the record in the table, from 0."""
        return next(position for position, record in enumerate(_records()) if record["name"] == self.name)

    def dump_record(self) -> bytes:
        """Return the record of the table as canonical JSON: equal records give equal bytes."""
        return json.dumps(_records()[self.position], sort_keys=True).encode()

    def to_document(self, *, with_places: bool = False) -> Document:
        """Return the part of the record that is a scenario; ``with_places`` adds line and column of fields, slowly."""
        table = _placed() if with_places else Document(FILE, _records())
        record = table.data[self.position]
        data = {name: record[name] for name in _SCENARIO_KEYS if name in record}
        return Document(table.file, data, _select_places(table, self.position))


@lru_cache(maxsize=1)
def load_recipes() -> tuple[Recipe, ...]:
    """Return every published recipe, in the order of the table.

    Raises
    ------
    ScenarioError
        Where a record has faults; it lists all of them, with file, line and column.
    """
    return read_recipes(_records(), _placed)


def read_recipes(records: Data, read_placed: Callable[[], Document]) -> tuple[Recipe, ...]:
    """Return the recipes of a list of records; ``read_placed`` reads the document with the places of their fields."""
    result: list[Recipe] = []
    for record in records:
        recipe, faults = check_table(Recipe, Document(FILE, record))
        if recipe is None:
            raise ScenarioError(tuple(_list_faults(read_placed())) or tuple(faults))
        result.append(recipe)
    names = [recipe.name for recipe in result]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ScenarioError((Fault(FILE, 0, 0, "name", f"every recipe has a name of its own, met {duplicate} twice"),))
    return tuple(result)


def _list_faults(document: Document) -> list[Fault]:
    """Return all faults in the records of a document that has places."""
    faults: list[Fault] = []
    for position, record in enumerate(document.data):
        faults += check_table(Recipe, Document(document.file, record, _select_places(document, position)))[1]
    return faults


def _select_places(document: Document, position: int) -> dict[FieldPath, tuple[int, int]]:
    """Return the places of the fields of one record, by their paths inside it."""
    return {path[1:]: place for path, place in document.places.items() if path[:1] == (position,)}


def _read_content() -> bytes:
    return (find_root() / FILE).read_bytes()


@lru_cache(maxsize=1)
def _records() -> Data:
    """Return the records of the table, read as plain JSON: places, which are slow, are read only after a fault."""
    return parse_json(_read_content())


def _placed() -> Document:
    return parse_document(_read_content(), FILE)


def list_recipe_layouts(problem: Problem) -> tuple[tuple[str, Layout], ...]:
    """Return the legal layouts of all recipes for ``problem``, each once, with the name of its first recipe.

    Degrees and choices are those of the recipe, except: data ranks fill the devices, layers are divided anew where
    their number differs, and what the model or the batch does not allow becomes the nearest allowed choice. No plan is
    simulated.
    """
    names_by_layout: dict[Layout, str] = {}
    for recipe in load_recipes():
        layout = carry_over(problem, recipe.layout)
        if layout is not None and layout not in names_by_layout and not list_rule_violations(problem, layout):
            names_by_layout[layout] = recipe.name
    return tuple((name, layout) for layout, name in names_by_layout.items())


def carry_over(problem: Problem, layout: Layout) -> Layout | None:
    """Return a layout of another problem adapted to ``problem``; None where its degrees do not divide the devices.

    The result may still break rules of ``problem``.
    """
    devices = len(problem.cluster.free_devices)
    model_ranks = layout.model_ranks
    if devices % model_ranks:
        return None
    data = devices // model_ranks
    expert = gcd(layout.expert, _count_experts(problem), data)
    shards = layout.zero_shards
    rank_batch = problem.training.global_batch // data
    # uneven local batches suit the machine of the recipe: all ranks take the smallest
    microbatch = layout.microbatch if isinstance(layout.microbatch, int) else min(layout.microbatch)
    result = replace(
        layout,
        data=data,
        expert=expert,
        microbatch=gcd(rank_batch, microbatch)
        if rank_batch and problem.training.global_batch % data == 0
        else microbatch,
        zero_shards=shards if 1 < shards < data and data % shards == 0 and shards % expert == 0 else 0,
        placement=(),
        order=layout.order if set(layout.order) == set(AXES) else AXES,
    )
    return _with_attention(problem, _with_layers(problem, result))


def _with_layers(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with chunks, stages and recomputation that suit the layers of ``problem``."""
    layers = num_layers(problem.graph)
    if layout.pipeline * layout.chunks > layers:
        layout = replace(layout, chunks=1, schedule=_to_plain_schedule(layout.schedule))
    stages = layout.pipeline * layout.chunks
    if not isinstance(layout.stages, tuple) or len(layout.stages) != stages or sum(layout.stages) != layers:
        layout = replace(layout, stages="balanced" if layers % stages else "even")
    recompute = layout.recompute
    if isinstance(recompute, FirstLayers) and recompute.layers >= layers // stages:
        recompute = recompute.layer
    if isinstance(recompute, PerStage) and len(recompute.stages) != stages:
        recompute = Recompute.FULL
    if isinstance(recompute, SomeOperators):
        names = {operator.name for block in problem.graph.blocks if block.layer for operator in block.operators}
        known_operators = tuple(name for name in recompute.names if name.removesuffix(HALF) in names)
        recompute = SomeOperators(known_operators) if known_operators else Recompute.NONE
    return replace(layout, recompute=recompute)


def _to_plain_schedule(schedule: str) -> str:
    """Return the schedule if it has no chunks, else 1F1B."""
    rule = SCHEDULES.get(schedule)
    return schedule if rule is not None and rule.chunks[1] == 1 else "1f1b"


def _with_attention(problem: Problem, layout: Layout) -> Layout:
    """Return the layout with context-parallel attention that suits the kernels: ring attention needs a fused kernel."""
    kinds = {operator.kind for block in problem.graph.blocks for operator in block.operators}
    if layout.context > 1 and layout.attention is Attention.RING and OperatorKind.SOFTMAX in kinds:
        return replace(layout, attention=Attention.ALL_GATHER)
    return layout


def _count_experts(problem: Problem) -> int:
    """Return the number of experts of a layer; 1 for a dense model."""
    dims = (
        size
        for block in problem.graph.blocks
        for operator in block.operators
        for dim, size in operator.dims
        if dim == EXPERTS
    )
    return gcd(*dims) or 1
