"""Compares what the ranks of a run computed with the same training by one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.executor.job import Job, tensors_file

TOLERANCE = 1e-12
"""The largest difference that counts as equal, of a loss and of a gradient's element over its `gradient_scale`.

fp64 has 16 digits, but sums have another order on ranks than in one process.
"""
SINGLE_TOLERANCE = 1e-4
"""The same for a module that casts to fp32 by itself, as norms of Llama do: fp32 has 7 digits."""
MIN_SHARE = 1e-2
"""The least `gradient_scale`, as a part of the largest gradient: sums of smaller ones have errors of that size too."""


def gradient_scale(size: float, largest: float) -> float:
    """Return the divisor of a gradient's differences: its largest element, or a part of the largest of all gradients.

    It is 1 where all gradients are zero. So a small gradient, as of a mean over many tokens, is told from zero.

    >>> gradient_scale(2e-6, 4e-6), gradient_scale(1e-9, 1e-6), gradient_scale(0.0, 0.0)
    (2e-06, 1e-08, 1.0)
    """
    return max(size, MIN_SHARE * largest) or 1.0


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the results of the ranks are from those of one process, in fp64.

    Parameters
    ----------
    loss_error
        Largest difference of the loss over the steps, relative to the loss (or to 1, where that is larger).
    gradient_error
        Largest difference of an element of the last step's gradients, over their `gradient_scale`.
    parameter_error
        Largest absolute difference of a parameter, or of a buffer that forward renews, after the last step.
    reference
        What the ranks were compared with, in words.
    tolerance
        The largest difference of loss and gradients that counts as equal.
    largest
        The name of what differs most: ``loss``, or a gradient, parameter or buffer.
    """

    loss_error: float
    gradient_error: float
    parameter_error: float
    reference: str = "single process"
    tolerance: float = TOLERANCE
    largest: str = ""

    @property
    def equal(self) -> bool:
        """Whether loss and gradients differ by at most ``tolerance`` and parameters by at most a thousand times that.

        AdamW divides by the root of a second moment that may be near 0.
        """
        close = max(self.loss_error, self.gradient_error) <= self.tolerance
        return close and self.parameter_error <= 1000 * self.tolerance


class VerificationError(RuntimeError):
    """The ranks did not compute what one process computes; the message says by how much."""


def require_equal(verification: Verification, subject: str = " on a scaled-down model") -> Verification:
    """Return ``verification`` if it is equal; ``subject`` says, for the message, which model was compared.

    Raises
    ------
    VerificationError
        Where it is not equal.
    """
    if verification.equal:
        return verification
    errors = (
        f"loss {verification.loss_error:.1e}, gradients {verification.gradient_error:.1e}, "
        f"parameters {verification.parameter_error:.1e}"
    )
    worst = f", most in {verification.largest}" if verification.largest else ""
    tolerance = verification.tolerance
    rule = f"at most {tolerance:.0e} for loss and gradients and {1000 * tolerance:.0e} for parameters"
    raise VerificationError(
        f"the run was not started: its ranks do not compute what one process computes, in fp64{subject}; "
        f"largest differences: {errors}{worst}; equal is {rule}"
    )


def verify(job: Job, folder: Path, losses: tuple[float, ...]) -> Verification:
    """Return how far the ranks' ``losses``, and their tensors in ``folder``, are from those of one process.

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
    """Return how far ``losses``, and the tensors of ``ranks`` ranks in ``folder``, are from what is expected.

    Raises
    ------
    ValueError
        Where the ranks together did not write every tensor.
    """
    sizes = {name: _largest_element(value) for name, value in expected.items() if name.startswith("gradient")}
    largest_gradient = max(sizes.values(), default=0.0)
    errors = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}
    worst = (0.0, "")
    for actual, expected_loss in zip(losses, expected_losses, strict=True):
        errors["loss"] = max(
            errors["loss"], _largest_element(actual - expected_loss) / max(1.0, _largest_element(expected_loss))
        )
    tensor_names: set[str] = set()
    for rank in range(ranks):
        path = tensors_file(folder, rank)
        if path.exists():
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    kind = name.partition(" ")[0]
                    scale = gradient_scale(sizes[name], largest_gradient) if kind == "gradient" else 1.0
                    error = _largest_difference(arrays[name], expected[name]) / scale
                    errors[kind] = max(errors[kind], error)
                    # AdamW magnifies an error of a gradient in the parameter: name the gradient, which is the reason
                    worst = max(worst, (error / (1.0 if kind == "gradient" else 1000.0), name))
                    tensor_names.add(name)
    if missing := expected.keys() - tensor_names:
        raise ValueError(f"the ranks leave every tensor of the model, missing: {', '.join(sorted(missing))}")
    largest = max(worst, (errors["loss"], "loss"))[1]
    other_error = max(errors["parameter"], errors["buffer"])
    return Verification(errors["loss"], errors["gradient"], other_error, tolerance=tolerance, largest=largest)


def _largest_difference(actual: Any, expected: Any) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"a gathered tensor has the shape {expected.shape}, met {actual.shape}")
    return _largest_element(actual - expected)


def _largest_element(values: Any) -> float:
    """Return the largest absolute element; infinite where one is not a number, which ``max`` might skip.

    >>> _largest_element(np.array([1.0, -2.0])), _largest_element(float("nan"))
    (2.0, inf)
    """
    sizes = np.nan_to_num(np.abs(np.asarray(values, dtype=np.float64)), nan=np.inf, posinf=np.inf)
    return float(sizes.max(initial=0.0))
