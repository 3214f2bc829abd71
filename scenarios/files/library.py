"""The scenarios that come with the program, and how a name on the command line finds a file."""

from importlib.resources import files
from pathlib import Path

from meshwise.scenarios.files.errors import Fault, ScenarioError, nearest

SCHEMA = "scenario.schema.json"
"""In the folder of the library, and beside a scenario that `meshwise init` writes: its first line names it."""


def root() -> Path:
    """Return the folder of the library."""
    return Path(str(files("meshwise.scenarios")))


def names() -> tuple[str, ...]:
    """Return the name of every scenario of the library, as in ``megatron/gpt-145b-1536-a100``."""
    top = root()
    return tuple(sorted(path.relative_to(top).with_suffix("").as_posix() for path in top.rglob("*.yaml")))


def find(name: str | Path) -> Path:
    """Return the file that ``name`` means: a path, or a scenario of the library by name.

    The folder of a library name may be left out. `ScenarioError` where there is neither.
    """
    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    known = names()
    for candidate in known:
        if str(name) in (candidate, candidate.rsplit("/", 1)[-1]):
            return root() / f"{candidate}.yaml"
    near = nearest(str(name), [*known, *(candidate.rsplit("/", 1)[-1] for candidate in known)])
    message = f"there is no such file, and no scenario of that name in the library{near}"
    raise ScenarioError((Fault(str(name), 0, 0, "", message),))
