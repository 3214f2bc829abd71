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

WHOLE = (1.0,)

TO_HOST, HOST, FROM_HOST = "to host", "host", "from host"
"""Kinds of transfers of one rank: from the device to its host, within host memory, and back to the device."""

CHUNKS = 8
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
            each: tuple[float, ...] = getattr(self, name)
            wrong = [value for value in each if not 0 <= value <= 1]
            if wrong:
                near = 1.0 if wrong[0] > 1 else 0.0
                raise ValueError(f"{name}: a fraction is at least 0 and at most 1, met {wrong[0]:g}; nearest: {near}")
            if each == (0.0,):
                raise ValueError(f"{name}: a fraction of all is more than 0, met 0; nearest: leave it out")
        if self.step is StepPlace.DEVICE and not any(self.optimizer):
            raise ValueError("optimizer: step: device needs states on the host, met none; nearest: step: host")

    def __bool__(self) -> bool:
        return any(any(getattr(self, name)) for name in OFFLOADS)

    def __str__(self) -> str:
        parts = [(name, getattr(self, name)) for name in OFFLOADS]
        where = " (stepped on the device)" if self.step is StepPlace.DEVICE else ""
        each = (f"{_shown(value)}{name}{where if name == 'optimizer' else ''}" for name, value in parts if any(value))
        return ", ".join(each)

    def at(self, what: str, position: int) -> float:
        """Return the fraction of one kind of `OFFLOADS` that a pipeline rank keeps on its host.

        >>> Offloading(activations=(1.0, 0.5)).at("activations", 1)
        0.5
        """
        each: tuple[float, ...] = getattr(self, what)
        return each[position if len(each) > 1 else 0] if each else 0.0

    @property
    def in_passes(self) -> bool:
        """Whether ranks exchange data with their hosts during passes."""
        return any(self.parameters) or any(self.activations)

    @property
    def document(self) -> list[str] | dict[str, Any]:
        """The offloading as plain data: a list of names where all fractions are 1, otherwise fractions by name."""
        stated = {name: getattr(self, name) for name in OFFLOADS if getattr(self, name)}
        if self.step is StepPlace.HOST and all(each == WHOLE for each in stated.values()):
            return list(stated)
        document = {name: each[0] if len(each) == 1 else list(each) for name, each in stated.items()}
        if self.step is StepPlace.DEVICE:
            document["optimizer"] = {"fraction": document["optimizer"], "step": str(self.step)}
        return document


NOTHING = Offloading()
"""Everything stays on devices."""


def _shown(each: tuple[float, ...]) -> str:
    return "" if each == WHOLE else "/".join(f"{value:.4g}" for value in each) + " of "


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
        _known(document)
        return _of_mapping(document)
    if isinstance(document, list | tuple) and all(isinstance(name, str) for name in document):
        _known(document)
        twice = next((name for name in document if document.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"names each of {', '.join(OFFLOADS)} once, met {twice} twice")
        return _of(dict.fromkeys(document, WHOLE))
    raise ValueError(
        f"is a list of names, any of {', '.join(OFFLOADS)}, or a mapping from names to fractions, "
        f"met {Repr().repr(document)}"
    )


def _known(names: Iterable[Any]) -> None:
    wrong = next((name for name in names if name not in OFFLOADS), None)
    if wrong is not None:
        close = [f"; nearest: {near}" for near in get_close_matches(str(wrong), OFFLOADS, n=1)]
        raise ValueError(f"holds any of {', '.join(OFFLOADS)}, met {Repr().repr(wrong)}{''.join(close)}")


def _of_mapping(document: Mapping[str, Any]) -> Offloading:
    found = dict(document)
    step = StepPlace.HOST
    if isinstance(found.get("optimizer"), Mapping):
        found["optimizer"], step = _optimizer(found["optimizer"])
    return _of({name: _fractions(name, value) for name, value in found.items()}, step)


def _of(found: Mapping[str, tuple[float, ...]], step: StepPlace = StepPlace.HOST) -> Offloading:
    return Offloading(found.get("optimizer", ()), found.get("parameters", ()), found.get("activations", ()), step)


def _optimizer(document: Mapping[str, Any]) -> tuple[Any, StepPlace]:
    """Return the fraction and the step place that the optimizer's part of a document states."""
    known = ("fraction", "step")
    wrong = next((key for key in document if key not in known), None)
    if wrong is not None:
        raise ValueError(f"optimizer: holds fraction and step, met {Repr().repr(wrong)}")
    step = document.get("step", StepPlace.HOST)
    if step not in list(StepPlace):
        raise ValueError(f"optimizer: step is {' or '.join(StepPlace)}, met {Repr().repr(step)}; nearest: host")
    return document.get("fraction", 1.0), StepPlace(step)


def _fractions(name: str, value: Any) -> tuple[float, ...]:
    each = value if isinstance(value, list | tuple) else [value]
    # type() and not isinstance: true and false are ints in Python
    if not each or not all(type(one) in (int, float) for one in each):
        raise ValueError(
            f"{name}: is a fraction of more than 0 and at most 1, or one for every pipeline rank, "
            f"met {Repr().repr(value)}; nearest: 1.0"
        )
    return tuple(map(float, each))


def fraction_of(count: int, fraction: float) -> int:
    """Return a fraction of ``count``, rounded up; fractions are taken in millionths.

    >>> fraction_of(10, 0.25), fraction_of(10, 0.3)
    (3, 3)
    """
    # exact rationals, since 100 * 0.07 is 7.000000000000001 in floats and would be rounded up to 8
    return count * int(fraction) if fraction in (0, 1) else ceil(count * Fraction(fraction).limit_denominator(10**6))
