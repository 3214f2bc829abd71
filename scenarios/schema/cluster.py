"""The fields of a cluster file, and the values that each allows.

Every network and fabric has a ``kind``, and only the fields of that kind.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    Strict,
    Tag,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from meshwise.scenarios.files.errors import format_value, suggest_nearest
from meshwise.scenarios.files.fields import (
    Bandwidth,
    Bytes,
    ComputeRate,
    Count,
    Delay,
    Fraction,
    OneOf,
    Size,
    SizeOrNone,
    Table,
    Text,
    Time,
    tag_by_key,
)
from meshwise.simulator.catalog import accelerator_names
from meshwise.simulator.collective import Algorithm, Collective
from meshwise.simulator.machine.accelerator import REFINED_KINDS
from meshwise.simulator.machine.factors import FACTORS, MAX_FACTOR
from meshwise.simulator.operator_graph import ITEMSIZE, OperatorKind

MAX_DEVICES = 1_000_000
MAX_DEVICES_PER_NODE = 4096
MAX_EDGES = 100_000

Devices = Annotated[int, Count(MAX_DEVICES)]
Narrowing = Annotated[float, Field(gt=0, le=1000)]
Place = Annotated[int, Count(MAX_DEVICES_PER_NODE - 1, minimum=0)]
"""The index of a device in its node."""
Pair = Annotated[tuple[Place, Place, Annotated[int, Count(1000)]], Strict(False)]


@dataclass(frozen=True)
class ByKind:
    """Marks a union of tables that ``kind`` tells apart; messages list the ``kinds`` in this order."""

    kinds: tuple[str, ...]
    default: str | None = None

    def check(self, value: Any) -> Any:
        """Return ``value``; raise ``ValueError`` where it is a mapping of none of the kinds."""
        kind = self._find_kind(value)
        if isinstance(value, dict) and not (isinstance(kind, str) and kind in self.kinds):
            nearest_text = suggest_nearest(str(kind), self.kinds)
            raise ValueError(f"kind is one of {', '.join(self.kinds)}, met {format_value(kind)}{nearest_text}")
        return value

    def _find_kind(self, value: Any) -> Any:
        return value.get("kind", self.default) if isinstance(value, dict) else self.kinds[0]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tables = {
            f"<{get_args(table.model_fields['kind'].annotation)[0]}>": handler.generate_schema(table)
            for table in get_args(source)
        }
        union = core_schema.tagged_union_schema(tables, lambda value: f"<{self._find_kind(value)}>")
        return core_schema.no_info_before_validator_function(self.check, union)


class LinkTable(Table):
    """One direction of a connection."""

    latency: Delay = 0.0
    bandwidth: Bandwidth
    launch: Delay = Field(default=0.0, description="What a collective over it costs once, besides its steps.")


class RingNetwork(LinkTable):
    """Each device is wired to the next and the one before."""

    kind: Literal["ring"]


class SwitchNetwork(LinkTable):
    """Every device has a port into a switch that blocks nothing."""

    kind: Literal["switch"] = "switch"
    reduces: bool = Field(default=False, description="The switch adds and multicasts (NVLink SHARP).")


class MeshNetwork(LinkTable):
    """Devices wired to each other: all of them where no pairs are given."""

    kind: Literal["mesh"]
    pairs: Annotated[list[Pair], Field(max_length=MAX_EDGES)] = Field(
        default=[], description="Device, device, and how many links join them."
    )


class PcieNetwork(LinkTable):
    """Devices on PCIe switches, switches on sockets; the link is a slot and a switch's uplink."""

    kind: Literal["pcie"]
    devices_per_switch: Annotated[int, Count(MAX_DEVICES_PER_NODE)]
    switches_per_socket: Annotated[int, Count(MAX_DEVICES_PER_NODE)]
    socket: LinkTable


NodeNetworkTable = Annotated[
    RingNetwork | SwitchNetwork | MeshNetwork | PcieNetwork, ByKind(("switch", "mesh", "ring", "pcie"), "switch")
]


class CrossbarFabric(Table):
    """Full bisection: NICs are the only limit."""

    kind: Literal["crossbar"]


class LeavesTable(Table):
    """Switches that nodes are plugged into."""

    nodes_per_leaf: Devices
    oversubscription: Narrowing = 1.0
    rail_optimized: bool = Field(default=False, description="NIC i of all nodes of a unit shares a leaf.")
    hop: Delay = Field(default=0.0, description="Latency of one more switch.")
    reduces: bool = False


