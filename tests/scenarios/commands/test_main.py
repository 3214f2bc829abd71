"""Interrupts that come while a module is being imported are neither lost nor early."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOSES = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    loaded = "whole"
except KeyboardInterrupt:  # as extension modules do
    loaded = "in part"
"""
NEVER_ENDS = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
while True:
    pass
"""
PROGRAM = """
import time
{install}
try:
    import module
    time.sleep(2)
    print("goes on")
except KeyboardInterrupt:
    print("interrupted")
    time.sleep(0.1)  # no second one comes
import sys
print(getattr(sys.modules.get("module"), "loaded", "not there"))
"""
INSTALL = "from meshwise.scenarios.commands.main import PatientInterrupt; PatientInterrupt().install()"


def run(folder: Path, module: str, install: str) -> list[str]:
    (folder / "module.py").write_text(module)
    (folder / "program.py").write_text(PROGRAM.format(install=install))
    found = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.parametrize(
    ("install", "told"),
    [("", ["goes on", "in part"]), (INSTALL, ["interrupted", "whole"])],
    ids=["as Python does", "patient"],
)
def test_an_import_that_loses_interrupts_is_waited_for(tmp_path: Path, install: str, told: list[str]) -> None:
    assert run(tmp_path, LOSES, install) == told


def test_an_import_that_does_not_end_is_interrupted(tmp_path: Path) -> None:
    assert run(tmp_path, NEVER_ENDS, INSTALL) == ["interrupted", "not there"]


def test_a_job_that_ignores_interrupts_still_does(tmp_path: Path) -> None:
    program = f"import os, signal\n{INSTALL}\nos.kill(os.getpid(), signal.SIGINT)\nprint('goes on')"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "goes on\n"), found.stderr


def test_an_interrupt_that_python_ignores_comes_again(tmp_path: Path) -> None:
    program = f"""
import os, signal, time
{INSTALL}
def lines():
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
try:
    next(lines())  # dropped, so closed where exceptions are ignored
    time.sleep(2)
    print("goes on")
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("interrupted\n", "")


AT_THE_END = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"
SWALLOWED = """
import os, signal, time
def swallow():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [(AT_THE_END, "import module"), (SWALLOWED, "import module; module.swallow()")],
    ids=["during the last import", "swallowed"],
)
def test_a_command_that_ends_before_its_interrupt_is_raised_ends_as_interrupted(
    tmp_path: Path, module: str, command: str
) -> None:
    (tmp_path / "module.py").write_text(module)
    program = f"""
from meshwise.scenarios.commands import main
main.application = lambda: lambda **options: exec({command!r})
main.main()
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


def test_an_interrupt_that_waits_where_a_command_fails_does_not_come_while_python_ends(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(AT_THE_END)
    program = """
import atexit, time
from meshwise.scenarios.commands import main
atexit.register(time.sleep, 0.1)
main.application = lambda: lambda **options: exec("import module; raise ValueError('a message')")
main.main()
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (2, "a message\n")
