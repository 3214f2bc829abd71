"""Every command of the command line: its module, its function and its line of help.

A command is imported only when it is called, so that help, completion and errors in names cost no more than typer.
"""

from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Place(NamedTuple):
    """The module and function of a command, and the first line of its help."""

    module: str
    function: str
    help: str


COMMANDS = {
    "init": Place(
        "init",
        "init",
        "Write a commented scenario to start from, and beside it the schema by which an editor completes it.",
    ),
    "list": Place("library", "names", "List what a scenario can name."),
    "validate": Place(
        "validate", "validate", "Check a scenario, plan, cluster or graph file and report all errors at once."
    ),
    "schema": Place("schema", "schema", "Print the JSON Schema of a kind of file, for completion in editors."),
    "simulate": Place("simulate", "simulate", "Simulate one step of a plan: time, memory, and where both go."),
    "replay": Place(
        "traces",
        "replay",
        "Simulate Chakra execution traces: a file a rank, as `meshwise simulate --chakra` writes them and others do.",
    ),
    "search": Place(
        "search",
        "search",
        "Search for the fastest plan that fits. Ctrl-C ends the search and keeps the best so far.",
    ),
    "compare": Place(
        "search", "compare", "Run several algorithms on one problem: quality against evaluations and against time."
    ),
    "explain": Place(
        "explain",
        "explain",
        "Explain the best plan, or a given one; --why-not and --lost are answered alone. Ctrl-C prints what is known.",
    ),
    "execute": Place(
        "execute", "execute", "Run a plan for real on this machine and set measurement against prediction."
    ),
    "export": Place(
        "export", "export", "Say a plan in another system's words; what that system cannot say is refused."
    ),
    "calibrate": Place(
        "calibrate",
        "calibrate",
        "Measure this machine into a cluster file; or fit accelerators or links to published timings.",
    ),
    "capture": Place(
        "capture",
        "capture",
        "Turn any torch module into an operator graph; forward(*inputs) returns a loss, dim 0 of inputs is the batch.",
    ),
    "demo": Place(
        "demo", "demo", "Show the whole chain on this machine: calibrate, search a plan, run it, compare and report."
    ),
    "accuracy": Place(
        "accuracy",
        "accuracy",
        "Compare predictions with measured runs; a run that cannot be predicted is listed with its reason.",
    ),
    "benchmark": Place(
        "benchmark", "benchmark", "Measure the program's own speed on this machine, in CPU time of one core."
    ),
    "doctor": Place("doctor", "doctor", "Show versions, cores, GPUs, what is installed and what is missing."),
}
"""Commands by name, in the order of the help."""


class LazyCommand(TyperCommand):
    """A stand-in for a command of the table that imports the command's module to parse the arguments."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command, with which typer continues."""
        assert self.name is not None
        return load_command(self.name).make_context(info_name, args, parent, **extra)


def load_command(name: str) -> Any:
    """Return a command of the table, with the options of its function."""
    place = COMMANDS[name]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(getattr(import_module(f"meshwise.scenarios.commands.{place.module}"), place.function))
    return typer.main.get_command(app)


def command_group() -> TyperGroup:
    """Return the command line without importing any command."""
    app = typer.Typer(
        name="meshwise",
        help="Simulate, search and execute parallel plans for training neural networks on a cluster.",
        no_args_is_help=True,
        callback=lambda: None,  # makes a group of an application that has no command of its own
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, place in COMMANDS.items():
        group.add_command(LazyCommand(name, help=place.help, rich_markup_mode=None))
    return group
