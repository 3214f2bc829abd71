"""What ranks keep more than once without a flush: versions of their weights, and buffers of gradients."""

from strategies.lowering.memory import ONCE, Copies
from strategies.lowering.stage import StageCosts
from strategies.lowering.unflushed import updates
from strategies.plan import Plan


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
