"""Every command of the command line: its module, its function and its line of help.

A command is imported only when it is called, so that help, completion and errors in names cost no more than typer.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "init": "Write a commented scenario to start from, and beside it the schema by which an editor completes it.",
    "list": "List what a scenario can name.",
    "validate": "Check a scenario, plan, cluster or graph file and report all errors at once.",
    "schema": "Print the JSON Schema of a kind of file, for completion in editors.",
    "simulate": "Simulate one step of a plan: time, memory, and where both go.",
    "replay": (
        "Simulate Chakra execution traces: a file a rank, as `meshwise simulate --chakra` writes them and others do."
    ),
    "search": "Search for the fastest plan that fits. Ctrl-C ends the search and keeps the best so far.",
    "compare": "Run several algorithms on one problem: quality against evaluations and against time.",
    "explain": (
        "Explain the best plan, or a given one; --why-not and --lost are answered alone. Ctrl-C prints what is known."
    ),
    "execute": "Run a plan for real on this machine and set measurement against prediction.",
    "train": "Train your own module on your own data: data parallelism, ZeRO, recompute, pipelines, cut operators.",
    "export": "Say a plan in another system's words; what that system cannot say is refused.",
    "calibrate": (
        "Measure this machine into a cluster file; or fit one to measured steps or collectives, or parts to timings."
    ),
    "capture": (
        "Turn any torch module into an operator graph; forward(*inputs) returns a loss, dim 0 of inputs is the batch."
    ),
    "demo": "Show the whole chain on this machine: calibrate, search a plan, run it, compare and report.",
    "accuracy": (
        "Compare predictions with measured runs or collectives; what cannot be predicted is listed with its reason."
    ),
    "benchmark": "Measure the program's own speed on this machine, in CPU time of one core.",
    "doctor": "Show versions, cores, GPUs, what is installed and what is missing.",
}
"""The first line of the help of every command, in their order there."""

_FUNCTIONS = {"list": "library.names", "replay": "traces.replay"}
"""Functions of commands by module, where both names are not the command's."""


class LazyCommand(TyperCommand):
    """A stand-in for a command of the table that imports the command's module to parse the arguments."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command, with which typer continues."""
        assert self.name is not None
        return load_command(self.name).make_context(info_name, args, parent, **extra)


def import_function(name: str) -> Callable[..., None]:
    """Return the function of a command."""
    module, _, function = _FUNCTIONS.get(name, f"{name}.{name}").partition(".")
    imported_function: Callable[..., None] = getattr(import_module(f"meshwise.scenarios.commands.{module}"), function)
    return imported_function


def load_command(name: str) -> Any:
    """Return a command of the table, with the options of its function."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name)(import_function(name))
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
    for name, line in COMMANDS.items():
        group.add_command(LazyCommand(name, help=line, rich_markup_mode=None))
    return group
