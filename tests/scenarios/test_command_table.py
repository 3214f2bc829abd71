"""The table of commands is true, and nothing of a command is loaded to tell what there is."""

import inspect
import subprocess
import sys

import pytest

from meshwise.scenarios.commands.table import COMMANDS, command_group, import_function, load_command

PROGRAM = """
import atexit, os, sys
os.environ.update({environment!r})
own = lambda: sorted(name.split(".")[3] for name in sys.modules if name.startswith("meshwise.scenarios.commands."))
atexit.register(lambda: print("loaded", *own(), *[name for name in ("numpy", "yaml") if name in sys.modules]))
from meshwise.scenarios.commands.main import run
run({arguments!r})
"""
COMPLETION = {"_MESHWISE_COMPLETE": "complete_bash", "COMP_WORDS": "meshwise ", "COMP_CWORD": "1"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_the_first_line_of_its_docstring(name: str) -> None:
    assert COMMANDS[name] == (inspect.getdoc(import_function(name)) or "").splitlines()[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_told_of_in_the_list_as_by_itself(name: str) -> None:
    told = command_group().commands[name].get_short_help_str(200)
    assert told == load_command(name).get_short_help_str(200)


def test_every_module_of_commands_that_is_in_the_table_is_there_once() -> None:
    functions = [import_function(name) for name in COMMANDS]
    assert len(set(functions)) == len(functions)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["--help"], {}), ([], {}), (["simulat"], {}), ([], COMPLETION)],
    ids=["help", "nothing", "a wrong name", "completion"],
)
def test_what_commands_there_are_is_told_without_loading_one(arguments: list[str], environment: dict[str, str]) -> None:
    program = PROGRAM.format(arguments=arguments, environment=environment)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    *told, loaded = done.stdout.splitlines()
    assert loaded == "loaded main table", done.stderr
    if environment:
        assert told == list(COMMANDS)
