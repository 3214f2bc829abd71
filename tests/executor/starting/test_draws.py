"""Draws are of a seed, and those of the caller stay."""

import random

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from meshwise.executor.starting.draws import keep_all_draws, seed_draws


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_draws_of_the_body_are_seeded_and_leave_others() -> None:
    seed_draws(1)
    expected = draw(), draw()
    seed_draws(1)
    first = draw()
    with keep_all_draws():
        seed_draws(2)
        other = draw()
    assert (first, draw()) == expected and other not in expected
