"""One direction of a connection."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: ``latency`` in s, ``bandwidth`` in byte/s.

    ``launch`` is what a collective over this link costs once, in s, besides its steps.
    """

    latency: float
    bandwidth: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.launch >= 0 and self.bandwidth > 0):
            raise ValueError(f"a link has latency >= 0 and bandwidth > 0, met {self}")
