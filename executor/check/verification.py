"""The same training run by one process, plainly, and how far the ranks are from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.executor.job import Job, tensors_file

TOLERANCE = 1e-12
"""Largest difference that is equal: of a loss, absolute, and of a gradient's element, over its `gradient_scale`.

fp64 keeps 16 digits; the order of sums differs between ranks and one process.
"""
SINGLE = 1e-4
"""The same of a module that turns to fp32 by itself, as norms of Llama do: fp32 keeps 7 digits."""
LEAST_SHARE = 1e-2
"""Part of the largest gradient that differences of a smaller one are set beside: its sums have errors of that size."""


def gradient_scale(own: float, largest: float) -> float:
    """Return what differences of a gradient are set beside: its largest element, or a part of that of all gradients.

    1 where all are zero. So a gradient that is small, as that of a mean over many tokens is, is told from zero.

    >>> gradient_scale(2e-6, 4e-6), gradient_scale(1e-9, 1e-6), gradient_scale(0.0, 0.0)
    (2e-06, 1e-08, 1.0)
    """
    return max(own, LEAST_SHARE * largest) or 1.0


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the ranks are from one process in fp64.

    Parameters
    ----------
    loss_error
        Largest difference of the loss over the steps, relative to the loss (or to 1, where that is larger).
    gradient_error
        Largest difference of an element of the last step's gradients, over their `gradient_scale`.
    parameter_error
        Largest absolute difference of a parameter, or of a buffer that forward renews, after the last step.
    tolerance
        What loss and gradients may differ by.
    largest
        What differs most: the loss, or a gradient, parameter or buffer by name.
    equal
        Whether loss and gradients differ by at most ``tolerance`` and parameters by at most a thousand
        times that: AdamW divides by the root of a second moment that may be near 0.
    """

    loss_error: float
    gradient_error: float
    parameter_error: float
    reference: str = "single process"
    tolerance: float = TOLERANCE
    largest: str = ""

    @property
    def equal(self) -> bool:
        """Whether the ranks computed what one process computes."""
        close = max(self.loss_error, self.gradient_error) <= self.tolerance
        return close and self.parameter_error <= 1000 * self.tolerance


class VerificationError(RuntimeError):
    """The ranks did not compute what one process computes; the message says by how much."""


def require_equal(found: Verification, of: str = " on a scaled-down model") -> Verification:
    """Return ``found`` where it is equal; ``of`` says of which model it is.

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
    most = f", most in {found.largest}" if found.largest else ""
    held = f"at most {found.tolerance:.0e} for loss and gradients and {1000 * found.tolerance:.0e} for parameters"
    raise VerificationError(
        f"the run was not started: its ranks do not compute what one process computes, in fp64{of}; "
        f"largest differences: {errors}{most}; equal is {held}"
    )


def verify(job: Job, folder: Path, losses: tuple[float, ...]) -> Verification:
    """Return how far the tensors that the ranks left in ``folder``, and their ``losses``, are from one process.

    Every data-parallel replica is compared.

    Raises
    ------
    ValueError
        Where the ranks together did not leave every tensor.
    """
    from meshwise.executor.check.reference import train

    return distance(job.plan.mesh.num_ranks, folder, losses, *train(job))


def distance(
    ranks: int,
    folder: Path,
    losses: tuple[float, ...],
    expected_losses: tuple[float, ...],
    expected: dict[str, Any],
    tolerance: float = TOLERANCE,
) -> Verification:
    """Return how far the tensors that ``ranks`` ranks left in ``folder``, and ``losses``, are from what is expected.

    Raises
    ------
    ValueError
        Where the ranks together did not leave every tensor.
    """
    sizes = {name: _largest(value) for name, value in expected.items() if name.startswith("gradient")}
    largest_gradient = max(sizes.values(), default=0.0)
    errors = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
    worst = (0.0, "")
    for actual, wanted in zip(losses, expected_losses, strict=True):
        errors["loss"] = max(errors["loss"], _largest(actual - wanted) / max(1.0, _largest(wanted)))
    seen: set[str] = set()
    for rank in range(ranks):
        path = tensors_file(folder, rank)
        if path.exists():
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    kind = name.partition(" ")[0]
                    scale = gradient_scale(sizes[name], largest_gradient) if kind == "gradient" else 1.0
                    found = _distance(arrays[name], expected[name]) / scale
                    errors[kind] = max(errors[kind], found)
                    # an optimizer carries an error of a gradient into its parameter: the gradient is the reason
                    worst = max(worst, (found / (1.0 if kind == "gradient" else 1000.0), name))
                    seen.add(name)
    if missing := expected.keys() - seen:
        raise ValueError(f"the ranks leave every tensor of the model, missing: {', '.join(sorted(missing))}")
    largest = max(worst, (errors["loss"], "loss"))[1]
    others = max(errors["parameter"], errors["buffer"])
    return Verification(errors["loss"], errors["gradient"], others, tolerance=tolerance, largest=largest)


def _distance(actual: Any, expected: Any) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"a gathered tensor has the shape {expected.shape}, met {actual.shape}")
    return _largest(actual - expected)


def _largest(values: Any) -> float:
    """Return the largest size of an element: infinite where one is no number, which `max` would pass over.

    >>> _largest(np.array([1.0, -2.0])), _largest(float("nan"))
    (2.0, inf)
    """
    sizes = np.nan_to_num(np.abs(np.asarray(values, dtype=np.float64)), nan=np.inf, posinf=np.inf)
    return float(sizes.max(initial=0.0))
