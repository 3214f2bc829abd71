"""Rules of norms and softmax: they need statistics along dims, which parts of these dims cannot compute alone."""

from meshwise.executor.capture.rules.elementwise import broadcast, tensors
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, Work, present
from meshwise.simulator.operator_graph import OperatorKind


def layer_norm(call: Call) -> Work:
    """Normalise over the last dims, which weight and bias have as well."""
    source = call.value(0)
    axes = call.axes(source)
    broadcast(call, tensors(call))
    over = present(axes[len(axes) - len(call["normalized_shape"]) :])
    if over:
        over[-1].leaves[-1].hints.add((4, "hidden"))
    return Work((axes,), OperatorKind.NORM, uncut=over, saves=(source,))


def group_norm(call: Call) -> Work:
    """Normalise groups of channels over all points; weight and bias have one value per channel."""
    source = call.value(0)
    axes = call.axes(source)
    for name in ("weight", "bias"):
        if call.given.get(name) is not None:
            call.read(name, call.align(call[name], {0: axes[1]}))
    return Work((axes,), OperatorKind.NORM, uncut=present(axes[1:]), saves=(source,))


def softmax(call: Call) -> Work:
    """Compute the softmax along one dim; backward reads the result."""
    axes = call.axes(call.value(0))
    over = present((axes[call.place(call["dim"], axes)],))
    return Work((axes,), OperatorKind.SOFTMAX, uncut=over, saves=(RESULT,))


def log_softmax(call: Call) -> Work:
    """Compute the log-softmax along the classes of a loss; backward reads the result."""
    axes = call.axes(call.value(0))
    over = present((axes[call.place(call["dim"], axes)],))
    for dim in over:
        dim.leaves[0].hints.add((3, "classes"))
    return Work((axes,), OperatorKind.CROSS_ENTROPY, uncut=over, saves=(RESULT,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "group_norm": group_norm,
    **dict.fromkeys(("softmax", "_softmax"), softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), log_softmax),
}
