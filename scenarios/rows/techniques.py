"""What a plan uses, as tags: by these an error can be traced to a part of the simulator."""

from collections.abc import Iterator

from scenarios.scenario import Scenario
from strategies.plan import Plan
from strategies.recomputation import Recompute


def techniques(scenario: Scenario) -> tuple[str, ...]:
    """Return the techniques of a scenario's plan; ``plain`` where there is none."""
    return tuple(_tags(scenario, scenario.chosen())) or ("plain",)


def _tags(scenario: Scenario, plan: Plan) -> Iterator[str]:
    training, graph = scenario.problem.training, scenario.problem.graph
    degrees = (("dp", plan.data), ("tp", plan.tensor), ("pp", plan.pipeline), ("cp", plan.context), ("ep", plan.expert))
    yield from (name for name, degree in degrees if degree > 1)
    if plan.chunks > 1:
        yield "vpp"
    if plan.sequence_parallel:
        yield "sp"
    if plan.overlap_tensor:
        yield "tp overlap"
    if plan.zero and plan.data * plan.context > 1:
        yield f"zero{plan.zero}"
    if plan.replica > 1:
        yield "hsdp"
    if plan.recompute is not Recompute.NONE:
        yield "recompute"
    if plan.offload:
        yield "offload"
    if training.precision == "fp8":
        yield "fp8"
    if any(dim == "experts" for block in graph.blocks for op in block.operators for dim, _ in op.dims):
        yield "moe"
