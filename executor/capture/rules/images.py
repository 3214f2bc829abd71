"""Rules of convolution, pooling and resizing of images, with dims ``batch, channels`` and then the spatial dims."""

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Dim, TensorDims
from meshwise.executor.capture.rules.work import Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind

SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def convolution(call: Call) -> Work:
    """``(batch, in, ..) * weight (out, in / groups, kernel ..) -> (batch, out, ..)``.

    No mesh axis cuts spatial dims, because a point needs its neighbours. With groups, channels are not cut either.
    """
    weight, channels = call["weight"], call.get_dims(call["input"])[1]
    read_weight = call.align(weight, {1: channels}) if call["groups"] == 1 else weight
    read_weight = call.separate(read_weight, [0], (channels,))
    return _convolve(call, read_weight, call.get_dims(read_weight)[0], call.get_dims(read_weight)[1])


def transposed_convolution(call: Call) -> Work:
    """``(batch, in, ..) * weight (in, out / groups, kernel ..) -> (batch, out, ..)``."""
    channels = call.get_dims(call["input"])[1]
    read_weight = call.separate(call.align(call["weight"], {0: channels}), [1], (channels,))
    (grouped_channels,) = call.unifier.create_dims(call.shape[1:2])
    return _convolve(
        call, read_weight, call.get_dims(read_weight)[1] if call["groups"] == 1 else grouped_channels, channels
    )


def general_convolution(call: Call) -> Work:
    """Convolve or convolve transposed, as the argument ``transposed`` says."""
    return transposed_convolution(call) if call["transposed"] else convolution(call)


def _convolve(call: Call, weight: Node, output_channels: Dim | None, input_channels: Dim | None) -> Work:
    call.replace_operand("weight", weight)
    source = call["input"]
    dims, kernel_dims = call.get_dims(source), call.get_dims(weight)
    if call["bias"] is not None:
        call.replace_operand("bias", call.align(call["bias"], {0: output_channels}))
    space_dims = _map_space(call, dims, call.shape)
    out = (dims[0], output_channels, *space_dims)
    window_dims = kernel_dims[2:]
    call.unifier.keep_apart((*out, input_channels, *window_dims))
    _hint_dims(call, dims, out, kernel_dims)
    is_transposed = call.arguments.get("transposed", "transpose" in str(call.node.target))
    points = dims[2:] if is_transposed else space_dims  # transposed it multiplies at every point that it reads
    iteration_dims = drop_none((dims[0], output_channels, *points, input_channels, *window_dims))
    spatial_dims = drop_none((*space_dims, *dims[2:], *window_dims))
    channels = drop_none((output_channels, dims[1], input_channels)) if call["groups"] > 1 else ()
    return Work(
        (out,),
        OperatorKind.CONVOLUTION,
        reduced_dims=drop_none((input_channels, *window_dims)),
        uncut_dims=(*spatial_dims, *channels),
        space=iteration_dims,
        flops=2.0,
        saves=(source,),
    )


def _map_space(call: Call, dims: TensorDims, shape: tuple[int, ...]) -> TensorDims:
    """Return the spatial dims of a result: the image's dim where the size is the same, else a new dim."""
    result = []
    for dim, size in zip(dims[2:], shape[2:], strict=True):
        is_same = dim is not None and dim.size == size
        result.append(dim if is_same else call.unifier.create_dim(size) if size > 1 else None)
    return tuple(result)


def _hint_dims(call: Call, dims: TensorDims, out: TensorDims, kernel_dims: TensorDims = ()) -> None:
    names = SPACE.get(len(out) - 2, ())
    for image_dims in (dims, out):
        for dim, name in zip(image_dims[1:], ("channels", *names), strict=False):
            if dim is not None:
                dim.leaves[0].hints.add((5, name))
    for dim, name in zip(kernel_dims[2:], names, strict=False):
        if dim is not None:
            dim.leaves[0].hints.add((5, f"kernel_{name}"))


def pooling(call: Call) -> Work:
    """Reduce windows of an image; backward of a maximum reads the image, backward of a mean does not."""
    source = call.get_argument(0)
    dims = call.get_dims(source)
    out = (*dims[:2], *_map_space(call, dims, call.shape))
    call.unifier.keep_apart(out)
    _hint_dims(call, dims, out)
    saves = (source,) if "max" in str(call.node.target) else ()
    shapes = tuple(out for _ in call.shapes)
    return Work(shapes, OperatorKind.POOLING, uncut_dims=drop_none((*out[2:], *dims[2:])), saves=saves)


def resizing(call: Call) -> Work:
    """Interpolate an image at other points."""
    dims = call.get_dims(call.get_argument(0))
    out = (*dims[:2], *_map_space(call, dims, call.shape))
    call.unifier.keep_apart(out)
    _hint_dims(call, dims, out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut_dims=drop_none((*out[2:], *dims[2:])))


_POOLING = [
    f"{kind}_pool{num_dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for num_dims in (1, 2, 3)
]
_RESIZING = ("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    "convolution": general_convolution,
    **dict.fromkeys((*_POOLING, "max_pool2d_with_indices", "_adaptive_avg_pool2d"), pooling),
    **dict.fromkeys(_RESIZING, resizing),
}
