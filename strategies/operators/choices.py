"""The legal shardings of an operator over the operator axes of a mesh, and the pins by which users decide them.

An axis cuts one dim of an operator's iteration space or none, and two axes may cut one dim. Cutting a dim that all
results have gives independent parts; cutting a summed dim gives partial results; cutting a dim over which a norm
takes statistics gives partial statistics. No other dim may be cut.

A pin names an operator, ``layers.attention`` for all layers or ``layers.0.attention`` for one, and says which
axes cut which of its dims: by name, or in the order of the dims that may be cut. All other dims are whole.
``tensor`` is the inner axis, inside a node; ``data``, or ``tensor_rows``, the outer one.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from meshwise.simulator.machine.compute import PRODUCTS
from meshwise.simulator.operator_graph import BATCH, SEQUENCE, Block, Operator, OperatorGraph, OperatorKind, Tensor
from meshwise.strategies.plan.mesh import DATA, OPERATOR_AXES, TENSOR_ROWS, nearest_divisor
from meshwise.strategies.plan.parallelism import CAPACITY
from meshwise.strategies.plan.sharding import OperatorSharding

Cuts = tuple[tuple[str, tuple[str, ...]], ...]
"""The axes that cut each dim, outermost first; dims without a cut are left out."""

_SUMS = frozenset(
    {
        OperatorKind.MATMUL,
        OperatorKind.BATCH_MATMUL,
        OperatorKind.GROUPED_MATMUL,
        OperatorKind.CONVOLUTION,
        OperatorKind.EMBEDDING,
        OperatorKind.CROSS_ENTROPY,
        OperatorKind.ELEMENTWISE,
    }
)
"""Kinds whose reduced dims may be cut: each rank sums its part, and a collective sums the partial results."""

_WINDOWS = frozenset({"height", "width", "input_height", "input_width", "rows", "columns", "kernel"})
"""Dims along which the window of a convolution or pooling would reach into the next rank's part."""

_MIXED = frozenset({"head_dim", "gate", "top_k"})
"""Dims whose points belong together: rotations and gates pair them, and a token's experts are summed."""

_ALIASES = (SEQUENCE, "key", CAPACITY)
"""Names that one dim, the tokens, has in different tensors: as tokens, as keys, or as sent to experts."""


def cuttable(block: Block, operator: Operator) -> tuple[str, ...]:
    """Return the dims of an operator that axes may cut, in the order of its iteration space."""
    return tuple(dim for dim, _ in operator.dims if _may_cut(block, operator, dim))


def _may_cut(block: Block, operator: Operator, dim: str) -> bool:
    if dim in operator.uncut or dim in _WINDOWS or (dim in _MIXED and operator.kind not in PRODUCTS):
        return False
    if dim in operator.reduced:
        return operator.kind in _SUMS
    # a result without the dim would be whole on every rank: only sums, above, may leave it partial
    names = {dim, *followers(block, operator, dim)}
    if any(names.isdisjoint(block.tensor[name].dims) for name in operator.outputs):
        return False
    if operator.kind is OperatorKind.NORM:
        own = not operator.statistics and any(dim in block.tensor[name].dims for name in operator.parameters)
        return own or dim in dict(operator.statistics) or dim in (BATCH, SEQUENCE)
    if operator.kind is OperatorKind.SOFTMAX:
        return dim != block.tensor[operator.inputs[0]].dims[-1]
    return operator.kind is not OperatorKind.INTERACTION or dim == BATCH


def followers(block: Block, operator: Operator, dim: str) -> tuple[str, ...]:
    """Return the names that a dim of an operator has in those of its tensors that name it differently."""
    if dim not in _ALIASES:
        return ()
    own = dict(operator.dims)
    met = {each for name in operator.inputs + operator.outputs for each in block.tensor[name].dims}
    return tuple(each for each in _ALIASES if each in met and each not in own)


