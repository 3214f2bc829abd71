"""The same training run by one process, plainly, and how far the ranks are from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.job import Job, tensors_file

TOLERANCE = 1e-12
"""Largest absolute difference of a loss, or of a gradient element over the largest gradient, that is equal.

fp64 keeps 16 digits; the order of sums differs between ranks and one process.
"""


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the ranks are from one process in fp64.

    Parameters
    ----------
    loss_error
        Largest absolute difference of the loss over the steps.
    gradient_error
        Largest absolute difference of an element of the last step's gradients, relative to the
        largest element of all of them (or to 1, where that is larger).
    parameter_error
        Largest absolute difference of a parameter, or of a buffer that forward renews, after the last step.
    equal
        Whether loss and gradients differ by at most `TOLERANCE` and parameters by at most a thousand
        times that: AdamW divides by the root of a second moment that may be near 0.
    """

    loss_error: float
    gradient_error: float
    parameter_error: float
    reference: str = "single process"

    @property
    def equal(self) -> bool:
        """Whether the ranks computed what one process computes."""
        close = max(self.loss_error, self.gradient_error) <= TOLERANCE
        return close and self.parameter_error <= 1000 * TOLERANCE


class VerificationError(RuntimeError):
    """The ranks did not compute what one process computes; the message says by how much."""


def require_equal(found: Verification) -> Verification:
    """Return ``found`` where it is equal.

    Raises
    ------
    VerificationError
        Where it is not.
    """
    if found.equal:
        return found
    errors = (
        f"loss {found.loss_error:.1e}, gradients {found.gradient_error:.1e}, parameters {found.parameter_error:.1e}"
    )
    held = f"at most {TOLERANCE:.0e} for loss and gradients and {1000 * TOLERANCE:.0e} for parameters"
    raise VerificationError(
        f"the run was not started: its ranks do not compute what one process computes, in fp64 on a scaled-down model; "
        f"largest differences: {errors}; equal is {held}"
    )


def verify(job: Job, folder: Path, losses: tuple[float, ...]) -> Verification:
    """Return how far the tensors that the ranks left in ``folder``, and their ``losses``, are from one process.

    Every data-parallel replica is compared.

    Raises
    ------
    ValueError
        Where the ranks together did not leave every tensor.
    """
    from executor.reference import train

    return distance(job.plan.mesh.num_ranks, folder, losses, *train(job))


def distance(
    ranks: int, folder: Path, losses: tuple[float, ...], expected_losses: tuple[float, ...], expected: dict[str, Any]
) -> Verification:
    """Return how far the tensors that ``ranks`` ranks left in ``folder``, and ``losses``, are from what is expected.

    Raises
    ------
    ValueError
        Where the ranks together did not leave every tensor.
    """
    errors = {"gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
    seen: set[str] = set()
    for rank in range(ranks):
        path = tensors_file(folder, rank)
        if path.exists():
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    kind = name.partition(" ")[0]
                    errors[kind] = max(errors[kind], _distance(arrays[name], expected[name]))
                    seen.add(name)
    if missing := expected.keys() - seen:
        raise ValueError(f"the ranks leave every tensor of the model, missing: {', '.join(sorted(missing))}")
    scale = max(1.0, *(float(np.abs(value).max()) for name, value in expected.items() if name.startswith("gradient")))
    loss_error = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    return Verification(loss_error, errors["gradient"] / scale, max(errors["parameter"], errors["buffer"]))


def _distance(actual: Any, expected: Any) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"a gathered tensor has the shape {expected.shape}, met {actual.shape}")
    return float(np.abs(actual - expected).max())
