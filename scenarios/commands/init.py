"""``meshwise init``: a scenario to start from."""

from pathlib import Path
from typing import Annotated

import typer

from meshwise.scenarios.commands.options import Json
from meshwise.scenarios.console import emit
from meshwise.scenarios.files.library import SCHEMA, find_root
from meshwise.scenarios.files.results import make_folder, write


def init(
    directory: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to write it.")] = ".", as_json: Json = False
) -> None:
    """Write a commented scenario to start from, and beside it the schema by which an editor completes it."""
    target = Path(directory) / "scenario.yaml"
    if target.exists():
        raise ValueError(f"{target}: the file exists; name another folder or remove it")
    make_folder(directory)
    schema = Path(directory) / SCHEMA
    if not schema.exists():
        write(schema, (find_root() / SCHEMA).read_text("utf-8"))
    write(target, (find_root() / "starter.yaml").read_text("utf-8"))
    if as_json:
        emit({"file": str(target), "schema": str(schema)})
    else:
        print(f"{target} is written; try: meshwise simulate {target}")
