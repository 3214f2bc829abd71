"""The plan that cuts the operators of a captured module, chosen by one rank for all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.cut_modules.captures import CutError
from meshwise.executor.modules.layout import list_operator_axes
from meshwise.executor.modules.sharding import find_rank
from meshwise.strategies.plan.mesh import Axis, Mesh
from meshwise.strategies.plan.partition import Stage
from meshwise.strategies.plan.plan import Plan

PlanChoice = Callable[[CapturedModule], Plan]
"""Returns the plan that cuts the operators of a captured module."""


def agree_on_plan(choose_plan: PlanChoice, captured: CapturedModule) -> Plan:
    """Return the plan that rank 0 chooses, on all ranks; its error is that of all."""
    answer: list[Any] = [None]
    if find_rank() == 0:
        try:
            answer[0] = choose_plan(captured).to_json()
        except ValueError as error:
            answer[0] = str(error)
    dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], str):
        raise CutError(answer[0])
    return Plan.from_json(answer[0])


def keep_operator_axes(plan: Plan) -> Plan:
    """Return a plan of one stage and one data rank: what it says of operators alone."""
    axes = tuple(Axis(name, size) for name, size in list_operator_axes(plan).items())
    stage = Stage(tuple(block for stage in plan.stages for block in stage.blocks))
    return replace(plan, mesh=Mesh(axes), stages=(stage,), zero=0)
