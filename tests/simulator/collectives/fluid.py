"""An independent reference: messages as fluids that share links max-min fairly, solved anew at every event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass
class Message:
    """Bytes over links, all in proportion; it waits for ``after``, then its latency."""

    usage: Mapping[int, float]
    latency: float
    after: Sequence[int] = ()
    left: float = field(default=1.0, init=False)
    starts: float = field(default=inf, init=False)
    ends: float = field(default=inf, init=False)


def rates(messages: Sequence[Message], capacity: Mapping[int, float]) -> list[float]:
    """Return fractions a second: progressive filling in bytes a second on each message's busiest link."""
    found = [0.0] * len(messages)
    active, left = set(range(len(messages))), dict(capacity)
    while active:
        share = {
            i: {link: size / max(messages[i].usage.values()) for link, size in messages[i].usage.items()}
            for i in active
        }
        weight: dict[int, float] = {}
        for i in active:
            for link, part in share[i].items():
                weight[link] = weight.get(link, 0.0) + part
        level = min(left[link] / weight[link] for link in weight)
        full = {link for link in weight if left[link] / weight[link] <= level * (1 + 1e-9)}
        for i in sorted(active):
            if full & share[i].keys():
                found[i] = level / max(messages[i].usage.values())
                active.discard(i)
                for link, part in share[i].items():
                    left[link] = max(left[link] - part * level, 0.0)
    return found


def run(messages: Sequence[Message], capacity: Mapping[int, float]) -> float:
    """Return when the last message has arrived."""
    now = 0.0
    while any(message.ends == inf for message in messages):
        for message in messages:
            if message.starts == inf and all(messages[other].ends <= now for other in message.after):
                message.starts = now + message.latency
        moving = [m for m in messages if m.starts <= now and m.ends == inf]
        speeds = rates(moving, capacity)
        arrivals = [now + m.left / speed for m, speed in zip(moving, speeds, strict=True)]
        starts = [m.starts for m in messages if now < m.starts < inf]
        then = min([*arrivals, *starts])
        for message, speed, arrival in zip(moving, speeds, arrivals, strict=True):
            message.left -= speed * (then - now)
            if arrival <= then * (1 + 1e-12):
                message.ends = then
        now = then
    return max(message.ends for message in messages)
