"""Tensor parallelism over a grid: the bytes of the papers, shares of memory, and every way to the step time."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.scenario import layout_of
from simulator.collective_kinds import Collective
from simulator.engine import simulate, step_time
from simulator.models.bert import Bert
from simulator.models.experts import Experts
from simulator.models.t5 import T5
from simulator.models.vit import VisionTransformer
from simulator.operator_graph import OperatorGraph
from simulator.program import TaskKind
from strategies.bound import Bounds
from strategies.cost_model import SimulatedCosts
from strategies.grid import HIDDEN
from strategies.layout import Layout, complete, violations
from strategies.lowering import Granularity, StageCosts, lower
from strategies.lowering.operator import BlockLayout
from strategies.lowering.step import Step
from strategies.mesh import DATA, TENSOR, TENSOR_ROWS
from strategies.needs import Needs
from strategies.parallelism import Attention
from strategies.plan import Plan
from strategies.problem import Problem
from strategies.recomputation import Recompute
from strategies.schedule import SCHEDULES

from .problems import problem

SEQUENCE, HIDDEN_SIZE, HEADS, VOCAB, FP32 = 32, 64, 8, 128, 4  # of tests/strategies/problems.py
GRIDS = [(2, 2), (4, 4), (2, 4), (4, 2)]


def steps(small: Problem, layout: Layout, block: str, direction: str) -> list[Step]:
    """Return every collective of one pass of a block."""
    plan, costs = complete(small, layout), StageCosts(small)
    every: tuple[Step, ...] = getattr(costs.blocks.cost(plan, block, costs.machine(plan).rank(0)).steps, direction)
    return [step for step in every if step.collective is not None]


def received(moved: Iterable[Step], rows: int, columns: int) -> float:
    """Return the bytes that a rank receives, and in a reduce-scatter sends: all of a block row but its own part."""
    total = 0.0
    for step in moved:
        ways = {TENSOR: columns, TENSOR_ROWS: rows}[step.axis]
        total += step.size * (ways - 1) / ways * (2 if step.collective is Collective.ALL_REDUCE else 1)
    return total


def weights_and_products(moved: Iterable[Step]) -> list[Step]:
    """Return what table 1 of Optimus counts: matrices, without vectors and statistics."""
    left = ("bias", "norm_weight")
    return [step for step in moved if step.collective is not Collective.ALL_REDUCE and not step.tensor.endswith(left)]
