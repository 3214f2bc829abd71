"""Judges a run under a plan by the same steps of a plain loop: exactly in fp64, and within a bound in a low precision.

In fp64 losses, learning rates, weights, buffers and optimizer states differ by rounding only. States show what weights
do not: Adam steps alike from gradients of any scale.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from meshwise.executor.modules.states import list_checkpoints
from meshwise.executor.recording.weight_files import read_weights
from meshwise.executor.user_training.job import CHECKPOINTS, WEIGHTS
from meshwise.executor.user_training.log import StepRow
from meshwise.executor.user_training.plain_training import PlainRun

TOLERANCE = 1e-9
"""Fraction by which losses, weights and states in fp64 may differ from those of one process."""
SMALLEST_STATE = 1e-5
"""Fraction of the largest state of all parameters below which differences of states are rounding."""
NOISE_FACTOR, NOISE_FLOOR = 3.0, 0.25
"""Of `compare_updates`: how often the noise of the format, and which fraction beside, an update may be off."""
FEWEST_ELEMENTS = 256
"""Elements of a tensor that is judged alone: four of them that turn around are 1/4 of the update."""
MOST_NOISE = 0.7
"""Fraction from which on a small tensor is rounding, and is not judged with others."""
LOSS_FLOOR = 2e-2
"""Fraction by which a loss in a low precision may be off beside the noise of the format."""


class DifferenceError(RuntimeError):
    """A run under a plan that does not compute what one process computes."""


@dataclass(frozen=True, slots=True)
class UpdateDifference:
    """The update in a low precision that is the farthest from that in fp32, as a fraction of its bound.

    Parameters
    ----------
    error
        Its relative distance from that of fp32.
    bound
        What the distance may be.
    name
        The parameter, or its state, with the step.
    """

    error: float
    bound: float
    name: str

    @property
    def is_equal(self) -> bool:
        """Whether it is within the bound."""
        return self.error <= self.bound


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences of a run in fp64 from one process.

    Parameters
    ----------
    loss
        That of losses and learning rates.
    weights
        That of parameters, buffers and optimizer states; ``worst_name`` is that of the largest.
    draws
        That of blocks that are computed again from kept ones, with dropout; ``None`` where there is nothing such.
    update
        That of updates in the precision of the run; ``None`` where that is not low.
    """

    loss: float
    weights: float
    worst_name: str = ""
    draws: float | None = None
    update: UpdateDifference | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the differences in fp64 are as small as rounding is."""
        return max(self.loss, self.weights, self.draws or 0.0) <= TOLERANCE

    @property
    def is_equal(self) -> bool:
        """Whether all differences are those of rounding."""
        return self.is_exact and (self.update is None or self.update.is_equal)

    def describe(self) -> str:
        """Return what differs, in words."""
        if not self.is_exact:
            apart = f"losses {self.loss:.1e} and weights {self.weights:.1e} apart ({self.worst_name})"
            drawn = "" if self.draws is None else f", {self.draws:.1e} where blocks are computed again with dropout"
            return f"{apart}{drawn}; random draws in forward or data, other than of dropout modules, differ too"
        assert self.update is not None
        return (
            f"{self.update.name} in the low precision {self.update.error:.2f} of its size away from fp32; nearest: the "
            f"{self.update.bound:.2f} that rounding explains"
        )


class StepStates(NamedTuple):
    """What a checkpoint has: weights by name, and tensors of the optimizer's states by parameter and name."""

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def read_states(checkpoint: Path) -> StepStates:
    """Return the tensors of a checkpoint."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    tensors: dict[str, Any] = {
        name: torch.empty(record.size, dtype=record.properties.dtype)
        for name, record in metadata.state_dict_metadata.items()
        if isinstance(record, TensorStorageMetadata)
    }
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # that this is a single process
        load(tensors, checkpoint_id=checkpoint, no_dist=True)
    result = StepStates({}, {})
    for name, tensor in tensors.items():
        if name.startswith("module."):
            result.weights[name.removeprefix("module.")] = tensor
        elif name.startswith("optimizer.state."):
            parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
            result.states.setdefault(parameter, {})[key] = tensor
    return result


def list_states(folder: Path) -> Iterator[StepStates]:
    """Yield what the checkpoints of a run have, the oldest first."""
    checkpoints = folder / CHECKPOINTS
    return (read_states(checkpoints / name) for name in list_checkpoints(checkpoints))


def find_largest(values: Iterable[float]) -> float:
    """Return the largest of some differences, which is infinite where one is no number.

    >>> find_largest([0.5, float("nan"), 0.25])
    inf
    """
    return max((inf if isnan(value) else value for value in values), default=0.0)


def compare_exactly(rows: Sequence[StepRow], folder: Path, plain: PlainRun) -> Difference:
    """Return how far a run in fp64 is from one process: its steps, exported weights, and last checkpoint."""
    weights = read_weights(folder / WEIGHTS)
    (*_, last) = list_states(folder)
    expected = plain.steps[-1]
    pairs = zip([row.loss for row in rows], plain.losses, strict=True)
    loss = find_largest(abs(loss - plain_loss) / max(abs(plain_loss), 1e-12) for loss, plain_loss in pairs)
    rate = abs(rows[-1].learning_rate - expected.learning_rate) / max(abs(expected.learning_rate), 1e-12)
    if missing_names := set(expected.weights) - set(weights):
        raise DifferenceError(f"the weights of both runs have equal names, met no {', '.join(sorted(missing_names))}")
    differences = {
        name: _measure_distance(weights[name], tensor, plain.noisy_elements.get(name))
        for name, tensor in expected.weights.items()
        if tensor.numel() and name not in plain.noisy_names
    }
    differences |= _compare_states(last.states, expected.states, plain.noisy_names)
    largest = find_largest(differences.values())
    worst_name = next((name for name, value in differences.items() if not value < largest), "")
    return Difference(find_largest((loss, rate)), largest, worst_name)


def _measure_distance(tensor: Tensor, expected: Tensor, noisy_elements: Tensor | None) -> float:
    """Return the largest difference of elements, but for noisy ones, over the largest element."""
    distance = (tensor - expected).double().abs()
    if noisy_elements is not None:
        distance = distance.masked_fill(noisy_elements & distance.isfinite(), 0.0)
    return float(distance.max()) / max(_find_size(expected), 1e-12)


def compare_draws(both_rows: tuple[Sequence[StepRow], Sequence[StepRow]], folders: tuple[Path, Path]) -> float:
    """Return the largest relative difference of two runs with dropout, in losses and in states at the end."""
    pairs = zip(*both_rows, strict=True)
    losses = [abs(first.loss - second.loss) / max(abs(second.loss), 1e-12) for first, second in pairs]
    first, second = ([*list_states(folder)][-1] for folder in folders)
    first_states, second_states = (states.states | {"": states.weights} for states in (first, second))
    return find_largest([*losses, *_compare_states(first_states, second_states, frozenset()).values()])


def _compare_states(
    states: Mapping[str, Mapping[str, Tensor]],
    expected_states: Mapping[str, Mapping[str, Tensor]],
    noisy_names: frozenset[str],
) -> dict[str, float]:
    """Return the relative differences of the optimizer's states."""
    largest: dict[str, float] = {}
    for own_states in expected_states.values():
        for key, value in own_states.items():
            largest[key] = max(largest.get(key, 0.0), _find_size(value))
    differences = {}
    for name, own_states in expected_states.items():
        for key, expected in own_states.items():
            if name in noisy_names or not expected.numel():
                continue
            own_state = states.get(name, {}).get(key)
            size = max(_find_size(expected), SMALLEST_STATE * largest[key], 1e-300)
            label = f"{key} of {name}"
            differences[label] = inf if own_state is None else float((own_state - expected).double().abs().max()) / size
    return differences


