"""Rules that take parts of tensors, look up by index, or join tensors; no mesh axis cuts the dim of a part."""

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.views import keep_dims
from meshwise.executor.capture.rules.work import Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def _replace_dims(call: Call, dims: TensorDims, shape: tuple[int, ...]) -> TensorDims:
    """Return the dims of a result: the operand's dim where sizes are equal, else a new dim."""
    out = tuple(
        dim if dim is not None and dim.size == size else call.unifier.create_dim(size) if size > 1 else None
        for dim, size in zip(dims, shape, strict=True)
    )
    call.unifier.keep_apart(out)
    return out


def _list_changed(dims: TensorDims, out: TensorDims) -> tuple[Dim, ...]:
    common_dims = {dim for dim in dims if dim is not None} & {dim for dim in out if dim is not None}
    return tuple(dim for dim in drop_none((*dims, *out)) if dim not in common_dims)


def take_part(call: Call) -> Work:
    """Take a part along one dim; a part that is the whole tensor is a view."""
    dims = call.get_dims(call.get_argument(0))
    if tuple(call.get_argument(0).meta["val"].shape) == call.shape and call["step"] == 1:
        return keep_dims(call)
    out = _replace_dims(call, dims, call.shape)
    return Work((out,), OperatorKind.VIEW, uncut_dims=_list_changed(dims, out))


def select(call: Call) -> Work:
    """Take one index along a dim, and remove the dim."""
    dims = call.get_dims(call.get_argument(0))
    place = call.normalise_index(call["dim"], dims)
    return Work(((*dims[:place], *dims[place + 1 :]),), OperatorKind.VIEW, uncut_dims=drop_none((dims[place],)))


def unbind(call: Call) -> Work:
    """Return one tensor for each index along a dim, and remove the dim."""
    dims = call.get_dims(call.get_argument(0))
    place = call.normalise_index(call["dim"], dims)
    out = (*dims[:place], *dims[place + 1 :])
    return Work(tuple(out for _ in call.shapes), OperatorKind.VIEW, uncut_dims=drop_none((dims[place],)))


def split(call: Call) -> Work:
    """Split a tensor into parts along a dim."""
    dims = call.get_dims(call.get_argument(0))
    part_dims = tuple(_replace_dims(call, dims, shape) for shape in call.shapes)
    changed_dims = tuple(dim for out in part_dims for dim in _list_changed(dims, out))
    return Work(part_dims, OperatorKind.VIEW, uncut_dims=changed_dims, space=drop_none(dims))


def concatenate(call: Call) -> Work:
    """Concatenate tensors along a dim, which becomes a new dim."""
    operands = list(call["tensors"])
    place = call.normalise_index(call["dim"], call.get_dims(operands[0]))
    common_dims: list[Dim | None] = list(call.get_dims(operands[0]))
    uncut: list[Dim] = []
    for item, operand in enumerate(operands):
        wanted_dims = {index: dim for index, dim in enumerate(common_dims) if index != place}
        operand_dims = call.get_dims(call.read("tensors", call.align(operand, wanted_dims), item))
        common_dims = [dim or operand_dims[index] for index, dim in enumerate(common_dims)]
        uncut += drop_none((operand_dims[place],))
    joined_dim = call.unifier.create_dim(call.shape[place])
    out = tuple(joined_dim if index == place else dim for index, dim in enumerate(common_dims))
    call.unifier.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=(joined_dim, *uncut), space=drop_none(out))


def stack(call: Call) -> Work:
    """Stack tensors along a new dim."""
    place = call["dim"] % len(call.shape)
    operands = list(call["tensors"])
    dims = list(call.get_dims(operands[0]))
    for item, operand in enumerate(operands[1:], 1):
        call.read("tensors", call.align(operand, dict(enumerate(dims))), item)
    stack_dim = call.unifier.create_dim(len(operands)) if len(operands) > 1 else None
    out = (*dims[:place], stack_dim, *dims[place:])
    call.unifier.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=drop_none((stack_dim,)))


def resize(call: Call) -> Work:
    """Pad, repeat or cut dims whose size changes."""
    dims = call.get_dims(call.get_argument(0))
    dims = (None,) * (len(call.shape) - len(dims)) + dims
    out = _replace_dims(call, dims, call.shape)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=_list_changed(dims, out), space=drop_none(out))


def write_part(call: Call) -> Work:
    """Return a tensor whose part along a dim is that of another tensor."""
    dims = call.get_dims(call["self"])
    place = call.normalise_index(call["dim"], dims)
    is_select = "index" in call.arguments
    wanted_dims = dict(enumerate((*dims[:place], *dims[place + 1 :]) if is_select else dims))
    if not is_select:
        del wanted_dims[place]
    source_dims = list(call.get_dims(call.read("src", call.align(call["src"], wanted_dims))))
    part_dim = None if is_select else source_dims.pop(place)
    kept_dims = [dim or other for dim, other in zip((*dims[:place], *dims[place + 1 :]), source_dims, strict=True)]
    out = (*kept_dims[:place], dims[place], *kept_dims[place:])
    call.unifier.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=drop_none((dims[place], part_dim)), space=drop_none(out))


