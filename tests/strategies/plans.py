"""Any plan of the field for a small network on a small machine: what the laws of lowering and simulating are told of.

A case is drawn by one function, `choose`, which takes one of several: hypothesis, or a random generator.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st

from meshwise.simulator.collective import Collective
from meshwise.simulator.machine.cluster import LOSSLESS, Cluster, CommunicationLibrary, Node, Tenant
from meshwise.simulator.machine.cluster import Protocol as LibraryProtocol
from meshwise.simulator.machine.host import Host, Pcie
from meshwise.simulator.machine.topology import (
    Crossbar,
    Dragonfly,
    Fabric,
    FatTree,
    LeafSpine,
    Link,
    Mesh,
    NodeNetwork,
    PcieTree,
    Ring,
    Switch,
    Torus,
)
from meshwise.simulator.models.experts import Experts
from meshwise.simulator.models.model import build
from meshwise.simulator.models.transformer import Transformer
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.framework import FRAMEWORKS
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.mesh import AXES, DATA, PIPELINE, TENSOR
from meshwise.strategies.plan.offloading import NO_OFFLOADING, WHOLE_FRACTION, Offloading, StepPlace
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.plan.recomputation import (
    FirstLayers,
    PerStage,
    Recomputation,
    Recompute,
    SomeOperators,
    StageRecompute,
)
from meshwise.strategies.plan.rules import violations
from meshwise.strategies.schedules.schedule import SCHEDULES

from .problems import IDEAL

T = TypeVar("T")
SEQUENCE, HEADS, EXPERTS = 32, 8, 4

RECOMPUTATIONS: tuple[StageRecompute, ...] = (
    *Recompute,
    FirstLayers(Recompute.FULL, 1),
    FirstLayers(Recompute.SELECTIVE, 1),
    SomeOperators(("input_norm", "attention_residual")),
    SomeOperators(("qkv", "projection")),
    SomeOperators(("qkv/2", "projection")),
)
OFFLOADINGS = (
    *(NO_OFFLOADING,) * 4,
    Offloading(optimizer=WHOLE_FRACTION),
    Offloading(optimizer=(0.5,)),
    Offloading(optimizer=WHOLE_FRACTION, step=StepPlace.DEVICE),
    Offloading(activations=(0.5,)),
    Offloading(optimizer=WHOLE_FRACTION, activations=WHOLE_FRACTION),
    Offloading(optimizer=WHOLE_FRACTION, parameters=(0.5,)),
    Offloading(WHOLE_FRACTION, WHOLE_FRACTION, WHOLE_FRACTION),
)
ORDERS = ((PIPELINE, DATA, TENSOR), AXES, AXES[::-1], ("data", "expert", "context", "pipeline", "tensor"))


class Choose(Protocol):
    """Takes one of several."""

    def __call__(self, among: Sequence[T]) -> T: ...


class Network(NamedTuple):
    """A decoder transformer: how many layers, and what they are made of."""

    layers: int
    kind: str
    tied: bool

    def spec(self) -> Transformer:
        attention = "unfused" if self.kind == "unfused" else "flash"
        experts = Experts(EXPERTS, 2, 32) if self.kind == "experts" else None
        sizes = (self.layers, 64, HEADS, HEADS, 128, 128)
        return Transformer(*sizes, tied_embeddings=self.tied, attention=attention, experts=experts)


NCCL = CommunicationLibrary(
    (LibraryProtocol("ll", 0.5, 0.25, 0.125, True), LibraryProtocol("ll128", 0.75, 0.5, 0.5)), 0.5, 0.75, 1e-6
)
"""A library that loses some of its links."""


class Machine(NamedTuple):
    """Equal nodes on a fabric, with devices and a link that are slow, and another job's exchanges."""

    nodes: int
    devices: int
    nics: int
    network: NodeNetwork
    fabric: Fabric
    bandwidth: float
    host: Host
    speeds: tuple[tuple[int, float], ...] = ()
    slow_nic: int | None = None
    slowdown: float = 1.0
    tenants: tuple[Tenant, ...] = ()
    library: CommunicationLibrary = LOSSLESS

    def cluster(self) -> Cluster:
        network = replace(self.network, link=replace(self.network.link, bandwidth=self.bandwidth))
        node = Node(IDEAL, self.host, self.devices, network, self.nics, Link(2e-6, self.bandwidth / 4))
        return Cluster(
            "small",
            ((node, self.nodes),),
            self.fabric,
            speeds=self.speeds,
            link_speeds=() if self.slow_nic is None else ((f"nic {self.slow_nic} out", 0.5),),
            tenants=self.tenants,
            overlap_slowdown=self.slowdown,
            library=self.library,
        )


