"""The joint search on random small problems, each against the enumeration of its plans.

Run ``python -m tests.studies.joint_enumeration [--problems N] [--first SEED]`` for a line a problem and a summary. A
problem has one or two products, with or without a stem before them, of random sizes, on two slow devices. Enumerated
and simulated are all plans of one schedule: every mesh, microbatch, ZeRO stage, and sharding of every operator.
The search may be faster, by another schedule; a bound above a plan, and so a proof beside a faster one, is a
defect.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.operator_plan import list_operator_violations
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.operators.pass_table import compute_pass_table
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.algorithms.joint import Joint
from meshwise.strategies.search.joint.courses import BestPlans
from meshwise.strategies.search.joint.joint_search import JointSearch
from meshwise.strategies.search.joint.meshes import list_joint_meshes
from meshwise.strategies.search.joint.stages import assemble_exactly
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ..strategies.operators.tiny import SLOW

EQUAL = 1e-9
"""Fraction by which step times may differ and count as equal."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best plan of an enumeration, in seconds, and what the search says of the same problem."""

    seed: int
    num_plans: int
    least_time: float
    best_time: float
    lower_bound: float

    @property
    def verdict(self) -> str:
        """Return how the search did: a defect, or equal, faster or slower than the enumeration."""
        limit = self.least_time * (1 + EQUAL)
        if self.lower_bound > limit:
            return "bound above a plan"
        if self.best_time > limit:
            return "slower"
        return "faster" if self.best_time < self.least_time * (1 - EQUAL) else "equal"


def build_random_problem(random: Random) -> Problem:
    """Return one or two products, with an activation or none, for two slow devices on a random link."""
    hidden, wide = random.choice((4, 6, 8, 12, 16)), random.choice((4, 6, 8, 16, 24, 32))
    sequence, batch = random.choice((2, 4)), random.choice((2, 4, 6))
    precision = random.choice(("fp32", "bf16"))
    blocks = [_build_stem(precision, sequence, hidden)] if random.random() < 0.5 else []
    for name, rows, columns in (("first", hidden, wide), ("next", wide, hidden))[: random.choice((1, 2))]:
        blocks.append(_build_product(precision, sequence, name, rows, columns, active=random.random() < 0.7))
    accelerator = replace(
        SLOW, launch=random.choice((0.0, 0.125, 0.5)), memory_bandwidth=random.choice((256.0, 4096.0))
    )
    link = Link(random.choice((0.0, 0.0625, 0.25)), 2.0 ** random.randint(3, 12))
    cluster = build_homogeneous("two devices", accelerator, Host("host", 1e12), 1, 2, link, link, 2)
    training = Training(batch, sequence, precision, random.choice(("adamw", "sgd")))
    return Problem(OperatorGraph("products", tuple(blocks), sequence), cluster, training)


def _build_stem(precision: str, sequence: int, hidden: int) -> Block:
    """Return what makes the tensor that the first product reads."""
    builder = BlockBuilder(precision, {"sequence": sequence, "hidden": hidden})
    x, out = (builder.add_tensor(name, "batch sequence hidden") for name in ("x", "out"))
    builder.add_elementwise("work", "batch sequence", (x,), (out,))
    return builder.build_block("stem", (x,), (out,), layer=True)


def _build_product(precision: str, sequence: int, name: str, rows: int, columns: int, *, active: bool) -> Block:
    """Return a product, and an activation where ``active``."""
    builder = BlockBuilder(precision, {"sequence": sequence, f"in_{name}": rows, f"out_{name}": columns})
    x, y = (
        builder.add_tensor(tensor, f"batch sequence {tensor_dim}_{name}")
        for tensor, tensor_dim in (("x", "in"), ("y", "out"))
    )
    linear(builder, f"product_{name}", x, (y,), f"out_{name}", f"in_{name}")
    if not active:
        return builder.build_block(name, (x,), (y,), layer=True)
    z = builder.add_tensor("z", f"batch sequence out_{name}")
    builder.add_elementwise("activation", f"batch sequence out_{name}", (y,), (z,), saved=(y,))
    return builder.build_block(name, (x,), (z,), layer=True)


def list_step_times(problem: Problem) -> Iterator[float]:
    """Yield the seconds of every plan: all meshes, shardings of operators, and ZeRO stages, on the usual schedule."""
    costs = SimulatedCost(problem)
    joint = JointSearch(problem, Space(), SimulatedCost(problem), partial(assemble_exactly, spread=9.0), BestPlans())
    for mesh in list_joint_meshes(problem, Space()):
        base = joint.build_base_plan(mesh)
        choices = compute_pass_table(Setting(problem, base, StageCosts(problem))).choices
        for shardings in product(*choices):
            for zero in (0,) if mesh.data == 1 else (0, 1, 2, 3):
                plan = replace(base, zero=zero, shardings=shardings)
                if not any(list_operator_violations(problem, plan)):
                    yield costs.evaluate(plan).step_time


def compare(seed: int) -> Comparison:
    """Return the comparison on the problem of a seed."""
    problem = build_random_problem(Random(seed))
    step_times = list(list_step_times(problem))
    result = search(Joint(), problem)
    assert result.best is not None and result.lower_bound is not None
    best_time = result.best.evaluation.step_time
    return Comparison(seed, len(step_times), min(step_times), best_time, result.lower_bound)


def main(arguments: Sequence[str]) -> int:
    """Run the study and return the number of defects, at most 1."""
    parser = ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--problems", type=int, default=300, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    num_plans, num_proven = 0, 0
    for seed in range(options.first, options.first + options.problems):
        comparison = compare(seed)
        counts[comparison.verdict] += 1
        num_plans += comparison.num_plans
        num_proven += comparison.best_time <= comparison.lower_bound * (1 + EQUAL)
        print(
            f"{seed}: {comparison.num_plans} plans, {comparison.verdict}, best {comparison.best_time:.6g} s, "
            f"enumerated {comparison.least_time:.6g} s, bound {comparison.lower_bound:.6g} s",
            flush=True,
        )
    print(f"{sum(counts.values())} problems, {num_plans} plans, {num_proven} proven: {dict(counts.most_common())}")
    return int(counts["bound above a plan"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
