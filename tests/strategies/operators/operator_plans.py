"""Random plans that cut every operator in a way of its own."""

from random import Random

from meshwise.strategies.operators.choices import list_choices
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.plan.mesh import DATA, PIPELINE, TENSOR, TENSOR_DEPTH, TENSOR_ROWS, Axis, Mesh
from meshwise.strategies.plan.partition import partition_layers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.sharding import OperatorSharding

from ..problems import problem

DEGREES: tuple[dict[str, int], ...] = (
    {TENSOR: 2},
    {TENSOR: 6},
    {TENSOR_ROWS: 2, TENSOR: 2},
    {TENSOR_ROWS: 3, TENSOR: 2},
    {TENSOR_DEPTH: 2, TENSOR: 3},
    {TENSOR_DEPTH: 2, TENSOR_ROWS: 2, TENSOR: 2},
)


def random_plan(random: Random) -> tuple[Problem, Plan]:
    """Return a small problem and a plan of several stages and data ranks, some layers cut unlike others."""
    degrees, pipeline, data = random.choice(DEGREES), random.choice((1, 1, 2)), random.choice((1, 1, 2))
    ranks = pipeline * data
    for degree in degrees.values():
        ranks *= degree
    nodes = random.choice([n for n in (1, 2, 4) if ranks % n == 0])
    sizes = {"hidden": 72, "heads": 12, "kv_heads": 12, "ffn": 144, "vocab": 144}
    bandwidth, devices = random.choice((1e9, 1e11)), ranks // nodes
    small = problem(nodes=nodes, devices=devices, nics=devices, layers=3, batch=12 * data, bandwidth=bandwidth, **sizes)  # type: ignore[arg-type]
    microbatch = random.choice((6, 12))
    mesh = Mesh(tuple(Axis(*each) for each in ((PIPELINE, pipeline), (DATA, data), *degrees.items())))
    everything = Problem(small.graph, small.cluster.with_size(1, ranks // pipeline // data), small.training)
    plan = build_operator_plan(everything, degrees, microbatch, random_shardings(random, small, degrees, microbatch))
    stages = partition_layers(small.graph, pipeline, "balanced")
    changes = {"mesh": mesh, "stages": stages, "num_microbatches": 12 // microbatch}
    return small, Plan(**{name: getattr(plan, name) for name in Plan.__dataclass_fields__} | changes)


def random_shardings(
    random: Random, small: Problem, degrees: dict[str, int], microbatch: int
) -> tuple[OperatorSharding, ...]:
    """Return a legal sharding for every operator, and others for some operators of single layers."""
    result = []
    for block in small.graph.blocks:
        for operator in block.operators:
            for name in (block.name, *(each for each in block.names() if random.random() < 0.2 and block.repeat > 1)):
                result.append(random.choice(list_choices(name, block, operator, degrees, microbatch)))
    return tuple(result)
