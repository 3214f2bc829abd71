"""Picture of the operator graph: how a plan shards every operator, and which collectives run between them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from meshwise.reports.document import plain
from meshwise.reports.pictures.figure import INK, QUIET, axes, header, sheet
from meshwise.simulator.collective import Collective
from meshwise.simulator.operator_graph import BATCH, Operator, OperatorGraph
from meshwise.simulator.units import format_size
from meshwise.strategies.lowering.costs.kinds import kinds
from meshwise.strategies.lowering.costs.operator import BlockLayout, summed_gradient, transfers
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.sharding import ShardingSpec

COLOURS = {
    Collective.ALL_REDUCE: "#CF4A16",
    Collective.REDUCE_SCATTER: "#B57600",
    Collective.ALL_GATHER: "#1D5B96",
    Collective.ALL_TO_ALL: "#5A2A82",
}
"""Colours of edges, by the most expensive collective on the edge."""
_ORDER = tuple(COLOURS)
_STILL = "#B8B8B8"
_FILLS = {
    "cut along what it sums": "#FBE3CF",
    "along a dim of its result": "#D6E8F7",
    "along the batch": "#DDF0DC",
    "whole on every rank": "#F4F4F4",
}
_SUMMED, _RESULT, _BATCH, _WHOLE = _FILLS
_BOX, _GAP, _TOP, _WIDTH = 50, 44, 180, 400
_LEAST_HEIGHT = 420
_MOST_OPERATORS = 60
_PITCH, _MOST_BLOCKS = 520, 3
INPUT = -1
"""Index that stands for the previous block as the producer of a tensor."""
Point = tuple[float, float]
Moves = tuple[tuple[Collective, int], ...]
"""Collectives of an edge, each with its bytes."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The redistributions between two operators, which are indices in the block; `INPUT` is the previous block."""

    source: int
    target: int
    forward: Moves = ()
    backward: Moves = ()

    @property
    def dearest(self) -> Collective | None:
        """The most expensive collective of the edge, which gives it its colour."""
        moved = [kind for kind, _ in (*self.forward, *self.backward)]
        return min(moved, key=_ORDER.index) if moved else None


def edges(layout: BlockLayout) -> tuple[Edge, ...]:
    """Return the edges into and inside a block, each with its collectives and bytes, forward and backward.

    Readers that need a tensor in the same layout share one redistribution; the edge to the first of them has it.
    """
    block = layout.block
    made = dict.fromkeys(block.inputs, INPUT)
    found: dict[tuple[int, int], Edge] = {}
    shared: set[tuple[str, ShardingSpec]] = set()
    for place, operator in enumerate(block.operators):
        for name in (each for each in operator.inputs if each in made):
            edge = found.get((made[name], place), Edge(made[name], place))
            read = name, layout.wanted(operator, name)
            forward, backward = ((), ()) if read in shared else _moves(layout, operator, name)
            shared.add(read)
            moved = edge.forward + forward, edge.backward + backward
            found[edge.source, place] = Edge(edge.source, place, *moved)
        made |= dict.fromkeys(operator.outputs, place)
    return tuple(found.values())


def _moves(layout: BlockLayout, operator: Operator, name: str) -> tuple[Moves, Moves]:
    have, wanted = layout.produced[name], layout.wanted(operator, name)
    between = have.complete if layout.adds_before_cut(operator) else have
    forward = (*_collectives(layout, name, have, between), *_collectives(layout, name, between, wanted))
    if not layout.has_gradient(name):
        return forward, ()
    gradient = summed_gradient(layout, name, wanted)
    return forward, tuple(_collectives(layout, name, gradient, have.complete))


def _collectives(
    layout: BlockLayout, name: str, source: ShardingSpec, target: ShardingSpec
) -> Iterator[tuple[Collective, int]]:
    if source == target:
        return
    for move, size in transfers(layout, name, source, target):
        if layout.mesh.size(move.axis) > 1:
            yield move.collective, round(size)


def draw_sharded_graph(graph: OperatorGraph, plan: Plan, path: Path | str) -> None:
    """Draw the operators of the first three kinds of blocks with their shardings and the collectives between them.

    Blocks with the same shardings and the same input layouts are drawn once.

    Parameters
    ----------
    path
        Where to write it: .png or .svg.

    Raises
    ------
    ValueError
        Where a block has more operators than a picture shows.
    """
    found = kinds(graph, plan.shardings)
    count = Counter(found.names.values())
    shown = [(name, kind) for name, kind in found.of_name.items() if count[name]][:_MOST_BLOCKS]
    most = max(len(kind.block.operators) for _, kind in shown)
    if most > _MOST_OPERATORS:
        raise ValueError(f"a picture shows blocks of at most {_MOST_OPERATORS} operators, met {most}")
    height = max(_LEAST_HEIGHT, _TOP + most * (_BOX + _GAP) + 40)
    left = len(count) - len(shown)
    with sheet(path, height) as figure:
        facts = plan.describe() + (f"; {left} other kinds of blocks are not shown" if left else "")
        header(figure, f"{plain(graph.name, 60)}: how every operator is cut", facts)
        ax = axes(figure, 0, 0, 1600, height)
        ax.set_xlim(0, 1600)
        ax.set_ylim(height, 0)
        ax.set_axis_off()
        ax.patch.set_alpha(0.0)
        for column, (name, kind) in enumerate(shown):
            layout = BlockLayout.of_kind(kind, plan.mesh, plan.sizes[0])
            title = f"{plain(name, 30)}" + (f" x {count[name]}" if count[name] > 1 else "")
            _draw_block(ax, layout, title, 90 + (1600 - _PITCH * len(shown)) / 2 + column * _PITCH)
        _legend(ax, height)


