"""Many inputs of one parser, and the smallest of those that fail alike."""

import mmap
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random

from .parsers import Parser
from .watch import MEGABYTES, Failure, failure

ROOM = 3 * MEGABYTES * 2**20
"""Bytes of address space that reading may take beyond what the process has: then it is out of memory."""
SHRINKS = 300
"""Tries to make a failing input smaller."""
_PLACE = struct.Struct("q")


@dataclass
class Report:
    """What came of the inputs of a parser; ``failures`` has the smallest input of each kind and place."""

    parser: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    failures: dict[tuple[str, str], tuple[Failure, bytes]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Inputs in a second of CPU."""
        return self.inputs / self.seconds if self.seconds else 0.0


def input_of(name: str, parser: Parser, seed: int) -> Callable[[int], bytes]:
    """Return the function that makes input ``index`` of a seed: the same in every process."""
    mutator = parser.mutator()
    return lambda index: mutator.input(Random(f"{name} {seed} {index}"))


def fuzz(
    name: str,
    parser: Parser,
    inputs: int,
    seed: int,
    folder: Path,
    told: Callable[[int], None] | None = None,
    first: int = 0,
) -> Report:
    """Return what came of some inputs; the parser may look into ``folder``, and ``told`` hears of each before."""
    made, read, report = input_of(name, parser, seed), parser.reader(folder), Report(name)
    start = time.process_time()
    for index in range(first, first + inputs):
        if told is not None:
            told(index)
        content = made(index)
        found, accepted, seconds = failure(read, content, parser.errors, folder)
        if found is not None and found.kind == "slow":
            # first imports and a busy machine make a reading slow once; the input is slow where it is slow again
            found, accepted, seconds = failure(read, content, parser.errors, folder)
        report.inputs += 1
        report.accepted += accepted
        report.slowest = max(report.slowest, seconds)
        if found is not None:
            key = (found.kind, found.place)
            if key not in report.failures or len(content) < len(report.failures[key][1]):
                report.failures[key] = found, content
    report.seconds = time.process_time() - start
    for key, (found, content) in report.failures.items():
        if found.kind not in ("slow", "too long", "memory"):
            report.failures[key] = found, _shrunk(read, content, parser, folder, key)
    return report


def _shrunk(
    read: Callable[[bytes], object], content: bytes, parser: Parser, folder: Path, key: tuple[str, str]
) -> bytes:
    """Return a smaller input that fails alike: pieces are left out, large ones first."""
    tries, size = 0, len(content) // 2
    while size and tries < SHRINKS:
        start = 0
        while start < len(content) and tries < SHRINKS:
            candidate = content[:start] + content[start + size :]
            found, _, _ = failure(read, candidate, parser.errors, folder)
            tries += 1
            if found is not None and (found.kind, found.place) == key:
                content = candidate
            else:
                start += size
        size //= 2
    return content


def fuzz_apart(name: str, parser: Parser, inputs: int, seed: int, folder: Path, out: Path) -> bool:
    """Run inputs in a process of its own with little memory; return whether none failed, not even by killing it.

    Its report is printed, and failing inputs are files in ``out``.
    """
    place = mmap.mmap(-1, _PLACE.size)
    child = os.fork()
    if not child:
        code = 1
        try:
            _limit()
            report = fuzz(name, parser, inputs, seed, folder, lambda index: _PLACE.pack_into(place, 0, index))
            print(line(report), flush=True)
            for found, content in report.failures.values():
                print(
                    f"  {found.kind} at {found.place}: {found.detail}\n  -> {keep(out, name, found, content)}",
                    flush=True,
                )
            code = int(bool(report.failures))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0 or status > 1:
        (index,) = _PLACE.unpack(place)
        found = Failure(f"killed by signal {-status}", "", "the process of the parser died")
        print(f"{name}: {found.kind} -> {keep(out, name, found, input_of(name, parser, seed)(index))}")
    return status == 0


def line(report: Report) -> str:
    """Return a report in one line."""
    share = report.accepted / max(1, report.inputs)
    return (
        f"{report.parser:<12} {report.inputs:>9,} inputs  {share:>4.0%} accepted  {report.rate:>8,.0f} inputs/s  "
        f"slowest {report.slowest:.3f} s  {len(report.failures)} failures"
    )


def keep(out: Path, name: str, found: Failure, content: bytes) -> Path:
    """Write a failing input into ``out`` and return its file."""
    out.mkdir(parents=True, exist_ok=True)
    words = "".join(letter if letter.isalnum() else "-" for letter in f"{found.kind}-{found.place}")
    path = out / f"{name}-{words}-{sha256(content).hexdigest()[:8]}.txt"
    path.write_bytes(content)
    return path


def _limit() -> None:
    """Let this process take `ROOM` more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