class LeafSpineFabric(LeavesTable):
    """Two tiers of switches."""

    kind: Literal["leaf_spine"]


class FatTreeFabric(LeavesTable):
    """Three tiers: leaves in pods, pods joined by a core."""

    kind: Literal["fat_tree"]
    leaves_per_pod: Devices
    core_oversubscription: Narrowing = 1.0


class DragonflyFabric(Table):
    """Routers all-to-all in groups, groups all-to-all."""

    kind: Literal["dragonfly"]
    nodes_per_router: Devices
    routers_per_group: Devices
    local: LinkTable
    group_link: LinkTable


class TorusFabric(LinkTable):
    """Devices on a grid, each wired to its neighbours."""

    kind: Literal["torus"]
    shape: Annotated[list[Devices], Field(min_length=1, max_length=3)]
    wraparound: bool = True


EdgeTable = create_model(
    "EdgeTable",
    __base__=LinkTable,
    __module__=__name__,
    __doc__="A connection of a graph between two vertices by name; device i is the vertex 'device i'.",
    **{"from": (Text, ...), "to": (Text, ...), "both": (bool, Field(default=False, description="And back."))},
)  # type: ignore[call-overload]


class GraphFabric(Table):
    """Any graph."""

    kind: Literal["graph"]
    edges: Annotated[list[EdgeTable], Field(min_length=1, max_length=MAX_EDGES)]  # type: ignore[valid-type]


FabricTable = Annotated[
    CrossbarFabric | LeafSpineFabric | FatTreeFabric | DragonflyFabric | TorusFabric | GraphFabric,
    ByKind(("crossbar", "leaf_spine", "fat_tree", "dragonfly", "torus", "graph")),
]


MAX_NODE_TYPES = 10_000
MAX_TENANTS = 1000


DtypeName = Annotated[str, OneOf(lambda: ITEMSIZE)]
_STREAMED_KINDS = (*OperatorKind, *REFINED_KINDS)
KindName = Annotated[
    str, OneOf(lambda: [*_STREAMED_KINDS, *(f"{kind}_backward" for kind in _STREAMED_KINDS), "optimizer"])
]
CollectiveName = Annotated[str, OneOf(lambda: list(Collective))]
AlgorithmName = Annotated[str, OneOf(lambda: [name for name in Algorithm if name is not Algorithm.MEASURED])]
"""A measured curve is no choice: it applies to its own collective and group size."""


BandwidthShare = Annotated[float, Field(gt=0, le=1000)]
"""Fraction of the memory bandwidth; above 1 where a kernel finds its data in a cache."""


RateShare = Annotated[float, Field(gt=0, le=2)]
"""Fraction of the forward rate of a matrix multiplication."""

TileSides = Annotated[tuple[Annotated[int, Count(1_000_000)], Annotated[int, Count(1_000_000)]], Strict(False)]


class MatmulTable(Table):
    """How near a matrix multiplication comes to the peak."""

    fraction: Fraction = 1.0
    half_k: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    tiles: Annotated[tuple[TileSides, ...], Strict(False), Field(min_length=1, max_length=64)] = ((1, 1),)
    edge: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    units: Annotated[int, Count(1_000_000, minimum=0)] = 0
    waves: Annotated[float, Field(ge=0, le=1)] = 1.0
    sharpness: Annotated[float, Field(ge=1, le=1e6)] | None = None
    data_gradient: RateShare = 1.0
    weight_gradient: RateShare = 1.0
    batched: RateShare = 1.0
    product_launch: Delay = 0.0
    fractions: dict[DtypeName, Fraction] = Field(default={})


class AttentionTable(Table):
    """How near fused attention comes to the best matrix multiplication."""

    forward: Annotated[float, Field(gt=0, le=1000)] = 0.75
    backward: Annotated[float, Field(gt=0, le=1000)] = 0.75
    half_sequence: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    half_head: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    tail: Annotated[float, Field(ge=0, le=1000)] = 0.0
    backward_tail: Annotated[float, Field(ge=0, le=1000)] = 0.0
    block: Annotated[int, Count(1_000_000)] = 1
    launch: Delay = 0.0
    second: Annotated[float, Field(ge=1, le=1000)] = 1.0