class Case(NamedTuple):
    """A network, a machine, a training step and a layout of it."""

    network: Network
    machine: Machine
    training: Training
    layout: Layout

    def problem(self) -> Problem:
        """Return the problem."""
        graph = build(self.network.spec(), SEQUENCE, self.training.dtype)
        return Problem(graph, self.machine.cluster(), self.training)

    def build(self) -> tuple[Problem, Plan]:
        """Return the problem and the plan."""
        small = self.problem()
        return small, complete(small, self.layout)


@st.composite
def any_cases(draw: st.DrawFn, ranks: int = 12) -> Case:
    """Draw a case on at most so many ranks."""
    return any_case(lambda among: draw(st.sampled_from(among)), ranks)


def any_case(choose: Choose, most: int = 12) -> Case:
    """Return a case with a legal layout on at most so many ranks, four at least."""
    kind = choose(["flash", "flash", "unfused", "experts"])
    pipeline, schedule, chunks, microbatches = _pipeline(choose)
    degrees = _degrees(choose, kind, most // pipeline)
    data = degrees["data"]
    stages, layers = choose(["even", "balanced"]), pipeline * chunks * choose([1, 1, 1, 2])
    layout = Layout(
        **degrees,
        pipeline=pipeline,
        schedule=schedule,
        chunks=chunks,
        microbatch=_microbatch(choose, degrees),
        stages=stages,
        **_sharing(choose, data, degrees["expert"]),
        recompute=_recompute(choose, SCHEDULES[schedule].count_stages(pipeline, chunks)),
        **_choices(choose, kind, degrees),
    )
    machine = any_machine(choose, data * degrees["tensor"] * degrees["tensor_rows"] * degrees["context"] * pipeline)
    ranks = machine.nodes * machine.devices
    if not machine.tenants and choose([False, False, True]):
        turn, step = choose(range(ranks)), choose([-1, 1])
        layout = replace(layout, placement=tuple((turn + step * rank) % ranks for rank in range(ranks)))
    training = Training(
        layout.sequences * microbatches,
        SEQUENCE,
        choose(["fp32", "bf16"]),
        choose(["adamw", "sgd"]),
        gradient_clipping=choose([False, True]),
        framework=choose(sorted(FRAMEWORKS)),
        frozen=not SCHEDULES[schedule].splits_backward and choose([False, False, True]),
    )
    network = Network(layers + (stages == "balanced"), kind, choose([False, True]))
    layout = replace(layout, overlap_tensor=layout.sequence_parallel and choose([False, True]))
    return _legal(Case(network, machine, training, layout))


def _legal(case: Case) -> Case:
    """Return a case, without what it offloads or overlaps where that is refused beside the rest of it."""
    fields = {violation.field.split(".")[0] for violation in violations(case.problem(), case.layout)}
    plain = {"offload": NO_OFFLOADING, "overlap_tensor": False}
    return case._replace(layout=replace(case.layout, **{name: plain[name] for name in plain if name in fields}))


def _pipeline(choose: Choose) -> tuple[int, str, int, int]:
    """Return pipeline ranks, schedule, chunks and microbatches."""
    pipeline = choose([1, 2, 2, 3, 4])
    rules = [rule for rule in SCHEDULES.values() if not rule.is_asynchronous and (pipeline > 1 or rule.chunks[0] == 1)]
    rule = choose(rules)
    fewest, most = rule.chunks
    chunks = choose(range(fewest, (most or 2) + 1)) if pipeline > 1 else 1
    return pipeline, rule.name, chunks, rule.condition.find_nearest(pipeline, choose(range(1, 5)))


def _degrees(choose: Choose, kind: str, left: int) -> dict[str, Any]:
    """Return the degrees besides pipeline, and how the ranks of a context group attend."""
    tensor = choose([size for size in (1, 1, 2, 4) if size <= left])
    context = choose([size for size in (1, 1, 2, 4) if size * tensor <= left])
    data = choose([size for size in (1, 2, 3, 4, 8) if size * tensor * context <= left])
    expert = choose([size for size in (1, 2, 4) if data % size == 0]) if kind == "experts" else 1
    rows = choose(
        [size for size in (1, 1, 1, 2) if size * tensor * context * data <= left and (expert == 1 or size == 1)]
    )
    barred = {Attention.RING} if kind == "unfused" else set()
    barred |= {Attention.ULYSSES} if tensor * context > HEADS else set()
    ways = [way for way in Attention if way not in barred]
    degrees = {"tensor": tensor, "tensor_rows": rows, "context": context, "data": data, "expert": expert}
    return degrees | {"attention": choose(ways)}


def _microbatch(choose: Choose, degrees: dict[str, Any]) -> int | tuple[int, ...]:
    """Return the sequences of a microbatch, or those of every data rank; ranks that share experts have as many."""
    rows, expert = degrees["tensor_rows"], degrees["expert"]
    if choose([True, True, False]):
        return rows * choose([1, 1, 2])
    return tuple(size for _ in range(degrees["data"] // expert) for size in [rows * choose([1, 2, 3])] * expert)


def _sharing(choose: Choose, data: int, expert: int) -> dict[str, Any]:
    """Return what ZeRO shares, and over whom."""
    zero = choose([0, 1, 2, 3])
    groups = [size for size in range(max(expert, 2), data) if data % size == 0 and size % expert == 0]
    return {
        "zero": zero,
        "zero_shards": choose([0, *groups]) if zero else 0,
        "reshard_after_forward": zero < 3 or choose([True, False]),
        "gradient_reduction": "all_reduce" if zero else choose(["all_reduce", "all_reduce", "parameter_server"]),
    }


def _recompute(choose: Choose, stages: int) -> Recomputation:
    """Return what all stages recompute, or what each does."""
    if choose([True, True, False]):
        return choose(RECOMPUTATIONS)
    return PerStage(tuple(choose(RECOMPUTATIONS) for _ in range(stages)))


def _choices(choose: Choose, kind: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """Return what can be chosen whatever the degrees are."""
    return {
        "sequence_parallel": degrees["tensor"] > 1 and degrees["tensor_rows"] == 1 and choose([False, True]),
        "overlap_gradients": choose([False, True]),
        "scatter_gather": choose([False, True]),
        "offload": choose(OFFLOADINGS),
        "order": choose([order for order in ORDERS if _names(order, degrees)]),
    }


def _names(order: tuple[str, ...], degrees: dict[str, Any]) -> bool:
    """Return whether an order names all axes along which there are several ranks."""
    return all(degrees[axis] == 1 or axis in order for axis in ("context", "expert", "tensor_rows"))


def any_machine(choose: Choose, ranks: int) -> Machine:
    """Return a machine with so many free devices."""
    devices = choose([size for size in (1, 2, 4, 8) if ranks % size == 0])
    link, wide = Link(1e-6, 1.0), Link(1e-6, 1e9)
    reducing = Switch(Link(1e-6, 1.0, launch=5e-6), reduces=True)
    network = choose([Switch(link), reducing, Mesh(link), Ring(link), PcieTree(link, 2, 1, wide)])
    tenants, others = (), 0
    if choose([False] * 7 + [True]):
        others = 2 // min(devices, 2)
        first = choose([0, ranks])
        taken = tuple(range(first, first + others * devices))
        tenants = (Tenant("neighbour", taken, Collective.ALL_REDUCE, 1e4, 1e-3, choose([0.0, 1e-4])),)
    nodes = ranks // devices + others
    host = Host("host", 1e12, choose([inf, 4e9]), launch=choose([0.0, 0.0, 1e-6]))
    fabric = choose(_fabrics(nodes * devices))
    slow = tuple(choose(range(nodes * devices)) for _ in range(choose([0, 0, 0, 1, 2])))
    return Machine(
        nodes,
        devices,
        choose([1, devices]),
        network,
        fabric,
        choose([1e8, 1e10]),
        replace(host, pcie=choose([None, Pcie(Link(1e-6, 1e9), 2)])),
        speeds=tuple((device, 0.5 + place / 4) for place, device in enumerate(dict.fromkeys(slow))),
        slow_nic=None if isinstance(fabric, Torus) else choose([None, None, None, 0]),
        slowdown=choose([1.0, 1.0, 1.2]),
        tenants=tenants,
        library=choose([LOSSLESS, NCCL]),
    )


def _fabrics(devices: int) -> list[Fabric]:
    """Return fabrics; twice the one that nothing passes but NICs."""
    slow = Link(1e-6, 1e8)
    fabrics: list[Fabric] = [Crossbar(), Crossbar(), LeafSpine(1, 4.0), LeafSpine(2, 2.0, rail_optimized=True)]
    fabrics += [FatTree(1, 2, 2.0, 2.0), Dragonfly(1, 2, slow, slow)]
    if devices > 1:
        fabrics += [Torus((devices,), slow)]
        fabrics += [Torus((2, devices // 2), slow) if devices % 2 == 0 else Torus((devices,), slow, wraparound=False)]
    return fabrics
