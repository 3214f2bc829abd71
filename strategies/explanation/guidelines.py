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

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwise.simulator.program import TaskKind
from meshwise.simulator.timeline import Timeline
from meshwise.simulator.units import format_bandwidth, format_size, format_time
from meshwise.strategies.explanation.alternatives import Alternative
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem
from meshwise.strategies.tables.table import without_tables

SC21 = "Narayanan et al., SC 2021"
ZERO = "Rajbhandari et al., ZeRO, SC 2020"
KORTHIKANTI = "Korthikanti et al., MLSys 2023"
MINDSPORE = "MindSpore documentation, Distributed parallelism strategies"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A guideline of the field about a kind of parallelism, and whether a plan follows it.

    ``numbers`` are those of the problem and plan, in words.
    """

    about: str
    guideline: str
    numbers: str
    follows: bool
    source: str


def recommendations(
    problem: Problem, plan: Plan, timeline: Timeline, alternatives: Mapping[str, Alternative]
) -> tuple[Recommendation, ...]:
    """Return the guidelines with the numbers of a problem, and whether a plan follows them.

    ``timeline`` is the plan's simulated step; ``alternatives`` are by topic the fastest plan that decides it otherwise.
    """
    # tables that data ranks share are no part of a replica
    names = tuple(name for name, _ in plan.embeddings.tables)
    problem = replace(problem, graph=without_tables(problem.graph, names))
    return (
        _recommend_data(problem, plan),
        _recommend_optimizer(problem, plan, alternatives),
        _recommend_operator(problem, plan),
        _recommend_pipeline(problem, plan, timeline, alternatives),
        _recommend_microbatch(plan, alternatives),
        _recommend_overlap(timeline),
        _recommend_recompute(problem, plan, timeline, alternatives),
    )


def count_state_bytes(problem: Problem) -> float:
    """Return the bytes of parameters, gradients and optimizer states of a whole replica (ZeRO, section 3.1)."""
    training = problem.training
    parameter_bytes = training.parameter_bytes + training.gradient_bytes + training.optimizer_bytes
    return float(problem.graph.num_parameters * parameter_bytes)


def count_sharded_bytes(problem: Problem, zero: int, ranks: int) -> float:
    """Return the bytes of a replica's states on each of ``ranks`` data ranks, shared by a ZeRO stage alone.

    Stage 1 divides optimizer states, stage 2 gradients too, stage 3 parameters too (ZeRO, section 5).
    """
    training = problem.training
    parts = (training.optimizer_bytes, training.gradient_bytes, training.parameter_bytes)
    parameter_bytes = sum(size / ranks if zero >= stage else size for stage, size in enumerate(parts, start=1))
    return float(problem.graph.num_parameters * parameter_bytes)


def _recommend_data(problem: Problem, plan: Plan) -> Recommendation:
    usable_bytes, replica_bytes = problem.usable_memory(problem.cluster.accelerator), count_state_bytes(problem)
    is_data_alone = plan.mesh.num_ranks == plan.data and plan.expert == 1
    rank_bytes = count_sharded_bytes(problem, plan.zero, plan.shards) if is_data_alone else replica_bytes
    fits_device = rank_bytes <= usable_bytes
    verb = "are at most" if fits_device else "exceed"
    own_text = f" ({format_size(rank_bytes)} of them on a data rank, by ZeRO-{plan.zero})"
    share_text = own_text if rank_bytes < replica_bytes else ""
    return Recommendation(
        "data",
        "data parallelism alone where a replica fits in one device, whole or as ZeRO shares it",
        f"the states of a replica, {format_size(replica_bytes)}{share_text}, {verb} the {format_size(usable_bytes)} "
        f"usable of a device; the plan has {plan.data} replicas over {plan.mesh.num_ranks} devices",
        is_data_alone == fits_device,
        f"{ZERO}, section 3; {MINDSPORE}",
    )


def _recommend_optimizer(problem: Problem, plan: Plan, alternatives: Mapping[str, Alternative]) -> Recommendation:
    training, model_ranks = problem.training, plan.operator_ranks * plan.pipeline
    rank_bytes = problem.graph.num_parameters * training.optimizer_bytes / model_ranks
    saved_bytes = rank_bytes * (1 - 1 / plan.shards)
    words = (
        f"a model-parallel rank has {format_size(rank_bytes)} of optimizer states; shared over {plan.shards} "
        f"data ranks {format_size(saved_bytes)} of it go"
    )
    return Recommendation(
        "optimizer",
        "share optimizer states over data ranks: it communicates no more than data parallelism",
        words + _describe_alternative(alternatives, "ZeRO"),
        plan.zero >= 1 or plan.shards == 1,
        f"{ZERO}, section 5.1 and 7.1",
    )


def _recommend_operator(problem: Problem, plan: Plan) -> Recommendation:
    cluster = problem.cluster
    node = cluster.first_node.devices
    node_bandwidth = cluster.first_node.network.link.bandwidth
    nic_bandwidth = cluster.first_node.nic.bandwidth * cluster.first_node.nics / node
    words = f"a node has {node} devices; a device sends {format_bandwidth(node_bandwidth)} inside it"
    words += f" and {format_bandwidth(nic_bandwidth)} out of it" if cluster.num_nodes > 1 else ""
    return Recommendation(
        "operator",
        "cut operators (tensor parallelism) over the devices of a node at most",
        f"{words}; the plan cuts them over {plan.operator_ranks}",
        plan.operator_ranks <= node,
        f"{SC21}, takeaway 1",
    )


def _recommend_pipeline(
    problem: Problem, plan: Plan, timeline: Timeline, alternatives: Mapping[str, Alternative]
) -> Recommendation:
    usable_bytes, node = problem.usable_memory(problem.cluster.accelerator), problem.cluster.first_node.devices
    ranks = max(plan.mesh.num_ranks // node, 1)  # data ranks, if operators were cut over a node, without stages
    node_bytes = count_sharded_bytes(problem, plan.zero, ranks)
    is_needed = node_bytes > usable_bytes * node
    verb = "exceed" if is_needed else "are at most"
    share_text = f" as ZeRO-{plan.zero} shares them over {ranks} nodes" if plan.zero and ranks > 1 else ""
    states_text = f"the states of a replica{share_text}"
    return Recommendation(
        "pipeline",
        "pipeline parallelism once operators cut over a whole node do not make the model fit, and no more than that",
        f"{states_text}, {format_size(node_bytes)}, {verb} the {format_size(usable_bytes * node)} usable of a node; "
        f"{_describe_bubble(plan, timeline)}" + _describe_alternative(alternatives, "mesh degrees"),
        is_needed == (plan.pipeline > 1),
        f"{SC21}, takeaways 1 and 2, section 2.2.2",
    )


def _describe_bubble(plan: Plan, timeline: Timeline) -> str:
    """Return the idle time of stages in words: by the formula for the bubble, and by the simulation."""
    if plan.pipeline == 1:
        return "one stage has no bubble"
    bubble = (plan.pipeline - 1) / (plan.chunks * plan.num_microbatches)
    return (
        f"{plan.pipeline} stages idle (p - 1) / (v m) = {plan.pipeline - 1} / ({plan.chunks} * "
        f"{plan.num_microbatches}) = {bubble:.1%} of the time of their passes, and {timeline.bubble:.1%} of the step "
        "in the simulation"
    )


def _recommend_microbatch(plan: Plan, alternatives: Mapping[str, Alternative]) -> Recommendation:
    return Recommendation(
        "microbatch",
        "the size of a microbatch is a trade of kernel efficiency against bubble and memory: try it out",
        f"{plan.num_microbatches} microbatches of {plan.microbatch}"
        + _describe_alternative(alternatives, "microbatch"),
        True,
        f"{SC21}, takeaway 3",
    )


def _recommend_overlap(timeline: Timeline) -> Recommendation:
    kind = TaskKind.DATA_COMMUNICATION
    busy_time = _find_busy_time(timeline, kind)
    exposed_time = timeline.exposed_communication().get(kind, 0.0)
    return Recommendation(
        "data",
        "sums of gradients, and gathers of parameters, run beneath passes, most of them",
        f"a rank communicates along the data axis for up to {format_time(busy_time)} of a step; on average "
        f"{format_time(exposed_time)} are not hidden, {exposed_time / timeline.step_time:.1%} of the step",
        exposed_time <= 0.5 * busy_time,  # "most of them" is taken as half
        f"{MINDSPORE}; {ZERO}, section 7",
    )


def _recommend_recompute(
    problem: Problem, plan: Plan, timeline: Timeline, alternatives: Mapping[str, Alternative]
) -> Recommendation:
    fullest = max(timeline.memory, key=lambda profile: profile.peak / profile.capacity)
    busy_time = _find_busy_time(timeline, TaskKind.RECOMPUTE)
    return Recommendation(
        "recompute",
        "recompute no more than memory asks for: selective recomputation costs little, full about a forward pass",
        f"recompute ({plan.recompute}) takes {format_time(busy_time)} of a step; "
        f"the fullest device holds {format_size(fullest.peak)} of {format_size(fullest.capacity)} usable"
        + _describe_alternative(alternatives, "recompute"),
        str(plan.recompute) != "full" or "recompute" not in alternatives or alternatives["recompute"].margin >= 0,
        f"{KORTHIKANTI}, section 5",
    )


def _find_busy_time(timeline: Timeline, kind: TaskKind) -> float:
    """Return the most seconds of a step that any rank spends on a kind of work."""
    classes = range(len(timeline.rank_classes))
    return max((timeline.busy_time(class_index, [kind]) for class_index in classes), default=0.0) / timeline.steps


def _describe_alternative(alternatives: Mapping[str, Alternative], decision: str) -> str:
    """Return the fastest plan that decides a topic otherwise, and its margin, in words; empty where there is none."""
    if decision not in alternatives:
        return ""
    alternative = alternatives[decision]
    return f"; decided otherwise, {alternative.margin:+.2%}: {alternative.trial.plan.describe()}"
