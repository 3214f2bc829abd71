"""Offloading: which fractions of optimizer states, activations and parameters are kept in host memory.

A fraction is one number for all pipeline ranks or one per rank. It counts updated parameters for optimizer states,
the first layers of a stage for activations, and the first blocks of a stage for parameters.

References
----------
Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (optimizer
on the host); DeepSpeed, ``offload_optimizer.ratio`` (a part of it: ZeRO-Offload++, "Twin-Flow").
Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning",
SC 2021 (parameters and activations too); PyTorch 2, ``torch.distributed.fsdp.CPUOffloadPolicy``.
Megatron-LM, ``--cpu-offloading-num-layers`` (activations of the first layers).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fractions import Fraction
from math import ceil
from reprlib import Repr
from typing import Any, NamedTuple

from meshwise.simulator.program import StreamKind, TaskKind

OFFLOADS = ("optimizer", "parameters", "activations")
"""What can be kept in host memory."""

WHOLE_FRACTION = (1.0,)

TO_HOST, HOST, FROM_HOST = "to host", "host", "from host"
"""Kinds of transfers of one rank: from the device to its host, within host memory, and back to the device."""

HOST_KINDS = (TO_HOST, HOST, FROM_HOST)
"""Kinds of copies between one rank and its host, and of work on the host."""

HOST_STREAMS = {TO_HOST: StreamKind.TO_HOST, HOST: StreamKind.HOST, FROM_HOST: StreamKind.FROM_HOST}
"""Streams of copies and of work on the host, by kind."""

UPDATE_CHUNKS = 8
"""Pieces into which an offloaded update is split, so that copies run beside the optimizer."""


class StepPlace(StrEnum):
    """Where the optimizer updates the parameters whose states are on the host."""

    HOST = "host"
    DEVICE = "device"


class UpdateStep(NamedTuple):
    """One stage of the update of a chunk, on its own stream; ``kind`` is empty for the optimizer on the device."""

    kind: str
    task: TaskKind
    stream: StreamKind
    name: str


STEPS = (
    UpdateStep(TO_HOST, TaskKind.HOST_COPY, StreamKind.TO_HOST, "gradients to host"),
    UpdateStep(HOST, TaskKind.HOST_COPY, StreamKind.HOST, "optimizer on host"),
    UpdateStep(FROM_HOST, TaskKind.HOST_COPY, StreamKind.FROM_HOST, "parameters from host"),
    UpdateStep(FROM_HOST, TaskKind.HOST_COPY, StreamKind.FROM_HOST, "optimizer states from host"),
    UpdateStep("", TaskKind.OPTIMIZER, StreamKind.COMPUTE, "optimizer"),
    UpdateStep(TO_HOST, TaskKind.HOST_COPY, StreamKind.TO_HOST, "optimizer states to host"),
)
STEPS_ON_HOST, STEPS_ON_DEVICE = (0, 1, 2), (3, 4, 5)


class Update(NamedTuple):
    """How a pipeline rank updates its parameters.

    Parameters
    ----------
    has_device_states
        Whether some states are on the device.
    steps
        The stages, of `STEPS`, of every chunk whose states are on the host; none where no states are.
    has_host_gradients
        Whether some gradients are on the host.
    """

    has_device_states: bool = True
    steps: tuple[int, ...] = ()
    has_host_gradients: bool = False

    @property
    def streams_states(self) -> bool:
        """Whether states come to the device to be updated."""
        return STEPS_ON_DEVICE[0] in self.steps


@dataclass(frozen=True, slots=True)
class Offloading:
    """What is kept in host memory; false where nothing is.

    Parameters
    ----------
    optimizer, parameters, activations
        The fraction of each in host memory: empty for none, one number for all pipeline ranks, or one per rank.
    step
        Where the optimizer updates the parameters whose states are on the host.

    Raises
    ------
    ValueError
        Where a fraction is not between 0 and 1, or is 0 for all pipeline ranks together.
    """

    optimizer: tuple[float, ...] = ()
    parameters: tuple[float, ...] = ()
    activations: tuple[float, ...] = ()
    step: StepPlace = StepPlace.HOST

    def __post_init__(self) -> None:
        for name in OFFLOADS:
            fractions: tuple[float, ...] = getattr(self, name)
            bad_values = [value for value in fractions if not 0 <= value <= 1]
            if bad_values:
                nearest = 1.0 if bad_values[0] > 1 else 0.0
                raise ValueError(
                    f"{name}: a fraction is at least 0 and at most 1, met {bad_values[0]:g}; nearest: {nearest}"
                )
            if fractions == (0.0,):
                raise ValueError(f"{name}: a fraction of all is more than 0, met 0; nearest: leave it out")
        if self.step is StepPlace.DEVICE and not any(self.optimizer):
            raise ValueError("optimizer: step: device needs states on the host, met none; nearest: step: host")

    def __bool__(self) -> bool:
        return any(any(getattr(self, name)) for name in OFFLOADS)

    def __str__(self) -> str:
        parts = [(name, getattr(self, name)) for name in OFFLOADS]
        place_text = " (stepped on the device)" if self.step is StepPlace.DEVICE else ""
        texts = (
            f"{_format_fractions(value)}{name}{place_text if name == 'optimizer' else ''}"
            for name, value in parts
            if any(value)
        )
        return ", ".join(texts)

    def fraction_at(self, kind: str, position: int) -> float:
        """Return the fraction of one kind of `OFFLOADS` that a pipeline rank keeps on its host.

        >>> Offloading(activations=(1.0, 0.5)).fraction_at("activations", 1)
        0.5
        """
        return select_fraction(getattr(self, kind), position)

    @property
    def moves_in_passes(self) -> bool:
        """Whether ranks exchange data with their hosts during passes."""
        return any(self.parameters) or any(self.activations)

    @property
    def document(self) -> list[str] | dict[str, Any]:
        """The offloading as plain data: a list of names where all fractions are 1, otherwise fractions by name."""
        stated_fractions = {name: getattr(self, name) for name in OFFLOADS if getattr(self, name)}
        if self.step is StepPlace.HOST and all(fractions == WHOLE_FRACTION for fractions in stated_fractions.values()):
            return list(stated_fractions)
        document = {
            name: fractions[0] if len(fractions) == 1 else list(fractions)
            for name, fractions in stated_fractions.items()
        }
        if self.step is StepPlace.DEVICE:
            document["optimizer"] = {"fraction": document["optimizer"], "step": str(self.step)}
        return document


NO_OFFLOADING = Offloading()
"""Everything stays on devices."""


def _format_fractions(fractions: tuple[float, ...]) -> str:
    return "" if fractions == WHOLE_FRACTION else "/".join(f"{value:.4g}" for value in fractions) + " of "


def offloading(document: Any) -> Offloading:
    """Return the offloading of a document: a list of names, or a mapping from names to fractions.

    >>> offloading(["optimizer"])
    Offloading(optimizer=(1.0,), parameters=(), activations=(), step=<StepPlace.HOST: 'host'>)
    >>> offloading({"activations": [1.0, 0.5], "optimizer": {"fraction": 0.5, "step": "device"}}).activations
    (1.0, 0.5)

    Raises
    ------
    ValueError
        Where the document is neither; the message begins with the wrong name.
    """
    if isinstance(document, Mapping):
        _check_names(document)
        return _parse_mapping(document)
    if isinstance(document, list | tuple) and all(isinstance(name, str) for name in document):
        _check_names(document)
        repeated_name = next((name for name in document if document.count(name) > 1), None)
        if repeated_name is not None:
            raise ValueError(f"names each of {', '.join(OFFLOADS)} once, met {repeated_name} twice")
        return _parse_mapping(dict.fromkeys(document, 1.0))
    raise ValueError(
        f"is a list of names, any of {', '.join(OFFLOADS)}, or a mapping from names to fractions, "
        f"met {Repr().repr(document)}"
    )


def _check_names(names: Iterable[Any]) -> None:
    unknown_name = next((name for name in names if name not in OFFLOADS), None)
    if unknown_name is not None:
        hints = [f"; nearest: {nearest}" for nearest in get_close_matches(str(unknown_name), OFFLOADS, n=1)]
        raise ValueError(f"holds any of {', '.join(OFFLOADS)}, met {Repr().repr(unknown_name)}{''.join(hints)}")


def _parse_mapping(document: Mapping[str, Any]) -> Offloading:
    values = dict(document)
    step = StepPlace.HOST
    if isinstance(values.get("optimizer"), Mapping):
        values["optimizer"], step = _parse_optimizer(values["optimizer"])
    return Offloading(**{name: _parse_fractions(name, value) for name, value in values.items()}, step=step)


def _parse_optimizer(document: Mapping[str, Any]) -> tuple[Any, StepPlace]:
    """Return the fraction and the step place that the optimizer's part of a document states."""
    known_keys = ("fraction", "step")
    unknown_key = next((key for key in document if key not in known_keys), None)
    if unknown_key is not None:
        raise ValueError(f"optimizer: holds fraction and step, met {Repr().repr(unknown_key)}")
    step = document.get("step", StepPlace.HOST)
    if step not in list(StepPlace):
        raise ValueError(f"optimizer: step is {' or '.join(StepPlace)}, met {Repr().repr(step)}; nearest: host")
    return document.get("fraction", 1.0), StepPlace(step)


def _parse_fractions(name: str, value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    # type() and not isinstance: true and false are ints in Python
    if not values or not all(type(item) in (int, float) for item in values):
        raise ValueError(
            f"{name}: is a fraction of more than 0 and at most 1, or one for every pipeline rank, "
            f"met {Repr().repr(value)}; nearest: 1.0"
        )
    return tuple(map(float, values))


def select_fraction(fractions: tuple[float, ...], position: int) -> float:
    """Return the fraction of a pipeline position: its own, or the one of all positions; 0 where there is none.

    >>> select_fraction((0.25,), 3)
    0.25
    """
    return fractions[position if len(fractions) > 1 else 0] if fractions else 0.0


def count_fraction(count: int, fraction: float) -> int:
    """Return a fraction of ``count``, rounded up; fractions are taken in millionths.

    >>> count_fraction(10, 0.25), count_fraction(10, 0.3)
    (3, 3)
    """
    # exact rationals, since 100 * 0.07 is 7.000000000000001 in floats and would be rounded up to 8
    return count * int(fraction) if fraction in (0, 1) else ceil(count * Fraction(fraction).limit_denominator(10**6))