def repeat_interleave(call: Call) -> Work:
    """Repeat every index along a dim: the new dim is the old one times the repeats."""
    dims = call.get_dims(call["self"])
    place = call.normalise_index(call["dim"], dims)
    old_dim, total_size = dims[place], call.shape[place]
    repeat_dim = call.unifier.create_dim(total_size // (old_dim.size if old_dim is not None else 1))
    merged_dim = repeat_dim if old_dim is None else call.unifier.merge((old_dim, repeat_dim))
    out = (*dims[:place], merged_dim, *dims[place + 1 :])
    call.unifier.keep_apart(out)
    return Work((out,), OperatorKind.ELEMENTWISE)


def scan_dims(call: Call) -> Work:
    """Move, sort or accumulate values along dims that keep their size; no mesh axis cuts these dims."""
    dims = call.get_dims(call.get_argument(0))
    dim_argument = call.arguments.get("dims", call.arguments.get("dim"))
    places = list(range(len(dims))) if dim_argument is None else dim_argument
    places = places if isinstance(places, list | tuple) else [places]
    uncut = drop_none(dims[call.normalise_index(place, dims)] for place in places)
    return Work(tuple(dims for _ in call.shapes), OperatorKind.ELEMENTWISE, uncut_dims=uncut)


def take_triangle(call: Call) -> Work:
    """Keep a triangle of the last two dims, which no mesh axis cuts."""
    dims = call.get_dims(call.get_argument(0))
    return Work((dims,), OperatorKind.ELEMENTWISE, uncut_dims=drop_none(dims[-2:]))


def gather(call: Call) -> Work:
    """Take the indices of an index tensor along one dim."""
    source, index = call["self"], call["index"]
    source_dims, index_dims = call.get_dims(source), call.get_dims(index)
    place = call.normalise_index(call["dim"], source_dims)
    shared_dims = {
        position: source_dims[position]
        for position, (source_dim, index_dim) in enumerate(zip(source_dims, index_dims, strict=True))
        if position != place and source_dim is not None and index_dim is not None and source_dim.size == index_dim.size
    }
    read_index = call.read("index", call.separate(call.align(index, shared_dims), [place], source_dims))
    out = call.get_dims(read_index)
    uncut_dims = drop_none(
        dim
        for position, dim_pair in enumerate(zip(source_dims, out, strict=True))
        for dim in dim_pair
        if position not in shared_dims or position == place
    )
    call.unifier.keep_apart((*out, source_dims[place]))
    space = drop_none((*out, source_dims[place]))
    return Work(
        (out,), OperatorKind.ELEMENTWISE, uncut_dims=uncut_dims, space=space, saves=(read_index,), is_pointwise=True
    )


def index(call: Call) -> Work:
    """Take the indices of index tensors, along each dim that has one."""
    dims = call.get_dims(call.get_argument(0))
    indices = list(call["indices"])
    indexed_places = [place for place, index_node in enumerate(indices) if index_node is not None]
    is_contiguous = indexed_places == list(range(indexed_places[0], indexed_places[-1] + 1))
    # torch puts the indexed dims first where the index tensors are not next to each other
    start = indexed_places[0] if is_contiguous else 0
    kept_dims = [dim for place, dim in enumerate(dims) if place not in indexed_places]
    num_dims = len(call.shape) - len(kept_dims)
    index_dims = list(call.unifier.create_dims(call.shape[start : start + num_dims]))
    for item in indexed_places:
        operand_dims = call.get_dims(indices[item])
        wanted_dims = dict(enumerate(index_dims[num_dims - len(operand_dims) :]))
        call.read("indices", call.align(indices[item], wanted_dims), item)
    out = (*kept_dims[:start], *index_dims, *kept_dims[start:])
    call.unifier.keep_apart(out)
    lost_dims = drop_none(dims[place] for place in indexed_places)
    saves = tuple(index_node for index_node in call["indices"] if index_node is not None)
    space = (*drop_none(out), *lost_dims)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=lost_dims, space=space, saves=saves)


def embedding(call: Call) -> Work:
    """Look up rows of ``weight (rows, width)``, which is a sum over rows in which all but one have the factor 0."""
    weight, indices = call["weight"], call["indices"]
    rows, width = call.get_dims(call.read("weight", call.separate(weight, [1], call.get_dims(indices))))
    out = (*call.get_dims(indices), width)
    call.unifier.keep_apart((*out, rows))
    for dim, name in ((rows, "vocab"), (width, "hidden")):
        if dim is not None:
            dim.leaves[0].hints.add((2, name))
    return Work((out,), OperatorKind.EMBEDDING, reduced_dims=drop_none((rows,)), saves=(indices,))


def index_select(call: Call) -> Work:
    """Take the indices of a list along a dim."""
    dims = call.get_dims(call["self"])
    place = call.normalise_index(call["dim"], dims)
    read_index = call.read("index", call.separate(call["index"], [0], dims))
    out = (*dims[:place], call.get_dims(read_index)[0], *dims[place + 1 :])
    call.unifier.keep_apart((*out, dims[place]))
    uncut_dims = drop_none((dims[place],))
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=uncut_dims, space=drop_none(out), saves=(read_index,))


RULES: dict[str, Rule] = {
    "embedding": embedding,
    "index_select": index_select,
    **dict.fromkeys(("slice", "narrow"), take_part),
    "select": select,
    "unbind": unbind,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    **dict.fromkeys(("cat", "concat"), concatenate),
    "stack": stack,
    **dict.fromkeys(("slice_scatter", "select_scatter"), write_part),
    **dict.fromkeys(("constant_pad_nd", "pad", "repeat", "pixel_shuffle"), resize),
    "repeat_interleave": repeat_interleave,
    **dict.fromkeys(("roll", "flip", "cumsum", "cumprod", "sort", "argsort"), scan_dims),
    **dict.fromkeys(("tril", "triu"), take_triangle),
    "gather": gather,
    "index": index,
}
