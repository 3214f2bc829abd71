"""What lies between a failure and training again: detection, a sound host, a restart."""

from collections import deque
from dataclasses import dataclass
from math import inf

from simulator.units import to_ticks


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long the parts of a recovery take; s.

    Parameters
    ----------
    detection
        From a failure until it is noticed and its host known.
    restart
        Scheduling and initialisation, without loading the checkpoint.
    repair
        Until a broken host can be used again, from the failure on.
    replacement
        Until a host from elsewhere arrives, asked for only where no host is left and none is repaired
        earlier; the host that broke last is given for it. None: there are no such hosts.
    """

    detection: float
    restart: float
    repair: float
    replacement: float | None = None

    def __post_init__(self) -> None:
        for name in ("detection", "restart", "repair", "replacement"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ValueError(f"{name} is not negative and finite, met {value}")


class HostPool:
    """Hosts outside the job: when each can be used, the next one first; ticks."""

    def __init__(self, spares: int, recovery: Recovery) -> None:
        self._ready = deque([0] * spares)
        self._repair = to_ticks(recovery.repair)
        self._replacement = None if recovery.replacement is None else to_ticks(recovery.replacement)

    def broke(self, now: int) -> None:
        """A host left the job to be repaired."""
        self._ready.append(now + self._repair)

    def take(self, now: int) -> int:
        """Return when the next host is there; it belongs to the job from now on.

        Every `take` follows a `broke`, so there is always one.
        """
        if self._replacement is not None and self._ready[0] > now + self._replacement:
            self._ready.pop()
            return now + self._replacement
        return max(now, self._ready.popleft())
