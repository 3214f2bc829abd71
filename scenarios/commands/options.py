"""Arguments and options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


class FileKind(StrEnum):
    """Kinds of input files."""

    SCENARIO = "scenario"
    PLAN = "plan"
    CLUSTER = "cluster"
    GRAPH = "graph"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario file, or the name of one of the library.")
]
PlanFile = Annotated[
    str | None,
    typer.Option(
        help="A plan file, instead of the scenario's own plan; or TARGET:FILE of another trainer (see export)."
    ),
]
ClusterFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Predict with this machine, as `meshwise calibrate` measured it.")
]
SearchTarget = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="TARGET",
        help="Among what a trainer can say: torchtitan, megatron, deepspeed, accelerate, nanotron; or execute.",
    ),
]
PricedTarget = Annotated[
    str | None,
    typer.Option("--for", metavar="TARGET", help="Price by the conventions of this trainer, as search --for."),
]
Brave = Annotated[bool, typer.Option("--brave", help="Allow plans that are likelier than 5 % to run out of memory.")]
Budget = Annotated[int | None, typer.Option(min=1, help="Evaluations at most.")]
Seconds = Annotated[float | None, typer.Option(help="Wall time at most, in seconds.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of algorithms that draw.")]

MeetingPoint = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Do not run: print what each of several hosts runs; HOST is the first."),
]
Collect = Annotated[
    bool, typer.Option("--collect", help="Do not run: read what the ranks of several hosts left in --out.")
]
