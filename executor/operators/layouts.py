"""The layout of every value of a captured program under a plan, and of every gradient that comes back.

Views have no layout of their own: what reads one reads the value behind it, its *root*, which is kept with one
torch dim for each named dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from executor.capture.captured import Captured
from executor.operators.views import ALIASES
from simulator.operator_graph import BATCH, Operator, Tensor
from strategies.sharding import REPLICATED, OperatorSharding, ShardingSpec

Cuts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """How an operator reads a root: in which layout, and the layout of the gradient that it gives back."""

    wanted: ShardingSpec
    gradient: ShardingSpec


class Layouts:
    """Layouts of roots by name.

    Parameters
    ----------
    shardings
        By the name of an operator in the graph.
    batch_axes
        Axes that cut the batch of everything that has one, outside of what the shardings say (data parallelism).
    """

    def __init__(
        self, captured: Captured, shardings: Mapping[str, OperatorSharding], batch_axes: tuple[str, ...] = ()
    ) -> None:
        self.captured = captured
        self._operators = {
            f"{block.name}.{operator.name}": operator for block in captured.graph.blocks for operator in block.operators
        }
        self._shardings = {
            name: _with_batch(shardings.get(name, OperatorSharding(name, ())), batch_axes) for name in self._operators
        }
        self._several: dict[str, list[str]] = {}
        for name in captured.dims:
            self._several.setdefault(name.rpartition(".")[0], []).append(name)
        self.root: dict[str, str] = {}
        self.produced: dict[str, ShardingSpec] = {}
        self.gradient: dict[tuple[str, ShardingSpec], ShardingSpec] = {}
        nodes = [node for node in captured.program.graph.nodes if node.op != "output"]
        for node in nodes:
            self._place(node)
        for node in nodes:
            for root in self.read_by(node):
                reading = self.reading(node, root)
                partial = self.gradient.get((root, reading.wanted), REPLICATED).partial
                union = tuple(dict.fromkeys([*partial, *reading.gradient.partial]))
                self.gradient[root, reading.wanted] = ShardingSpec(reading.wanted.cuts, union)

    @property
    def loss(self) -> str:
        """The root of the loss."""
        output = next(iter(self.captured.program.graph.find_nodes(op="output")))
        return self.root[output.args[0][0].name]

    def roots(self, node: Node) -> list[str]:
        """Return the roots that a node makes."""
        return [name for name in self._outputs(node) if self.root.get(name) == name]

    def dims(self, root: str) -> tuple[str, ...]:
        """Return the named dims of a root, one for each torch dim that it is kept with."""
        return tuple(dim for dims in self.captured.dims[root] for dim in dims)

    def tensor(self, root: str) -> Tensor:
        """Return a root as a tensor of the graph."""
        dims = self.dims(root)
        return Tensor(root, dims, tuple(self.captured.sizes[dim] for dim in dims), "fp32")

    def sharding(self, node: Node) -> OperatorSharding | None:
        """Return how the operator of a node is cut; ``None`` where it has none."""
        name = self.captured.operators.get(node.name)
        return None if name is None else self._shardings[name]

    def operator(self, node: Node) -> Operator | None:
        """Return the operator of a node; ``None`` where it has none."""
        name = self.captured.operators.get(node.name)
        return None if name is None else self._operators[name]

    def read_by(self, node: Node) -> tuple[str, ...]:
        """Return the roots that a node reads, each once; an alias reads none."""
        if node.target in ALIASES and node.name not in self.captured.operators:
            return ()
        return tuple(dict.fromkeys(self.root[each.name] for each in node.all_input_nodes if each.name in self.root))

    def reading(self, node: Node, root: str) -> Reading:
        """Return how a node reads a root."""
        sharding, tensor = self.sharding(node), self.tensor(root)
        if sharding is not None:
            return Reading(sharding.of_input(tensor), sharding.of_gradient(tensor))
        outputs = {dim for name in self._outputs(node) for dim in self.dims(name)}
        have = self.produced[root]
        wanted = ShardingSpec(tuple((dim, axes) for dim, axes in have.cuts if dim in outputs))
        return Reading(wanted, wanted)

    def kept(self, root: str) -> ShardingSpec:
        """Return the layout in which a parameter is kept: as its first reader says."""
        return self.produced[root]

    def _outputs(self, node: Node) -> list[str]:
        return [node.name] if node.name in self.captured.dims else self._several.get(node.name, [])

    def _place(self, node: Node) -> None:
        """Note root and layout of what a node makes."""
        captured = self.captured
        if node.op == "placeholder":
            self.root[node.name] = node.name
            self.produced[node.name] = self._of_placeholder(node)
        elif _picks(node):
            source, index = node.args
            self.root[node.name] = f"{source.name}.{index}"  # type: ignore[union-attr]
        elif node.target in ALIASES and node.name not in captured.operators:
            source = node.args[0]
            assert isinstance(source, Node)
            self.root[node.name] = self.root[source.name]
        else:
            for name in self._outputs(node):
                self.root[name] = name
                self.produced[name] = self._made(node, name)

    def _of_placeholder(self, node: Node) -> ShardingSpec:
        """Return how an input, constant or buffer comes, whole; a parameter as its first reader keeps it."""
        if node.name not in self.captured.parameters:
            return REPLICATED
        for reader in _readers(node):
            sharding = self.sharding(reader)
            if sharding is not None:
                return self._of_kept(sharding, node.name)
        return REPLICATED

    def _of_kept(self, sharding: OperatorSharding, placeholder: str) -> ShardingSpec:
        """Return the layout in which an operator keeps a parameter, which the graph knows by another name."""
        tensor = self.tensor(placeholder)
        name = self.captured.tensors.get(placeholder, placeholder)
        return sharding.of_kept(Tensor(name, tensor.dims, tensor.shape, tensor.dtype))

    def _made(self, node: Node, name: str) -> ShardingSpec:
        sharding, operator = self.sharding(node), self.operator(node)
        if sharding is not None and operator is not None:
            return sharding.of_output(operator, self.tensor(name))
        cuts: dict[str, tuple[str, ...]] = {}
        for root in self.read_by(node):
            cuts |= {dim: axes for dim, axes in self.reading(node, root).wanted.cuts if dim in self.dims(name)}
        return ShardingSpec(tuple(cuts.items()))


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a value, through aliases too, in order."""
    found: list[Node] = []
    for user in node.users:
        found += _readers(user) if user.target in ALIASES else [user]
    return found


def _picks(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _with_batch(sharding: OperatorSharding, axes: tuple[str, ...]) -> OperatorSharding:
    if not axes:
        return sharding
    cuts: dict[str, Any] = dict(sharding.cuts)
    return OperatorSharding(
        sharding.operator, tuple((cuts | {BATCH: (*axes, *cuts.get(BATCH, ()))}).items()), sharding.kept
    )
