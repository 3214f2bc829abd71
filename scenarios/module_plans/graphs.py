"""Operator graphs of a user's module that carry measured times: of its blocks, or of the operators of its capture.

Either graph takes as long as the module was measured to. A captured graph says what of it each operator takes, in the
ratio of the times by the cost model; a graph of blocks says what each block took.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from re import sub

from meshwise.executor.module_measures.figures import BlockFigures, ModuleFigures
from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.compute import PRODUCTS, Pass, operator_time
from meshwise.simulator.operator_graph import (
    BATCH,
    ITEMSIZE,
    Block,
    MeasuredTime,
    Operator,
    OperatorGraph,
    OperatorKind,
    Tensor,
)

KEPT_KINDS = PRODUCTS | {OperatorKind.ATTENTION}
"""Kinds of operators whose results selective recomputation keeps."""

Line = tuple[float, float]
"""Seconds of a pass: fixed, and a sample."""


def fit_line(samples: tuple[int, int], seconds: tuple[float, float]) -> Line:
    """Return the fixed seconds and those a sample of passes with fewer and with more samples; neither is below 0.

    >>> fit_line((2, 8), (3.0, 6.0))
    (2.0, 0.5)
    >>> fit_line((2, 8), (1.0, 8.0))
    (0.0, 1.0)
    """
    fewer, more = samples
    if fewer == more:
        return 0.0, seconds[1] / more
    slope = min(max((seconds[1] - seconds[0]) / (more - fewer), 0.0), seconds[1] / more)
    return seconds[1] - slope * more, slope


def build_block_graph(figures: ModuleFigures, dtype: str, name: str) -> OperatorGraph:
    """Return a graph with one operator for every block, and for what is before and after blocks."""
    scale = _find_scale(figures)
    blocks, source = [], "batch"
    parts = figures.parts
    for number, part in enumerate(parts):
        is_tail = number == len(parts) - 1
        path = ("head", *(f"block{place}" for place in range(len(figures.blocks))), "tail")[number]
        result = "loss" if is_tail else f"{path}_result"
        blocks.append(_build_block(part, path, source, result, dtype, figures, parts[number - 1].output, scale))
        source = result
    return OperatorGraph(name, tuple(blocks), 1)


def _find_scale(figures: ModuleFigures) -> tuple[Line, float]:
    """Return the line of whole passes, and the sum of all parts, which their hooks have made longer."""
    line = fit_line(figures.samples, figures.passes)
    return line, sum(part.forward + part.backward for part in figures.parts)


def _share_line(scale: tuple[Line, float], seconds: float) -> Line:
    """Return the part of the passes that took so many of the seconds of all parts."""
    (fixed, slope), total = scale
    fraction = seconds / total if total else 0.0
    return fixed * fraction, slope * fraction


def _build_block(
    part: BlockFigures,
    name: str,
    source: str,
    result: str,
    dtype: str,
    figures: ModuleFigures,
    source_bytes: float,
    scale: tuple[Line, float],
) -> Block:
    is_first = source == "batch"
    tensors = [
        _build_bytes(source, figures.batch, "mask") if is_first else _build_bytes(source, source_bytes, dtype),
        _build_bytes(result, part.output, dtype),
    ]
    saved, results = [], [result]
    if part.saves_input and not is_first:
        saved.append(source)
    if part.saved >= 1:
        saved.append("saved")
        tensors.append(_build_bytes("saved", part.saved, "mask"))
        results.append("saved")  # a recomputed block makes it again
    parameters = []
    for number, shape in enumerate(part.shapes):
        dims = tuple(f"p{number}_{place}" for place in range(len(shape)))
        tensors.append(Tensor(f"parameter{number}", dims, shape, dtype))
        parameters.append(f"parameter{number}")
    operator = Operator(
        name,
        OperatorKind.ELEMENTWISE,
        ((BATCH, 1),),
        (source,),
        tuple(results),
        tuple(parameters),
        saved=tuple(saved),
        measured=MeasuredTime(_share_line(scale, part.forward), _share_line(scale, part.backward)),
    )
    return Block(name, (operator,), tuple(tensors), (source,), (result,), layer=bool(part.path))


def _build_bytes(name: str, size: float, dtype: str) -> Tensor:
    """Return a tensor of so many bytes a sample."""
    return Tensor(name, (BATCH, f"{name}_bytes"), (1, max(round(size / ITEMSIZE[dtype]), 1)), dtype)


def measure_operators(graph: OperatorGraph, figures: ModuleFigures, model: Accelerator) -> OperatorGraph:
    """Return a captured graph whose operators take the measured passes, in the ratio of their times on a model."""
    forward, backward = _measure_directions(figures)
    samples = figures.samples[1]
    totals = {direction: _sum_times(graph, model, samples, direction) for direction in Pass}

    def measure(block: Block, operator: Operator) -> Operator:
        if operator.kind is OperatorKind.VIEW:
            return operator
        shares = {
            direction: time_operator(model, block, operator, samples, direction) / totals[direction]
            for direction in Pass
        }
        lines = ((Pass.FORWARD, forward), (Pass.BACKWARD, backward))
        # what does not depend on samples takes as long for any number of them
        has_samples = any(name == BATCH for name, _ in operator.dims)
        parts = [
            (line[0] * shares[direction], line[1] * shares[direction])
            if has_samples
            else (line[0] * shares[direction] + line[1] * samples * shares[direction], 0.0)
            for direction, line in lines
        ]
        return replace(operator, measured=MeasuredTime(*parts))

    blocks = (
        replace(block, operators=tuple(measure(block, operator) for operator in block.operators))
        for block in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))


def _measure_directions(figures: ModuleFigures) -> tuple[Line, Line]:
    """Return the lines of forward and of backward of all parts together."""
    scale = _find_scale(figures)
    forward, backward = (sum(getattr(part, name) for part in figures.parts) for name in ("forward", "backward"))
    return _share_line(scale, forward), _share_line(scale, backward)


def _sum_times(graph: OperatorGraph, model: Accelerator, samples: int, direction: Pass) -> float:
    return sum(
        block.repeat * time_operator(model, block, operator, samples, direction)
        for block in graph.blocks
        for operator in block.operators
    )


def mark_cheap_operators(graph: OperatorGraph) -> OperatorGraph:
    """Return a captured graph of which selective recomputation runs all again but products, convolutions and attention.

    That is what `meshwise.executor.modules.blocks.recompute_blocks` keeps.
    """

    def mark(block: Block) -> Block:
        cheap_names: set[str] = set()
        operators = []
        for operator in block.operators:
            is_cheap = operator.kind not in KEPT_KINDS
            if operator.kind is OperatorKind.VIEW:  # it has the memory of what it shows
                is_cheap = not cheap_names.isdisjoint(operator.inputs)
            cheap_names.update(operator.outputs if is_cheap else ())
            operators.append(replace(operator, recompute_selectively=is_cheap))
        return replace(block, operators=tuple(operators))

    return replace(graph, blocks=tuple(mark(block) if block.layer else block for block in graph.blocks))


def find_pace(graph: OperatorGraph, figures: ModuleFigures, model: Accelerator) -> float:
    """Return how many times as long as on a model the backward of a captured graph was measured to take."""
    _, (fixed, slope) = _measure_directions(figures)
    samples = figures.samples[1]
    return (fixed + slope * samples) / _sum_times(graph, model, samples, Pass.BACKWARD)


def time_operator(
    model: Accelerator,
    block: Block,
    operator: Operator,
    samples: int,
    direction: Pass,
    parts: Mapping[str, int] | None = None,
) -> float:
    """Return the seconds of an operator on a model with so many samples; of one of so many parts of its dims."""
    sizes = {name: samples if name == BATCH else size for name, size in operator.dims}
    for name, number in (parts or {}).items():
        if name in sizes:
            sizes[name] = max(sizes[name] // number, 1)
    return operator_time(model, block, operator, sizes, direction)


EXTRA = "kept"
"""Name of the tensor of `keep_more`."""


def keep_more(graph: OperatorGraph, size: float, *, at_end: bool = False) -> OperatorGraph:
    """Return a graph whose first operator keeps so many bytes a sample more for backward: through both passes.

    With ``at_end`` the last block does, of which a pipeline has one microbatch at a time.
    """
    if round(size) < 1:
        return graph
    blocks = graph.blocks[::-1] if at_end else graph.blocks
    first = next((block for block in blocks if not block.layer), blocks[0])
    operator, *operators = first.operators
    changed = replace(
        first,
        operators=(replace(operator, saved=(*operator.saved, EXTRA)), *operators),
        tensors=(*first.tensors, _build_bytes(EXTRA, size, "mask")),
    )
    return replace(graph, blocks=tuple(changed if block is first else block for block in graph.blocks))


def mark_blocks(graph: OperatorGraph, paths: Sequence[str]) -> OperatorGraph:
    """Return a captured graph whose layers are the blocks of a module, by the names of these, alone.

    A capture takes the members of all lists of modules for layers, and all that lies between them.
    """
    members = {path.replace(".", "_") for path in paths}
    lists = {path.rpartition(".")[0].replace(".", "_") for path in paths}

    def is_block(block: Block) -> bool:
        # a second run of equal members has a number behind its name
        return block.name in members or (block.repeat > 1 and sub(r"_\d+$", "", block.name) in lists | members)

    return replace(graph, blocks=tuple(replace(block, layer=is_block(block)) for block in graph.blocks))


def count_layers(graph: OperatorGraph) -> int:
    """Return the number of blocks that count as layers, with all their copies."""
    return sum(block.repeat for block in graph.blocks if block.layer)


def list_shapes(figures: ModuleFigures) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all trained parameters."""
    for part in figures.parts:
        yield from part.shapes