def _draw_block(ax: Axes, layout: BlockLayout, title: str, left: float) -> None:
    ax.text(left, _TOP - _GAP - 8, title, fontsize=14, fontweight="bold", va="bottom")
    for place, operator in enumerate(layout.block.operators):
        _draw_operator(ax, layout, operator, left, _top(place))
    lanes = 0
    for edge in edges(layout):
        lanes += _draw_edge(ax, edge, left, lanes)


def _top(place: int) -> float:
    return _TOP + place * (_BOX + _GAP)


def _draw_operator(ax: Axes, layout: BlockLayout, operator: Operator, left: float, top: float) -> None:
    cut = _cut(layout, operator)
    box = FancyBboxPatch(
        (left, top),
        _WIDTH,
        _BOX,
        boxstyle="round,pad=0,rounding_size=6",
        facecolor=_FILLS[_fill(operator, cut)],
        edgecolor=QUIET,
        linewidth=0.8,
    )
    ax.add_patch(box)
    name = plain(operator.name, 30)
    ax.text(left + 10, top + 16, name, fontsize=11, fontweight="bold", va="center", color=INK)
    kept = [name for name in operator.parameters if layout.gathers_again(operator, name)]
    note = f"gathers {', '.join(kept)}" if kept else str(operator.kind).replace("_", " ")
    ax.text(left + _WIDTH - 10, top + 16, plain(note, 30), fontsize=9, va="center", ha="right", color=QUIET)
    ax.text(left + 10, top + 36, plain(_space(layout, operator, cut), 56), fontsize=9, va="center", color=INK)


def _cut(layout: BlockLayout, operator: Operator) -> dict[str, str]:
    """Return the sharded dims of an operator, each with its mesh axes and their sizes as text."""
    cuts = layout.shardings[operator.name].cuts
    axes_of = {dim: [axis for axis in every if layout.mesh.size(axis) > 1] for dim, every in cuts}
    return {dim: " ".join(f"/ {axis} {layout.mesh.size(axis)}" for axis in own) for dim, own in axes_of.items() if own}


def _fill(operator: Operator, cut: dict[str, str]) -> str:
    if not cut:
        return _WHOLE
    if any(dim in operator.reduced for dim in cut):
        return _SUMMED
    return _BATCH if set(cut) == {BATCH} else _RESULT


def _space(layout: BlockLayout, operator: Operator, cut: dict[str, str]) -> str:
    """Return the dims of an operator of size above 1, with sizes and cuts; sharded dims come first."""
    sizes = {dim: size * (layout.microbatch if dim == BATCH else 1) for dim, size in operator.dims}
    shown = sorted((dim for dim, size in sizes.items() if size > 1), key=lambda dim: dim not in cut)
    return ", ".join(f"{dim} {sizes[dim]:,} {cut.get(dim, '')}".strip() for dim in shown) or "one number"


def _draw_edge(ax: Axes, edge: Edge, left: float, lane: int) -> int:
    """Draw an edge; return 1 if it skips operators and so takes a lane beside them, else 0."""
    colour = COLOURS[edge.dearest] if edge.dearest is not None else _STILL
    width = 2.0 if edge.dearest is not None else 1.0
    start, end = _top(edge.source) + _BOX, _top(edge.target)
    if edge.target == edge.source + 1:
        x = left + _WIDTH / 2
        ax.add_patch(_arrow((x, start), (x, end), colour, width))
        _label(ax, edge, x + 12, (start + end) / 2, colour)
        return 0
    start, end = start - _BOX * (0.25 if edge.source != INPUT else 0.0), end + _BOX * 0.25
    bend = 14 + 12 * (lane % 7)
    ax.plot([left, left - bend, left - bend], [start, start, end], color=colour, linewidth=width)
    ax.add_patch(_arrow((left - bend, end), (left, end), colour, width))
    _label(ax, edge, left - bend - 150, end - 14, colour)
    return 1


def _arrow(start: Point, end: Point, colour: str, width: float) -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, color=colour, linewidth=width, arrowstyle="-|>", mutation_scale=10.0, shrinkA=0.0, shrinkB=0.0
    )


def _label(ax: Axes, edge: Edge, x: float, y: float, colour: str) -> None:
    lines = [*_words(edge.forward, "\u2193"), *_words(edge.backward, "\u2191")]
    ax.text(x, y, "\n".join(lines), fontsize=9, va="center", color=colour, linespacing=1.15)


def _words(moves: Sequence[tuple[Collective, int]], way: str) -> Iterator[str]:
    if moves:
        counted = Counter(f"{str(kind).replace('_', '-')} {format_size(size)}" for kind, size in moves)
        yield f"{way} " + ", ".join(f"{count} x {text}" if count > 1 else text for text, count in counted.items())


def _legend(ax: Axes, height: int) -> None:
    x = 40.0
    for fill, colour in _FILLS.items():
        ax.add_patch(FancyBboxPatch((x, height - 28), 16, 12, boxstyle="square,pad=0", fc=colour, ec=QUIET, lw=0.6))
        ax.text(x + 22, height - 22, fill, fontsize=9, va="center", color=INK)
        x += 48 + 6.6 * len(fill)
    lines = {str(kind).replace("_", "-"): colour for kind, colour in COLOURS.items()} | {"nothing moves": _STILL}
    x += 10
    for word, colour in lines.items():
        ax.plot([x, x + 22], [height - 22, height - 22], color=colour, linewidth=2.0)
        ax.text(x + 28, height - 22, word, fontsize=9, va="center", color=INK)
        x += 52 + 6.6 * len(word)
    ax.text(x, height - 22, "\u2193 forward  \u2191 backward", fontsize=9, va="center", color=INK)
