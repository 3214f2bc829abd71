"""One panel of a timeline picture: the lanes of all rank classes over a window of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshwise.reports.lanes import Bar, FloatArray, Lanes, Row, arrange_lanes, cover_shares, lane_row, merge_bars
from meshwise.reports.palette import CHUNKED, IDLE, KIND_COLOUR, blend, shade_kind, text_colour
from meshwise.reports.pictures.figure import DPI, add_axes, axes_pixels, choose_time_unit
from meshwise.simulator.program import RankClass, TaskKind
from meshwise.simulator.spans import Span
from meshwise.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIN_CELL, _BARS_IN_CELL = 3, 6.0  # where shares of time are drawn: pixels of a cell, and bars that even out in it
_MIN_SHARE = 0.005  # that a strip shows
_MIN_BAR = 2.5  # pixels below which single bars would be noise, and have no edge
_MIN_RECOMPUTE = 6.0  # pixels below which recomputation is a part of the backward bar
_MIN_BAND = 10  # pixels of a compute row in which that part can be seen
_MIN_EDGED_BAR = 3.9  # pixels from which bars have an edge: close-ups are drawn for bars of 4
_STRIP_GAP = 3.0  # pixels between bars of a strip that can be told apart
_MIN_WIDTH = 1.5  # pixels of any bar, so that it is seen at all
_MIN_STRENGTH = 0.35  # colour of a strip bar that is hardly busy, on the way from white to full
_DIGIT = 0.64 * DPI / 72  # pixels of a digit, for type of one point
_LETTER = 0.54 * DPI / 72  # pixels of a letter, the same
_LABEL_PIXELS = 200
_MIN_TYPE, _MAX_TYPE = 6.5, 13.0  # points
_MAX_NUMBERS = 4000
_NARROW_FACTOR = 0.8  # of the typical forward bar, down to which numbers are made to fit in the narrowest
_MAX_VECTORS = 6000  # shapes of one panel that an SVG keeps as such
# from the bottom up
_STACK = TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT, TaskKind.RECOMPUTE, TaskKind.FORWARD, TaskKind.OPTIMIZER


@dataclass(frozen=True, slots=True)
class Box:
    """Position and size of a panel on its sheet, in pixels from the top left."""

    left_edge: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds that a panel shows."""

    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Panel:
    """A drawn panel: its axes, its lanes, and whether it shows shares of time because bars were too thin."""

    ax: Axes
    lanes: Lanes
    shares: bool


@dataclass(frozen=True, slots=True)
class _Shapes:
    corners: list[FloatArray] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)

    def add_rectangle(self, left_edge: float, right_edge: float, ys: tuple[float, float], colour: str) -> None:
        top, bottom = ys
        self.corners.append(np.array([(left_edge, top), (left_edge, bottom), (right_edge, bottom), (right_edge, top)]))
        self.colours.append(colour)

    def draw(self, ax: Axes, edge: float = 0.0) -> None:
        from matplotlib.collections import PolyCollection

        shapes = PolyCollection(
            self.corners, facecolors=self.colours, edgecolors="white" if edge else "none", linewidths=edge
        )
        # more shapes make an SVG large and slow to open
        shapes.set_rasterized(len(self.corners) > _MAX_VECTORS)
        ax.add_collection(shapes, autolim=False)


def draw_panel(figure: Figure, timeline: Timeline, window: Window, box: Box, *, with_numbers: bool = True) -> Panel:
    """Draw a window of ``timeline`` into ``box``, as bars or, where those are too thin, as shares of time."""
    pixel = window.duration / box.width
    spans = [span for span in timeline.spans if span.end > window.start and span.start < window.end]
    drawn_bars = merge_bars(spans, gap=_STRIP_GAP * pixel, absorb=True)
    width = typical_duration(bar.end - bar.start for bar in drawn_bars if bar.row is Row.COMPUTE) / pixel
    is_thin = width < _MIN_BAR
    rows = {lane_row(kind) for kind in {span.kind for span in timeline.spans}}
    panel_lanes = arrange_lanes(timeline.rank_classes, tuple(rows), box.height, grouped=is_thin)
    ax = add_axes(figure, box.left_edge, box.top, box.width, panel_lanes.pixels * len(panel_lanes.labels))
    _prepare_axes(ax, panel_lanes, window, timeline.length)
    if is_thin:
        _draw_shares(ax, spans, panel_lanes, window, max(_MIN_CELL, int(_BARS_IN_CELL * width)))
        return Panel(ax, panel_lanes, True)
    drawn_bars = tuple(bar for bar in _separate_recompute(spans, drawn_bars, pixel) if bar.row in panel_lanes.rows)
    _draw_bars(ax, drawn_bars, panel_lanes, timeline.rank_classes, pixel, 0.6 if width >= _MIN_EDGED_BAR else 0.0)
    if with_numbers:
        _draw_numbers(ax, drawn_bars, panel_lanes, timeline.rank_classes, window)
    return Panel(ax, panel_lanes, False)


