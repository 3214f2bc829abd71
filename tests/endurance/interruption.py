"""One command of ``meshwise`` is interrupted at a moment of its run, and what is left of it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from tests.host_processes import is_alive, is_stopped, list_children

INTERRUPTED = frozenset({130, -signal.SIGINT})
"""What a process that was interrupted ends with: a shell shows both as 130."""
_WORDS = ("Traceback", "Exception ignored", "Fatal Python error")
_MARK = "MESHWISE_TRIAL"
"""Variable of the environment by which what a command started is known, whoever its parent is now."""
_PATIENCE = 120.0
"""Seconds after which a command that does not end is killed."""
_MOMENT = 2.0
_ROOT = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT_TIMES = slice(11, 15)
"""User and system time, its own and of children that it waited for, behind the name in ``/proc/PID/stat``."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """What came of one interrupt.

    Parameters
    ----------
    moment
        Seconds from the start of the process to the signal.
    ended_before
        Whether the command had ended by itself when its moment came.
    seconds, cpu_seconds
        From the signal until the process was gone: wall time, and CPU time of it and of what it waited for; too little
        where workers were left to end by themselves, whose time until the signal is taken off.
    code
        What it ended with; negative for a signal.
    in_program
        Whether the signal met the program itself, not the interpreter before the first module of the program.
    orphans
        Processes of the command that were left.
    """

    command: str
    moment: float
    ended_before: bool
    seconds: float
    cpu_seconds: float
    code: int
    in_program: bool
    orphans: int
    errors: str

    def faults(self, limit: float, *, busy: bool = False) -> list[str]:
        """Return what is not as it should be; ``limit`` is in seconds, of CPU time where the machine is ``busy``."""
        allowed = {0} if self.ended_before else INTERRUPTED
        found = []
        if self.code not in allowed and self.in_program:
            found.append(f"ends with {self.code}")
        if any(word in self.errors for word in _WORDS) and self.in_program:
            found.append("a traceback")
        took = self.cpu_seconds if busy else self.seconds
        if took >= limit:
            found.append(f"took {took:.1f} s to end")
        if self.orphans:
            found.append(f"{self.orphans} processes are left")
        return found


def whole_run(arguments: Sequence[str], folder: Path) -> float:
    """Run a command in a folder to its end and return the seconds that it took; ``RuntimeError`` where it fails."""
    begun = time.monotonic()
    process = _start(arguments, folder, token_hex(8))
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"meshwise {' '.join(arguments)} ends with {process.returncode}: {errors.strip()[-500:]}")
    return time.monotonic() - begun


def interrupt(arguments: Sequence[str], folder: Path, moment: float) -> Interruption:
    """Start a command in a folder, interrupt it after ``moment`` seconds as Ctrl-C does, and return what came of it."""
    mark = token_hex(8)
    used = _reaped()
    begun = time.monotonic()
    process = _start(arguments, folder, mark)
    with suppress(subprocess.TimeoutExpired):
        process.wait(moment)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)  # else it might end before the signal comes
        while process.poll() is None and not is_stopped(process.pid):
            time.sleep(0.001)  # a process that the kernel ends already takes no signal any more
    ended_before = process.poll() is not None
    before = 0.0 if ended_before else sum(map(_cpu_time, [process.pid, *list_children(process.pid)]))
    sent = time.monotonic()
    if not ended_before:
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGCONT)
    try:
        _, errors = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    gone = time.monotonic()
    left = _left(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Interruption(
        arguments[0],
        sent - begun,
        ended_before,
        0.0 if ended_before else gone - sent,
        0.0 if ended_before else max(_reaped() - used - before, 0.0),
        process.returncode,
        in_program=_met_program(errors),
        orphans=len(left),
        errors=errors.strip()[-4000:],
    )


def _met_program(errors: str) -> bool:
    """Return whether an interrupt met the program, by what was written to stderr.

    An environment may lie in the program's own folder, and an editable install has a module there, that finds the
    program's, which Python loads as it begins. ``scenarios/api/__main__.py`` only imports the first module.

    >>> _met_program("Fatal Python error: init_import_site: Failed to import the site module")
    False
    >>> _met_program(f"Traceback (most recent call last): {_ROOT}/.venv/lib/site-packages/finder.py")
    False
    """
    begins = "init_import_site" in errors
    others = ("scenarios/api/__main__.py", "site-packages")
    own = [line for line in errors.splitlines() if str(_ROOT) in line and not any(name in line for name in others)]
    return not begins and (bool(own) or "Traceback" not in errors or "ignored" in errors)


def _start(arguments: Sequence[str], folder: Path, mark: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(_ROOT), _MARK: mark}
    return subprocess.Popen(
        [sys.executable, "-m", "meshwise", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _left(mark: str) -> list[int]:
    """Return the processes with a mark that are there a moment later still, not ended with their parent."""
    end = time.monotonic() + _MOMENT
    while (found := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _marked(mark: str) -> list[int]:
    """Return the processes that carry a mark and have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0") and is_alive(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _cpu_time(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that it has waited for; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[_STAT_TIMES])) / _TICKS


def _reaped() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
