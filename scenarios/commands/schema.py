"""``meshwise schema``: what input files may hold, for editors."""

from typing import Annotated

import typer

from meshwise.scenarios.commands.options import FileKind, Json
from meshwise.scenarios.console import emit
from meshwise.scenarios.schema.json_schema import build_json_schema


def schema(kind: Annotated[FileKind, typer.Argument(help="Which file.")], as_json: Json = False) -> None:
    """Print the JSON Schema of a kind of file, for completion in editors."""
    emit(build_json_schema(kind.value))
