"""What a plan says of a user's module: data parallelism, shards of states, recomputation, stages, cuts of operators."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import prod
from typing import Any

from meshwise.strategies.plan.mesh import DATA, OPERATOR_AXES, TENSOR, TENSOR_DEPTH, TENSOR_ROWS
from meshwise.strategies.plan.offloading import NO_OFFLOADING, WHOLE_FRACTION, Offloading, offloading
from meshwise.strategies.plan.plan import Plan
from meshwise.strategies.plan.recomputation import (
    FirstLayers,
    PerStage,
    Recomputation,
    Recompute,
    StageRecompute,
    find_stage_recompute,
    parse_words,
    recomputation,
    write_words,
)
from meshwise.strategies.schedules.schedule import Schedule, build_schedule, find_rule
from meshwise.strategies.tables.embeddings import TableCut

MOST_DIGITS = 6
"""Digits of a number in words, at most."""

OFFLOADS = ("optimizer", "activations")
"""What may be kept on the host."""

CUTS = {"expert": TENSOR_DEPTH, "context": TENSOR_ROWS, "tensor": TENSOR}
"""The words of plans that cut operators, each by a rule of its own, and the axes of a mesh that they are.

`meshwise.scenarios.inputs.operator_cuts` has the rules. The outermost axis comes first.
"""

CutAxes = tuple[tuple[str, int], ...]
"""Axes of a mesh over which operators are cut, and their sizes."""

TABLES = (TableCut.REPLICATED, TableCut.ROWS, TableCut.TABLE, TableCut.COLUMNS)
"""How data ranks may have the embedding tables of a module."""

RECOMPUTES = (Recompute.NONE, Recompute.FULL)
"""What may be computed again of all blocks of a module, without knowing what products and attention are in them."""


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """How a user's module is trained.

    Parameters
    ----------
    data
        Parts of the batch, each of which ranks of other stages, or with other parts of operators, have too.
    zero
        What ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
    zero_shards
        Ranks over which one copy of the shared states is cut; 0 for all. It divides ``data``.
    reshard_after_forward
        Whether parameters that are shared are freed between forward and backward.
    num_microbatches
        Parts of a rank's samples, one after the other in a step.
    recompute
        What backward computes again: nothing, every block, or the first blocks of every stage; or a choice for each
        stage. With `Recompute.SELECTIVE` it is all of a block but its products and its attention.
    pipeline
        Ranks, each with other stages of the module.
    schedule
        The name of the order of passes, or its text (`meshwise.strategies.schedules`).
    chunks
        Stages of a pipeline rank, for schedules that interleave them.
    cuts
        Names of the modules at which stages after the first begin; none for stages of about equal work.
    tensor
        Ranks over which the operators of the module are cut, and its parameters with them; with 1 they are whole.
    context
        Ranks over which operators are cut along the sequence, or heads inside attention; each has all parameters.
    expert
        Ranks over which operators of experts are cut, each with some of them; other operators along the samples.
    plan
        How the operators are cut; ``None`` where that is still to be chosen, or nothing is cut.
    offload
        What is kept in host memory, whole: optimizer states, or what blocks keep for backward.
    tables
        How data ranks have embedding tables: all of them whole, or each of them cut, or on one rank.
    """

    data: int = 1
    zero: int = 0
    zero_shards: int = 0
    reshard_after_forward: bool = True
    num_microbatches: int = 1
    recompute: Recomputation = Recompute.NONE
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    cuts: tuple[str, ...] = ()
    tensor: int = 1
    context: int = 1
    expert: int = 1
    plan: Plan | None = None
    offload: Offloading = NO_OFFLOADING
    tables: TableCut = TableCut.REPLICATED

    def __post_init__(self) -> None:
        for name in ("data", "num_microbatches", "pipeline", "chunks", *CUTS):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, met {getattr(self, name)}; nearest: 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero is 0, 1, 2 or 3, met {self.zero}; nearest: {min(max(self.zero, 0), 3)}")
        if self.zero_shards < 0 or (self.zero_shards and self.data % self.zero_shards):
            raise ValueError(f"zero_shards divides data({self.data}), met {self.zero_shards}; nearest: {self.data}")
        self._require_recompute()
        self._require_offload()
        self._require_tables()
        if self.pipeline > 1:
            self._require_stages()

    def _require_recompute(self) -> None:
        """Raise where operators are named, or a list has not one choice a stage."""
        if isinstance(self.recompute, PerStage) and len(self.recompute.stages) != self.num_stages:
            met = f"met {len(self.recompute.stages)}"
            nearest = write_words(self.find_recompute(0))
            rule = f"recompute of a list has one a stage, of {self.num_stages} in all"
            raise ValueError(f"{rule}, {met}; nearest: {nearest}")
        if not all(isinstance(self.find_recompute(place), Recompute | FirstLayers) for place in range(self.num_stages)):
            rule = "recompute: blocks of a module are computed again, not operators by name"
            raise ValueError(f"{rule}, met {self.recompute}; nearest: {Recompute.FULL}")

    def _require_offload(self) -> None:
        """Raise where a part of something is kept on the host, or what is not."""
        if not self.offload:
            return
        whole = find_whole(self.offload)
        if self.offload != whole:
            rule = f"offload of a module is all of its {' or '.join(OFFLOADS)}, stepped on the host"
            raise ValueError(f"{rule}, met {self.offload}; nearest: {whole or OFFLOADS[0]}")
        choices = {self.find_recompute(place).layer for place in range(self.num_stages)}
        if self.offload.activations and Recompute.SELECTIVE in choices:
            rule = "offload: what selective recompute keeps stays on the device"
            raise ValueError(f"{rule}, met {self.offload} on the host; nearest: {Recompute.FULL}")
        if self.offload.activations and self.pipeline > 1 and find_rule(self.schedule).splits_backward:
            rule = "offload: activations on the host move with whole passes"
            raise ValueError(f"{rule}, met {self.schedule}; nearest: 1f1b")

    def _require_tables(self) -> None:
        """Raise where tables are cut in a way, or beside something, that no step runs."""
        if self.tables not in TABLES:
            raise ValueError(f"tables are {', '.join(TABLES)}, met {self.tables}; nearest: {TableCut.ROWS}")
        if self.tables is TableCut.REPLICATED:
            return
        words = (*CUTS, "pipeline")
        others = [f"{word}={getattr(self, word)}" for word in words if getattr(self, word) > 1]
        others += [f"zero={self.zero}"] * (self.zero > 0) + [f"offload={self.offload}"] * bool(self.offload)
        if others:
            rule = f"tables({self.tables}) are cut over ranks that have all else whole"
            raise ValueError(f"{rule}, met {', '.join(others)}; nearest: data={self.num_ranks}")

    def _require_stages(self) -> None:
        """Raise where the schedule does not exist for these numbers, or cuts are not one fewer than stages."""
        rule = find_rule(self.schedule)
        if rule.is_asynchronous:
            raise ValueError(f"schedule: a step ends before the next begins, met {self.schedule}; nearest: 1f1b")
        if rule.splits_backward and (self.zero or self.recomputes):
            raise ValueError(
                f"schedule: gradients of inputs and weights apart need whole states and kept activations, met "
                f"{self.schedule} with {self.describe()}; nearest: 1f1b"
            )
        actions = self.actions
        if self.cuts and len(self.cuts) != actions.num_stages - 1:
            met = f"met {len(self.cuts)} for {actions.num_stages} stages"
            raise ValueError(f"cuts are one fewer than stages, {met}; nearest: {actions.num_stages - 1}")

    @property
    def cuts_tables(self) -> bool:
        """Whether ranks have parts of embedding tables."""
        return self.tables is not TableCut.REPLICATED and self.data > 1

    @property
    def is_staged(self) -> bool:
        """Whether the module runs in stages, or in one whose cut operators have shards or are computed again.

        So do experts beside data ranks, each of which sorts its own rows by expert.
        """
        has_own_rows = self.expert > 1 and self.data > 1
        is_more = self.zero > 0 or self.recomputes or bool(self.offload) or has_own_rows
        return self.pipeline > 1 or (self.operator_ranks > 1 and is_more)

    @property
    def num_stages(self) -> int:
        """All stages."""
        return self.pipeline * self.chunks if self.pipeline > 1 else 1

    @property
    def recomputes(self) -> bool:
        """Whether backward computes something again."""
        return any(self.find_recompute(place) is not Recompute.NONE for place in range(self.num_stages))

    def find_recompute(self, stage: int) -> StageRecompute:
        """Return what backward computes again of a stage."""
        return find_stage_recompute(self.recompute, stage)

    @property
    def actions(self) -> Schedule:
        """The order of passes on every pipeline rank."""
        return build_schedule(self.schedule, self.pipeline, self.num_microbatches, self.chunks)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data * self.pipeline * self.operator_ranks

    @property
    def operator_ranks(self) -> int:
        """Ranks over which operators are cut, along all axes."""
        return self.tensor * self.context * self.expert

    @property
    def operator_axes(self) -> dict[str, int]:
        """The ranks along the axes of a mesh over which operators are cut, from the outermost on.

        >>> ModuleLayout(tensor=2).operator_axes, ModuleLayout(context=2).operator_axes
        ({'tensor': 2}, {'tensor_rows': 2, 'tensor': 1})
        """
        if self.plan is not None:
            return list_operator_axes(self.plan)
        sizes = {axis: getattr(self, name) for name, axis in CUTS.items()}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == TENSOR}

    @property
    def cut_axes(self) -> CutAxes:
        """The axes of more than one rank over which operators are cut, with their sizes, from the outermost on.

        >>> ModuleLayout(context=2).cut_axes
        (('tensor_rows', 2),)
        """
        return find_cut_axes(self.operator_axes)

    def find_data_part(self, rank: int) -> int:
        """Return which part of the batch a rank has: ranks of a stage, or with parts of operators, follow each other.

        >>> [ModuleLayout(data=2, tensor=2).find_data_part(rank) for rank in range(4)]
        [0, 0, 1, 1]
        >>> [ModuleLayout(data=2, tensor=2, pipeline=2, num_microbatches=2).find_data_part(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        >>> [ModuleLayout(data=2, pipeline=2, num_microbatches=2).find_data_part(rank) for rank in range(4)]
        [0, 1, 0, 1]
        """
        if self.plan is None or self.is_staged or self.operator_ranks == 1:
            return rank // self.operator_ranks % self.data
        inner = 1
        for axis in reversed(self.plan.mesh.axes):
            if axis.name == DATA:
                return rank // inner % axis.size
            inner *= axis.size
        return 0

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The first rank of every part of the batch."""
        parts = [self.find_data_part(rank) for rank in range(self.num_ranks)]
        return tuple(parts.index(part) for part in range(self.data))

    @property
    def shards(self) -> int:
        """Ranks over which one copy of the shared states is cut."""
        return (self.zero_shards or self.data) if self.zero else 1

    def describe(self) -> str:
        """Return the layout in words.

        >>> ModuleLayout(4, zero=3, zero_shards=2, num_microbatches=2).describe()
        'data 4, 2 microbatches, ZeRO-3 over 2'
        """
        parts = [f"pipeline {self.pipeline} ({self.schedule})"] if self.pipeline > 1 else []
        if self.cuts:
            parts.append(f"cut at {', '.join(self.cuts)}")
        parts.append(f"data {self.data}")
        parts += [f"{name} {getattr(self, name)}" for name in reversed(CUTS) if getattr(self, name) > 1]
        parts += [f"{self.num_microbatches} microbatch{'es' * (self.num_microbatches > 1)}"]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}" + (f" over {self.shards}" if self.shards < self.data else ""))
        if self.zero == 3 and not self.reshard_after_forward:
            parts.append("parameters kept after forward")
        if self.recomputes:
            parts.append(self._describe_recompute())
        if self.offload:
            parts.append(f"{self.offload} on the host")
        if self.cuts_tables:
            parts.append("tables each on one rank" if self.tables is TableCut.TABLE else f"tables by {self.tables}")
        return ", ".join(parts)

    def _describe_recompute(self) -> str:
        if not isinstance(self.recompute, FirstLayers):
            return (
                f"recompute {self.recompute}" if isinstance(self.recompute, PerStage) else f"{self.recompute} recompute"
            )
        count = self.recompute.layers
        return f"{self.recompute.layer} recompute of {count} block{'s' * (count > 1)}" + " a stage" * (
            self.pipeline > 1
        )

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "recompute": self.recompute.document,
            "offload": self.offload.document,
            "plan": None if self.plan is None else self.plan.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "ModuleLayout":
        """Return the layout of plain data."""
        plan = None if document.get("plan") is None else Plan.from_json(document["plan"])
        values = {
            "recompute": recomputation(document["recompute"]),
            "cuts": tuple(document.get("cuts", ())),
            "plan": plan,
            "offload": offloading(document.get("offload", ())),
            "tables": TableCut(document.get("tables", TableCut.REPLICATED)),
        }
        return cls(**document | values)


WORDS = (
    "data", "tensor", "context", "expert", "zero", "zero_shards", "num_microbatches", "recompute", "offload",
    "pipeline", "schedule", "chunks", "cuts", "tables",
)  # fmt: skip
"""What `parse_layout` reads."""


def parse_layout(text: str, default: ModuleLayout) -> ModuleLayout:
    """Return the layout of words ``NAME=VALUE,...``; what they do not say is as in ``default``.

    The names of ``cuts`` and ``offload`` have ``+`` between them, and ``recompute`` is as `parse_words` reads it. Where
    data ranks are not said, they are what stages and cuts leave of the ranks of ``default``.

    >>> parse_layout("data=4,zero=3,recompute=full", ModuleLayout()).describe()
    'data 4, 1 microbatch, ZeRO-3, full recompute'
    >>> parse_layout("recompute=2", ModuleLayout()).describe()
    'data 1, 1 microbatch, full recompute of 2 blocks'
    """
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in WORDS:
            matches = get_close_matches(name, WORDS, n=1)
            nearest = f"; nearest: {matches[0]}" if matches else ""
            raise ValueError(f"plan: words are {', '.join(WORDS)}, met {word.strip()!r}{nearest}")
        if name == "recompute":
            try:
                values[name] = parse_words(value)
            except ValueError as error:
                raise ValueError(f"plan: {error}") from error
        elif name == "offload":
            values[name] = _parse_offload(value)
        elif name == "schedule":
            values[name] = value
        elif name == "tables":
            values[name] = _parse_tables(value)
        elif name == "cuts":
            values[name] = tuple(filter(None, value.split("+")))
        elif not (value.isascii() and value.isdecimal()) or len(value) > MOST_DIGITS:
            raise ValueError(f"plan: {name} is a number, met {value!r}; nearest: 1")
        else:
            values[name] = int(value)
    if "data" not in values:
        cuts = prod(values.get(name, getattr(default, name)) for name in ("pipeline", *CUTS))
        values["data"] = max(default.num_ranks // cuts, 1)
    return replace(default, **values)


def find_whole(offload: Offloading) -> Offloading:
    """Return what of an offloading a module can have on the host."""
    return offloading([name for name in OFFLOADS if getattr(offload, name) == WHOLE_FRACTION])


def _parse_tables(text: str) -> TableCut:
    """Return how a word says that ranks have tables."""
    if text not in TABLES:
        nearest = next(iter(get_close_matches(text, TABLES, n=1)), TableCut.ROWS)
        raise ValueError(f"plan: tables are {', '.join(TABLES[:-1])} or {TABLES[-1]}, met {text!r}; nearest: {nearest}")
    return TableCut(text)


def _parse_offload(text: str) -> Offloading:
    """Return the offloading of names with ``+`` between them, or of ``none``."""
    try:
        return offloading(() if text == "none" else text.split("+"))
    except ValueError as error:
        raise ValueError(f"plan: offload {error}") from error


def find_cut_axes(sizes: Mapping[str, int]) -> CutAxes:
    """Return the axes of more than one rank."""
    return tuple((axis, size) for axis, size in sizes.items() if size > 1)


def read_cut_words(axes: CutAxes) -> dict[str, Any]:
    """Return axes over which operators are cut as the words of a plan.

    >>> read_cut_words((("tensor_depth", 2),))
    {'expert': 2}
    """
    words = {axis: word for word, axis in CUTS.items()}
    return {words[axis]: size for axis, size in axes}


def list_operator_axes(plan: Plan) -> dict[str, int]:
    """Return the sizes of the axes over which a plan cuts operators, from the outermost on."""
    return {axis.name: axis.size for axis in plan.mesh.axes if axis.name in OPERATOR_AXES}
