"""The bytes on links of collectives that are no tasks of their own."""

from collections import Counter

from strategies.lowering.contention import Passes
from strategies.lowering.cuts import Cuts
from strategies.lowering.machine import INSIDE, Rank
from strategies.lowering.pieces import Granularity
from strategies.lowering.stage import Run
from strategies.lowering.variant import BACKWARD_PASS, FORWARD_PASS, LAST_BACKWARD, kind_of, variant_of
from strategies.plan import Plan


def traffic(cuts: Cuts, plan: Plan) -> tuple[float, ...]:
    """Return the bytes on every link class of collectives inside parts of ranks, in a step of ``plan``."""
    machine = cuts.machine
    total = [0.0] * len(machine.table.first_link)
    if cuts.granularity is Granularity.OPERATOR:
        return tuple(total)
    hidden: dict[tuple[object, ...], Counter[Run]] = {}
    for kind in (kind for kind in INSIDE if kind in machine.table.tables):
        for group, members in enumerate(machine.table.tables[kind].classes):
            position, rank = machine.table.positions[members[0]], machine.rank(members[0])
            if cuts.passes[position] is Passes.APART:
                continue
            key = (position, rank.key)
            if key not in hidden:
                hidden[key] = _hidden(cuts, plan, position, rank)
            communicator = machine.communicator(kind, group)
            for (axis, collective, size), count in hidden[key].items():
                for leg in communicator.legs(collective, size) if axis == kind else ():
                    for link, moved in leg.flow.usage:
                        total[link] += moved * count
    return tuple(total)


def _hidden(cuts: Cuts, plan: Plan, position: int, rank: Rank) -> Counter[Run]:
    """Return how often a step runs each collective inside parts of a rank."""
    found = Counter[Run]()
    for stage in plan.stages_at(position):
        collectives = cuts.costs.stage(plan, stage, rank).collectives
        for variant, count in passes_of(plan, stage):
            if cuts.cut(stage, variant).every:
                continue
            for run, times in collectives[kind_of(variant)].items():
                found[run] += times * count
            for step in cuts.before(stage, variant, rank):
                if step.collective is not None:
                    found[step.axis, step.collective, step.size] += count
    return found


def passes_of(plan: Plan, stage: int) -> tuple[tuple[int, int], ...]:
    """Return how often a step runs each variant of a stage's passes."""
    every = plan.num_microbatches
    if not plan.splits_backward:
        return (FORWARD_PASS, every), (BACKWARD_PASS, every - 1), (LAST_BACKWARD, 1)
    order = plan.schedule.orders[plan.positions[stage]]
    last = plan.schedule.last_gradient(stage)
    return tuple(Counter(variant_of(a, a == last) for a in order if a.stage == stage).items())
