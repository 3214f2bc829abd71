"""Rules of views: the same values under other torch dims. A view is no operator and is sharded as its operand."""

from collections.abc import Iterator

from meshwise.executor.capture.rules.dims import Axes, Dim, leaves
from meshwise.executor.capture.rules.work import Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def same(call: Call) -> Work:
    """Keep all dims."""
    return Work((call.axes(call.value(0)),))


def detach(call: Call) -> Work:
    """Keep all dims, as an operator: a view would be replaced by its operand, through which gradients flow."""
    axes = call.axes(call.value(0))
    return Work((axes,), OperatorKind.VIEW, space=present(axes))


def reshape(call: Call) -> Work:
    """Merge and split dims; where sizes do not nest, the dims are new ones and no mesh axis cuts the old ones."""
    source = call.value(0)
    axes, shape = present(call.axes(source)), [size for size in call.shape if size > 1]
    made: list[Dim] = []
    lost: list[Dim] = []
    for group, sizes in _groups(axes, shape):
        parts = tuple(group) if [dim.size for dim in group] == sizes else call.dims.split(group, sizes)
        if parts is None:
            lost += leaves(group)
            parts = tuple(call.dims.new(size) for size in sizes)
        made += parts
    remaining = iter(made)
    out = tuple(next(remaining) if size > 1 else None for size in call.shape)
    call.dims.keep_apart(out)
    return Work((out,), OperatorKind.VIEW, uncut=tuple(lost), space=axes) if lost else Work((out,))


def _groups(axes: tuple[Dim, ...], shape: list[int]) -> Iterator[tuple[list[Dim], list[int]]]:
    """Yield, in order, the shortest groups of dims and of sizes whose products are equal."""
    old, new = list(axes), list(shape)
    while old:
        dims, sizes = [old.pop(0)], [new.pop(0)]
        read, written = dims[0].size, sizes[0]
        while read != written:
            if read < written:
                dims.append(old.pop(0))
                read *= dims[-1].size
            else:
                sizes.append(new.pop(0))
                written *= sizes[-1]
        yield dims, sizes


def permute(call: Call) -> Work:
    """Permute dims."""
    axes = call.axes(call.value(0))
    return Work((tuple(axes[call.place(place, axes)] for place in call.value(1)),))


def transpose(call: Call) -> Work:
    """Exchange two dims."""
    axes = list(call.axes(call.value(0)))
    one, other = call.place(call.value(1), tuple(axes)), call.place(call.value(2), tuple(axes))
    axes[one], axes[other] = axes[other], axes[one]
    return Work((tuple(axes),))


def turned(call: Call) -> Work:
    """Exchange the last two dims."""
    axes = call.axes(call.value(0))
    return Work(((*axes[:-2], *axes[:-3:-1]),))


def expand(call: Call) -> Work:
    """Repeat values along new dims, or along dims of size 1."""
    return Work((_expanded(call, call.axes(call.value(0)), call.shape),))


def _expanded(call: Call, axes: Axes, shape: tuple[int, ...]) -> Axes:
    shift = len(shape) - len(axes)
    kept = (None,) * shift + axes
    out = tuple(dim or (call.dims.new(size) if size > 1 else None) for dim, size in zip(kept, shape, strict=True))
    call.dims.keep_apart(out)
    return out


def broadcast_tensors(call: Call) -> Work:
    """Expand several tensors to their common shape."""
    if any(tuple(each.meta["val"].shape) != call.shape for each in call.value(0)):
        first = _expanded(call, call.axes(call.value(0)[0]), call.shape)
        wide = tuple(_expanded(call, call.axes(each), call.shape) for each in call.value(0)[1:])
        return Work((first, *wide))
    return Work(tuple(call.axes(each) for each in call.value(0)))


_SAME = ("alias", "clone", "contiguous", "lift_fresh_copy")
_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "ravel")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, same),
    **dict.fromkeys(("detach", "detach_"), detach),
    **dict.fromkeys(_SHAPED, reshape),
    **dict.fromkeys(("permute", "movedim_to"), permute),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("t", "mT", "numpy_T", "adjoint"), turned),
    **dict.fromkeys(("expand", "broadcast_to", "expand_as"), expand),
    "broadcast_tensors": broadcast_tensors,
}
