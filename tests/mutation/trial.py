"""Runs tests on mutants of a file, each in a process of its own that finds them in a copy of the tree."""

import contextlib
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

_ROOMS = ("simulator", "strategies", "executor", "reports", "scenarios")
_COPIED = (*_ROOMS, "tests", "pyproject.toml")
_SHARED = ("_pytest.assertion.rewrite", "hypothesis.internal.conjecture.engine", "numpy", "simpy", "networkx")
"""What tests of all files import besides: it is loaded once."""
_EXAMPLES = 30
"""Random examples of a property that says of no number; those that say of one get it."""
_AT_LEAST = 20
"""Seconds of CPU after which a mutant's tests do not come to an end: three times what they take, and no less."""


class Outcome(StrEnum):
    """What tests say of a mutant."""

    KILLED = "killed"
    ENDLESS = "endless"
    SURVIVED = "survived"


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yield a copy of what tests need of a tree, for as long as it is used."""
    with TemporaryDirectory(prefix="mutants-") as folder:
        for name in _COPIED:
            source, target = root / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            elif source.exists():
                shutil.copy(source, target)
        _link(Path(folder))
        yield Path(folder)


def _link(tree: Path) -> None:
    """Make the package `meshwise` of a tree: what is installed elsewhere must not be found."""
    package = tree / "meshwise"
    package.mkdir()
    for room in _ROOMS:
        (package / room).symlink_to(tree / room)
    for path in (tree / "scenarios" / "api").glob("*"):
        (package / path.name).symlink_to(path)


class Bench:
    """Tests of one file of a copied tree; loading what all of them import is paid once."""

    def __init__(self, tree: Path, path: str, tests: Sequence[str]) -> None:
        for name in _SHARED:
            with contextlib.suppress(ImportError):
                import_module(name)
        self.tree, self.file, self.tests = tree, tree / path, tuple(tests)
        self.original = self.file.read_text("utf-8")
        self.limit = 10 * _AT_LEAST
        code, self.seconds = self._run(write=True)
        if code:
            raise ValueError(f"{' '.join(tests)}: tests pass before anything is changed, met exit status {code}")
        self.limit = max(_AT_LEAST, int(3 * self.seconds))

    def outcome(self, source: str) -> Outcome:
        """Return what the tests say where the file has another text."""
        for old in self.file.parent.glob(f"__pycache__/{self.file.stem}.*"):
            old.unlink()  # bytes made of a text of the same second and length would be taken for those of this one
        self.file.write_text(source, "utf-8")
        try:
            code, _ = self._run(write=False)
        finally:
            self.file.write_text(self.original, "utf-8")
        if code is None:
            return Outcome.ENDLESS
        return Outcome.KILLED if code else Outcome.SURVIVED

    def _run(self, *, write: bool) -> tuple[int | None, float]:
        """Return the exit status of the tests, ``None`` where they took too long, and their seconds of CPU."""
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit))
            _leave(lambda: _pytest(self.tree, self.tests, write))
        deadline = time.monotonic() + 20 * self.limit
        while not (found := os.wait4(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, 9)
            time.sleep(0.02)
        _, status, used = found
        code = os.waitstatus_to_exitcode(status)
        return None if code < 0 else code, used.ru_utime + used.ru_stime


def _leave(work: Callable[[], int]) -> None:
    """End this process with the status that some work returns, silently."""
    code = 3
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        code = work()
    finally:
        os._exit(code)


def _pytest(tree: Path, tests: Sequence[str], write: bool) -> int:
    """Run tests of a tree until one fails; random examples are the same every time, and are not made smaller."""
    import pytest
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", max_examples=_EXAMPLES, database=None, derandomize=True, deadline=None, phases=phases
    )
    settings.load_profile("mutants")
    sys.dont_write_bytecode = not write
    for name in [name for name in sys.modules if name.split(".")[0] in (*_COPIED, "meshwise")]:
        del sys.modules[name]
    here = Path(__file__).parents[2]
    sys.path[:] = [str(tree), *(each for each in sys.path if each and Path(each).resolve() != here)]
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
