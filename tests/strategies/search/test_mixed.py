"""Devices of two speeds behind links of two speeds: what a search gains that knows of them."""

from dataclasses import replace

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import Cluster, Node
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link, Switch
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.cost_model import SimulatedCost
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search import BestFirst, Space, search


def mixed_problem() -> Problem:
    """Return 8 layers on a fast node of two devices and a slow one, whose compute and links are a third as fast."""
    fast = Accelerator("fast", (("bf16", 3e12),), memory=1e9, memory_bandwidth=3e11)
    slow = replace(fast, name="slow", peak_flops=(("bf16", 1e12),), memory_bandwidth=1e11)
    outside, host = Link(5e-6, 1e9), Host("host", 1e10)
    nodes = ((Node(fast, host, 2, Switch(Link(1e-6, 3e10)), 1, outside), 1),)
    nodes += ((Node(slow, host, 2, Switch(Link(1e-6, 1e10)), 1, replace(outside, bandwidth=3e8)), 1),)
    spec = Transformer(8, 256, 4, 4, 1024, vocab=512)
    return Problem(build(spec, 64, "bf16"), Cluster("mixed", nodes), Training(8, 64))


def test_stages_by_speed_beat_the_best_plan_of_those_that_take_all_devices_to_be_equal() -> None:
    problem = mixed_problem()
    costs = SimulatedCost(problem)
    knowing = search(BestFirst(), problem, costs=costs)
    equal = search(BestFirst(), problem, Space(stages=("even", "balanced")), costs=costs)
    assert knowing.best is not None and equal.best is not None
    assert knowing.gap == equal.gap == 0.0
    assert knowing.best.evaluation.step_time < equal.best.evaluation.step_time
    layers = [sum("layers" in name for name in stage.blocks) for stage in knowing.best.plan.stages]
    positions = knowing.best.plan.positions
    of_rank = [
        sum(n for n, at in zip(layers, positions, strict=True) if at == q) for q in range(knowing.best.plan.pipeline)
    ]
    assert of_rank[0] > of_rank[-1]  # the first ranks are on the fast node
