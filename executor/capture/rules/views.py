"""Rules of views: the same values under other torch dims. A view is no operator and is sharded as its operand."""

from collections.abc import Iterator

from meshwise.executor.capture.rules.dims import Dim, TensorDims, list_leaves
from meshwise.executor.capture.rules.work import Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def keep_dims(call: Call) -> Work:
    """Keep all dims."""
    return Work((call.get_dims(call.get_argument(0)),))


def detach(call: Call) -> Work:
    """Keep all dims, as an operator: a view would be replaced by its operand, through which gradients flow."""
    dims = call.get_dims(call.get_argument(0))
    return Work((dims,), OperatorKind.VIEW, space=drop_none(dims))


def reshape(call: Call) -> Work:
    """Merge and split dims; where sizes do not nest, the dims are new ones and no mesh axis cuts the old ones."""
    source = call.get_argument(0)
    dims, shape = drop_none(call.get_dims(source)), [size for size in call.shape if size > 1]
    new_dims: list[Dim] = []
    lost_dims: list[Dim] = []
    for group, sizes in _group_dims(dims, shape):
        parts = tuple(group) if [dim.size for dim in group] == sizes else call.unifier.split(group, sizes)
        if parts is None:
            lost_dims += list_leaves(group)
            parts = tuple(call.unifier.create_dim(size) for size in sizes)
        new_dims += parts
    remaining_dims = iter(new_dims)
    out = tuple(next(remaining_dims) if size > 1 else None for size in call.shape)
    call.unifier.keep_apart(out)
    return Work((out,), OperatorKind.VIEW, uncut_dims=tuple(lost_dims), space=dims) if lost_dims else Work((out,))


def _group_dims(old_dims: tuple[Dim, ...], shape: list[int]) -> Iterator[tuple[list[Dim], list[int]]]:
    """Yield, in order, the shortest groups of dims and of sizes whose products are equal."""
    remaining_dims, remaining_sizes = list(old_dims), list(shape)
    while remaining_dims:
        dims, sizes = [remaining_dims.pop(0)], [remaining_sizes.pop(0)]
        read_size, written_size = dims[0].size, sizes[0]
        while read_size != written_size:
            if read_size < written_size:
                dims.append(remaining_dims.pop(0))
                read_size *= dims[-1].size
            else:
                sizes.append(remaining_sizes.pop(0))
                written_size *= sizes[-1]
        yield dims, sizes


def permute(call: Call) -> Work:
    """Permute dims."""
    dims = call.get_dims(call.get_argument(0))
    return Work((tuple(dims[call.normalise_index(place, dims)] for place in call.get_argument(1)),))


def transpose(call: Call) -> Work:
    """Exchange two dims."""
    dims = list(call.get_dims(call.get_argument(0)))
    first_place, second_place = (call.normalise_index(call.get_argument(place), tuple(dims)) for place in (1, 2))
    dims[first_place], dims[second_place] = dims[second_place], dims[first_place]
    return Work((tuple(dims),))


def transpose_last(call: Call) -> Work:
    """Exchange the last two dims."""
    dims = call.get_dims(call.get_argument(0))
    return Work(((*dims[:-2], *dims[:-3:-1]),))


def expand(call: Call) -> Work:
    """Repeat values along new dims, or along dims of size 1."""
    return Work((_expand_dims(call, call.get_dims(call.get_argument(0)), call.shape),))


def _expand_dims(call: Call, dims: TensorDims, shape: tuple[int, ...]) -> TensorDims:
    padded_dims = (None,) * (len(shape) - len(dims)) + dims
    out = tuple(
        dim or (call.unifier.create_dim(size) if size > 1 else None)
        for dim, size in zip(padded_dims, shape, strict=True)
    )
    call.unifier.keep_apart(out)
    return out


def broadcast_tensors(call: Call) -> Work:
    """Expand several tensors to their common shape."""
    operands = call.get_argument(0)
    if any(tuple(operand.meta["val"].shape) != call.shape for operand in operands):
        return Work(tuple(_expand_dims(call, call.get_dims(operand), call.shape) for operand in operands))
    return Work(tuple(call.get_dims(operand) for operand in operands))


_IDENTITIES = ("alias", "clone", "contiguous", "lift_fresh_copy")
_RESHAPES = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_copy", "ravel")

RULES: dict[str, Rule] = {
    **dict.fromkeys(_IDENTITIES, keep_dims),
    **dict.fromkeys(("detach", "detach_"), detach),
    **dict.fromkeys(_RESHAPES, reshape),
    **dict.fromkeys(("permute", "movedim_to"), permute),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("t", "mT", "numpy_T", "adjoint"), transpose_last),
    **dict.fromkeys(("expand", "broadcast_to", "expand_as"), expand),
    "broadcast_tensors": broadcast_tensors,
}
