"""Rules that take parts of tensors or join tensors; no mesh axis cuts the dim along which they do so."""

from meshwise.executor.capture.rules.dims import Axes, Dim
from meshwise.executor.capture.rules.views import same
from meshwise.executor.capture.rules.work import Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def _replaced(call: Call, axes: Axes, shape: tuple[int, ...]) -> Axes:
    """Return the dims of a result: the operand's dim where sizes are equal, else a new dim."""
    out = tuple(
        axis if axis is not None and axis.size == size else call.dims.new(size) if size > 1 else None
        for axis, size in zip(axes, shape, strict=True)
    )
    call.dims.keep_apart(out)
    return out


def _changed(axes: Axes, out: Axes) -> tuple[Dim, ...]:
    kept = {axis for axis in axes if axis is not None} & {axis for axis in out if axis is not None}
    return tuple(axis for axis in present((*axes, *out)) if axis not in kept)


def part(call: Call) -> Work:
    """Take a part along one dim; a part that is the whole tensor is a view."""
    axes = call.axes(call.value(0))
    if tuple(call.value(0).meta["val"].shape) == call.shape and call["step"] == 1:
        return same(call)
    out = _replaced(call, axes, call.shape)
    return Work((out,), OperatorKind.VIEW, uncut=_changed(axes, out))


def select(call: Call) -> Work:
    """Take one index along a dim, and remove the dim."""
    axes = call.axes(call.value(0))
    place = call.place(call["dim"], axes)
    return Work(((*axes[:place], *axes[place + 1 :]),), OperatorKind.VIEW, uncut=present((axes[place],)))


def unbind(call: Call) -> Work:
    """Return one tensor for each index along a dim, and remove the dim."""
    axes = call.axes(call.value(0))
    place = call.place(call["dim"], axes)
    out = (*axes[:place], *axes[place + 1 :])
    return Work(tuple(out for _ in call.shapes), OperatorKind.VIEW, uncut=present((axes[place],)))


def split(call: Call) -> Work:
    """Split a tensor into parts along a dim."""
    axes = call.axes(call.value(0))
    made = tuple(_replaced(call, axes, shape) for shape in call.shapes)
    changed = tuple(dim for out in made for dim in _changed(axes, out))
    return Work(made, OperatorKind.VIEW, uncut=changed, space=present(axes))


def concatenate(call: Call) -> Work:
    """Concatenate tensors along a dim, which becomes a new dim."""
    operands = list(call["tensors"])
    place = call.place(call["dim"], call.axes(operands[0]))
    first: list[Dim | None] = list(call.axes(operands[0]))
    uncut: list[Dim] = []
    for item, operand in enumerate(operands):
        wanted = {index: dim for index, dim in enumerate(first) if index != place}
        read = call.align(operand, wanted)
        if read is not operand:
            call.read_item("tensors", item, read)
        axes = call.axes(read)
        first = [dim or axes[index] for index, dim in enumerate(first)]
        uncut += present((axes[place],))
    joined = call.dims.new(call.shape[place])
    out = tuple(joined if index == place else dim for index, dim in enumerate(first))
    call.dims.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=(joined, *uncut), space=present(out))


def stack(call: Call) -> Work:
    """Stack tensors along a new dim."""
    place = call["dim"] % len(call.shape)
    operands = list(call["tensors"])
    shape = list(call.axes(operands[0]))
    for item, operand in enumerate(operands[1:], 1):
        read = call.align(operand, dict(enumerate(shape)))
        if read is not operand:
            call.read_item("tensors", item, read)
    number = call.dims.new(len(operands)) if len(operands) > 1 else None
    out = (*shape[:place], number, *shape[place:])
    call.dims.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=present((number,)))


def resized(call: Call) -> Work:
    """Pad, repeat or cut dims whose size changes."""
    axes = call.axes(call.value(0))
    shift = len(call.shape) - len(axes)
    axes = (None,) * shift + axes
    out = _replaced(call, axes, call.shape)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=_changed(axes, out), space=present(out))


def repeat_interleave(call: Call) -> Work:
    """Repeat every index along a dim: the new dim is the old one times the repeats."""
    axes = call.axes(call["self"])
    place = call.place(call["dim"], axes)
    old, total = axes[place], call.shape[place]
    times = call.dims.new(total // (old.size if old is not None else 1))
    merged = times if old is None else call.dims.merge((old, times))
    out = (*axes[:place], merged, *axes[place + 1 :])
    call.dims.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE)


def along(call: Call) -> Work:
    """Move, sort or accumulate values along dims that keep their size; no mesh axis cuts these dims."""
    axes = call.axes(call.value(0))
    given = call.given.get("dims", call.given.get("dim"))
    places = list(range(len(axes))) if given is None else given if isinstance(given, list | tuple) else [given]
    uncut = present(axes[call.place(place, axes)] for place in places)
    return Work(tuple(axes for _ in call.shapes), OperatorKind.ELEMENTWISE, uncut=uncut)


def triangle(call: Call) -> Work:
    """Keep a triangle of the last two dims, which no mesh axis cuts."""
    axes = call.axes(call.value(0))
    return Work((axes,), OperatorKind.ELEMENTWISE, uncut=present(axes[-2:]))


def gather(call: Call) -> Work:
    """Take the indices of an index tensor along one dim."""
    source, index = call["self"], call["index"]
    axes, picked = call.axes(source), call.axes(index)
    place = call.place(call["dim"], axes)
    alike = {
        each: axes[each]
        for each, (one, other) in enumerate(zip(axes, picked, strict=True))
        if each != place and one is not None and other is not None and one.size == other.size
    }
    read = call.align(index, alike)
    read = call.separate(read, [place], axes)
    if read is not index:
        call.read("index", read)
    out = call.axes(read)
    others = present(
        dim
        for each, pair in enumerate(zip(axes, out, strict=True))
        for dim in pair
        if each not in alike or each == place
    )
    call.dims.keep_apart((*out, axes[place]))
    return Work(
        (out,), OperatorKind.ELEMENTWISE, uncut=others, space=present(out) + present((axes[place],)), saves=(read,)
    )


def index(call: Call) -> Work:
    """Take the indices of index tensors, along each dim that has one."""
    axes = call.axes(call.value(0))
    indices = list(call["indices"])
    taken = [place for place, each in enumerate(indices) if each is not None]
    together = taken == list(range(taken[0], taken[-1] + 1))
    # torch puts the indexed dims first where the index tensors are not next to each other
    start = taken[0] if together else 0
    kept = [axis for place, axis in enumerate(axes) if place not in taken]
    rank = len(call.shape) - len(kept)
    inner = list(call.dims.axes(call.shape[start : start + rank]))
    for item in taken:
        have = call.axes(indices[item])
        shift = rank - len(have)
        read = call.align(indices[item], {place: inner[place + shift] for place in range(len(have))})
        if read is not indices[item]:
            call.read_item("indices", item, read)
    out = (*kept[:start], *inner, *kept[start:])
    call.dims.keep_apart(out)
    lost = present(axes[place] for place in taken)
    saves = tuple(each for each in call["indices"] if each is not None)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=lost, space=(*present(out), *lost), saves=saves)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("slice", "narrow"), part),
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    **dict.fromkeys(("cat", "concat"), concatenate),
    "stack": stack,
    **dict.fromkeys(("constant_pad_nd", "pad", "repeat", "pixel_shuffle"), resized),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("roll", "flip", "cumsum", "cumprod", "sort", "argsort"), along),
    **dict.fromkeys(("tril", "triu"), triangle),
    "gather": gather,
    "index": index,
}
