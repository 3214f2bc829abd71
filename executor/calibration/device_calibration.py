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

from meshwise.executor.calibration.figures import count_rows
from meshwise.executor.calibration.worker import PARTS, skipped_file
from meshwise.executor.device import DEVICES, count_gpus
from meshwise.executor.launch.launcher import ExecutionError, launch_ranks, require_torch
from meshwise.executor.recording.rank_files import make_teller

SILENCE_LIMIT = 600.0
"""Seconds without a heartbeat after which a worker is given up, in addition to the seconds of measurement."""
_SHARES = {"kernels": 0.7, "training": 1.0, "collectives": 0.3}
"""Share of the time for each part. Training runs a fixed number of steps; its share only extends the wait."""


def choose_device(requested_device: str | None) -> str:
    """Return the kind of device to measure: ``requested_device``; without it CUDA where torch sees a GPU, else the CPU.

    Raises
    ------
    ValueError
        Where there is no such kind, or CUDA is asked for and torch sees no GPU.
    ModuleNotFoundError
        Where torch is not installed.
    """
    if requested_device not in (None, *DEVICES):
        raise ValueError(f"device is one of {', '.join(DEVICES)}, met {requested_device}")
    if requested_device == "cpu":
        return requested_device
    require_torch()
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if requested_device == "cuda":
        raise ValueError(f"device cuda: torch {torch.__version__} sees no GPU on this machine; nearest: --device cpu")
    return "cpu"


def choose_num_ranks(device: str, requested_ranks: int | None) -> int:
    """Return the number of devices for collectives: ``requested_ranks``; without it all GPUs, and 2 on a CPU.

    ``ValueError`` where the machine has fewer GPUs.
    """
    if device == "cpu":
        return 2 if requested_ranks is None else requested_ranks
    num_devices = count_gpus()
    if requested_ranks is not None and not 1 <= requested_ranks <= num_devices:
        raise ValueError(
            f"processes are 1 to {num_devices} on {num_devices} GPUs, met {requested_ranks}; nearest: {num_devices}"
        )
    return requested_ranks or num_devices


def measure_devices(
    out: Path,
    device: str,
    num_ranks: int,
    seconds: float,
    parts: Sequence[str] = PARTS,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Write the rows of this machine to ``out`` and return a line for each measurement left out, with the reason.

    Every part runs in its own processes, which write each row as soon as it is measured, so that rows stay however the
    measurement ends.

    Parameters
    ----------
    num_ranks
        Number of devices for collectives; one device has none to measure.
    seconds
        Approximate time to measure, without starts and training steps.
    parts
        Parts to measure, of `PARTS`.
    """
    out.write_text("")  # workers append
    skipped_lines: list[str] = []
    for part in PARTS:
        part_ranks = num_ranks if part == "collectives" else 1
        if part in parts and not (part == "collectives" and num_ranks < 2):
            skipped_lines += _measure_part(out.resolve(), device, part, part_ranks, _SHARES[part] * seconds, progress)
    return skipped_lines


def _measure_part(
    out: Path, device: str, part: str, num_ranks: int, seconds: float, progress: Callable[[str], None] | None
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name:
        folder = Path(name)
        launch_ranks(
            "meshwise.executor.calibration.worker",
            [name, str(seconds), str(out), device, part],
            folder,
            num_ranks,
            timeout=SILENCE_LIMIT + seconds,
            poll=make_teller(folder, progress),
        )
        path = skipped_file(folder)
        return path.read_text().splitlines() if path.exists() else []


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
    options = parser.parse_args(arguments)
    try:
        device = choose_device(options.device)
        num_ranks = choose_num_ranks(device, options.processes)
        skipped_lines = measure_devices(
            options.out, device, num_ranks, options.seconds, options.only or PARTS, _print_line
        )
    except KeyboardInterrupt:
        _print_line(f"interrupted: {describe_rows(options.out)}")
        return 130
    except (ValueError, OSError) as error:
        _print_line(str(error))
        return 2
    except ExecutionError as error:
        _print_line(f"{error}\n{describe_rows(options.out)}")
        return 1
    for line in skipped_lines:
        _print_line(f"left out: {line}")
    _print_line(describe_rows(options.out))
    return 0


def describe_rows(out: Path) -> str:
    """Return a sentence with the number of rows in a file."""
    return f"{out} has {count_rows(out)} rows"


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
