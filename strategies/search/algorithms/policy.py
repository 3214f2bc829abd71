"""A policy over decisions: a network that reads the operator graph and the machine and scores branches. Needs torch.

References
----------
.. [1] Scarselli et al., "The graph neural network model", IEEE Transactions on Neural Networks 20(1), 2009;
   Hamilton, Ying, Leskovec, "Inductive representation learning on large graphs", NeurIPS 2017: means of neighbours.
.. [2] Weinberger et al., "Feature hashing for large scale multitask learning", ICML 2009.
.. [3] Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log10, sqrt
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from meshwise.simulator.machine.cluster import Cluster
from meshwise.simulator.memo import memoise
from meshwise.simulator.operator_graph import BATCH, Operator, OperatorGraph, OperatorKind
from meshwise.simulator.operator_graph import Tensor as Value
from meshwise.strategies.plan.problem import Problem, Training
from meshwise.strategies.search.decisions import Branch, DecisionTree, PartialPlan

WIDTH = 32
"""Elements of an embedding."""
ROUNDS = 3
"""Rounds of messages between operators."""
HASH_WIDTH = 48
"""Elements of the vector into which the values of decisions are hashed."""


class Draw(NamedTuple):
    """One draw per walk of a batch: the branch, the logarithm of its probability, and the entropy of the draw."""

    branch_indices: list[int]
    log_probability: Tensor
    entropy: Tensor


class Walks(NamedTuple):
    """Plans that a policy has drawn: where they end, how likely they were and how open the decisions, [walks]."""

    ends: list[PartialPlan]
    log_probability: Tensor
    entropy: Tensor


class Policy:
    """Probabilities of the next decision, given the problem and the decisions before.

    The operators of every distinct block are nodes, with their work and bytes as features. In every round a node adds
    the mean embeddings of its producers and of its consumers [1]_. The mean over nodes and the machine's features make
    one embedding of the problem. Decisions are embedded by their hashed values [2]_. A branch is scored by one hidden
    layer over the problem, the sum of the decisions before, and the branch. Only legal branches are scored, so illegal
    ones have no probability.

    Parameters
    ----------
    generator
        The source of initial weights and draws.
    """

    def __init__(self, problem: Problem, generator: torch.Generator, learning_rate: float) -> None:
        self.generator = generator
        nodes, edges = read_operators(problem.graph)
        self._nodes, self._machine = _to_tensor(nodes), _to_tensor(read_machine(problem.cluster, problem.training))
        self._edges = torch.tensor(sorted(set(edges)), dtype=torch.int64).reshape(-1, 2).T
        shapes = {
            "node": (self._nodes.shape[1], WIDTH),
            **{
                f"{role}{turn}": (WIDTH, WIDTH) for turn in range(ROUNDS) for role in ("self", "producers", "consumers")
            },
            "machine": (self._machine.shape[0], WIDTH),
            "problem": (2 * WIDTH, WIDTH),
            "before": (HASH_WIDTH + 1, WIDTH),
            "branch": (HASH_WIDTH + 1, WIDTH),
            "deep": (WIDTH, WIDTH),
            "score": (WIDTH, 1),
        }
        self.weights = {
            name: (torch.randn(shape, generator=generator) / sqrt(shape[0])).requires_grad_()
            for name, shape in shapes.items()
        }
        self._optimizer = torch.optim.Adam(self.weights.values(), lr=learning_rate)

    def embed(self) -> Tensor:
        """Return the embedding of the problem, [`WIDTH`]."""
        embeddings = torch.tanh(self._nodes @ self.weights["node"])
        producers, consumers = self._edges
        for turn in range(ROUNDS):
            producer_sums = _mean_neighbours(embeddings, producers, consumers) @ self.weights[f"producers{turn}"]
            consumer_sums = _mean_neighbours(embeddings, consumers, producers) @ self.weights[f"consumers{turn}"]
            embeddings = torch.tanh(embeddings @ self.weights[f"self{turn}"] + producer_sums + consumer_sums)
        inputs = torch.cat((embeddings.mean(0), torch.tanh(self._machine @ self.weights["machine"])))
        return torch.tanh(inputs @ self.weights["problem"])

    def find_features(self, branch: Branch) -> Tensor:
        """Return the features of a decision, [`HASH_WIDTH` + 1]: hashed values, and the logarithms of its numbers."""
        return self._hash_values(branch.fields, branch.values)

    @memoise
    def _hash_values(self, fields: tuple[str, ...], values: tuple[object, ...]) -> Tensor:
        vector = torch.zeros(HASH_WIDTH + 1)
        for field, value in zip(fields, values, strict=True):
            # crc32 and not hash(): strings hash differently in every process
            code = crc32(f"{field}={value}".encode())
            vector[code % HASH_WIDTH] += 1 if code >> 31 else -1
            if type(value) is int:
                vector[HASH_WIDTH] += log10(1 + value)
        return vector

    def logits(self, problem: Tensor, history: Tensor, rows: Sequence[Sequence[Branch]]) -> Tensor:
        """Return the scores of every walk's branches, [walks, most branches]; minus infinity where there is no branch.

        ``history`` is the sum of the features of every walk's decisions so far, [walks, `HASH_WIDTH` + 1].
        """
        branches = torch.stack([self.find_features(branch) for row in rows for branch in row])
        walks = torch.tensor([walk for walk, row in enumerate(rows) for _ in row])
        columns = torch.tensor([column for row in rows for column in range(len(row))])
        walk_inputs = problem + history @ self.weights["before"]
        hidden = torch.tanh(walk_inputs[walks] + branches @ self.weights["branch"])
        scores = (torch.tanh(hidden @ self.weights["deep"]) @ self.weights["score"]).squeeze(1)
        masked_scores = torch.full((len(rows), max(map(len, rows))), -torch.inf)
        return masked_scores.index_put((walks, columns), scores)

    def choose_branches(self, problem: Tensor, history: Tensor, rows: Sequence[Sequence[Branch]]) -> Draw:
        """Return a drawn branch for every walk."""
        logarithms = torch.log_softmax(self.logits(problem, history, rows), dim=1)
        probabilities = logarithms.exp()
        indices = torch.multinomial(probabilities.detach(), 1, generator=self.generator)
        # minus infinity times a probability of 0 would be NaN
        entropy = -(probabilities * logarithms.masked_fill(logarithms == -torch.inf, 0.0)).sum(1)
        return Draw(indices.squeeze(1).tolist(), logarithms.gather(1, indices).squeeze(1), entropy)

    def learn(self, loss: Tensor) -> None:
        """Update the weights by one step of Adam [3]_ on a loss."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def read_operators(graph: OperatorGraph) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """Return the features of the operators of every distinct block, and the edges (producer, consumer) between them."""
    rows: list[list[float]] = []
    edges: list[tuple[int, int]] = []
    boundary: list[int | None] = []
    for block in graph.blocks:
        producers = {name: node for name, node in zip(block.inputs, boundary, strict=False) if node is not None}
        for operator in block.operators:
            node = len(rows)
            rows.append(_read_operator(operator, block.tensor, block.repeat))
            edges += [(producers[name], node) for name in operator.inputs if name in producers]
            producers |= dict.fromkeys(operator.outputs, node)
        boundary = [producers.get(name) for name in block.outputs]
    return rows, edges


def _read_operator(operator: Operator, tensor: dict[str, Value], repeat: int) -> list[float]:
    """Return the features of an operator: its kind, and the logarithms of its work, bytes, repeats and largest dim."""
    kinds = [float(kind is operator.kind) for kind in OperatorKind]
    read_bytes, written_bytes, parameters = (
        sum(tensor[name].nbytes for name in names) for names in (operator.inputs, operator.outputs, operator.parameters)
    )
    cuttable_sizes = [size for dim, size in operator.dims if dim != BATCH and dim not in operator.uncut]
    sizes = (operator.flops, read_bytes, written_bytes, parameters, repeat, max(cuttable_sizes, default=1))
    return kinds + [log10(1 + size) / 10 for size in sizes]


def read_machine(cluster: Cluster, training: Training) -> list[float]:
    """Return the features of a machine and a training step: logarithms of rates and sizes."""
    node, accelerator = cluster.first_node, cluster.accelerator
    peak = max(rate for _, rate in accelerator.peak_flops)
    rates = (peak, accelerator.memory_bandwidth, accelerator.memory, node.nic.bandwidth * node.nics / node.devices)
    counts = (cluster.num_devices, node.devices, training.global_batch, training.sequence)
    return [log10(1 + value) / 10 for value in (*rates, *counts)]


def _to_tensor(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _mean_neighbours(values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """Return for every node the mean of the values of the nodes with an edge to it; 0 where there are none."""
    count = torch.zeros(len(values)).index_add(0, targets, torch.ones(len(targets)))
    return torch.zeros_like(values).index_add(0, targets, values[sources]) / count.clamp(min=1).unsqueeze(1)


def draw(policy: Policy, tree: DecisionTree, count: int) -> Walks:
    """Return ``count`` plans drawn by a policy, of those that are left to visit."""
    problem = policy.embed()
    history = torch.zeros(count, len(policy.find_features(Branch((), (), tree.root))))
    ends, log_probability, entropy = [tree.root] * count, torch.zeros(count), torch.zeros(count)
    while rows := {walk: row for walk, end in enumerate(ends) if (row := tree.list_branches(end))}:
        walks = torch.tensor(list(rows))
        choice = policy.choose_branches(problem, history[walks], list(rows.values()))
        log_probability = log_probability.index_add(0, walks, choice.log_probability)
        entropy = entropy.index_add(0, walks, choice.entropy)
        branches = [row[index] for row, index in zip(rows.values(), choice.branch_indices, strict=True)]
        history = history.index_add(0, walks, torch.stack([policy.find_features(branch) for branch in branches]))
        for walk, branch in zip(rows, branches, strict=True):
            ends[walk] = branch.child
    return Walks(ends, log_probability, entropy)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
