"""The tests that should notice a change in a file of cost formulas: fast ones, those nearest to it first."""

_COLLECTIVES = "tests/simulator/collectives"
_LEVELS = (
    f"{_COLLECTIVES}/test_levels.py",
    "tests/simulator/test_library.py",
    f"{_COLLECTIVES}/test_steps.py",
    "tests/simulator/test_collective.py",
)
_COMPUTE = ("tests/simulator/test_compute.py", "tests/simulator/kernels")

TESTS: dict[str, tuple[str, ...]] = {
    "simulator/machine/compute.py": (*_COMPUTE, "tests/simulator/models/test_attention_kernels.py"),
    "simulator/machine/kernels.py": (
        "tests/simulator/kernels/test_matmul.py",
        "tests/simulator/kernels/test_attention.py",
        "tests/simulator/models/test_attention_kernels.py",
        "tests/simulator/test_compute.py",
    ),
    "simulator/collectives/choose.py": _LEVELS,
    "simulator/collectives/ring.py": (f"{_COLLECTIVES}/test_ring.py", *_LEVELS),
    "simulator/collectives/tree.py": (f"{_COLLECTIVES}/test_tree.py", *_LEVELS),
    "simulator/collectives/hierarchical.py": _LEVELS,
    "simulator/collectives/torus.py": (f"{_COLLECTIVES}/test_torus.py", *_LEVELS),
    "simulator/collectives/in_switch.py": _LEVELS,
    "simulator/collectives/point_to_point.py": (f"{_COLLECTIVES}/test_point_to_point.py", *_LEVELS),
    "simulator/collectives/traffic.py": _LEVELS,
    "simulator/machine/cluster.py": ("tests/simulator/test_library.py",),
    "simulator/engine/flows.py": ("tests/simulator/test_max_min.py", "tests/simulator/test_pace.py"),
    "strategies/bounds/step_time.py": ("tests/strategies/test_bound.py",),
    "strategies/explanation/sensitivity.py": (
        "tests/strategies/explanation/test_edge.py",
        "tests/strategies/explanation/test_sensitivity.py",
    ),
    "strategies/bounds/group_bounds.py": (
        "tests/strategies/test_group_bounds.py",
        "tests/strategies/test_group_bounds_memory.py",
    ),
    "strategies/lowering/costs/rewrites.py": (
        "tests/strategies/test_accumulation.py",
        "tests/strategies/test_tensor_overlap.py",
    ),
    "strategies/lowering/costs/optimizer.py": (
        "tests/strategies/test_clipping.py",
        "tests/strategies/test_gradient_storage.py",
        "tests/strategies/test_optimizer.py",
        "tests/strategies/test_training.py",
    ),
    "strategies/lowering/costs/liveness.py": (
        "tests/strategies/test_live_tensors.py",
        "tests/strategies/test_liveness.py",
    ),
    "strategies/lowering/rank_classes/placement.py": ("tests/strategies/test_loads.py",),
    "strategies/lowering/costs/memory.py": ("tests/strategies/test_memory.py",),
    "strategies/lowering/costs/recompute.py": ("tests/strategies/test_recompute_memory.py",),
    "strategies/lowering/costs/operator.py": (
        "tests/strategies/test_steps_around.py",
        "tests/strategies/operators/test_edge_costs.py",
    ),
    "strategies/operators/costs.py": (
        "tests/strategies/operators/test_edge_costs.py",
        "tests/strategies/operators/test_node_costs.py",
        "tests/strategies/operators/test_costs.py",
    ),
}
