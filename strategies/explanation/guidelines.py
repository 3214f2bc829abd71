"""The field's guidelines on when to use which kind of parallelism, with the numbers of a problem.

References
----------
.. [1] Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
   section 3: takeaways 1 to 3.
.. [2] Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, sections 3
   and 5.
.. [3] Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023, sections 4, 5.
.. [4] MindSpore documentation, "Distributed parallelism strategies": which of data, operator, optimizer and pipeline
   parallelism to choose.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwise.simulator.program import TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_bandwidth, format_size, format_time
from meshwise.strategies.explanation.alternatives import Alternative
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem

SC21 = "Narayanan et al., SC 2021"
ZERO = "Rajbhandari et al., ZeRO, SC 2020"
KORTHIKANTI = "Korthikanti et al., MLSys 2023"
MINDSPORE = "MindSpore documentation, Distributed parallelism strategies"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A guideline with the numbers of a problem.

    Parameters
    ----------
    about
        The kind of parallelism.
    guideline
        The guideline of the field.
    numbers
        The numbers of this problem and plan, in words.
    follows
        Whether the plan follows the guideline.
    """

    about: str
    guideline: str
    numbers: str
    follows: bool
    source: str


def recommendations(
    problem: Problem, plan: Plan, timeline: Timeline, others: Mapping[str, Alternative]
) -> tuple[Recommendation, ...]:
    """Return the guidelines with the numbers of a problem, and whether a plan follows them.

    Parameters
    ----------
    timeline
        The plan's simulated step.
    alternatives
        By topic, the fastest plan that decides it otherwise.
    """
    return tuple(_recommendations(problem, plan, timeline, others))


def _recommendations(
    problem: Problem, plan: Plan, timeline: Timeline, others: Mapping[str, Alternative]
) -> Iterator[Recommendation]:
    yield _data(problem, plan)
    yield _optimizer(problem, plan, others)
    yield _operator(problem, plan)
    yield _pipeline(problem, plan, timeline, others)
    yield _microbatch(plan, others)
    yield _hidden(plan, timeline)
    yield _recompute(problem, plan, timeline, others)


def state_bytes(problem: Problem) -> float:
    """Return the bytes of parameters, gradients and optimizer states of a whole replica (ZeRO, section 3.1)."""
    training = problem.training
    each = training.parameter_bytes + training.gradient_bytes + training.optimizer_bytes
    return float(problem.graph.num_parameters * each)


def sharded_bytes(problem: Problem, zero: int, ranks: int) -> float:
    """Return the bytes of a replica's states on each of ``ranks`` data ranks, shared by a ZeRO stage alone.

    Stage 1 divides optimizer states, stage 2 gradients too, stage 3 parameters too (ZeRO, section 5).
    """
    training = problem.training
    parts = (training.optimizer_bytes, training.gradient_bytes, training.parameter_bytes)
    each = sum(size / ranks if zero >= stage else size for stage, size in enumerate(parts, start=1))
    return float(problem.graph.num_parameters * each)


def _data(problem: Problem, plan: Plan) -> Recommendation:
    has, states = problem.usable(problem.cluster.accelerator), state_bytes(problem)
    alone = plan.mesh.num_ranks == plan.data and plan.expert == 1
    share = sharded_bytes(problem, plan.zero, plan.shards) if alone else states
    fitting = share <= has
    verb = "are at most" if fitting else "exceed"
    shared = f" ({format_size(share)} of them on a data rank, by ZeRO-{plan.zero})" if share < states else ""
    return Recommendation(
        "data",
        "data parallelism alone where a replica fits in one device, whole or as ZeRO shares it",
        f"the states of a replica, {format_size(states)}{shared}, {verb} the {format_size(has)} usable of a device; "
        f"the plan has {plan.data} replicas over {plan.mesh.num_ranks} devices",
        alone == fitting,
        f"{ZERO}, section 3; {MINDSPORE}",
    )


def _optimizer(problem: Problem, plan: Plan, others: Mapping[str, Alternative]) -> Recommendation:
    training, model = problem.training, plan.operator_ranks * plan.pipeline
    share = problem.graph.num_parameters * training.optimizer_bytes / model
    saved = share * (1 - 1 / plan.shards)
    words = (
        f"a model-parallel rank has {format_size(share)} of optimizer states; shared over {plan.shards} "
        f"data ranks {format_size(saved)} of it go"
    )
    return Recommendation(
        "optimizer",
        "share optimizer states over data ranks: it communicates no more than data parallelism",
        words + _otherwise(others, "ZeRO"),
        plan.zero >= 1 or plan.shards == 1,
        f"{ZERO}, section 5.1 and 7.1",
    )


