"""What a few seconds of a user's module have shown on this machine: figures from which its steps are predicted.

All are of this module alone, in seconds and bytes, measured on all ranks at once, as they compute in training.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwise.executor.modules.layout import CutAxes
from meshwise.simulator.brief import brief_repr
from meshwise.strategies.plan.plan import Plan

CollectiveRow = tuple[str, int, int, float]
"""Name of a collective, ranks, bytes and seconds."""


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """A block of the module, or what comes before or after all blocks.

    Parameters
    ----------
    path
        Its name in the module; empty for what is outside blocks.
    forward, backward
        Seconds of its passes with `ModuleFigures.samples`.
    saved
        Bytes a sample that its backward reads, without its input.
    output
        Bytes a sample of its result.
    saves_input
        Whether backward reads its input.
    shapes
        The shapes of its trained parameters; one that several blocks have is the first one's.
    """

    path: str
    forward: float
    backward: float
    saved: float
    output: float
    saves_input: bool
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "BlockFigures":
        """Return the figures of plain data."""
        return cls(**dict(document) | {"shapes": tuple(map(tuple, document["shapes"]))})


@dataclass(frozen=True, slots=True)
class CutFigures:
    """The program of a rank of the module whose operators are cut over ranks.

    Parameters
    ----------
    axes
        Those of the mesh over which they are cut.
    samples
        Those of a pass, fewer and more, which all these ranks have.
    passes
        Seconds of forward and backward together with either number of samples, with all messages of them.
    messages
        Of these the seconds of messages on the rank that waits least.
    peak
        Most bytes of tensors in passes of the larger number, above those that were there before.
    """

    axes: CutAxes
    samples: tuple[int, int]
    passes: tuple[float, float]
    messages: tuple[float, float]
    peak: float

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "CutFigures":
        """Return the figures of plain data."""
        lists = {name: tuple(document[name]) for name in ("samples", "passes", "messages")}
        axes = tuple((name, size) for name, size in document["axes"])
        return cls(**dict(document) | lists | {"axes": axes})


@dataclass(frozen=True, slots=True)
class ModuleFigures:
    """What one rank measured of a module.

    Parameters
    ----------
    samples
        Those of a pass, fewer and more.
    passes
        Seconds of forward and backward together with either number of samples, on all ranks at once.
    alone
        Seconds of passes with the larger number while all other ranks wait, without anything of several ranks.
    head, blocks, tail
        What comes before the first block, the blocks in the order of forward, and what comes after the last one.
    buffers
        Bytes of buffers, and of parameters that are not trained.
    batch
        Bytes of a sample of the data.
    peak
        Most bytes of tensors in a pass of the larger number of samples, above those that were there before.
    update, update_launches
        Seconds of the optimizer's step, and of one of as many parameters of a single element.
    update_peak
        Most bytes of tensors in the optimizer's step, above those that were there before.
    state
        Bytes of optimizer states of all parameters.
    reading, read_samples
        Seconds to read a batch, and the samples of it; those of all ranks where each reads all.
    loop
        Seconds of a step of nothing, with neither messages nor passes.
    reduction
        Seconds in which ranks add up their losses.
    replica
        Further seconds of passes in `DistributedDataParallel` without a message.
    units
        Units that `fully_shard` gathers one at a time.
    unit
        Further seconds of passes a unit, for its gather and its reduction without messages.
    sharded_update
        Further seconds of the optimizer's step on sharded parameters.
    whole_batch
        Why one rank has the whole batch in one microbatch, or empty.
    whole_microbatch
        Why a rank has one microbatch, or empty.
    whole_states
        Why ranks share no states, or empty.
    collectives
        Messages of all sizes between ranks.
    cuts
        Programs of cut operators, one for each mesh of operator axes.
    """

    samples: tuple[int, int]
    passes: tuple[float, float]
    alone: float
    head: BlockFigures
    blocks: tuple[BlockFigures, ...]
    tail: BlockFigures
    buffers: int
    batch: float
    peak: float
    update: float
    update_launches: float
    update_peak: float
    state: int
    reading: float
    read_samples: int
    loop: float
    reduction: float
    replica: float
    units: int
    unit: float
    sharded_update: float
    whole_batch: str
    whole_microbatch: str
    whole_states: str
    collectives: tuple[CollectiveRow, ...]
    cuts: tuple[CutFigures, ...] = ()

    __repr__ = brief_repr()

    @property
    def parts(self) -> tuple[BlockFigures, ...]:
        """Head, blocks and tail."""
        return (self.head, *self.blocks, self.tail)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "ModuleFigures":
        """Return the figures in a file."""
        document = json.loads(path.read_text())
        parts = {name: BlockFigures.from_json(document[name]) for name in ("head", "tail")}
        lists: dict[str, Any] = {name: tuple(document[name]) for name in ("samples", "passes")}
        lists["blocks"] = tuple(map(BlockFigures.from_json, document["blocks"]))
        lists["collectives"] = tuple(map(tuple, document["collectives"]))
        lists["cuts"] = tuple(map(CutFigures.from_json, document["cuts"]))
        return cls(**document | parts | lists)


def figures_file(folder: Path, rank: int) -> Path:
    """Return the path of the figures of a rank."""
    return folder / f"rank-{rank}.figures"


START_FILE = "start-measuring"
"""The file whose presence has ranks begin to measure; it has the plans whose cut operators they measure."""


def write_start(folder: Path, plans: Iterable[Plan]) -> None:
    """Have ranks begin to measure, also what they have under some plans that cut operators."""
    path = folder / START_FILE
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps([plan.to_json() for plan in plans]))
    draft.replace(path)


def read_start(folder: Path) -> list[Plan] | None:
    """Return the plans of `write_start`; ``None`` where it is not written yet."""
    path = folder / START_FILE
    return [Plan.from_json(document) for document in json.loads(path.read_text())] if path.exists() else None