def choices(
    name: str, block: Block, operator: Operator, degrees: Mapping[str, int], microbatch: int
) -> tuple[OperatorSharding, ...]:
    """Return every legal sharding of an operator; the first one is whole.

    Parameters
    ----------
    name
        The name of the block, or of one of its occurrences.
    degrees
        Ranks along each operator axis, from the outermost to the innermost.
    microbatch
        Sequences of a microbatch: the size of the batch dim that axes divide.
    """
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    dims = cuttable(block, operator)
    found = []
    for chosen in product((None, *dims), repeat=len(axes)):
        cuts = tuple((dim, tuple(a for a, c in zip(axes, chosen, strict=True) if c == dim)) for dim in dims)
        cuts = tuple((dim, each) for dim, each in cuts if each)
        if all(not refused(block, operator, dim, each, degrees, microbatch) for dim, each in cuts):
            found += [
                OperatorSharding(f"{name}.{operator.name}", _with_followers(block, operator, cuts), kept)
                for kept in ways_to_keep(block, operator, cuts, degrees)
            ]
    return tuple(found)


def refused(
    block: Block, operator: Operator, dim: str, axes: tuple[str, ...], degrees: Mapping[str, int], microbatch: int
) -> str:
    """Return the divisibility rule that cutting a dim by ``axes`` breaks; empty where it breaks none."""
    ways = prod(degrees[axis] for axis in axes)
    for each, size in _sizes(block, operator, dim, microbatch).items():
        if size % ways:
            product_of = " * ".join(f"{axis}({degrees[axis]})" for axis in axes)
            return f"{product_of} divides {each}({size}), met {ways}; nearest: {nearest_divisor(size, ways)}"
    return ""


def _sizes(block: Block, operator: Operator, dim: str, microbatch: int) -> dict[str, int]:
    """Return the sizes of a dim by its names in an operator and its tensors: every one must divide."""
    found = {dim: dict(operator.dims)[dim] * (microbatch if dim == BATCH else 1)}
    names = set(followers(block, operator, dim))
    for name in operator.inputs + operator.outputs:
        tensor = block.tensor[name]
        found |= {each: size for each, size in zip(tensor.dims, tensor.shape, strict=True) if each in names}
    return found


def _with_followers(block: Block, operator: Operator, cuts: Cuts) -> Cuts:
    return (*cuts, *((each, axes) for dim, axes in cuts for each in followers(block, operator, dim)))


def ways_to_keep(
    block: Block, operator: Operator, cuts: Cuts, degrees: Mapping[str, int]
) -> Iterator[tuple[tuple[str, Cuts], ...]]:
    """Yield the layouts in which parameters may be kept: as they are read, or also cut along further axes.

    Further axes are those that cut only dims which no parameter has, so that all their ranks hold the same parameters
    (as in ZeRO 3). The last layout cuts them along most axes.
    """
    yield ()
    tensors = [block.tensor[name] for name in operator.parameters]
    own = {dim for tensor in tensors for dim in tensor.dims if dim != SEQUENCE}
    free = [axis for dim, axes in cuts if dim not in own and dim not in operator.reduced for axis in axes]
    for count in range(1, len(free) + 1):
        for axes in combinations([axis for axis in degrees if axis in free], count):
            kept = [(tensor.name, _cut_besides(tensor, cuts, axes, degrees)) for tensor in tensors]
            found = tuple((name, each) for name, each in kept if each is not None)
            if found:
                yield found


def _cut_besides(tensor: Tensor, cuts: Cuts, axes: tuple[str, ...], degrees: Mapping[str, int]) -> Cuts | None:
    """Return the cuts of a parameter with ``axes`` added to the first dim that they divide; None where none is."""
    have = {dim: each for dim, each in cuts if dim in tensor.dims and dim != SEQUENCE}
    for dim, size in zip(tensor.dims, tensor.shape, strict=True):
        together = (*have.get(dim, ()), *axes)
        if dim != SEQUENCE and size % prod(degrees[axis] for axis in together) == 0:
            after = have | {dim: together}
            return tuple((name, after[name]) for name in tensor.dims if name in after)
    return None


AXIS_NAMES = {DATA: TENSOR_ROWS} | {axis: axis for axis in OPERATOR_AXES}
"""The operator axis that each name in a pin means."""


class Pin(NamedTuple):
    """The cuts that the user demands of an operator: axes by dim, a name or an index into the dims that may be cut."""

    operator: str
    cuts: tuple[tuple[str | int, tuple[str, ...]], ...]


class Resolved(NamedTuple):
    """The cuts that a pin demands of one operator of one occurrence of a block."""

    block: Block
    operator: Operator
    cuts: Cuts


