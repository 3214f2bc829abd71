"""Other jobs on the same network, as flows that come back."""

from simulator.program import Background, Flow
from simulator.units import to_ticks
from strategies.lowering.classes import ClassTable
from strategies.lowering.communicator import Communicator
from strategies.lowering.placed import tenant_kind


def background(table: ClassTable) -> tuple[Background, ...]:
    """Return the exchanges of every tenant of the cluster, on link classes."""
    result = []
    for number, tenant in enumerate(table.cluster.tenants):
        legs = Communicator(table, tenant_kind(number), 0).legs(tenant.collective, tenant.size)
        usage: dict[int, float] = {}
        for leg in legs:
            for link, moved in leg.flow.usage:
                usage[link] = usage.get(link, 0.0) + moved
        latency = sum(leg.latency for leg in legs)
        flow = Flow(tuple(usage.items()), sum(leg.flow.unit for leg in legs))
        result.append(Background(tenant.name, flow, latency, to_ticks(tenant.period), to_ticks(tenant.start)))
    return tuple(result)
