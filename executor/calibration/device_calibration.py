"""Measures the devices of this machine into rows.

``python -m meshwise.executor.calibration.device_calibration --out ROWS.jsonl``

It needs torch but no simulator, so that rows can be measured on one machine and fitted on another:
``meshwise calibrate --from ROWS.jsonl --out CLUSTER.yaml``.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwise.executor.calibration.device_worker import PARTS, skipped_file
from meshwise.executor.calibration.figures import count
from meshwise.executor.device import count_gpus
from meshwise.executor.launch.launcher import ExecutionError, launch, require_torch
from meshwise.executor.recording.rank_files import teller

DEVICES = ("cpu", "cuda")
STILL = 600.0
"""Seconds without a heartbeat after which a worker is given up, in addition to the seconds of measurement."""
_SHARES = {"kernels": 0.7, "training": 1.0, "collectives": 0.3}
"""Share of the time for each part. Training runs a fixed number of steps; its share only extends the wait."""


def chosen_device(given: str | None) -> str:
    """Return the kind of device to measure: ``given``; without it CUDA where torch sees a GPU, else the CPU.

    Raises
    ------
    ValueError
        Where there is no such kind, or CUDA is asked for and torch sees no GPU.
    ModuleNotFoundError
        Where torch is not installed.
    """
    if given not in (None, *DEVICES):
        raise ValueError(f"device is one of {', '.join(DEVICES)}, met {given}")
    if given == "cpu":
        return given
    require_torch()
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if given == "cuda":
        raise ValueError(f"device cuda: torch {torch.__version__} sees no GPU on this machine; nearest: --device cpu")
    return "cpu"


def chosen_ranks(device: str, given: int | None) -> int:
    """Return the number of devices for collectives: ``given``; without it all GPUs of the machine, and 2 on a CPU.

    Raises
    ------
    ValueError
        Where the machine has fewer GPUs.
    """
    if device == "cpu":
        return 2 if given is None else given
    devices = count_gpus()
    if given is not None and not 1 <= given <= devices:
        raise ValueError(f"processes are 1 to {devices} on {devices} GPUs, met {given}; nearest: {devices}")
    return given or devices


def measure(
    out: Path,
    device: str,
    ranks: int,
    seconds: float,
    parts: Sequence[str] = PARTS,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Write the rows of this machine to ``out`` and return a line for each measurement left out, with the reason.

    Every part runs in its own processes, which write each row as soon as it is measured, so that rows stay however the
    measurement ends.

    Parameters
    ----------
    ranks
        Number of devices for collectives; one device has none to measure.
    seconds
        Approximate time to measure, without starts and training steps.
    parts
        Parts to measure, of `PARTS`.
    """
    out.write_text("")  # workers append
    skipped: list[str] = []
    for part in PARTS:
        size = ranks if part == "collectives" else 1
        if part in parts and not (part == "collectives" and ranks < 2):
            skipped += _measure(out.resolve(), device, part, size, _SHARES[part] * seconds, progress)
    return skipped


def _measure(
    out: Path, device: str, part: str, ranks: int, seconds: float, progress: Callable[[str], None] | None
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder = Path(name)
        arguments = [name, str(out), device, part, str(seconds)]
        launch(
            "meshwise.executor.calibration.device_worker",
            arguments,
            folder,
            ranks,
            timeout=STILL + seconds,
            poll=teller(folder, progress),
        )
        found = skipped_file(folder)
        return found.read_text().splitlines() if found.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code: 0, 1 failed, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m meshwise.executor.calibration.device_calibration", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, metavar="ROWS.jsonl", help="where rows go")
    parser.add_argument("--device", choices=DEVICES, help="cuda where torch sees a GPU, else cpu with small shapes")
    parser.add_argument("--seconds", type=float, default=30.0, help="time for kernels and collectives, about")
    parser.add_argument("--processes", type=int, help="devices that communicate; all GPUs")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part; can be repeated")
    given = parser.parse_args(arguments)
    try:
        device = chosen_device(given.device)
        ranks = chosen_ranks(device, given.processes)
        skipped = measure(given.out, device, ranks, given.seconds, given.only or PARTS, _say)
    except KeyboardInterrupt:
        _say(f"interrupted: {kept(given.out)}")
        return 130
    except (ValueError, OSError) as error:
        _say(str(error))
        return 2
    except ExecutionError as error:
        _say(f"{error}\n{kept(given.out)}")
        return 1
    for line in skipped:
        _say(f"left out: {line}")
    _say(kept(given.out))
    return 0


def kept(out: Path) -> str:
    """Return a sentence with the number of rows in a file."""
    return f"{out} has {count(out)} rows"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
