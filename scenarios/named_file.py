"""A file that an input file names: one of its own folder."""

from pathlib import Path

from scenarios.errors import ScenarioError, shown
from scenarios.reader import Document, FieldPath


def referenced(document: Document, path: FieldPath, name: str) -> Path:
    """Return the file that the field at ``path`` names, relative to the document's folder.

    Raises
    ------
    ScenarioError
        Where the name leads out of the folder, by itself or by a link, or to what is neither file nor folder: a pipe
        or a device might never end.
    """
    folder = Path(document.file).parent
    target = folder / name
    try:
        leaves = not target.resolve().is_relative_to(folder.resolve())
        special = target.exists() and not (target.is_file() or target.is_dir())
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, or a name that no file has
        raise ScenarioError((document.fault(path, f"names a file, met {shown(name)}: {error}"),)) from None
    if leaves:
        message = f"a path stays in the folder of its file, without links out of it; met {shown(name)}"
        raise ScenarioError((document.fault(path, message),))
    if special:
        raise ScenarioError((document.fault(path, f"names a file, met a pipe or device, {shown(name)}"),))
    return target
