"""How the stages of a plan that cuts single operators are cut, in words."""

from collections.abc import Iterator

from meshwise.simulator.operator_graph import Operator
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.plan.recomputation import Recompute, find_stage_recompute
from meshwise.strategies.plan.sharding import OperatorSharding

MOST_NAMES = 4
"""Operators that are named where they are cut alike; of more, their number is said."""


def describe_stages(problem: Problem, plan: Plan) -> Iterator[str]:
    """Yield for every stage its blocks, the operators by how they are cut, and what is computed again.

    For example ``embedding to layers.5: batch over tensor (40 operators); embedding.lookup: vocab over tensor``.
    Operators that one rank has whole come last.
    """
    shardings, blocks = {item.operator: item for item in plan.shardings}, dict(problem.graph.occurrences)
    for number, stage in enumerate(plan.stages):
        if not stage.blocks:
            continue
        groups: dict[str, list[str]] = {}
        for name in stage.blocks:
            block = blocks[name]
            for operator in block.operators:
                sharding = shardings.get(f"{name}.{operator.name}") or shardings.get(f"{block.name}.{operator.name}")
                groups.setdefault(_describe_cut(operator, sharding), []).append(f"{name}.{operator.name}")
        ordered = sorted(groups.items(), key=lambda group: (not group[0], -len(group[1])))
        cuts = "; ".join(_describe_group(cut, names) for cut, names in ordered)
        recompute = find_stage_recompute(plan.recompute, number)
        again = "" if recompute is Recompute.NONE else f"; recompute {recompute}"
        first, last = stage.blocks[0], stage.blocks[-1]
        yield f"{first if first == last else f'{first} to {last}'}: {cuts}{again}"


def _describe_cut(operator: Operator, sharding: OperatorSharding | None) -> str:
    """Return the dims that are cut with their axes; empty for an operator that every rank has whole."""
    if sharding is None:
        return ""
    dims = dict(operator.dims)
    cuts = [f"{dim} over {' and '.join(axes)}" for dim, axes in sharding.cuts if dim in dims]
    return ", ".join(cuts) + (" (parameters kept in parts)" if sharding.kept else "")


def _describe_group(cut: str, names: list[str]) -> str:
    if len(names) > MOST_NAMES:
        return f"{cut or 'whole'} ({len(names)} operators)"
    return f"{', '.join(names)}: {cut or 'whole'}"