def _separate_recompute(spans: Sequence[Span], merged: tuple[Bar, ...], pixel: float) -> tuple[Bar, ...]:
    """Return bars with separate recomputation, if it is wide enough to be seen and splits no backward pass."""
    if not any(bar.recompute for bar in merged):
        return merged
    separate = merge_bars(spans, gap=_STRIP_GAP * pixel)
    recompute = typical_duration(bar.end - bar.start for bar in separate if bar.kind is TaskKind.RECOMPUTE)
    num_separate, num_merged = (sum(bar.kind is TaskKind.BACKWARD for bar in bars) for bars in (separate, merged))
    return separate if recompute >= _MIN_RECOMPUTE * pixel and num_separate <= num_merged else merged


def typical_duration(durations: Iterable[float]) -> float:
    """Return the median of the ``durations`` above 0; infinity where there are none."""
    values = [duration for duration in durations if duration > 0]
    return float(np.median(values)) if values else float("inf")


def _prepare_axes(ax: Axes, lanes: Lanes, window: Window, step_time: float) -> None:
    """Set the scales, label the lanes and paint them in the idle colour."""
    count = len(lanes.labels)
    ax.set_xlim(window.start, window.end)
    ax.set_ylim(count, 0)
    _mark_time(ax, window, step_time)
    size = min(11.0, max(7.5, 0.5 * lanes.pixels), _LABEL_PIXELS / max(map(len, lanes.labels)) / _LETTER)
    label_stride = next((stride for stride in (1, 2, 4, 8, 16, 32) if stride * lanes.pixels >= 1.7 * size), 64)
    middle = lanes.compute_pixels / lanes.pixels / 2
    ax.set_yticks([i + middle for i in range(0, count, label_stride)], lanes.labels[::label_stride], fontsize=size)
    ax.tick_params(axis="y", length=0)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    idle = _Shapes()
    for lane in range(count):
        idle.add_rectangle(0.0, step_time, lanes.extent(lane * lanes.group, Row.COMPUTE), IDLE)
    idle.draw(ax)