def _operator(problem: Problem, plan: Plan) -> Recommendation:
    cluster = problem.cluster
    node = cluster.first.devices
    inside = cluster.first.network.link.bandwidth
    outside = cluster.first.nic.bandwidth * cluster.first.nics / node
    words = f"a node has {node} devices; a device sends {format_bandwidth(inside)} inside it"
    words += f" and {format_bandwidth(outside)} out of it" if cluster.num_nodes > 1 else ""
    return Recommendation(
        "operator",
        "cut operators (tensor parallelism) over the devices of a node at most",
        f"{words}; the plan cuts them over {plan.operator_ranks}",
        plan.operator_ranks <= node,
        f"{SC21}, takeaway 1",
    )


def _pipeline(problem: Problem, plan: Plan, timeline: Timeline, others: Mapping[str, Alternative]) -> Recommendation:
    has, node = problem.usable(problem.cluster.accelerator), problem.cluster.first.devices
    ranks = max(plan.mesh.num_ranks // node, 1)  # data ranks, if operators were cut over a node, without stages
    states = sharded_bytes(problem, plan.zero, ranks)
    needed = states > has * node
    verb = "exceed" if needed else "are at most"
    shared = f" as ZeRO-{plan.zero} shares them over {ranks} nodes" if plan.zero and ranks > 1 else ""
    what = f"the states of a replica{shared}"
    return Recommendation(
        "pipeline",
        "pipeline parallelism once operators cut over a whole node do not make the model fit, and no more than that",
        f"{what}, {format_size(states)}, {verb} the {format_size(has * node)} usable of a node; "
        f"{_bubble_in_words(plan, timeline)}" + _otherwise(others, "mesh degrees"),
        needed == (plan.pipeline > 1),
        f"{SC21}, takeaways 1 and 2, section 2.2.2",
    )


def _bubble_in_words(plan: Plan, timeline: Timeline) -> str:
    """Return the idle time of stages in words: by the formula for the bubble, and by the simulation."""
    if plan.pipeline == 1:
        return "one stage has no bubble"
    bubble = (plan.pipeline - 1) / (plan.chunks * plan.num_microbatches)
    return (
        f"{plan.pipeline} stages idle (p - 1) / (v m) = {plan.pipeline - 1} / ({plan.chunks} * "
        f"{plan.num_microbatches}) = {bubble:.1%} of the time of their passes, and {timeline.bubble:.1%} of the step "
        "in the simulation"
    )


def _microbatch(plan: Plan, others: Mapping[str, Alternative]) -> Recommendation:
    return Recommendation(
        "microbatch",
        "the size of a microbatch is a trade of kernel efficiency against bubble and memory: try it out",
        f"{plan.num_microbatches} microbatches of {plan.microbatch}" + _otherwise(others, "microbatch"),
        True,
        f"{SC21}, takeaway 3",
    )


def _hidden(plan: Plan, timeline: Timeline) -> Recommendation:
    kind = TaskKind.DATA_COMMUNICATION
    classes = range(len(timeline.rank_classes))
    whole = max((timeline.busy(each, [kind]) for each in classes), default=0.0) / timeline.steps
    exposed = timeline.exposed_communication().get(kind, 0.0)
    return Recommendation(
        "data",
        "sums of gradients, and gathers of parameters, run beneath passes, most of them",
        f"a rank communicates along the data axis for up to {format_time(whole)} of a step; on average "
        f"{format_time(exposed)} are not hidden, {exposed / timeline.step_time:.1%} of the step",
        exposed <= 0.5 * whole,  # "most of them" is taken as half
        f"{MINDSPORE}; {ZERO}, section 7",
    )


def _recompute(problem: Problem, plan: Plan, timeline: Timeline, others: Mapping[str, Alternative]) -> Recommendation:
    has = problem.usable(problem.cluster.accelerator)
    again = [TaskKind.RECOMPUTE]
    spent = max((timeline.busy(each, again) for each in range(len(timeline.rank_classes))), default=0.0)
    return Recommendation(
        "recompute",
        "recompute no more than memory asks for: selective recomputation costs little, full about a forward pass",
        f"recompute ({plan.recompute}) takes {format_time(spent / timeline.steps)} of a step; the fullest device holds "
        f"{format_size(timeline.peak_memory)} of {format_size(has)} usable" + _otherwise(others, "recompute"),
        str(plan.recompute) != "full" or "recompute" not in others or others["recompute"].margin >= 0,
        f"{KORTHIKANTI}, section 5",
    )


def _otherwise(others: Mapping[str, Alternative], decision: str) -> str:
    """Return the fastest plan that decides a topic otherwise, and its margin, in words; empty where there is none."""
    if decision not in others:
        return ""
    other = others[decision]
    return f"; decided otherwise, {other.margin:+.2%}: {other.trial.plan.describe()}"
