"""The random numbers of torch, numpy and Python that the construction of a module draws."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_draws(seed: int) -> None:
    """Seed the random numbers of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def keep_all_draws() -> Iterator[None]:
    """Leave the random numbers of torch, on the host and on the current GPU, numpy and Python as they were."""
    torch_draws, numpy_draws, python_draws = torch.get_rng_state(), np.random.get_state(), random.getstate()
    has_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu_draws = torch.cuda.get_rng_state() if has_gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_draws)
        np.random.set_state(numpy_draws)
        random.setstate(python_draws)
        if gpu_draws is not None:
            torch.cuda.set_rng_state(gpu_draws)
