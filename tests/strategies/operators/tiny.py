"""A tiny layer on a slow machine, whose seconds and bytes can be reckoned on paper."""

from meshwise.simulator.machine.accelerator import Accelerator
from meshwise.simulator.machine.cluster import build_homogeneous
from meshwise.simulator.machine.host import Host
from meshwise.simulator.machine.topology import Link
from meshwise.simulator.models.layers import linear
from meshwise.simulator.models.model import BlockBuilder
from meshwise.simulator.operator_graph import Block, OperatorGraph
from meshwise.strategies.lowering.stage_costs import StageCosts
from meshwise.strategies.operators.operator_plan import build_operator_plan
from meshwise.strategies.operators.pass_costs import Setting
from meshwise.strategies.plan.mesh import TENSOR
from meshwise.strategies.plan.problem import Problem, Training

PEAKS = (("fp32", 1024.0), ("bf16", 1024.0), ("fp8", 1024.0))
SLOW = Accelerator("slow", PEAKS, 1e12, 1024.0, launch=0.5, optimizer_launch=0.25, reserved=1000.0)
"""1024 FLOP/s and byte/s, half a second a kernel, and a quarter for each tensor that is updated."""

X, WIDE = 256, 512
"""Bytes of x and of wide tensors in fp32: 2 sequences of 4 tokens, hidden 8 and wide 16."""
UP, SIDE, DOWN = 128 + 16, 128, 128
"""Parameters of the products: weights of 8 * 16, and the bias of up."""


def layer(precision: str = "fp32", name: str = "layer") -> Block:
    """Two products of x, their activation, which keeps both, and the product back."""
    builder = BlockBuilder(precision, {"sequence": 4, "hidden": 8, "ffn": 16})
    x, out = (builder.add_tensor(each, "batch sequence hidden") for each in ("x", "out"))
    wide, other, active = (builder.add_tensor(each, "batch sequence ffn") for each in ("wide", "other", "active"))
    linear(builder, "up", x, (wide,), "ffn", bias=True)
    linear(builder, "side", x, (other,), "ffn")
    builder.add_elementwise("activation", "batch sequence ffn", (wide, other), (active,), saved=(wide, other))
    linear(builder, "down", active, (out,), "hidden", "ffn")
    return builder.build_block(name, (x,), (out,), layer=True)


def tiny_problem(
    *blocks: Block,
    devices: int = 1,
    bandwidth: float = 64.0,
    latency: float = 0.25,
    tied: tuple[str, ...] = (),
    **training: object,
) -> Problem:
    """Return some blocks for 6 sequences a step; parameters of the first and the last block that are tied are one."""
    link = Link(latency, bandwidth)
    cluster = build_homogeneous("tiny", SLOW, Host("host", 1e12), 1, devices, link, link, devices)
    ends = tuple(((blocks[0].name, each), (blocks[-1].name, each)) for each in tied)
    changes = {"precision": "fp32"} | training
    return Problem(OperatorGraph("tiny", blocks, 4, ends), cluster, Training(6, 4, **changes))  # type: ignore[arg-type]


def setting(of: Problem, degrees: dict[str, int] | None = None) -> Setting:
    """Return a problem in 3 microbatches of 2 sequences, on one axis where nothing else is said."""
    degrees = degrees or {TENSOR: of.cluster.num_devices}
    return Setting(of, build_operator_plan(of, degrees, 2), StageCosts(of))
