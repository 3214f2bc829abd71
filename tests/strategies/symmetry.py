"""Other names for the devices of a machine, under which it is the same machine."""

from dataclasses import replace
from itertools import chain
from random import Random
from typing import TypeVar

from meshwise.simulator.machine.topology import Crossbar, FatTree, LeafSpine, Mesh, Ring, Switch, Torus

from .plans import Case, Machine

T = TypeVar("T")


def renamed(case: Case, random: Random) -> Case:
    """Return the case with other names for devices, every rank on the very device that it was on."""
    machine = case.machine
    name = _names(machine, random)
    taken = {device for tenant in machine.tenants for device in tenant.devices}
    placed = case.layout.placement or [device for device in range(len(name)) if device not in taken]
    slow = None if machine.slow_nic is None else name[0] * machine.nics // machine.devices
    other = machine._replace(
        speeds=tuple((name[device], factor) for device, factor in machine.speeds),
        slow_nic=slow,
        tenants=tuple(replace(each, devices=tuple(name[d] for d in each.devices)) for each in machine.tenants),
    )
    return case._replace(machine=other, layout=replace(case.layout, placement=tuple(name[d] for d in placed)))


def _names(machine: Machine, random: Random) -> list[int]:
    """Return the new name of every device."""
    total, each = machine.nodes * machine.devices, machine.devices
    if isinstance(machine.fabric, Torus):  # on to the next node, along the last axis where it holds whole nodes
        last = machine.fabric.shape[-1]
        turns = machine.fabric.wraparound and last % each == 0
        return [d - d % last + (d + each) % last if turns else d for d in range(total)]
    inside = _inside(machine, random)
    return [node * each + inside[device] for node in _nodes(machine, random) for device in range(each)]


def _nodes(machine: Machine, random: Random) -> list[int]:
    """Return the new name of every node: those on one switch change places, and whole switches do."""
    fabric, nodes = machine.fabric, list(range(machine.nodes))
    if isinstance(fabric, Crossbar):
        return shuffled(nodes, random)
    size = fabric.nodes_per_leaf if isinstance(fabric, LeafSpine) else 0
    size = fabric.nodes_per_leaf * fabric.leaves_per_pod if isinstance(fabric, FatTree) else size
    if not size or len(nodes) % size:
        return nodes
    groups = [shuffled(nodes[first : first + size], random) for first in range(0, len(nodes), size)]
    return list(chain.from_iterable(shuffled(groups, random)))


def _inside(machine: Machine, random: Random) -> list[int]:
    """Return the new name of every device of a node, in each the same.

    Devices keep their names where each has its own way to other nodes, a NIC or a link of PCIe: where a group has more
    ranks on a node than channels, those of the first names send, and other jobs of the step meet them there.
    """
    devices = list(range(machine.devices))
    pairs = machine.host.pcie is not None
    if machine.nics > 1 or (pairs and machine.nodes > 1):
        return devices
    if isinstance(machine.network, Switch | Mesh) and not pairs:
        return shuffled(devices, random)
    if isinstance(machine.network, Ring) and (len(devices) % 2 == 0 or not pairs):
        turn = random.choice(devices) // 2 * 2 if pairs else random.choice(devices)
        return devices[turn:] + devices[:turn]
    return [device ^ 1 for device in devices] if len(devices) % 2 == 0 else devices


def shuffled(values: list[T], random: Random) -> list[T]:
    return random.sample(values, len(values))
