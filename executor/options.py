"""Options of a run besides its plan, the same for both back ends, and the schedule of the learning rate.

The learning rate rises linearly in a warm-up, and is then constant or falls along a cosine to a minimum.

References
----------
Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2 (gradual warm-up).
Loshchilov and Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", equation 5, without restarts.
"""

import math
from dataclasses import dataclass

from meshwise.executor.device import CPU, check_device

PEAKS = {"adamw": 1e-3, "sgd": 0.02}
"""The default of the largest learning rate, by optimizer."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A schedule of the learning rate over steps, which count from 0.

    Parameters
    ----------
    peak
        The largest learning rate; ``None`` for that of the optimizer in `PEAKS`.
    warmup_steps
        Steps of the linear rise; the first one has the rate ``peak / warmup_steps``.
    decay_steps
        The step from which on the learning rate is ``minimum``, after a cosine from the end of the warm-up; ``None``
        for no decay.
    minimum
        The learning rate at which the cosine ends.
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
            requirement = f"decay_steps is above warmup_steps({self.warmup_steps})"
            raise ValueError(f"{requirement}, met {self.decay_steps}; nearest: {self.warmup_steps + 1}")
        if not 0 <= self.minimum < math.inf or self.minimum > (self.peak or math.inf):
            raise ValueError(f"min_learning_rate is from 0 to learning_rate, met {self.minimum:g}")
        if self.minimum and self.decay_steps is None:
            raise ValueError(f"min_learning_rate is what a decay ends at, met {self.minimum:g} without decay_steps")

    def rate_at(self, step: int, optimizer: str) -> float:
        """Return the learning rate of a step.

        >>> [LearningRate(0.8, warmup_steps=4, decay_steps=6).rate_at(step, "adamw") for step in (0, 3, 4, 5, 6, 7)]
        [0.2, 0.8, 0.8, 0.4, 0.0, 0.0]
        """
        peak = PEAKS[optimizer] if self.peak is None else self.peak
        if step < self.warmup_steps:
            return peak * ((step + 1) / self.warmup_steps)
        if self.decay_steps is None or step == self.warmup_steps:
            return peak
        if step >= self.decay_steps:
            return self.minimum
        angle = math.pi * (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return min(peak, self.minimum + (peak - self.minimum) * (1 + math.cos(angle)) / 2)


CONSTANT_RATE = LearningRate()
"""The usual learning rate of the optimizer, at every step."""

STEPS = 5
"""Default of the training steps of a run."""
UNVERIFIED_STEPS = 5
"""By default a run of more steps is verified before it begins."""
TIMEOUT = 600.0
"""Default of the seconds that a silent rank is waited for."""
KEPT_CHECKPOINTS = 2
"""Default of the number of newest checkpoints that stay."""
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run besides its plan.

    Parameters
    ----------
    steps
        Training steps in total; a resumed run does the remaining ones.
    verify
        Whether losses, gradients and parameters of a few steps in fp64, of a scaled-down model, are compared with one
        process before the run begins; ``None`` for yes where it has more than `UNVERIFIED_STEPS` steps.
    seed
        Seed of the first parameters and the order of the data; ``None`` for that of the resumed checkpoint, else 0.
    timeout
        Seconds without a heartbeat of a rank after which the run ends.
    device
        Device on which ranks train: one of `meshwise.executor.device.DEVICES`.
    data
        A text file or a folder of them, as bytes; ``None`` for the documentation topics that ship with Python.
    learning_rate
        ``None`` for that of the resumed checkpoint, else the optimizer's default without a schedule.
    checkpoint_every
        Steps between checkpoints, with one more after the last step; 0 for none.
    keep
        Number of newest checkpoints that stay.
    resume
        Whether the run continues from the newest intact checkpoint in its folder.
    """

    steps: int = STEPS
    verify: bool | None = None
    seed: int | None = None
    timeout: float = TIMEOUT
    device: str = CPU
    data: str | None = None
    learning_rate: LearningRate | None = None
    checkpoint_every: int = 0
    keep: int = KEPT_CHECKPOINTS
    resume: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is at least 1, met {self.steps}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is from 0 to {MAX_SEED}, met {self.seed}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout is above 0 and finite, in seconds, met {self.timeout:g}")
        check_device(self.device)
        if self.checkpoint_every < 0 or self.keep < 1:
            values_text = f"met {self.checkpoint_every} and {self.keep}"
            raise ValueError(f"checkpoint_every is at least 0 and keep_checkpoints at least 1, {values_text}")

    @property
    def is_verified(self) -> bool:
        """Whether the ranks are compared with one process before the run begins."""
        return self.steps > UNVERIFIED_STEPS if self.verify is None else self.verify

    @property
    def needs_own_model(self) -> bool:
        """Whether an option is set that runs of a user's module lack: data, learning rate, checkpoints, resume."""
        requested_options = self.data, self.learning_rate, self.checkpoint_every, self.keep, self.resume
        return requested_options != (None, None, 0, KEPT_CHECKPOINTS, False)


DEFAULT_OPTIONS = RunOptions()
