"""What ranks keep more than once without a flush: versions of their weights, and buffers of gradients."""

from typing import NamedTuple

from strategies.lowering.data import overlaps
from strategies.lowering.memory import ONCE, Copies
from strategies.lowering.stage import StageCosts
from strategies.plan import Plan


class Updates(NamedTuple):
    """After how many backwards of a stage its weights are updated, and at which positions as late as that is due."""

    every: int
    late: tuple[bool, ...]


def updates(costs: StageCosts, plan: Plan) -> Updates:
    """Return when the stages of a plan update their weights."""
    beneath = overlaps(costs.problem.cluster, plan) or any(plan.offload.optimizer)
    tied = {max(pair) for *pair, _ in costs.tied(plan)}  # the other one makes its gradients after that
    once = plan.asynchronous and not plan.rule.updates_every_microbatch
    late = tuple(once and (beneath or position in tied) for position in range(plan.pipeline))
    return Updates(plan.num_microbatches // plan.updates, late)


def copies(costs: StageCosts, plan: Plan) -> tuple[Copies, ...]:
    """Return for every pipeline position how often weights and gradients are kept.

    A version of the weights is what forward and backward read; the optimizer's states and main copy are kept once:
    weight stashing keeps one version for every microbatch in flight (Narayanan et al., "PipeDream", SOSP 2019,
    section 3.3), 2BW keeps two (Narayanan et al., ICML 2021, section 3.1).
    """
    if not plan.asynchronous:
        return (ONCE,) * plan.pipeline
    late = updates(costs, plan).late
    return tuple(Copies(plan.weight_versions(position), 1 + waits) for position, waits in enumerate(late))
