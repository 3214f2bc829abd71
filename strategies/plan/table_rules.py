"""The rules that the placement of embedding tables must keep."""

from collections.abc import Iterator
from difflib import get_close_matches

from meshwise.simulator.units import format_count
from meshwise.strategies.plan.layout import Layout, Violation
from meshwise.strategies.plan.mesh import EXPERT
from meshwise.strategies.plan.parallelism import EXPERTS
from meshwise.strategies.plan.problem import Problem, count_node_ranks
from meshwise.strategies.schedules.schedule import SCHEDULES
from meshwise.strategies.tables.embeddings import TableCut, TablePlacement
from meshwise.strategies.tables.table import Table, list_tables

_WHOLE_DEGREES = ("tensor", "tensor_rows", "pipeline", "context")
"""Degrees of 1 beside tables that data ranks share: what looks them up runs on whole samples."""


def table_violations(problem: Problem, layout: Layout) -> Iterator[Violation]:
    """Yield every rule that the placement of tables breaks."""
    embeddings, tables = layout.embeddings, list_tables(problem.graph)
    if embeddings.tables or embeddings:
        yield from _name_violations(layout, tables)
    if not embeddings:
        return
    if any(EXPERTS in dict(operator.dims) for block in problem.graph.blocks for operator in block.operators):
        yield Violation("embeddings", "tables that data ranks share need a model without experts")
    for name in _WHOLE_DEGREES:
        if (degree := getattr(layout, name)) > 1:
            yield Violation(name, f"tables that data ranks share need {name} 1, met {degree}; nearest: 1")
    if layout.expert not in (1, layout.data):
        rule = f"all data({layout.data}) ranks share the tables"
        yield Violation("expert", f"{rule}, and no experts, met expert {layout.expert}; nearest: 1")
    if EXPERT not in layout.order:
        rule = f"ranks that share tables lie along the axis {EXPERT}"
        yield Violation("order", f"order has {EXPERT}: {rule}, met {', '.join(layout.order)}")
    if layout.zero_shards not in (0, layout.data):
        rule = f"all data({layout.data}) ranks share the tables, and with them states"
        yield Violation("zero_shards", f"{rule}, met {layout.zero_shards}; nearest: 0")
    if not isinstance(layout.microbatch, int):
        yield Violation("microbatch", "ranks that share tables have equal microbatches, met several sizes")
    if layout.gradient_reduction != "all_reduce":
        rule = "ranks that share tables have no server"
        yield Violation("gradient_reduction", f"{rule}, met {layout.gradient_reduction}; nearest: all_reduce")
    if layout.schedule in SCHEDULES and SCHEDULES[layout.schedule].is_asynchronous:
        message = "tables that data ranks share are updated once a step"
        yield Violation("schedule", f"{message}, {layout.schedule} has no flush; nearest: 1f1b")
    if problem.training.frozen:
        yield Violation("embeddings", "frozen tables have no gradients, met tables that data ranks update")
    node_ranks = count_node_ranks(problem, layout.data)
    has_nodes = 1 < node_ranks < layout.data and not layout.placement
    if not has_nodes and any(placement.cut is TableCut.NODE_ROWS for placement in embeddings.placements):
        rule = "node_rows needs ranks in order on all devices of several alike nodes of several devices"
        devices_text = format_count(problem.cluster.num_devices, "device")
        nodes_text = format_count(problem.cluster.num_nodes, "node")
        met_text = f"{format_count(layout.data, 'rank')} on {devices_text} of {nodes_text}"
        yield Violation("embeddings", f"{rule}, met {met_text}; nearest: rows")
    for table in tables:
        yield from _placement_violations(layout, table, embeddings.find_placement(table.name))


def _name_violations(layout: Layout, tables: tuple[Table, ...]) -> Iterator[Violation]:
    """Yield a violation for every name that no table has."""
    names = [table.name for table in tables]
    if not names:
        yield Violation("embeddings", "the model has no tables that ranks may share; nearest: leave it out")
        return
    for name, _ in layout.embeddings.tables:
        if name not in names:
            hints = [f"; nearest: {match}" for match in get_close_matches(name, names, n=1)]
            known_names = ", ".join(names) if len(names) <= 8 else f"{names[0]} .. {names[-1]}"
            rule = f"names a table, of {known_names}, or default, optimizer, pipelined"
            yield Violation(f"embeddings.{name}", f"{rule}; met {name[:100]}{''.join(hints)}")


def _placement_violations(layout: Layout, table: Table, placement: TablePlacement) -> Iterator[Violation]:
    """Yield every rule that the placement of a table breaks."""
    is_named = table.name in dict(layout.embeddings.tables)
    field = f"embeddings.{table.name if is_named else 'default'}"
    if placement.device is not None and placement.device >= layout.data:
        is_node = placement.cut is TableCut.NODE_ROWS
        meaning = ", for it names the node of a data rank" if is_node else ""
        rule = f"{table.name}: device is below data({layout.data}){meaning}"
        yield Violation(field, f"{rule}, met {placement.device}; nearest: {layout.data - 1}")
    if placement.cut is TableCut.COLUMNS and table.width % layout.data:
        rule = f"{table.name}: data({layout.data}) divides the columns({table.width})"
        yield Violation(field, f"{rule}; nearest: rows")
