"""A model of about a billion parameters trained in bf16 on one device: our step beside a plain loop of torch.

Both sides compile the model, run attention by torch's flash kernel, and have AdamW with fp32 states. The plain loop
does not even read its losses. Blocks run in the order A B B A, each timed by the device's own clock; two neighbours
are a pair.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshwise
from meshwise.executor.calibration.device_machine import look_up_name
from meshwise.executor.recording.timer import make_timer

from ..studies.device_predictions import find_machine
from ..studies.eager_ratio import WIDEST, Ratio, compute_ratio
from .language import TINY_LLAMA, Llama, Sizes, Tokens
from .rows import RowFile

ASKED = 0.97
"""The MFU of our step over that of the plain loop, at least."""
PRECISION = "bf16"
NEEDED = 70e9
"""Bytes of a device on which two models of the whole size are trained by turns."""
FEWEST_LAYERS = 2


class Study(NamedTuple):
    """How much is measured: samples of a step, steps of a block, pairs of blocks, and the compiler."""

    sizes: Sizes
    batch: int
    steps: int
    pairs: int
    backend: str


FULL = Study(TINY_LLAMA, 4, 8, 12, "inductor")
TINY = Study(Sizes(2, 32, 4, 2, 64, 128, 16), 2, 2, 6, "aot_eager")


def fit(study: Study, memory: float) -> Study:
    """Return a study with as many layers as a device has memory for.

    >>> fit(FULL, 80e9).sizes.layers, fit(FULL, 35e9).sizes.layers
    (22, 11)
    """
    layers = max(int(study.sizes.layers * min(memory / NEEDED, 1.0)), FEWEST_LAYERS)
    return study._replace(sizes=study.sizes._replace(layers=layers))


def build_sides(study: Study, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return our step and that of a plain loop, on the same batch."""
    batch = tuple(part.to(device) for part in Tokens(study.sizes, study.batch).batch(0, study.batch))
    ours = meshwise.parallelize(build_model(study, device), "data=1", optimizer=build_optimizer, precision="bf16")
    module = build_model(study, device)
    optimizer = build_optimizer(module)

    def step_plainly() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return partial(ours, batch), step_plainly


def build_model(study: Study, device: torch.device) -> nn.Module:
    """Return the compiled model on a device."""
    torch.manual_seed(0)
    with device:
        module = Llama(study.sizes)
    module.compile(backend=study.backend)
    return module


def build_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW in one kernel."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def judge(ratio: Ratio) -> str:
    """Return whether the ratio that is asked for is met, or that the interval is too wide to say."""
    if not ratio.high - ratio.low <= WIDEST:
        return "not decided"
    return "met" if ratio.median >= ASKED else "not met"


def find_peak(device: torch.device) -> float | None:
    """Return the FLOP/s of the device in bf16 by the catalogue; ``None`` where it has none of that name."""
    if device.type != "cuda":
        return None
    try:
        return find_machine(look_up_name(torch.cuda.get_device_name(device))[0]).accelerator.peak(PRECISION)
    except ValueError:
        return None


def compare(study: Study, device: torch.device) -> dict[str, Any]:
    """Return the times of both sides, their MFU, and its ratio."""
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext()
    with attention:
        ours, plain = build_sides(study, device)
        losses = [float(side()) for side in (ours, plain)]
        rows = time_by_turns((ours, plain), study, make_timer(device.type))
    seconds = [median(side) for side in zip(*rows, strict=True)]
    ratio = compute_ratio([plain_time / our_time for our_time, plain_time in rows])
    flops = study.sizes.count_flops() * study.batch * study.sizes.length
    peak = find_peak(device)
    mfu = [None if peak is None else flops / side / peak for side in seconds]
    verdict = judge(ratio)
    told = [
        f"{flops / side / 1e12:.3g} TFLOP/s" if peak is None else f"MFU {flops / side / peak:.1%}" for side in seconds
    ]
    return {
        "parameters": study.sizes.count_parameters(),
        "sizes": study.sizes._asdict(),
        "batch": study.batch,
        "steps": study.steps,
        "first_losses": losses,
        "step_times": rows,
        "flops": flops,
        "peak_flops": peak,
        "mfu": mfu[0],
        "plain_mfu": mfu[1],
        "ratio": ratio._asdict(),
        "asked": ASKED,
        "verdict": verdict,
        "summary": f"{told[0]} beside {told[1]}, ratio {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]: "
        f"{verdict} (at least {ASKED})",
    }


def time_by_turns(sides: tuple[Callable[[], Any], ...], study: Study, timer: Any) -> list[list[float]]:
    """Return pairs of seconds of a step, ours first, of blocks in the order A B B A."""
    for side in (*sides, *sides):  # first steps compile, and build what later ones use
        side()
    rows = []
    for number in range(study.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        times = {place: timer.measure_row(sides[place], study.steps) for place in order}
        rows.append([times[0], times[1]])
    return rows


def measure(rows: RowFile, device: str, *, is_tiny: bool) -> None:
    """Compare both sides, in a row."""
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    study = TINY
    if not is_tiny:
        study = fit(FULL, torch.cuda.get_device_properties(place).total_memory if device == "cuda" else 0.0)
    name = f"Llama of {study.sizes.count_parameters() / 1e9:.2f} billion parameters, bf16, compiled, flash attention"
    rows.measure(name, partial(compare, study, place))
