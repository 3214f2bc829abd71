"""Rules of norms and softmax: they need statistics along dims, which parts of these dims cannot compute alone."""

from meshwise.executor.capture.rules.elementwise import broadcast_operands, list_tensors
from meshwise.executor.capture.rules.work import RESULT, Call, Rule, Work, drop_none
from meshwise.simulator.operator_graph import OperatorKind


def layer_norm(call: Call) -> Work:
    """Normalise over the last dims, which weight and bias have as well."""
    source = call.get_argument(0)
    dims = call.get_dims(source)
    broadcast_operands(call, list_tensors(call))
    normalised_dims = drop_none(dims[len(dims) - len(call["normalized_shape"]) :])
    if normalised_dims:
        normalised_dims[-1].leaves[-1].hints.add((4, "hidden"))
    return Work((dims,), OperatorKind.NORM, uncut_dims=normalised_dims, saves=(source,))


def group_norm(call: Call) -> Work:
    """Normalise groups of channels over all points; weight and bias have one value per channel."""
    source = call.get_argument(0)
    dims = call.get_dims(source)
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            call.replace_operand(name, call.align(call[name], {0: dims[1]}))
    return Work((dims,), OperatorKind.NORM, uncut_dims=drop_none(dims[1:]), saves=(source,))


def softmax(call: Call) -> Work:
    """Compute the softmax along one dim; backward reads the result."""
    dims = call.get_dims(call.get_argument(0))
    softmax_dims = drop_none((dims[call.normalise_index(call["dim"], dims)],))
    return Work((dims,), OperatorKind.SOFTMAX, uncut_dims=softmax_dims, saves=(RESULT,))


def log_softmax(call: Call) -> Work:
    """Compute the log-softmax along the classes of a loss; backward reads the result."""
    dims = call.get_dims(call.get_argument(0))
    softmax_dims = drop_none((dims[call.normalise_index(call["dim"], dims)],))
    for dim in softmax_dims:
        dim.leaves[0].hints.add((3, "classes"))
    return Work((dims,), OperatorKind.CROSS_ENTROPY, uncut_dims=softmax_dims, saves=(RESULT,))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    "group_norm": group_norm,
    **dict.fromkeys(("softmax", "_softmax"), softmax),
    **dict.fromkeys(("log_softmax", "_log_softmax"), log_softmax),
}
