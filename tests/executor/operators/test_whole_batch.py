"""What two steps of a module differ by, element by element."""

from math import inf
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from meshwise.executor.operators.whole_batch import StepResult, _note_autocast, measure_difference, run_step

MASK = [[0.0, -inf], [0.0, 0.0]]


def made(gradient: float, mask: list[list[float]] = MASK, other: float = 1.0) -> StepResult:
    gradients = {"weight": torch.tensor([other]), "bias": torch.tensor([gradient])}
    return StepResult(torch.tensor(2.0), gradients, {"mask": torch.tensor(mask)})


def test_masks_of_infinities_are_compared() -> None:
    assert measure_difference(made(1.0), made(1.0))[0] == 0.0
    assert measure_difference(made(1.0), made(1.0, [[0.0, 0.0], [0.0, 0.0]])) == (inf, "buffer mask")
    assert measure_difference(made(1.0), made(1.0, [[0.0, -inf], [0.5, 0.0]])) == (0.5, "buffer mask")


def test_a_small_gradient_is_set_beside_itself() -> None:
    # 1e-4 instead of 2e-4, beside 1e-2 of the largest gradient, 1e-4: 2e-4 / 2e-4 - 1e-4 / 2e-4 = 0.5
    met, what = measure_difference(made(2e-4, other=1e-2), made(1e-4, other=1e-2))
    assert (round(met, 6), what) == (0.5, "gradient of bias")


def test_what_is_no_number_differs_from_all() -> None:
    assert measure_difference(made(1.0), made(float("nan"))) == (inf, "gradient of bias")


class Casting(torch.nn.Module):
    """Multiplies in bf16 by itself."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self.enabled, self.up = enabled, torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = self.up(x)
        return y.square().mean()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_precision_of_its_own_is_noted_though_fp64_does_not_show_it(enabled: bool) -> None:
    lines: list[str] = []
    with _note_autocast(lines):
        run_step(Casting(enabled=enabled).double(), [(torch.ones(2, 4, dtype=torch.float64),)])
    assert len(lines) == int(enabled)
    assert not enabled or lines[0].endswith(f"test_whole_batch.py:{line_of('with torch.autocast')}")


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip().startswith(text))