def resolved(graph: OperatorGraph, pins: tuple[Pin, ...]) -> dict[str, Resolved]:
    """Return the pins by the names of the operators, ``layers.0.attention``, that they decide.

    A pin that names one occurrence of a block overrides one that names the block.

    Raises
    ------
    ValueError
        Where an operator, dim or axis does not exist; the message offers the nearest.
    """
    # names of occurrences have one more dot: sorted by dots, they come last and override
    found: dict[str, Resolved] = {}
    for pin in sorted(pins, key=lambda each: each.operator.count(".")):
        targets = list(_named(graph, pin.operator))
        if not targets:
            raise ValueError(_unknown(graph, pin.operator))
        cuts = _cuts(pin, *targets[0][1:])
        found |= {name: Resolved(block, operator, cuts) for name, block, operator in targets}
    return found


def _named(graph: OperatorGraph, name: str) -> Iterator[tuple[str, Block, Operator]]:
    for occurrence, block in graph.occurrences:
        for operator in block.operators:
            if name in (f"{occurrence}.{operator.name}", f"{block.name}.{operator.name}"):
                yield f"{occurrence}.{operator.name}", block, operator


def _unknown(graph: OperatorGraph, name: str) -> str:
    known = dict.fromkeys(
        f"{owner}.{operator.name}"
        for occurrence, block in graph.occurrences
        for operator in block.operators
        for owner in (block.name, occurrence)
    )
    near = get_close_matches(name, known, 1, 0.0)
    return f"pin names an operator of the model, met {name}; nearest: {near[0]}"


def _cuts(pin: Pin, block: Block, operator: Operator) -> Cuts:
    dims = cuttable(block, operator)
    result: list[tuple[str, tuple[str, ...]]] = []
    for dim, axes in pin.cuts:
        if isinstance(dim, int) and dim >= len(dims):
            raise ValueError(f"{pin.operator} has {len(dims)} dims that may be cut ({', '.join(dims)}), met {dim + 1}")
        name = dims[dim] if isinstance(dim, int) else dim
        if name not in dims:
            near = f"; nearest: {get_close_matches(name, dims, 1, 0.0)[0]}" if dims else ""
            raise ValueError(f"of {pin.operator} may be cut: {', '.join(dims) or 'nothing'}, met {name}{near}")
        unknown = next((axis for axis in axes if axis not in AXIS_NAMES), None)
        if unknown is not None:
            near = get_close_matches(unknown, AXIS_NAMES, 1, 0.0)[0]
            raise ValueError(f"{pin.operator}: axis is one of {', '.join(AXIS_NAMES)}, met {unknown}; nearest: {near}")
        own = {AXIS_NAMES[axis] for axis in axes}
        result.append((name, tuple(axis for axis in OPERATOR_AXES if axis in own)))
    used = [axis for _, axes in result for axis in axes]
    twice = next((axis for axis in used if used.count(axis) > 1), None)
    if twice is not None:
        raise ValueError(f"{pin.operator}: an axis cuts one dim, met {twice} for two")
    order = {dim: place for place, dim in enumerate(dims)}
    return tuple(sorted(((dim, axes) for dim, axes in result if axes), key=lambda each: order[each[0]]))


def broken(pins: Mapping[str, Resolved], degrees: Mapping[str, int], microbatch: int) -> str:
    """Return the first rule that pins break on a mesh of these degrees; empty where they break none."""
    for name, pin in pins.items():
        for dim, axes in pin.cuts:
            missing = next((axis for axis in axes if degrees.get(axis, 1) == 1), None)
            if missing is not None:
                return f"{name}: axis {missing} has one rank"
            found = refused(pin.block, pin.operator, dim, axes, degrees, microbatch)
            if found:
                return f"{name}: {found}"
    return ""


def admitted(
    pins: Mapping[str, Resolved], name: str, legal: tuple[OperatorSharding, ...]
) -> tuple[OperatorSharding, ...]:
    """Return those of the shardings of an operator, named with its occurrence, that the pins allow."""
    if name not in pins:
        return legal
    pin = pins[name]
    own = {dim for dim, _ in pin.operator.dims}
    return tuple(each for each in legal if tuple((d, axes) for d, axes in each.cuts if d in own) == pin.cuts)
