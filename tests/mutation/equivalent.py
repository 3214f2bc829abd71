"""Mutants that no test can notice, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "simulator/compute.py",
        "wide = ITEMSIZE[block.tensor[operator.inputs[0]].dtype]",
        "wide = ITEMSIZE[block.tensor[operator.inputs[(-1)]].dtype]",
    ): "both operands of a product have one dtype",
    (
        "strategies/lowering/gradient_storage.py",
        'return in_time and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > 2',
        'return in_time and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > (3)',
    ): "no dtype has 3 bytes",
    (
        "strategies/explanation/sensitivity.py",
        "if beaten.stays or abs(log(edge)) <= NEARER:",
        "if beaten.stays or (abs(log(edge)) < NEARER):",
    ): "an edge is found to the same fraction either way, and bisection never ends just there",
}
"""By file, what its line was and what it is now."""
