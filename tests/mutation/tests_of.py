"""The tests that should notice a change in a file of cost formulas: fast ones, those nearest to it first."""

_COLLECTIVES = "tests/simulator/collectives"
_LEVELS = (
    f"{_COLLECTIVES}/test_hierarchical.py",
    f"{_COLLECTIVES}/test_in_switch.py",
    f"{_COLLECTIVES}/test_choose.py",
    f"{_COLLECTIVES}/test_ring_steps.py",
    "tests/simulator/test_collective.py",
)
_COMPUTE = (
    "tests/simulator/machine/test_compute.py",
    "tests/simulator/machine/test_kernels.py",
    "tests/simulator/machine/test_kernels_attention.py",
)

TESTS: dict[str, tuple[str, ...]] = {
    "simulator/machine/compute.py": (*_COMPUTE, "tests/simulator/machine/test_compute_attention.py"),
    "simulator/machine/kernels.py": (
        "tests/simulator/machine/test_kernels.py",
        "tests/simulator/machine/test_kernels_attention.py",
        "tests/simulator/machine/test_compute_attention.py",
        "tests/simulator/machine/test_compute.py",
    ),
    "simulator/collectives/choose.py": _LEVELS,
    "simulator/collectives/ring.py": (f"{_COLLECTIVES}/test_ring.py", *_LEVELS),
    "simulator/collectives/tree.py": (f"{_COLLECTIVES}/test_tree.py", *_LEVELS),
    "simulator/collectives/hierarchical.py": _LEVELS,
    "simulator/collectives/torus.py": (f"{_COLLECTIVES}/test_torus.py", *_LEVELS),
    "simulator/collectives/in_switch.py": _LEVELS,
    "simulator/collectives/point_to_point.py": (f"{_COLLECTIVES}/test_point_to_point.py", *_LEVELS),
    "simulator/collectives/traffic.py": _LEVELS,
    "simulator/machine/cluster.py": ("tests/simulator/collectives/test_choose.py",),
    "simulator/engine/flows.py": ("tests/simulator/engine/test_flows.py",),
    "strategies/bounds/step_time.py": ("tests/strategies/bounds/test_step_time.py",),
    "strategies/stages/joint_program.py": ("tests/strategies/stages/test_joint_program.py",),
    "strategies/search/speed_division.py": (
        "tests/strategies/search/test_speed_division.py",
        "tests/strategies/search/test_choices.py",
    ),
    "strategies/explanation/sensitivity.py": (
        "tests/strategies/explanation/test_sensitivity_edge.py",
        "tests/strategies/explanation/test_sensitivity.py",
    ),
    "strategies/bounds/group_bounds.py": (
        "tests/strategies/bounds/test_group_bounds.py",
        "tests/strategies/bounds/test_group_bounds_memory.py",
    ),
    "strategies/lowering/costs/rewrites.py": (
        "tests/strategies/lowering/costs/test_rewrites.py",
        "tests/strategies/lowering/costs/test_rewrites_overlap.py",
    ),
    "strategies/lowering/costs/optimizer.py": (
        "tests/strategies/lowering/costs/test_optimizer_clipping.py",
        "tests/strategies/lowering/costs/test_optimizer.py",
        "tests/strategies/lowering/costs/test_optimizer_precisions.py",
        "tests/strategies/lowering/test_timing_optimizer.py",
    ),
    "strategies/lowering/timing.py": (
        "tests/strategies/lowering/test_timing.py",
        "tests/strategies/lowering/test_timing_optimizer.py",
        "tests/strategies/operators/test_costs_nodes.py",
    ),
    "strategies/lowering/costs/segments.py": (
        "tests/strategies/lowering/test_timing.py",
        "tests/strategies/lowering/costs/test_segments.py",
    ),
    "strategies/bounds/pass_peaks.py": ("tests/strategies/bounds/test_pass_peaks.py",),
    "strategies/lowering/costs/liveness.py": (
        "tests/strategies/lowering/costs/test_liveness_operators.py",
        "tests/strategies/lowering/costs/test_liveness.py",
    ),
    "strategies/lowering/rank_classes/placement.py": ("tests/strategies/lowering/rank_classes/test_placement.py",),
    "strategies/lowering/costs/memory.py": ("tests/strategies/lowering/costs/test_memory.py",),
    "strategies/lowering/costs/recompute.py": ("tests/strategies/lowering/costs/test_recompute.py",),
    "strategies/lowering/costs/operator.py": (
        "tests/strategies/lowering/costs/test_operator.py",
        "tests/strategies/operators/test_costs_edges.py",
    ),
    "strategies/lowering/costs/layout.py": (
        "tests/strategies/lowering/costs/test_operator.py",
        "tests/strategies/operators/test_costs_edges.py",
    ),
    "strategies/operators/pass_costs.py": (
        "tests/strategies/operators/test_costs_edges.py",
        "tests/strategies/operators/test_costs_nodes.py",
        "tests/strategies/operators/test_costs.py",
    ),
}
