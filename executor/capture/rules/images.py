"""Rules of convolution, pooling and resizing of images, with dims ``batch, channels`` and then the spatial dims."""

from torch.fx import Node

from meshwise.executor.capture.rules.dims import Axes, Dim
from meshwise.executor.capture.rules.work import Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind

SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def convolution(call: Call) -> Work:
    """``(batch, in, ..) * weight (out, in / groups, kernel ..) -> (batch, out, ..)``.

    No mesh axis cuts spatial dims, because a point needs its neighbours. With groups, channels are not cut either.
    """
    weight, channels = call["weight"], call.axes(call["input"])[1]
    read = call.align(weight, {1: channels}) if call["groups"] == 1 else weight
    read = call.separate(read, [0], (channels,))
    return _convolved(call, read, call.axes(read)[0], call.axes(read)[1])


def transposed_convolution(call: Call) -> Work:
    """``(batch, in, ..) * weight (in, out / groups, kernel ..) -> (batch, out, ..)``."""
    channels = call.axes(call["input"])[1]
    read = call.separate(call.align(call["weight"], {0: channels}), [1], (channels,))
    (grouped,) = call.dims.axes(call.shape[1:2])
    return _convolved(call, read, call.axes(read)[1] if call["groups"] == 1 else grouped, channels)


def general_convolution(call: Call) -> Work:
    """Convolve or convolve transposed, as the argument ``transposed`` says."""
    return transposed_convolution(call) if call["transposed"] else convolution(call)


def _convolved(call: Call, weight: Node, wide: Dim | None, inner: Dim | None) -> Work:
    call.read("weight", weight)
    source = call["input"]
    axes, kernel = call.axes(source), call.axes(weight)
    if call["bias"] is not None:
        call.read("bias", call.align(call["bias"], {0: wide}))
    space = _moved(call, axes, call.shape)
    out = (axes[0], wide, *space)
    window = kernel[2:]
    call.dims.keep_apart((*out, inner, *window))
    _name(call, axes, out, kernel)
    transposed = call.given.get("transposed", "transpose" in str(call.node.target))
    points = axes[2:] if transposed else space  # a transposed convolution multiplies at every point that it reads
    walked = present((axes[0], wide, *points, inner, *window))
    spatial = present((*space, *axes[2:], *window))
    channels = present((wide, axes[1], inner)) if call["groups"] > 1 else ()
    return Work(
        (out,),
        OperatorKind.CONVOLUTION,
        reduced=present((inner, *window)),
        uncut=(*spatial, *channels),
        space=walked,
        flops=2.0,
        saves=(source,),
    )


def _moved(call: Call, axes: Axes, shape: tuple[int, ...]) -> Axes:
    """Return the spatial dims of a result: the image's dim where the size is the same, else a new dim."""
    result = []
    for axis, size in zip(axes[2:], shape[2:], strict=True):
        same = axis is not None and axis.size == size
        result.append(axis if same else call.dims.new(size) if size > 1 else None)
    return tuple(result)


def _name(call: Call, axes: Axes, out: Axes, kernel: Axes = ()) -> None:
    names = SPACE.get(len(out) - 2, ())
    for image in (axes, out):
        for axis, name in zip(image[1:], ("channels", *names), strict=False):
            if axis is not None:
                axis.leaves[0].hints.add((5, name))
    for axis, name in zip(kernel[2:], names, strict=False):
        if axis is not None:
            axis.leaves[0].hints.add((5, f"kernel_{name}"))


def pooling(call: Call) -> Work:
    """Reduce windows of an image; backward of a maximum reads the image, backward of a mean does not."""
    source = call.value(0)
    axes = call.axes(source)
    out = (*axes[:2], *_moved(call, axes, call.shape))
    call.dims.keep_apart(out)
    _name(call, axes, out)
    kept = (source,) if "max" in str(call.node.target) else ()
    shapes = tuple(out for _ in call.shapes)
    return Work(shapes, OperatorKind.POOLING, uncut=present((*out[2:], *axes[2:])), saves=kept)


def resizing(call: Call) -> Work:
    """Interpolate an image at other points."""
    axes = call.axes(call.value(0))
    out = (*axes[:2], *_moved(call, axes, call.shape))
    call.dims.keep_apart(out)
    _name(call, axes, out)
    return Work((out,), OperatorKind.ELEMENTWISE, uncut=present((*out[2:], *axes[2:])))


_POOLING = [f"{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for rank in (1, 2, 3)]
_RESIZING = ("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution),
    "convolution": general_convolution,
    **dict.fromkeys((*_POOLING, "max_pool2d_with_indices", "_adaptive_avg_pool2d"), pooling),
    **dict.fromkeys(_RESIZING, resizing),
}
