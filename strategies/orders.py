"""The orders of a schedule as columns, all pipeline ranks one after another."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strategies.schedule import Order, rank_order, rule_of


class Orders(NamedTuple):
    """The actions of all pipeline ranks: rank ``r`` runs ``start[r]:start[r + 1]`` in that order.

    ``passes`` are ``2 * stage``, and 1 more for a backward.
    """

    passes: Order
    microbatch: Order
    start: Order


@lru_cache(maxsize=512)
def orders(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """Return the orders of a schedule by name; the same value for the same arguments.

    >>> orders("1f1b", 2, 2).passes.tolist()
    [0, 0, 1, 1, 2, 3, 2, 3]
    """
    rows = [rank_order(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    stage, backward, microbatch = np.concatenate(rows).T
    start = np.cumsum([0, *map(len, rows)])
    return Orders(2 * stage + backward, np.ascontiguousarray(microbatch), start)


class Actions(NamedTuple):
    """The actions of all pipeline ranks: rank ``r`` runs ``start[r]:start[r + 1]``.

    ``kind`` is a number of `KINDS`, ``together`` says whether an action runs as one with the next.
    """

    stage: Order
    kind: Order
    microbatch: Order
    start: Order
    together: NDArray[np.bool_]


@lru_cache(maxsize=512)
def actions(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Actions:
    """Return the orders of any schedule by name, also of one that splits backward.

    >>> actions("zb1p", 1, 1).kind.tolist()
    [0, 2, 3]
    """
    rows = [rank_order(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    stage, kind, microbatch = map(np.ascontiguousarray, np.concatenate(rows).T)
    start = np.cumsum([0, *map(len, rows)])
    together = np.zeros(len(stage), np.bool_)
    for rank, pairs in enumerate(rule_of(name).pairs(rank, ranks, microbatches, chunks) for rank in range(ranks)):
        together[start[rank] + np.array(pairs, np.int64)] = True
    return Actions(stage, kind, microbatch, start, together)
