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

_SUMMING_KINDS = frozenset(
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

_WINDOW_DIMS = frozenset({"height", "width", "input_height", "input_width", "rows", "columns", "kernel"})
"""Dims along which the window of a convolution or pooling would reach into the next rank's part."""

_MIXED_DIMS = frozenset({"head_dim", "gate", "top_k"})
"""Dims whose points belong together: rotations and gates pair them, and a token's experts are summed."""

_ALIASES = (SEQUENCE, "key", CAPACITY)
"""Names that one dim, the tokens, has in different tensors: as tokens, as keys, or as sent to experts."""


def list_cuttable_dims(block: Block, operator: Operator) -> tuple[str, ...]:
    """Return the dims of an operator that axes may cut, in the order of its iteration space."""
    return tuple(dim for dim, _ in operator.dims if _may_cut(block, operator, dim))


def _may_cut(block: Block, operator: Operator, dim: str) -> bool:
    if dim in operator.uncut or dim in _WINDOW_DIMS or (dim in _MIXED_DIMS and operator.kind not in PRODUCTS):
        return False
    if dim in operator.reduced:
        return operator.kind in _SUMMING_KINDS
    # a result without the dim would be whole on every rank: only sums, above, may leave it partial
    names = {dim, *list_aliases(block, operator, dim)}
    if any(names.isdisjoint(block.tensor[name].dims) for name in operator.outputs):
        return False
    if operator.kind is OperatorKind.NORM:
        is_parameter_dim = not operator.statistics and any(
            dim in block.tensor[name].dims for name in operator.parameters
        )
        return is_parameter_dim or dim in dict(operator.statistics) or dim in (BATCH, SEQUENCE)
    if operator.kind is OperatorKind.SOFTMAX:
        return dim != block.tensor[operator.inputs[0]].dims[-1]
    return operator.kind is not OperatorKind.INTERACTION or dim == BATCH


def list_aliases(block: Block, operator: Operator, dim: str) -> tuple[str, ...]:
    """Return the names that a dim of an operator has in those of its tensors that name it differently."""
    if dim not in _ALIASES:
        return ()
    operator_dims = dict(operator.dims)
    tensor_dims = {dim_name for name in operator.inputs + operator.outputs for dim_name in block.tensor[name].dims}
    return tuple(dim_name for dim_name in _ALIASES if dim_name in tensor_dims and dim_name not in operator_dims)


def list_choices(
    name: str, block: Block, operator: Operator, degrees: Mapping[str, int], microbatch: int
) -> tuple[OperatorSharding, ...]:
    """Return every legal sharding of an operator; the first one is whole.

    ``name`` is that of the block or of one of its occurrences, ``degrees`` are the ranks along each operator axis from
    the outermost to the innermost, and ``microbatch`` are its sequences: the size of the batch dim that axes divide.
    """
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    dims = list_cuttable_dims(block, operator)
    shardings = []
    for axis_dims in product((None, *dims), repeat=len(axes)):
        cuts = tuple(
            (dim, tuple(cut_axis for cut_axis, cut_dim in zip(axes, axis_dims, strict=True) if cut_dim == dim))
            for dim in dims
        )
        cuts = tuple((dim, dim_axes) for dim, dim_axes in cuts if dim_axes)
        if all(not find_cut_violation(block, operator, dim, dim_axes, degrees, microbatch) for dim, dim_axes in cuts):
            shardings += [
                OperatorSharding(f"{name}.{operator.name}", _with_aliases(block, operator, cuts), kept_cuts)
                for kept_cuts in list_kept_cuts(block, operator, cuts, degrees)
            ]
    return tuple(shardings)


def find_cut_violation(
    block: Block, operator: Operator, dim: str, axes: tuple[str, ...], degrees: Mapping[str, int], microbatch: int
) -> str:
    """Return the divisibility rule that cutting a dim by ``axes`` breaks; empty where it breaks none."""
    num_parts = prod(degrees[axis] for axis in axes)
    for dim_name, size in _list_sizes(block, operator, dim, microbatch).items():
        if size % num_parts:
            product_text = " * ".join(f"{axis}({degrees[axis]})" for axis in axes)
            nearest = nearest_divisor(size, num_parts)
            return f"{product_text} divides {dim_name}({size}), met {num_parts}; nearest: {nearest}"
    return ""


def _list_sizes(block: Block, operator: Operator, dim: str, microbatch: int) -> dict[str, int]:
    """Return the sizes of a dim by its names in an operator and its tensors: every one must divide."""
    sizes = {dim: dict(operator.dims)[dim] * (microbatch if dim == BATCH else 1)}
    names = set(list_aliases(block, operator, dim))
    for name in operator.inputs + operator.outputs:
        tensor = block.tensor[name]
        sizes |= {dim_name: size for dim_name, size in zip(tensor.dims, tensor.shape, strict=True) if dim_name in names}
    return sizes


def _with_aliases(block: Block, operator: Operator, cuts: Cuts) -> Cuts:
    return (*cuts, *((alias, axes) for dim, axes in cuts for alias in list_aliases(block, operator, dim)))


def list_kept_cuts(
    block: Block, operator: Operator, cuts: Cuts, degrees: Mapping[str, int]
) -> Iterator[tuple[tuple[str, Cuts], ...]]:
    """Yield the layouts in which parameters may be kept: as they are read, or also cut along further axes.

    Further axes are those that cut only dims which no parameter has, so that all their ranks hold the same parameters
    (as in ZeRO 3). The last layout cuts them along most axes.
    """
    yield ()
    tensors = [block.tensor[name] for name in operator.parameters]
    parameter_dims = {dim for tensor in tensors for dim in tensor.dims if dim != SEQUENCE}
    free_axes = [
        axis for dim, axes in cuts if dim not in parameter_dims and dim not in operator.reduced for axis in axes
    ]
    for num_axes in range(1, len(free_axes) + 1):
        for axes in combinations([axis for axis in degrees if axis in free_axes], num_axes):
            parameter_cuts = [(tensor.name, _add_cut(tensor, cuts, axes, degrees)) for tensor in tensors]
            kept_choice = tuple((name, tensor_cuts) for name, tensor_cuts in parameter_cuts if tensor_cuts is not None)
            if kept_choice:
                yield kept_choice


def _add_cut(tensor: Tensor, cuts: Cuts, axes: tuple[str, ...], degrees: Mapping[str, int]) -> Cuts | None:
    """Return the cuts of a parameter with ``axes`` added to the first dim that they divide; None where none is."""
    cuts_by_dim = {dim: dim_axes for dim, dim_axes in cuts if dim in tensor.dims and dim != SEQUENCE}
    for dim, size in zip(tensor.dims, tensor.shape, strict=True):
        joint_axes = (*cuts_by_dim.get(dim, ()), *axes)
        if dim != SEQUENCE and size % prod(degrees[axis] for axis in joint_axes) == 0:
            widened_cuts = cuts_by_dim | {dim: joint_axes}
            return tuple((name, widened_cuts[name]) for name in tensor.dims if name in widened_cuts)
    return None


AXIS_NAMES = {DATA: TENSOR_ROWS} | {axis: axis for axis in OPERATOR_AXES}
"""The operator axis that each name in a pin means."""


class Pin(NamedTuple):
    """The cuts that the user demands of an operator: axes by dim, a name or an index into the dims that may be cut."""

    operator: str
    cuts: tuple[tuple[str | int, tuple[str, ...]], ...]


class ResolvedPin(NamedTuple):
    """The cuts that a pin demands of one operator of one occurrence of a block."""

    block: Block
    operator: Operator
    cuts: Cuts


def resolve_pins(graph: OperatorGraph, pins: tuple[Pin, ...]) -> dict[str, ResolvedPin]:
    """Return the pins by the names of the operators, ``layers.0.attention``, that they decide.

    A pin that names one occurrence of a block overrides one that names the block.

    Raises
    ------
    ValueError
        Where an operator, dim or axis does not exist; the message offers the nearest.
    """
    operators: dict[str, dict[str, tuple[Block, Operator]]] = {}
    for occurrence, block in graph.occurrences:
        for operator in block.operators:
            for owner in (block.name, occurrence):
                targets = operators.setdefault(f"{owner}.{operator.name}", {})
                targets[f"{occurrence}.{operator.name}"] = (block, operator)
    # names of occurrences have one more dot: sorted by dots, they come last and override
    resolved_pins: dict[str, ResolvedPin] = {}
    for pin in sorted(pins, key=lambda candidate: candidate.operator.count(".")):
        if pin.operator not in operators:
            nearest = get_close_matches(pin.operator, operators, 1, 0.0)[0]
            raise ValueError(f"pin names an operator of the model, met {pin.operator}; nearest: {nearest}")
        targets = operators[pin.operator]
        cuts = _resolve_cuts(pin, *next(iter(targets.values())))
        resolved_pins |= {name: ResolvedPin(*target, cuts) for name, target in targets.items()}
    return resolved_pins


def _resolve_cuts(pin: Pin, block: Block, operator: Operator) -> Cuts:
    dims = list_cuttable_dims(block, operator)
    result: list[tuple[str, tuple[str, ...]]] = []
    for dim, axes in pin.cuts:
        if isinstance(dim, int) and dim >= len(dims):
            raise ValueError(f"{pin.operator} has {len(dims)} dims that may be cut ({', '.join(dims)}), met {dim + 1}")
        name = dims[dim] if isinstance(dim, int) else dim
        if name not in dims:
            suggestion = f"; nearest: {get_close_matches(name, dims, 1, 0.0)[0]}" if dims else ""
            raise ValueError(f"of {pin.operator} may be cut: {', '.join(dims) or 'nothing'}, met {name}{suggestion}")
        unknown_axis = next((axis for axis in axes if axis not in AXIS_NAMES), None)
        if unknown_axis is not None:
            suggestion = get_close_matches(unknown_axis, AXIS_NAMES, 1, 0.0)[0]
            raise ValueError(
                f"{pin.operator}: axis is one of {', '.join(AXIS_NAMES)}, met {unknown_axis}; nearest: {suggestion}"
            )
        pin_axes = {AXIS_NAMES[axis] for axis in axes}
        result.append((name, tuple(axis for axis in OPERATOR_AXES if axis in pin_axes)))
    used_axes = [axis for _, axes in result for axis in axes]
    repeated_axis = next((axis for axis in used_axes if used_axes.count(axis) > 1), None)
    if repeated_axis is not None:
        raise ValueError(f"{pin.operator}: an axis cuts one dim, met {repeated_axis} for two")
    order = {dim: position for position, dim in enumerate(dims)}
    return tuple(sorted(((dim, axes) for dim, axes in result if axes), key=lambda entry: order[entry[0]]))


def find_pin_violation(pins: Mapping[str, ResolvedPin], degrees: Mapping[str, int], microbatch: int) -> str:
    """Return the first rule that pins break on a mesh of these degrees; empty where they break none."""
    for name, pin in pins.items():
        for dim, axes in pin.cuts:
            absent_axis = next((axis for axis in axes if degrees.get(axis, 1) == 1), None)
            if absent_axis is not None:
                return f"{name}: axis {absent_axis} has one rank"
            violation = find_cut_violation(pin.block, pin.operator, dim, axes, degrees, microbatch)
            if violation:
                return f"{name}: {violation}"
    return ""


def filter_choices(
    pins: Mapping[str, ResolvedPin], name: str, shardings: tuple[OperatorSharding, ...]
) -> tuple[OperatorSharding, ...]:
    """Return those of the shardings of an operator, named with its occurrence, that the pins allow."""
    if name not in pins:
        return shardings
    pin = pins[name]
    operator_dims = {dim for dim, _ in pin.operator.dims}
    return tuple(
        sharding
        for sharding in shardings
        if tuple((cut_dim, axes) for cut_dim, axes in sharding.cuts if cut_dim in operator_dims) == pin.cuts
    )