class AcceleratorTable(Table):
    """A device: a ``preset`` of the catalogue, or written out.

    Figures of efficiency that are left out are those of the accelerator that ``like`` names, or the medians of those
    that the catalogue has timed.
    """

    preset: Annotated[str, OneOf(accelerator_names, "accelerators")] | None = None
    like: Annotated[str, OneOf(accelerator_names, "accelerators")] | None = Field(
        default=None, description="An accelerator of the catalogue whose efficiencies hold where none are stated."
    )
    name: Text | None = None
    peak: Annotated[dict[DtypeName, ComputeRate], Field(min_length=1)] | None = None
    memory: Size | None = None
    memory_bandwidth: Bandwidth | None = None
    launch: Delay = 0.0
    reserved: SizeOrNone = 0.0
    matmul: MatmulTable = MatmulTable()
    attention: AttentionTable = AttentionTable()
    sustained: Annotated[float, Field(ge=1, le=1000)] = 1.0
    kernel_bandwidth: dict[KindName, BandwidthShare] = Field(default={})
    kernel_bandwidth_default: BandwidthShare = 1.0
    sharded_launch: Delay = 0.0
    unit_launch: Delay = 0.0
    recompute_launch: Delay = 0.0
    optimizer_launch: Delay = 0.0
    computes_collectives: bool = False

    @model_validator(mode="after")
    def _check_preset(self) -> "AcceleratorTable":
        stated_fields = sorted(self.model_fields_set - {"preset"})
        if self.preset is not None and stated_fields:
            raise ValueError(f"holds preset alone or everything written out, met preset and {', '.join(stated_fields)}")
        required_fields = ("name", "peak", "memory", "memory_bandwidth")
        missing_fields = [field for field in required_fields if getattr(self, field) is None]
        if self.preset is None and missing_fields:
            raise ValueError(f"holds preset, or {', '.join(required_fields)}; {', '.join(missing_fields)} missing")
        return self


class PcieTable(LinkTable):
    """A device's slot in the host."""

    devices_per_switch: Annotated[int, Count(MAX_DEVICES_PER_NODE)] = Field(
        default=1, description="Devices that share a switch's uplink, as wide as one slot."
    )


class HostTable(Table):
    """The computer that holds accelerators."""

    name: Text
    memory: Size
    memory_bandwidth: Bandwidth | None = None
    cores: Annotated[int, Count(1_000_000)] = 1
    launch: Delay = Field(default=0.0, description="What one kernel costs the process that launches it.")
    numa_nodes: Annotated[int, Count(1000)] = 1
    pcie: PcieTable | None = Field(default=None, description="Left out where devices use host memory itself.")


class CurveTable(Table):
    """Measured times of one collective over ``ranks`` ranks, as pairs of size and time."""

    collective: CollectiveName
    ranks: Devices
    points: Annotated[list[Annotated[tuple[Bytes, Time], Strict(False)]], Field(min_length=1, max_length=1000)]


class TenantTable(Table):
    """Another job on the network, which exchanges ``size`` bytes over and over."""

    name: Text
    devices: Annotated[list[Annotated[int, Count(MAX_DEVICES - 1, minimum=0)]], Field(min_length=2, max_length=100_000)]
    collective: CollectiveName
    size: Size
    period: Time
    start: Delay = 0.0


def _parse_device(key: Any) -> int:
    if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,6}", key):
        return int(key)
    raise ValueError(f"names a device by its number, met {format_value(key)}; for example 17")


DeviceKey = Annotated[int, PlainValidator(_parse_device), WithJsonSchema({"type": "string", "pattern": "^[0-9]+$"})]
Speed = Annotated[float, Field(gt=0, le=1000)]


Part = Annotated[float, Field(ge=0, le=1000)]


class ProtocolTable(Table):
    """A way of the communication library to move bytes, beside the one that links are described by."""

    name: Text
    launch: Part = Field(description="Of the links' launch.")
    step: Part = Field(description="Of the links' latency.")
    payload: Fraction = Field(description="Of the links' bandwidth.")
    messages: bool = Field(default=False, description="Sends and all-to-alls may use it too.")


class LibraryTable(Table):
    """What the communication library makes of links."""

    protocols: Annotated[list[ProtocolTable], Field(max_length=16)] = Field(default=[])
    own: Annotated[float, Field(ge=0, le=2)] = Field(
        default=0.0, description="Bytes of a port that each byte costs which a rank of a group keeps."
    )
    reduction: Fraction = Field(default=1.0, description="Of a port's bandwidth, for collectives in switches.")
    reduction_launch: Delay = Field(default=0.0, description="What a collective in switches costs once besides.")