def _find_size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


class _Judgement(NamedTuple):
    """The squares of a change in fp32, of its differences in the run and by rounding, and whether the run has none."""

    name: str
    num_elements: int
    size: float
    difference: float
    noise: float
    is_stuck: bool = False


def compare_updates(rows: Sequence[StepRow], folder: Path, exact: PlainRun, rounded: PlainRun) -> UpdateDifference:
    """Return the update of a run in a low precision that is the farthest from fp32, measured by its bound.

    An update is what one step adds to a parameter; states of the optimizer, which are means of gradients, are judged
    in the same way. Its error is the Euclidean distance from that of a plain loop in fp32, over the size of the latter.

    Rounding makes errors too. How large they are depends on the module, and optimizers that divide by the size of
    gradients turn small ones around: an update of n elements of which m are turned around has an error of
    2 sqrt(m / n). So the *noise* of the format is measured, as the error of a plain loop whose operators round results
    and gradients to the format. The run rounds at other places, and may be 3 times as noisy, and off by 1/4 beside, for
    noise is but one sample: of the 256 elements that a tensor has at least, four may turn around where noise had none.
    The bound is ``1/4 + 3 noise``. A skipped, stuck or stale update has an error of about 1, and so has one with twice
    the learning rate; gradients that are not scaled show in the states, or without Adam in the update itself. A bound
    of 1 or more would say nothing: the direction is rounding then, and only a parameter that does not move is an error,
    unless its noise is larger than the update.

    Smaller tensors are judged together. Losses may be off by 2e-2 and 3 times their noise, and learning rates not at
    all.
    """
    worst = UpdateDifference(0.0, NOISE_FLOOR, "")
    last_weights = last_exact = last_rounded = exact.first_weights
    names = [name for name, value in exact.first_weights.items() if value.is_floating_point() and value.numel()]
    all_steps = zip(rows, list_states(folder), exact.steps, rounded.steps, strict=True)
    for number, (row, own, exact_step, rounded_step) in enumerate(all_steps):
        found = [_judge_loss(row, exact_step.loss, rounded_step.loss), _judge_rate(row, exact_step.learning_rate)]
        moves = [
            _judge(
                name,
                own.weights[name].double() - last_weights[name],
                exact_step.weights[name].double() - last_exact[name],
                rounded_step.weights[name].double() - last_rounded[name],
            )
            for name in names
        ]
        found += _measure_all(moves, "small parameters")
        state_judgements: dict[str, list[_Judgement]] = {}
        for name, states in exact_step.states.items():
            for key, value in states.items():
                own_state = own.states.get(name, {}).get(key, torch.zeros_like(value)).double()
                label, rounded_state = f"{key} of {name}", rounded_step.states[name][key].double()
                judgement = _judge(label, own_state, value.double(), rounded_state)
                state_judgements.setdefault(key, []).append(judgement)
        for key, judgements in state_judgements.items():
            found += _measure_all(judgements, f"{key} of small parameters")
        worst = max([worst, *(_name_step(item, number) for item in found)], key=lambda item: item.error / item.bound)
        last_weights, last_exact, last_rounded = own.weights, exact_step.weights, rounded_step.weights
    return worst


