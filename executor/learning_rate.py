"""The learning rate of every step: a linear warm-up, then constant, or a cosine down to a floor.

References
----------
Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2 (gradual warm-up).
Loshchilov and Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", equation 5, without restarts.
"""

import math
from dataclasses import dataclass

PEAKS = {"adamw": 1e-3, "sgd": 0.02}
"""The largest learning rate of an optimizer where none is given."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A schedule over steps, which count from 0.

    Parameters
    ----------
    peak
        The largest learning rate; ``None`` for that of the optimizer in `PEAKS`.
    warmup_steps
        Steps of a linear rise, the first of which has ``peak / warmup_steps``.
    decay_steps
        The step from which on the learning rate is ``minimum``, after a cosine from the end of the warm-up; ``None``
        for no decay.
    minimum
        What the cosine ends at.
    """

    peak: float | None = None
    warmup_steps: int = 0
    decay_steps: int | None = None
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if self.peak is not None and not 0 < self.peak < math.inf:
            raise ValueError(f"learning_rate is above 0 and finite, met {self.peak:g}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is at least 0, met {self.warmup_steps}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            held = f"decay_steps is above warmup_steps({self.warmup_steps})"
            raise ValueError(f"{held}, met {self.decay_steps}; nearest: {self.warmup_steps + 1}")
        if not 0 <= self.minimum < math.inf or self.minimum > (self.peak or math.inf):
            raise ValueError(f"min_learning_rate is from 0 to learning_rate, met {self.minimum:g}")
        if self.minimum and self.decay_steps is None:
            raise ValueError(f"min_learning_rate is what a decay ends at, met {self.minimum:g} without decay_steps")

    def at(self, step: int, optimizer: str) -> float:
        """Return the learning rate of a step.

        >>> [LearningRate(0.8, warmup_steps=4, decay_steps=6).at(step, "adamw") for step in (0, 3, 4, 5, 6, 7)]
        [0.2, 0.8, 0.8, 0.4, 0.0, 0.0]
        """
        peak = PEAKS[optimizer] if self.peak is None else self.peak
        if step < self.warmup_steps:
            return peak * ((step + 1) / self.warmup_steps)
        if self.decay_steps is None or step == self.warmup_steps:
            return peak
        if step >= self.decay_steps:
            return self.minimum
        turned = math.pi * (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return min(peak, self.minimum + (peak - self.minimum) * (1 + math.cos(turned)) / 2)


CONSTANT = LearningRate()
"""The usual learning rate of the optimizer, at every step."""
