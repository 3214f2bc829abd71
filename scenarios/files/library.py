"""The library of scenarios that come with the program, and how a name on the command line finds a file."""

from importlib.resources import files
from pathlib import Path

from meshwise.scenarios.files.errors import Fault, ScenarioError, suggest_nearest

SCHEMA = "scenario.schema.json"
"""File name of the schema, in the folder of the library and beside scenarios that `meshwise init` writes, whose first
line names it."""


def find_root() -> Path:
    """Return the folder of the library."""
    return Path(str(files("meshwise.scenarios")))


def list_names() -> tuple[str, ...]:
    """Return the name of every scenario of the library, such as ``megatron/gpt-145b-1536-a100``."""
    library_folder = find_root()
    return tuple(
        sorted(path.relative_to(library_folder).with_suffix("").as_posix() for path in library_folder.rglob("*.yaml"))
    )


def find_scenario(name: str | Path) -> Path:
    """Return the file of a path, or of a scenario of the library by name; the folder of that name may be left out.

    Raises
    ------
    ScenarioError
        Where there is neither such a file nor such a name; it suggests the nearest names.
    """
    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    library_names = list_names()
    for candidate in library_names:
        if str(name) in (candidate, candidate.rsplit("/", 1)[-1]):
            return find_root() / f"{candidate}.yaml"
    suggestion = suggest_nearest(
        str(name), [*library_names, *(candidate.rsplit("/", 1)[-1] for candidate in library_names)]
    )
    message = f"there is no such file, and no scenario of that name in the library{suggestion}"
    raise ScenarioError((Fault(str(name), 0, 0, "", message),))
