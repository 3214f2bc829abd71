"""Measures training on one CUDA device: ``bash tests/gpu/run [OUT]``.

Each part runs in a process of its own, so that one that fails, whatever it does to the device, leaves the others. OUT
gets a JSON object a line, as soon as it is measured. Without a device the parts are told that wait for one. With
``--device cpu --tiny`` the same code runs on cores, as a test of it.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwise.executor.device import CPU, CUDA, DEVICES, count_gpus
from meshwise.executor.launch.launcher import require_torch
from meshwise.executor.launch.processes import INTERRUPTED

from .rows import FAILED, RowFile, describe_row, read_rows

OUT = "reports/executor/gpu-training.jsonl"


class Part(NamedTuple):
    """A module of this folder, what it asks for, and the seconds that it may take."""

    name: str
    asked: str
    longest: float


PARTS = (
    Part("matrix", "every feature of parallelize on one device equals a plain loop of torch", 240.0),
    Part("throughput", "a 1B Llama in bf16, compiled, with flash attention: MFU >= 0.97 of a plain loop's", 360.0),
    Part("calibration", "meshwise calibrate on the device", 360.0),
    Part("predictions", "12 runs: step time within 15 % median, peak memory within 5 %", 780.0),
)
"""Together they take 29 minutes at most."""


def tell_waiting() -> None:
    """Print what waits for a device."""
    print("No CUDA device is at hand. With one, `bash tests/gpu/run` measures, in under 30 minutes:")
    for part in PARTS:
        print(f"  {part.name:<12}{part.asked}")


def run_part(part: Part, out: Path, device: str, *, is_tiny: bool) -> None:
    """Run a part in a process of its own; where that ends badly, a row says why."""
    options = ["--tiny"] if is_tiny else []
    command = [sys.executable, "-m", "tests.gpu.main", str(out), "--device", device, "--part", part.name, *options]
    try:
        code = subprocess.run(command, timeout=part.longest, check=False).returncode
        reason = f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        code, reason = 1, f"given up after {part.longest:.0f} s"
    if code:
        RowFile(out, part.name, device, is_tiny=is_tiny).write("part", FAILED, reason=reason)


def measure_part(name: str, out: Path, device: str, *, is_tiny: bool) -> None:
    """Measure a part in this process."""
    rows = RowFile(out, name, device, is_tiny=is_tiny)
    try:
        importlib.import_module(f".{name}", __package__).measure(rows, device, is_tiny=is_tiny)
    except Exception as error:  # what fails outside of any case: others parts go on
        rows.write("part", FAILED, reason=f"{type(error).__name__}: {error}")


def summarise(out: Path) -> str:
    """Return the rows of a file in words."""
    rows = read_rows(out)
    first = rows[0]
    driver = f", driver {first['driver']}" if first["driver"] else ""
    head = f"{first['device']}{driver}, torch {first['torch']}, {first['date'][:10]}"
    return "\n".join((head, *map(describe_row, rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says and return the exit code: 0, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="bash tests/gpu/run", description=__doc__)
    parser.add_argument("out", nargs="?", metavar="OUT", help=f"where rows go ({OUT}); it is replaced")
    parser.add_argument("--device", choices=DEVICES, default=CUDA, help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as a test of this program")
    parser.add_argument("--part", choices=[part.name for part in PARTS], help="this part alone; its rows are added")
    parser.add_argument("--relative-to", default=".", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == CPU and not (options.tiny and options.out):
        print("--device cpu is a test of this program: it goes with --tiny and OUT", file=sys.stderr)
        return 2
    try:
        require_torch()
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if options.device == CUDA and not count_gpus():
        tell_waiting()
        return 0
    out = Path(options.relative_to, options.out).resolve() if options.out else Path(OUT).resolve()
    try:
        if options.part:
            measure_part(options.part, out, options.device, is_tiny=options.tiny)
            return 0
        out.write_text("")
        for part in PARTS:
            run_part(part, out, options.device, is_tiny=options.tiny)
    except KeyboardInterrupt:
        print(f"interrupted: {out} has the rows that were measured", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(summarise(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
