"""The tests that should notice a change in a file of cost formulas: fast ones, those nearest to it first."""

_COLLECTIVES = ("tests/simulator/collectives", "tests/simulator/test_collective.py")
_KERNELS = ("tests/simulator/kernels", "tests/simulator/test_compute.py")
_STEPS = (
    "tests/strategies/test_training.py",
    "tests/strategies/test_stage_costs.py",
    "tests/strategies/test_lowering.py",
)

TESTS: dict[str, tuple[str, ...]] = {
    "simulator/compute.py": (*_KERNELS, "tests/simulator/models/test_attention_kernels.py"),
    "simulator/kernels/matmul.py": _KERNELS,
    "simulator/kernels/attention.py": (*_KERNELS, "tests/simulator/models/test_attention_kernels.py"),
    "simulator/collective.py": _COLLECTIVES,
    "simulator/collectives/ring.py": _COLLECTIVES,
    "simulator/collectives/tree.py": _COLLECTIVES,
    "simulator/collectives/hierarchical.py": _COLLECTIVES,
    "simulator/collectives/torus.py": _COLLECTIVES,
    "simulator/collectives/in_switch.py": _COLLECTIVES,
    "simulator/collectives/point_to_point.py": _COLLECTIVES,
    "simulator/collectives/traffic.py": _COLLECTIVES,
    "simulator/library.py": (*_COLLECTIVES, "tests/simulator/test_library.py"),
    "strategies/bound.py": ("tests/strategies/test_bound.py",),
    "strategies/explanation/sensitivity.py": ("tests/strategies/explanation/test_sensitivity.py",),
    "strategies/group_bounds.py": ("tests/strategies/test_group_bounds.py",),
    "strategies/lowering/gradient_storage.py": ("tests/strategies/test_gradient_storage.py",),
    "strategies/lowering/liveness.py": ("tests/strategies/test_liveness.py",),
    "strategies/lowering/loads.py": ("tests/strategies/test_loads.py",),
    "strategies/lowering/memory.py": ("tests/strategies/test_memory.py",),
    "strategies/lowering/optimizer.py": ("tests/strategies/test_optimizer.py", "tests/strategies/test_training.py"),
    "strategies/operators/edge_costs.py": ("tests/strategies/operators/test_costs.py",),
    "strategies/operators/node_costs.py": ("tests/strategies/operators/test_costs.py",),
}
