"""Mutated inputs for every parser of outside data: each must give a value or the one input error, soon and in little.

``python -m tests.endurance.fuzzing PARSER|all --inputs N --seed S`` runs them, each within a second and 500 MB; input
``i`` of a seed is always the same.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from meshwise.simulator.files import escape_text

from .parsers import PARSERS
from .run import fuzz_apart


def main(
    parser: Annotated[str, typer.Argument(help=f"One of {', '.join(PARSERS)}, or all.")],
    inputs: Annotated[int, typer.Option(min=1, help="Inputs of each parser.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Another seed, other inputs.")] = 0,
    out: Annotated[str, typer.Option(help="Where the smallest input of each failure goes.")] = "fuzzing-failures",
) -> None:
    """Read mutated inputs: each must give a value or the input error, and do nothing else."""
    if parser != "all" and parser not in PARSERS:
        raise typer.BadParameter(f"a parser is one of {', '.join(PARSERS)} or all, met {escape_text(parser[:60])}")
    sound = True
    for name in PARSERS if parser == "all" else (parser,):
        with tempfile.TemporaryDirectory(prefix="meshwise-") as folder:
            sound &= fuzz_apart(name, PARSERS[name], inputs, seed, Path(folder), Path(out))
    raise typer.Exit(0 if sound else 1)


if __name__ == "__main__":
    typer.run(main)