class ConditionsTable(Table):
    """What holds on top of the nodes: their fabric, what is slower than built, and who else uses it."""

    fabric: FabricTable | None = Field(default=None, description="How nodes reach each other. Default: crossbar.")
    speeds: dict[DeviceKey, Speed] = Field(default={}, description="Factor by device; a straggler's is below 1.")
    link_speeds: dict[Text, Speed] = Field(default={}, description="Factor by link, such as 'nic 3 out'.")
    algorithms: dict[CollectiveName, AlgorithmName] = Field(default={}, description="Others are chosen by size.")
    tenants: Annotated[list[TenantTable], Field(max_length=MAX_TENANTS)] = Field(default=[])
    overlap_slowdown: Annotated[float, Field(ge=1, le=2)] = Field(
        default=1.0,
        description="Time of computing beneath a collective over its time alone; 1.19 on the catalogue's GPUs "
        "(Lee et al. 2025, arXiv 2507.03114). Galvatron measured 1.13 on its machine.",
    )
    library: LibraryTable | None = Field(default=None, description="Default: nothing of the links is lost.")


FactorName = Annotated[str, OneOf(lambda: FACTORS)]
Deviation = Annotated[float, Field(ge=0, le=100)]
"""A standard deviation of natural logarithms."""


class RunCalibrationTable(Table):
    """What `meshwise calibrate --runs` learned of the machine; the figures of this file have the factors already."""

    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    runs: Annotated[int, Count(1_000_000)] = Field(description="Number of plans measured.")
    residual: Deviation = Field(description="Of ln(measured / predicted), were the factors known exactly.")
    spread: Deviation = Field(description="Of ln(predicted), because they are not.")
    factors: dict[FactorName, Annotated[float, Field(ge=1 / MAX_FACTOR, le=MAX_FACTOR)]] = Field(
        default={}, description="On the times that the catalogue gives."
    )
    deviations: dict[FactorName, Deviation] = Field(default={}, description="Of the logarithms of factors.")


Estimates = Annotated[list[Text], Field(max_length=3 * MAX_NODE_TYPES)]
_ESTIMATED = "Which figures were not measured and where they come from, as the program writes it."


class ClusterTable(ConditionsTable):
    """A cluster of equal nodes, written out."""

    name: Text
    nodes: Devices
    devices_per_node: Annotated[int, Count(MAX_DEVICES_PER_NODE)]
    hosts_per_node: Annotated[int, Count(MAX_DEVICES_PER_NODE)] = 1
    nics_per_node: Annotated[int, Count(MAX_DEVICES_PER_NODE)] = 1
    accelerator: AcceleratorTable
    host: HostTable
    intra_node: NodeNetworkTable
    inter_node: LinkTable
    collectives: Annotated[list[CurveTable], Field(max_length=1000)] = Field(default=[])
    estimated: Estimates = Field(default=[], description=_ESTIMATED)
    calibration: RunCalibrationTable | None = None


class NodeTypeTable(Table):
    """``count`` equal nodes of a mixed cluster; devices are numbered through in the order of the list."""

    count: Devices
    devices: Annotated[int, Count(MAX_DEVICES_PER_NODE)]
    hosts: Annotated[int, Count(MAX_DEVICES_PER_NODE)] = 1
    nics: Annotated[int, Count(MAX_DEVICES_PER_NODE)] = 1
    accelerator: AcceleratorTable
    host: HostTable
    intra_node: NodeNetworkTable
    inter_node: LinkTable


class MixedClusterTable(ConditionsTable):
    """A cluster of different nodes, written out."""

    name: Text
    node_types: Annotated[list[NodeTypeTable], Field(min_length=1, max_length=MAX_NODE_TYPES)]
    collectives: Annotated[list[CurveTable], Field(max_length=1000)] = Field(default=[])
    estimated: Estimates = Field(default=[], description=_ESTIMATED)
    calibration: RunCalibrationTable | None = None


WrittenCluster = Annotated[
    Annotated[ClusterTable, Tag("<written>")] | Annotated[MixedClusterTable, Tag("<node_types>")],
    tag_by_key("node_types"),
]
"""What a cluster file holds."""