def _mark_time(ax: Axes, window: Window, step_time: float) -> None:
    from matplotlib.ticker import MaxNLocator

    unit, name = choose_time_unit(step_time)
    locator = MaxNLocator(nbins=max(3, axes_pixels(ax)[0] // 110), steps=[1, 2, 2.5, 5, 10])
    marks = [mark * unit for mark in locator.tick_values(window.start / unit, window.end / unit)]
    marks = [mark for mark in marks if window.start <= mark <= window.end]
    ax.set_xticks(marks, [f"{mark / unit:.6g}" for mark in marks])
    ax.set_xlabel(f"time ({name})", labelpad=2)


def _draw_bars(
    ax: Axes, drawn_bars: Sequence[Bar], lanes: Lanes, classes: Sequence[RankClass], pixel: float, edge: float
) -> None:
    passes, strips, bands = _Shapes(), _Shapes(), _Shapes()
    for bar in drawn_bars:
        extent = lanes.extent(bar.rank_class, bar.row)
        has_edge = bar.row is Row.COMPUTE and bar.end - bar.start >= _MIN_BAR * pixel
        end = max(bar.end, bar.start + _MIN_WIDTH * pixel)
        (passes if has_edge else strips).add_rectangle(bar.start, end, extent, bar_colour(bar, classes))
        if bar.recompute and lanes.compute_pixels >= _MIN_BAND:
            band = _recompute_top(bar, extent)
            bands.add_rectangle(bar.start, bar.end, (band, extent[1]), KIND_COLOUR[TaskKind.RECOMPUTE])
    for shapes, width in ((passes, edge), (strips, 0.0), (bands, edge)):
        shapes.draw(ax, width)


def _recompute_top(bar: Bar, extent: tuple[float, float]) -> float:
    """Return the y of the top of the recomputation part of a backward bar."""
    top, bottom = extent
    return bottom - (bottom - top) * bar.recompute / bar.busy if bar.recompute else bottom


def bar_colour(bar: Bar, classes: Sequence[RankClass]) -> str:
    """Return the colour of ``bar``: by kind and model chunk; in strips fainter where it is less busy."""
    if bar.row is not Row.COMPUTE:
        return _strip_colour(bar.kind, bar.busy / (bar.end - bar.start) if bar.end > bar.start else 1.0)
    stages = classes[bar.rank_class].stages
    chunked = bar.kind in CHUNKED and bar.stage in stages
    return shade_kind(bar.kind, stages.index(bar.stage) if chunked else 0, len(stages))


def _draw_numbers(
    ax: Axes, drawn_bars: Sequence[Bar], lanes: Lanes, classes: Sequence[RankClass], window: Window
) -> None:
    pixel = window.duration / axes_pixels(ax)[0]
    size = choose_number_size(drawn_bars, pixel, lanes.compute_pixels)
    placed_numbers = list(place_numbers(drawn_bars, window, pixel, size)) if lanes.compute_pixels >= 1.4 * size else []
    # so many numbers cannot be read, and text is slow to draw
    if len(placed_numbers) > _MAX_NUMBERS:
        return
    for bar, middle in placed_numbers:
        extent = lanes.extent(bar.rank_class, Row.COMPUTE)
        ax.text(
            middle, (extent[0] + _recompute_top(bar, extent)) / 2, str(bar.microbatch), fontsize=size, ha="center",
            va="center_baseline", color=text_colour(bar_colour(bar, classes)), clip_on=True,
        )  # fmt: skip


def choose_number_size(drawn_bars: Sequence[Bar], pixel: float, height: int) -> float:
    """Return the type size, in points, at which microbatch numbers fit most forward bars of ``height`` pixels."""
    forward = [bar.end - bar.start for bar in drawn_bars if bar.kind is TaskKind.FORWARD]
    width = max(_NARROW_FACTOR * typical_duration(forward), min(forward, default=0.0)) / pixel
    digits = len(str(max((bar.microbatch for bar in drawn_bars), default=0)))
    return max(_MIN_TYPE, min(_MAX_TYPE, 0.45 * height, (width - 2) / digits / _DIGIT))


def place_numbers(drawn_bars: Sequence[Bar], window: Window, pixel: float, size: float) -> Iterator[tuple[Bar, float]]:
    """Yield the bars whose visible part has room for the microbatch number, with the number's position in s.

    Parameters
    ----------
    pixel
        Seconds of one pixel.
    size
        Type size in points.
    """
    for bar in drawn_bars:
        if bar.row is Row.COMPUTE and bar.microbatch >= 0 and bar.kind is not TaskKind.RECOMPUTE:
            shown_start, shown_end = max(bar.start, window.start), min(bar.end, window.end)
            if shown_end - shown_start >= (len(str(bar.microbatch)) * _DIGIT * size + 1) * pixel:
                yield bar, (shown_start + shown_end) / 2


def _draw_shares(ax: Axes, spans: Sequence[Span], lanes: Lanes, window: Window, cell: int) -> None:
    """Draw the share of time of each kind in cells of ``cell`` pixels: stacked heights, in strips colour strength.

    A strip shows one kind of communication, so that its colour alone can tell how busy it is.
    """
    edges = np.linspace(window.start, window.end, max(1, axes_pixels(ax)[0] // cell) + 1)
    levels = _measure_levels(spans, lanes, edges)
    shapes = _Shapes()
    for lane in range(len(lanes.labels)):
        base = np.zeros(len(edges) - 1)
        for kind in (kind for kind in _STACK if (lane, kind) in levels):
            top = np.minimum(base + levels[lane, kind], 1.0)
            shapes.corners.append(outline_steps(edges, base, top, lanes.extent(lane * lanes.group, Row.COMPUTE)))
            shapes.colours.append(KIND_COLOUR[kind])
            base = top
        for kind in (kind for kind in TaskKind if lane_row(kind) is not Row.COMPUTE and lane_row(kind) in lanes.rows):
            extent = lanes.extent(lane * lanes.group, lane_row(kind))
            for index, share in enumerate(levels.get((lane, kind), ())):
                if share > _MIN_SHARE:
                    shapes.add_rectangle(edges[index], edges[index + 1], extent, _strip_colour(kind, share))
    shapes.draw(ax)


def _measure_levels(spans: Sequence[Span], lanes: Lanes, edges: FloatArray) -> dict[tuple[int, TaskKind], FloatArray]:
    """Return by (lane, kind) the share of each cell's time, averaged over the rank classes of the lane."""
    intervals: dict[tuple[TaskKind, int], list[tuple[float, float]]] = {}
    for span in spans:
        intervals.setdefault((span.kind, span.rank_class), []).append((span.start, span.end))
    levels: dict[tuple[int, TaskKind], FloatArray] = {}
    for (kind, rank_class), rows in intervals.items():
        key = (rank_class // lanes.group, kind)
        levels[key] = levels.get(key, np.zeros(len(edges) - 1)) + cover_shares(rows, edges) / lanes.group
    return levels


def _strip_colour(kind: TaskKind, share: float) -> str:
    """Return the colour of a strip that is busy for a ``share`` of its time."""
    return blend("#FFFFFF", KIND_COLOUR[kind], _MIN_STRENGTH + (1 - _MIN_STRENGTH) * min(1.0, share))


def outline_steps(edges: FloatArray, low: FloatArray, high: FloatArray, extent: tuple[float, float]) -> FloatArray:
    """Return the outline between two step functions; 0 is the bottom of ``extent``, 1 its top."""
    top, bottom = extent
    xs = np.repeat(edges, 2)[1:-1]
    ys = np.concatenate([np.repeat(low, 2), np.repeat(high, 2)[::-1]])
    return np.stack([np.concatenate([xs, xs[::-1]]), bottom - (bottom - top) * ys], axis=1)
