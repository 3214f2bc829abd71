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
    (
        "strategies/bound.py",
        'if plan.schedule_name == "naive" and sends is not None:  # one microbatch after another, there and back',
        "if (plan.schedule_name == 'naive'):  # one microbatch after another, there and back",
    ): "stages of naive adjoin, so that there are sends; the rest is for the checker of types",
    (
        "strategies/bound.py",
        "return [sum(each) + sum(norm) for each in zip(reduced, replicated, squares, steps, gather, strict=True)]",
        "return [sum(each) + sum(norm) for each in zip(reduced, replicated, squares, steps, gather, strict=(False))]",
    ): "all columns have an entry a position",
    (
        "strategies/lowering/loads.py",
        "return parts[0] if len(parts) == 1 else np.concatenate(parts)",
        "return parts[0] if len(parts) == (0) else np.concatenate(parts)",
    ): "one part concatenated is that part, copied",
}
"""By file, what its line was and what it is now."""
