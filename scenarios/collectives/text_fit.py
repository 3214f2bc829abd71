"""Links of a machine fitted to what its owner measured with nccl-tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwise.scenarios.collectives.rows import MeasuredMessage, parse_messages, read_messages
from meshwise.scenarios.files.errors import Fault, ScenarioError, suggest_nearest
from meshwise.scenarios.inputs.cluster_file import load_cluster
from meshwise.simulator.calibration.machine_links import MachineFit, TimedMessage, fit_machine_links
from meshwise.simulator.catalog import cluster, cluster_names
from meshwise.simulator.machine.cluster import Cluster


def fit_links_to_text(text: str, machine: Cluster | None = None) -> MachineFit:
    """Return a machine whose links fit the collectives of a text.

    Parameters
    ----------
    text
        Output of nccl-tests or rccl-tests, or JSON rows of collectives, with one or more runs.
    machine
        The machine that was measured, whose figures are the prior; by default the one that the text tells: its
        accelerators, and the words of its lines ``# inter_node_link: ...``.

    Raises
    ------
    ValueError
        Where the text has no measurement that can be used, or the machine is smaller than a run.
    """
    messages, skipped = parse_messages(text, "text")
    if not messages:
        reason = f"{skipped[0].reason} (line {skipped[0].line})" if skipped else "the text is empty"
        raise ValueError(f"collectives have measurements that can be used, met none: {reason}")
    return _fit_messages(messages, machine)


def fit_links_to_file(path: str | Path, machine: Cluster | None = None) -> MachineFit:
    """Return the fit of `fit_links_to_text` to a file.

    Raises
    ------
    ScenarioError
        Where the file cannot be read or the fit cannot be made; the message names the file.
    """
    messages, _ = read_messages(path)
    try:
        return _fit_messages(messages, machine)
    except ValueError as error:
        raise ScenarioError((Fault(str(path), 0, 0, "", str(error)),)) from None


def find_cluster(name: str) -> Cluster:
    """Return a machine by its name in the catalogue, or from a cluster file; ``ValueError`` names the nearest."""
    if name in cluster_names():
        return cluster(name)
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return load_cluster(name)
    hint = suggest_nearest(name, cluster_names())
    raise ValueError(f"--cluster is a machine of `meshwise list clusters` or a cluster file, met {name[:100]!r}{hint}")


def _fit_messages(messages: Sequence[MeasuredMessage], machine: Cluster | None) -> MachineFit:
    base = machine if machine is not None else _find_largest(messages)
    return fit_machine_links(_list_timed(messages), _extend(base, max(message.nodes for message in messages)))


def _find_largest(messages: Sequence[MeasuredMessage]) -> Cluster:
    """Return the machine of the run with the most devices a node, and of these with the most nodes."""
    return max(messages, key=lambda message: (message.ranks // message.nodes, message.nodes)).machine


def _extend(machine: Cluster, nodes: int) -> Cluster:
    """Return a machine of equal nodes with at least ``nodes`` of them."""
    if len(machine.nodes) > 1:
        return machine
    ((node, count),) = machine.nodes
    return replace(machine, nodes=((node, max(count, nodes)),))


def _list_timed(messages: Sequence[MeasuredMessage]) -> list[TimedMessage]:
    return [
        TimedMessage(
            message.collective,
            message.ranks,
            message.nodes,
            message.size,
            max(message.seconds - message.overhead, 0.5 * message.seconds),
            message.algorithm,
        )
        for message in messages
    ]
