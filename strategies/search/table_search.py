"""Placements of embedding tables beside data-parallel layers, each judged by simulation."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import OperatorKind
from meshwise.simulator.units import to_seconds
from meshwise.strategies.evaluation import CostModel, Evaluation
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import EXPERT, TABLE_NODE
from meshwise.strategies.plan.offloading import FROM_HOST, TO_HOST
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, count_node_ranks
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.search.choices import allows_value
from meshwise.strategies.search.proposals import NO_CERTIFICATE, Certificate
from meshwise.strategies.search.space import Space
from meshwise.strategies.tables.embeddings import NO_EMBEDDINGS, Embeddings, TableCut, TablePlacement, parse_embeddings
from meshwise.strategies.tables.loads import TableSharing
from meshwise.strategies.tables.placement import (
    PlacedTables,
    PlacementProblem,
    Rates,
    has_even_columns,
    place_greedily,
    place_largest_on_hosts,
    place_tables,
)
from meshwise.strategies.tables.table import list_tables

PROBE_BYTES = 2.0**26
"""Messages of these bytes and of twice as many tell the rate of a collective."""

MAX_HALVINGS = 6
"""How often the microbatch is halved, at most, until a placement fits."""

HOST = parse_embeddings("host")
"""All rows on hosts: where this is illegal, no ranks may share tables."""

SPARING = 0.95
"""Part of the room for tables that a second placement by the program takes, and simple ones take."""

SUBJECT = "slowest device's tables"
"""What a certificate of these searches is about."""


def has_bags(problem: Problem) -> bool:
    """Return whether a model has tables whose rows are pooled sample by sample, as recommenders have."""
    return any(table.is_pooled for table in list_tables(problem.graph))


def propose_tables(
    problem: Problem, space: Space, costs: CostModel, *, gap: float, max_nodes: int
) -> Generator[Plan | Certificate, Evaluation, bool]:
    """Yield placements of tables beside data-parallel layers, with microbatches of fewer samples until one fits.

    For every level of shared states these are each cut for all tables, the greedy placement, and that of the program;
    each also with steps that overlap. They prove nothing of simulated times. Return whether one of them fits.
    """
    stage_costs, has_start = StageCosts(problem), False
    for layout in space.starts:  # the scenario's own plan
        plan = _complete(problem, space, layout) if layout.embeddings else None
        if plan is not None:
            yield NO_CERTIFICATE
            has_start |= (yield plan).fits
    for layouts in _list_layouts(problem, space):
        has_fit = False
        for layout in layouts:
            costs.check_time()
            for embeddings, certificate in list_placements(stage_costs, costs, layout, gap, max_nodes):
                plan = _complete(problem, space, replace(layout, embeddings=embeddings))
                if plan is not None:
                    yield certificate
                    has_fit |= (yield plan).fits
        if has_fit:
            return True
    return has_start


def _list_layouts(problem: Problem, space: Space) -> Iterator[list[Layout]]:
    """Yield the data-parallel layouts of one size of microbatches, from the largest on."""
    devices, batch = len(problem.cluster.free_devices), problem.training.global_batch
    whole = {"tensor": 1, "pipeline": 1, "context": 1, "tensor_rows": 1, "data": devices}
    is_limited = any(not allows_value(getattr(space, name), value) for name, value in whole.items())
    if is_limited or (space.devices is not None and devices not in space.devices):
        return
    for halvings in range(MAX_HALVINGS + 1):
        microbatch, remainder = divmod(batch, devices * 2**halvings)
        if not remainder and allows_value(space.microbatch, microbatch):
            levels = (zero for zero in (0, 1) if allows_value(space.zero, zero) and (not zero or devices > 1))
            layouts = [Layout(data=devices, microbatch=microbatch, zero=zero) for zero in levels]
            yield [
                layout
                for layout in layouts
                if space.allows(layout) and next(violations(problem, replace(layout, embeddings=HOST)), None) is None
            ]


def _complete(problem: Problem, space: Space, layout: Layout) -> Plan | None:
    """Return the plan of a layout; ``None`` where it is illegal, or those who restrict the space refuse it."""
    if next(violations(problem, layout), None) is not None:
        return None
    plan = complete(problem, layout)
    is_refused = space.accepts is not None and space.accepts.list_refusals(problem, plan)
    return None if is_refused else plan


def list_placements(
    stage_costs: StageCosts, costs: CostModel, layout: Layout, gap: float, max_nodes: int
) -> Iterator[tuple[Embeddings, Certificate]]:
    """Yield placements of the tables of a layout, each with what is known of it."""
    placement_problem = build_placement_problem(stage_costs, costs, layout)
    placed = place_tables(placement_problem, gap=gap, max_nodes=max_nodes)
    # the allocator may lose more than the margin leaves: with less room there is a placement that surely fits
    sparing_problem = replace(placement_problem, device_room=SPARING * placement_problem.device_room)
    costs.check_time()
    found = [
        item
        for item in (
            place_greedily(placement_problem),
            placed,
            place_tables(sparing_problem, gap=gap, max_nodes=max_nodes),
            *(place_largest_on_hosts(sparing_problem, cut) for cut in (TableCut.COLUMNS, TableCut.ROWS)),
        )
        if item is not None
    ]
    has_columns = all(has_even_columns(table, layout.data) for table in placement_problem.tables)
    is_possible = {TableCut.COLUMNS: has_columns, TableCut.NODE_ROWS: placement_problem.has_nodes}
    cuts = [cut for cut in TableCut if is_possible.get(cut, True)]
    values = {Embeddings(default=TablePlacement(cut)): NO_CERTIFICATE for cut in cuts}
    values |= {placement_problem.build_embeddings(item.choice): _certify(item, placed) for item in found}
    for embeddings, certificate in values.items():
        yield embeddings, certificate
        if embeddings:  # the program knows nothing of steps that overlap
            yield replace(embeddings, pipelined=True), NO_CERTIFICATE


def _certify(item: PlacedTables, placed: PlacedTables | None) -> Certificate:
    """Return how far a placement may be from the least, by the bound of the program."""
    bound = placed.bound if placed is not None else 0.0
    among = "placements with the program's cuts and cache shares"
    return Certificate(item._replace(bound=bound).gap, None, among, SUBJECT)


def build_placement_problem(stage_costs: StageCosts, costs: CostModel, layout: Layout) -> PlacementProblem:
    """Return the tables of a data-parallel layout, with the room that its layers leave and the rates of its machine."""
    problem, num_ranks = stage_costs.problem, layout.data
    plan = complete(problem, replace(layout, embeddings=HOST))
    table_bytes = stage_costs.find_table_bytes(plan)
    assert table_bytes is not None
    nodes = [node for node, _ in problem.cluster.nodes]
    device_room = min(problem.usable_memory(node.accelerator) for node in nodes)
    hosts = stage_costs.list_rank_hosts(plan)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return PlacementProblem(
        list_tables(problem.graph),
        TableSharing(layout.sequences, num_ranks, NO_EMBEDDINGS.optimizer, count_node_ranks(problem, num_ranks)),
        tuple(numbers[host] for host in hosts),
        find_rates(stage_costs, plan, _find_node_rate(stage_costs, layout)),
        max(device_room - (costs.peak_memory(plan) - table_bytes.device_bytes), 1.0),
        min(node.host.memory for node in nodes),
    )


class _Marginal(NamedTuple):
    """The seconds of one more byte of collectives of the ranks that share tables, or of copies."""

    costs: StageCosts
    plan: Plan

    def rate(self, kind: str, collective: Collective) -> float:
        """Return the seconds of one more byte, of large messages; 0 where there are no such groups."""
        machine = self.costs.machine(self.plan)
        if kind not in machine.table.tables:
            return 0.0
        ticks = (machine.communicator(kind, 0).ticks(collective, size) for size in (PROBE_BYTES, 2 * PROBE_BYTES))
        first, second = ticks
        return to_seconds(second - first) / PROBE_BYTES


def _find_node_rate(stage_costs: StageCosts, layout: Layout) -> float:
    """Return the seconds of a byte that the ranks of a node add up and gather; 0 where no table may be cut there."""
    layout = replace(layout, embeddings=Embeddings(default=TablePlacement(TableCut.NODE_ROWS)))
    if next(violations(stage_costs.problem, layout), None) is not None:
        return 0.0
    marginal = _Marginal(stage_costs, complete(stage_costs.problem, layout))
    return sum(marginal.rate(TABLE_NODE, item) for item in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER))


def find_rates(stage_costs: StageCosts, plan: Plan, node_reduction: float) -> Rates:
    """Return the rates of a machine for tables that the ranks of a plan share, given that of sums in nodes."""
    training, marginal = stage_costs.problem.training, _Marginal(stage_costs, plan)
    accelerator = stage_costs.problem.cluster.accelerator
    reduction = sum(marginal.rate(EXPERT, item) for item in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER))
    state_share = plan.shards if plan.zero else 1
    updated_bytes = training.gradient_bytes + training.updated_bytes + 2 * training.optimizer_bytes
    update = updated_bytes / state_share / accelerator.bandwidth("optimizer")
    return Rates(
        memory=1 / accelerator.bandwidth(OperatorKind.EMBEDDING),
        host=sum(marginal.rate(kind, Collective.SEND) for kind in (FROM_HOST, TO_HOST)),
        exchange=marginal.rate(EXPERT, Collective.ALL_TO_ALL),
        reduction=reduction,
        # the sum of dense gradients is a reduce-scatter and an all-gather
        dense=update + reduction * training.gradient_bytes,
        dense_bytes=training.parameter_bytes + training.gradient_bytes + training.optimizer_bytes / state_share,
        node_reduction=node_reduction,
    )
