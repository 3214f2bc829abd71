"""The fields of a cluster file that say how devices and nodes are wired.

Each shape of a network has a ``kind`` and the fields of that kind alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, create_model

from scenarios.errors import shown
from scenarios.fields import Bandwidth, Count, Delay, Table, Text, nearest

MAX_DEVICES = 1_000_000
MAX_DEVICES_PER_NODE = 4096
MAX_EDGES = 100_000

Devices = Annotated[int, Count(MAX_DEVICES)]
Narrowing = Annotated[float, Field(gt=0, le=1000)]
Place = Annotated[int, Count(MAX_DEVICES_PER_NODE - 1, least=0)]
"""A device's number in its node."""
Pair = Annotated[tuple[Place, Place, Annotated[int, Count(1000)]], Strict(False)]


def _shape(tags: dict[str, str], default: str | None = None) -> tuple[BeforeValidator, Discriminator]:
    """Return what checks ``kind`` and what chooses the table of that kind, by its tag."""

    def check(value: Any) -> Any:
        kind = value.get("kind", default) if isinstance(value, dict) else default
        if isinstance(value, dict) and not (isinstance(kind, str) and kind in tags):
            raise ValueError(f"kind is one of {', '.join(tags)}, met {shown(kind)}{nearest(str(kind), tags)}")
        return value

    def choose(value: Any) -> str:
        kind = value.get("kind", default) if isinstance(value, dict) else default
        return tags.get(str(kind), next(iter(tags.values())))

    return BeforeValidator(check), Discriminator(choose)


def _tag(field: str) -> Tag:
    """Return the tag of the first table of a union that has ``field``."""
    return Tag(f"<{field}>")


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


_CHECK_NETWORK, _CHOOSE_NETWORK = _shape(
    {"switch": "<reduces>", "mesh": "<pairs>", "ring": "<kind>", "pcie": "<socket>"}, default="switch"
)
NodeNetworkTable = Annotated[
    Annotated[
        Annotated[RingNetwork, _tag("kind")]
        | Annotated[SwitchNetwork, _tag("reduces")]
        | Annotated[MeshNetwork, _tag("pairs")]
        | Annotated[PcieNetwork, _tag("socket")],
        _CHOOSE_NETWORK,
    ],
    _CHECK_NETWORK,
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


_CHECK_FABRIC, _CHOOSE_FABRIC = _shape(
    {
        "crossbar": "<kind>",
        "leaf_spine": "<nodes_per_leaf>",
        "fat_tree": "<leaves_per_pod>",
        "dragonfly": "<nodes_per_router>",
        "torus": "<shape>",
        "graph": "<edges>",
    }
)
FabricTable = Annotated[
    Annotated[
        Annotated[CrossbarFabric, _tag("kind")]
        | Annotated[LeafSpineFabric, _tag("nodes_per_leaf")]
        | Annotated[FatTreeFabric, _tag("leaves_per_pod")]
        | Annotated[DragonflyFabric, _tag("nodes_per_router")]
        | Annotated[TorusFabric, _tag("shape")]
        | Annotated[GraphFabric, _tag("edges")],
        _CHOOSE_FABRIC,
    ],
    _CHECK_FABRIC,
]
