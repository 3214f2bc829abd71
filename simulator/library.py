"""The communication library: how it drives the links that it is given."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protocol:
    """A way to move a collective's bytes, beside the one that links are described by.

    Parameters
    ----------
    name
        What the library calls it.
    launch, step
        Its launch and the latency of its steps, as parts of those of the links.
    payload
        Part of the bandwidth that is left for the bytes of a collective, in (0, 1]; the rest
        are flags and idle time.
    messages
        Whether sends and all-to-alls may use it too, not only collectives that go in steps.

    Notes
    -----
    NCCL has three protocols [1]_. *Simple*, which links are described by, moves large chunks and
    waits for a flag in memory. *LL* writes 4 bytes of flag with every 4 of data, *LL128* 8 with
    every 120, and neither waits; both reach less of the bandwidth than that alone would leave.
    Sends and all-to-alls have LL and Simple [2]_.

    References
    ----------
    .. [1] NVIDIA/nccl, src/graph/tuning.cc and src/device/prims_ll128.h.
    .. [2] NVIDIA/nccl, src/enqueue.cc: ``NCCL_P2P_LL_THRESHOLD``.
    """

    name: str
    launch: float
    step: float
    payload: float
    messages: bool = False

    def __post_init__(self) -> None:
        if not (self.launch >= 0 and self.step >= 0 and 0 < self.payload <= 1):
            raise ValueError(f"a protocol has launch >= 0, step >= 0 and payload in (0, 1], met {self}")

    def latency(self, latency: float, launch: float) -> float:
        """Return the latency of a phase, of which ``launch`` is paid once and the rest in steps."""
        return launch * self.launch + (latency - launch) * self.step


SIMPLE = Protocol("simple", launch=1.0, step=1.0, payload=1.0)
"""The protocol that links are described by."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a communication library makes of links; by default nothing is lost.

    Parameters
    ----------
    protocols
        Those that it has beside `SIMPLE`. It takes the fastest for every collective and size, except
        for one in switches, which runs by `SIMPLE` alone.
    own
        Bytes of its port that each byte costs which a rank of a group inside a node keeps for itself,
        because it copies it too: a ring all-gather puts ``(n - 1 + own) / n`` of the size on a port.
    reduction
        Part of a port's bandwidth that collectives in the switches of a node reach, in (0, 1].
    reduction_launch
        What they cost once besides, in s.
    """

    protocols: tuple[Protocol, ...] = ()
    own: float = 0.0
    reduction: float = 1.0
    reduction_launch: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.own <= 2 and 0 < self.reduction <= 1 and self.reduction_launch >= 0):
            raise ValueError(f"own lies in [0, 2], reduction in (0, 1], reduction_launch >= 0, met {self}")

    def ways(self, latency: float, launch: float | None, messages: bool) -> Iterator[tuple[float, float]]:
        """Yield (latency, bytes on links for every byte) of a phase by every protocol that may run it.

        ``launch`` is the part of its latency that is paid once, ``None`` where `SIMPLE` alone may run it;
        ``messages`` says that it is sends or an all-to-all.
        """
        yield latency, 1.0
        if launch is not None:
            for protocol in self.protocols:
                if protocol.messages or not messages:
                    yield protocol.latency(latency, launch), 1.0 / protocol.payload


LOSSLESS = Library()
"""The library that makes of links what they are: `SIMPLE` alone, and nothing lost."""
