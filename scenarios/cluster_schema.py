"""The fields of a cluster file, and what each may hold."""

from typing import Annotated

from pydantic import Field, Strict, model_validator

from scenarios.fields import (
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
)
from simulator.cluster import Collective
from simulator.operator_graph import ITEMSIZE, OperatorKind

MAX_DEVICES = 1_000_000


def _accelerator_names() -> list[str]:
    from simulator.catalog import accelerator_names

    return list(accelerator_names())


DtypeName = Annotated[str, OneOf(lambda: ITEMSIZE)]
KindName = Annotated[str, OneOf(lambda: [*OperatorKind, "optimizer"])]


BandwidthShare = Annotated[float, Field(gt=0, le=1000)]
"""Of the memory bandwidth; above 1 where a kernel finds its data in a cache."""


class MatmulTable(Table):
    """How near a matrix multiplication comes to the peak."""

    fraction: Fraction = 1.0
    half_k: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    tile: Annotated[tuple[Annotated[int, Count(1_000_000)], Annotated[int, Count(1_000_000)]], Strict(False)] = (1, 1)
    units: Annotated[int, Count(1_000_000, least=0)] = 0
    gradient: Annotated[float, Field(gt=0, le=2)] = 1.0


class AcceleratorTable(Table):
    """A device: a ``preset`` of the catalogue, or written out."""

    preset: Annotated[str, OneOf(_accelerator_names)] | None = None
    name: Text | None = None
    peak: Annotated[dict[DtypeName, ComputeRate], Field(min_length=1)] | None = None
    memory: Size | None = None
    memory_bandwidth: Bandwidth | None = None
    launch: Delay = 0.0
    reserved: SizeOrNone = 0.0
    matmul: MatmulTable = MatmulTable()
    kernel_bandwidth: dict[KindName, BandwidthShare] = Field(default={})
    kernel_bandwidth_default: BandwidthShare = 1.0
    sharded_launch: Delay = 0.0
    optimizer_launch: Delay = 0.0
    computes_collectives: bool = False

    @model_validator(mode="after")
    def _preset_or_written(self) -> "AcceleratorTable":
        given = sorted(self.model_fields_set - {"preset"})
        if self.preset is not None and given:
            raise ValueError(f"holds preset alone or everything written out, met preset and {', '.join(given)}")
        needed = ("name", "peak", "memory", "memory_bandwidth")
        missing = [field for field in needed if getattr(self, field) is None]
        if self.preset is None and missing:
            raise ValueError(f"holds preset, or {', '.join(needed)}; {', '.join(missing)} missing")
        return self


class HostTable(Table):
    """The computer that holds accelerators."""

    name: Text
    memory: Size
    memory_bandwidth: Bandwidth | None = None
    cores: Annotated[int, Count(1_000_000)] = 1


class LinkTable(Table):
    """One direction of a connection."""

    latency: Delay = 0.0
    bandwidth: Bandwidth
    launch: Delay = 0.0


class CurveTable(Table):
    """Measured times of one collective over ``ranks`` ranks, as pairs of size and time."""

    collective: Annotated[str, OneOf(lambda: list(Collective))]
    ranks: Annotated[int, Count(MAX_DEVICES)]
    points: Annotated[list[Annotated[tuple[Bytes, Time], Strict(False)]], Field(min_length=1, max_length=1000)]


class ClusterTable(Table):
    """A cluster, written out."""

    name: Text
    nodes: Annotated[int, Count(MAX_DEVICES)]
    devices_per_node: Annotated[int, Count(4096)]
    nics_per_node: Annotated[int, Count(4096)] = 1
    accelerator: AcceleratorTable
    host: HostTable
    intra_node: LinkTable
    inter_node: LinkTable
    collectives: Annotated[list[CurveTable], Field(max_length=1000)] = Field(default=[])
