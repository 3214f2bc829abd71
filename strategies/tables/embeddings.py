"""Where the embedding tables of a model lie: each whole, cut or replicated, on devices or on their hosts.

All data ranks share the tables that are not replicated: a rank looks up rows for the samples of all, and all-to-alls
carry indices there and vectors back. Their gradients are sparse: only rows that were looked up are updated, in the
backward of every microbatch, as the fused optimizers of FBGEMM do it [1]_. Replicated tables are parameters like all
others, with dense gradients that data ranks sum.

A document is one word for all tables, or a mapping from tables to words or ``{cut, device, placement, cache}``, with
``default`` for all tables that it does not name::

    embeddings: {table_0: rows, table_1: {placement: host, cache: 0.1}, default: table}

References
----------
.. [1] pytorch/torchrec, ``torchrec/distributed/types.py``, ``ShardingType`` (table-wise, row-wise, column-wise, data
   parallel), and ``embedding_types.py``, ``EmbeddingComputeKernel`` (``fused``, ``fused_uvm``, ``fused_uvm_caching``).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from reprlib import Repr
from typing import Any, NamedTuple


class TableCut(StrEnum):
    """How a table is shared by data ranks."""

    REPLICATED = "replicated"
    """Every rank has the table, and sums dense gradients with the others."""
    SPARSE = "sparse"
    """Every rank has the table, and gathers the rows of gradients that the others have (``nn.Embedding(sparse=True)``,
    whose gradients Horovod and torch gather)."""
    TABLE = "table"
    """One rank has the table."""
    ROWS = "rows"
    """Every rank has an even share of the rows."""
    NODE_ROWS = "node_rows"
    """Every rank of one node has an even share of the rows (TorchRec's table-row-wise)."""
    COLUMNS = "columns"
    """Every rank has an even share of the columns."""


TABLE_OPTIMIZERS = {"rowwise_adagrad": (4, 0), "sgd": (0, 0), "adagrad": (0, 4), "adam": (0, 8)}
"""Bytes of state for a row and for an element of a table, in fp32, by optimizer. Row-wise AdaGrad keeps one sum of
squares a row (FBGEMM, ``EmbOptimType.EXACT_ROWWISE_ADAGRAD``). Rows of 16 bits have no main copy: FBGEMM rounds them
stochastically."""

HOST_WORD = "host"
"""The word for a table on the hosts, none of whose rows are cached on devices."""


WHOLE_CUTS, LOCAL_CUTS = (TableCut.REPLICATED, TableCut.SPARSE), (TableCut.TABLE, TableCut.NODE_ROWS)
"""Cuts with which every rank has the whole table, and with which one rank has it, or those of one node."""


class EmbeddingsFault(NamedTuple):
    """What is wrong with embeddings, and at which names below them."""

    path: tuple[str, ...]
    message: str

    def below(self, name: str) -> "EmbeddingsFault":
        """Return the fault of what stands under a name."""
        return EmbeddingsFault((name, *self.path), self.message)

    def __str__(self) -> str:
        return ": ".join([*self.path[:-1], f"{self.path[-1]} {self.message}"]) if self.path else self.message


class EmbeddingsError(ValueError):
    """Raised where embeddings have faults; ``faults`` are all of them."""

    def __init__(self, faults: Iterable[EmbeddingsFault]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(map(str, self.faults)))


def _list_placement_faults(cut: TableCut, device: int | None, cache: float | None) -> Iterator[EmbeddingsFault]:
    """Yield what is wrong with a placement whose values are of the right kind."""
    if device is not None and cut not in LOCAL_CUTS:
        words = " or ".join(LOCAL_CUTS)
        yield EmbeddingsFault(("device",), f"is that of cut: {words}, met cut: {cut}; nearest: leave it out")
    if device is not None and device < 0:
        yield EmbeddingsFault(("device",), f"is at least 0, met {device}; nearest: 0")
    if cache is not None and not 0 <= cache <= 1:
        nearest = 1.0 if cache > 1 else 0.0
        yield EmbeddingsFault(("cache",), f"is at least 0 and at most 1, met {cache:g}; nearest: {nearest}")
    if cache is not None and cut in WHOLE_CUTS:
        words = "table, rows, node_rows or columns"
        yield EmbeddingsFault(("cut",), f"of a table on hosts is {words}, met {cut}; nearest: rows")


def _list_optimizer_faults(optimizer: Any) -> Iterator[EmbeddingsFault]:
    if not isinstance(optimizer, str) or optimizer not in TABLE_OPTIMIZERS:
        met_text = f"met {optimizer if isinstance(optimizer, str) else Repr().repr(optimizer)}"
        message = f"is one of {', '.join(TABLE_OPTIMIZERS)}, {met_text}{_hint(optimizer)}"
        yield EmbeddingsFault(("optimizer",), message)


def _hint(value: Any, *words: str) -> str:
    """Return the nearest of some words, by default the optimizers, as the end of a message."""
    matches = get_close_matches(str(value), words or tuple(TABLE_OPTIMIZERS), n=1)
    return f"; nearest: {matches[0]}" if matches else ""


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """How one table is shared, and where its rows are.

    Parameters
    ----------
    cut
        How ranks share it.
    device
        The data rank that has all of it, or one of the node whose ranks have it; ``None`` where all ranks share it, or
        in a layout for the least loaded one.
    cache
        The share of the rows, the most popular ones, that devices keep of a table on their hosts; ``None`` where all of
        it is on devices.

    Raises
    ------
    EmbeddingsError
        Where a table that no single rank has names one, a replicated one is on hosts, or a cache is no fraction.
    """

    cut: TableCut = TableCut.REPLICATED
    device: int | None = None
    cache: float | None = None

    def __post_init__(self) -> None:
        faults = tuple(_list_placement_faults(self.cut, self.device, self.cache))
        if faults:
            raise EmbeddingsError(faults)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has the whole table."""
        return self.cut in WHOLE_CUTS

    @property
    def is_local(self) -> bool:
        """Whether one rank has the table, or those of one node."""
        return self.cut in LOCAL_CUTS

    @property
    def document(self) -> str | dict[str, Any]:
        """The placement as plain data: one word where that says it."""
        values: dict[str, Any] = {"cut": str(self.cut)}
        if self.device is not None:
            values["device"] = self.device
        if self.cache is not None:
            values |= {"placement": HOST_WORD, "cache": self.cache}
        return values["cut"] if len(values) == 1 else values

    def __str__(self) -> str:
        place_text = "the node of " if self.cut is TableCut.NODE_ROWS else ""
        device_text = "" if self.device is None else f" on {place_text}device {self.device}"
        cache_text = "" if self.cache is None else f" on hosts, {self.cache:.4g} cached"
        return f"{self.cut}{device_text}{cache_text}"


REPLICATED_TABLE = TablePlacement()
"""A table that is a parameter like all others."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Where all tables are; false where all are replicated.

    Parameters
    ----------
    tables
        Placements of single tables by name.
    default
        The placement of all others.
    optimizer
        What updates tables that are not replicated, of `TABLE_OPTIMIZERS`.
    pipelined
        Whether indices and rows on hosts of the next microbatch move beside the present one, and updated rows go back
        beside the next (TorchRec, ``TrainPipelineSparseDist`` and ``PrefetchTrainPipelineSparseDist``).
    """

    tables: tuple[tuple[str, TablePlacement], ...] = ()
    default: TablePlacement = REPLICATED_TABLE
    optimizer: str = "rowwise_adagrad"
    pipelined: bool = False

    def __post_init__(self) -> None:
        faults = tuple(_list_optimizer_faults(self.optimizer))
        if faults:
            raise EmbeddingsError(faults)

    def __bool__(self) -> bool:
        return any(placement.cut is not TableCut.REPLICATED for placement in self.placements)

    def __str__(self) -> str:
        if not self:
            return "replicated tables"
        counts: dict[str, int] = {}
        for _, placement in self.tables:
            word = f"{placement.cut} on hosts" if placement.cache is not None else str(placement.cut)
            counts[word] = counts.get(word, 0) + 1
        words = [f"{count} by {word}" for word, count in counts.items()]
        words += [f"others {self.default}"] if self.default != REPLICATED_TABLE else []
        return f"tables {', '.join(words)}{', pipelined' if self.pipelined else ''}"

    @property
    def placements(self) -> tuple[TablePlacement, ...]:
        """All placements that are stated."""
        return (*(placement for _, placement in self.tables), self.default)

    @property
    def uses_hosts(self) -> bool:
        """Whether some table is on hosts."""
        return any(placement.cache is not None for placement in self.placements)

    def find_placement(self, name: str) -> TablePlacement:
        """Return the placement of a table."""
        return dict(self.tables).get(name, self.default)

    @property
    def document(self) -> dict[str, Any]:
        """The placements as plain data; empty where all tables are replicated."""
        if not self:
            return {}
        document: dict[str, Any] = {name: placement.document for name, placement in self.tables}
        if self.default != REPLICATED_TABLE:
            document["default"] = self.default.document
        if self.optimizer != NO_EMBEDDINGS.optimizer:
            document["optimizer"] = self.optimizer
        return document | ({"pipelined": True} if self.pipelined else {})


NO_EMBEDDINGS = Embeddings()
"""All tables are replicated."""

_KEYS = ("cut", "device", "placement", "cache")
_PLACES = ("device", HOST_WORD)


def parse_embeddings(document: Any) -> Embeddings:
    """Return the embeddings of a document: one word, or a mapping from tables to placements.

    >>> parse_embeddings("rows").default.cut
    <TableCut.ROWS: 'rows'>
    >>> parse_embeddings({"table_1": {"placement": "host", "cache": 0.1}}).tables
    (('table_1', TablePlacement(cut=<TableCut.ROWS: 'rows'>, device=None, cache=0.1)),)

    Raises
    ------
    EmbeddingsError
        Where the document is neither, or has faults.
    """
    if isinstance(document, Embeddings):
        return document
    if isinstance(document, str):
        return Embeddings(default=_parse_placement(document))
    if not isinstance(document, Mapping) or not all(isinstance(name, str) for name in document):
        message = f"is a word or a mapping from tables to placements, met {Repr().repr(document)}"
        raise EmbeddingsError([EmbeddingsFault((), message)])
    values, faults = dict(document), list[EmbeddingsFault]()
    optimizer, pipelined = values.pop("optimizer", NO_EMBEDDINGS.optimizer), values.pop("pipelined", False)
    faults += _list_optimizer_faults(optimizer)
    if not isinstance(pipelined, bool):
        message = f"is true or false, met {Repr().repr(pipelined)}; nearest: true"
        faults.append(EmbeddingsFault(("pipelined",), message))
    placements: dict[str, TablePlacement] = {}
    for name, value in values.items():
        try:
            placements[name] = _parse_placement(value)
        except EmbeddingsError as error:
            faults += [fault.below(name) for fault in error.faults]
    if faults:
        raise EmbeddingsError(faults)
    default = placements.pop("default", REPLICATED_TABLE)
    return Embeddings(tuple(placements.items()), default, optimizer, pipelined)


def _parse_placement(value: Any) -> TablePlacement:
    """Return the placement of one table.

    Raises
    ------
    EmbeddingsError
        Where the value has faults.
    """
    is_word = isinstance(value, str)
    if is_word:
        value = {"placement": HOST_WORD} if value == HOST_WORD else {"cut": value}
    if not isinstance(value, Mapping):
        message = f"is a word or holds {', '.join(_KEYS)}, met {Repr().repr(value)}; nearest: rows"
        raise EmbeddingsError([EmbeddingsFault((), message)])
    faults = [
        EmbeddingsFault((str(key),), f"is none of {', '.join(_KEYS)}{_hint(key, *_KEYS)}")
        for key in value
        if key not in _KEYS
    ]
    place, cut = value.get("placement", "device"), value.get("cut", TableCut.ROWS)
    device, cache = value.get("device"), value.get("cache", 0.0 if place == HOST_WORD else None)
    if place not in _PLACES:
        message = f"is {' or '.join(_PLACES)}, met {Repr().repr(place)}; nearest: device"
        faults.append(EmbeddingsFault(("placement",), message))
    if cut not in list(TableCut):
        words = [*TableCut, HOST_WORD]
        message = f"is one of {', '.join(words)}, met {Repr().repr(cut)}{_hint(cut, *words)}"
        faults.append(EmbeddingsFault(() if is_word else ("cut",), message))
    # type() and not isinstance: true and false are ints in Python
    if device is not None and type(device) is not int:
        message = f"is a data rank, met {Repr().repr(device)}; nearest: 0"
        faults.append(EmbeddingsFault(("device",), message))
    if cache is not None and type(cache) not in (int, float):
        message = f"is a fraction of the rows, met {Repr().repr(cache)}; nearest: 0.1"
        faults.append(EmbeddingsFault(("cache",), message))
    elif cache is not None and place == "device":
        message = f"is of a table with placement: host, met {cache:g}; nearest: placement: host"
        faults.append(EmbeddingsFault(("cache",), message))
    told_keys = {key for fault in faults for key in fault.path or ("cut",)}
    if "cut" not in told_keys:
        sound_device = None if "device" in told_keys else device
        sound_cache = None if "cache" in told_keys or cache is None else float(cache)
        faults += _list_placement_faults(TableCut(cut), sound_device, sound_cache)
    if faults:
        raise EmbeddingsError(faults)
    return TablePlacement(TableCut(cut), device, None if cache is None else float(cache))