def _name_step(difference: UpdateDifference, step: int) -> UpdateDifference:
    return UpdateDifference(difference.error, difference.bound, f"{difference.name} at step {step}")


def _judge_loss(row: StepRow, exact_loss: float, rounded_loss: float) -> UpdateDifference:
    size = max(abs(exact_loss), 1e-12)
    bound = LOSS_FLOOR + NOISE_FACTOR * abs(rounded_loss - exact_loss) / size
    return UpdateDifference(find_largest([abs(row.loss - exact_loss) / size]), bound, "the loss")


def _judge_rate(row: StepRow, learning_rate: float) -> UpdateDifference:
    error = abs(row.learning_rate - learning_rate) / max(abs(learning_rate), 1e-12)
    return UpdateDifference(error, TOLERANCE, "the learning rate")


def _judge(name: str, own: Tensor, exact: Tensor, rounded: Tensor) -> _Judgement:
    size, difference, noise = (float(values.square().sum()) for values in (exact, own - exact, rounded - exact))
    is_stuck = noise < size and not bool(own.any())  # where noise is larger, gradients are nothing but rounding
    return _Judgement(name, exact.numel(), size, difference, noise, is_stuck)


def _measure_all(judgements: Sequence[_Judgement], small_name: str) -> list[UpdateDifference]:
    """Return the differences of large tensors alone, and of small ones together, as means over their elements."""
    small = [
        judgement
        for judgement in judgements
        if judgement.num_elements < FEWEST_ELEMENTS and not judgement.is_stuck and 0 < judgement.size < inf
    ]
    alone = [judgement for judgement in judgements if judgement not in small]
    joined = [judgement for judgement in small if judgement.noise < MOST_NOISE**2 * judgement.size]
    if joined:
        count = sum(judgement.num_elements for judgement in joined)
        difference = sum(judgement.num_elements * judgement.difference / judgement.size for judgement in joined)
        noise = sum(judgement.num_elements * judgement.noise / judgement.size for judgement in joined)
        alone.append(_Judgement(small_name, count, count, difference, noise))
    return [_measure(judgement) for judgement in alone]


def _measure(judgement: _Judgement) -> UpdateDifference:
    name, size = judgement.name, judgement.size
    if judgement.is_stuck:
        return UpdateDifference(1.0, NOISE_FLOOR, name)
    if not size:  # what does not move in fp32 moves by rounding only
        is_equal = judgement.difference == 0.0 or judgement.noise > 0.0
        return UpdateDifference(0.0 if is_equal else inf, NOISE_FLOOR, name)
    noise, error = (judgement.noise / size) ** 0.5, find_largest([(judgement.difference / size) ** 0.5])
    bound = max(NOISE_FLOOR, NOISE_FLOOR * (FEWEST_ELEMENTS / judgement.num_elements) ** 0.5) + NOISE_FACTOR * noise
    if bound < 1.0 or error == inf:
        return UpdateDifference(error, min(bound, 1.0), name)
    return UpdateDifference(0.0, 1.0, name)
