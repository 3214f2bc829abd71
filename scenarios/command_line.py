"""The console command ``meshwise``: parses arguments, and turns every failure into one message and a code."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from signal import SIG_DFL, SIGINT, getsignal, signal
from typing import TYPE_CHECKING

from executor.exit_codes import INTERRUPTED
from scenarios.console import BAD_INPUT, FAILED
from scenarios.patient_interrupt import PatientInterrupt

if TYPE_CHECKING:
    import typer

_OWN = ("simulator", "strategies", "executor", "reports", "scenarios")


def application() -> "typer.Typer":
    """Return the command line."""
    import typer

    from scenarios.commands import (
        accuracy,
        benchmark,
        calibrate,
        capture,
        demo,
        execute,
        explain,
        export,
        library,
        search,
        simulate,
        traces,
    )

    app = typer.Typer(
        name="meshwise",
        help="Simulate, search and execute parallel plans for training neural networks on a cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.command("init")(library.init)
    app.command("list")(library.names)
    app.command("validate")(library.validate)
    app.command("schema")(library.schema)
    app.command("simulate")(simulate.simulate)
    app.command("replay")(traces.replay)
    app.command("search")(search.search)
    app.command("compare")(search.compare)
    app.command("explain")(explain.explain)
    app.command("execute")(execute.execute)
    app.command("export")(export.export)
    app.command("calibrate")(calibrate.calibrate)
    app.command("capture")(capture.capture)
    app.command("demo")(demo.demo)
    app.command("accuracy")(accuracy.accuracy)
    app.command("benchmark")(benchmark.benchmark)
    app.command("doctor")(execute.doctor)
    return app


def run(arguments: Sequence[str] | None = None, *, interrupt: PatientInterrupt | None = None) -> int:
    """Return the exit code of a command line (that of the process: None).

    0 done, 1 failed while running, 2 bad input, 3 nothing fits, 130 interrupted: after an ``interrupt`` errors but
    those of files are made of it, as matplotlib's "Invalid affine transformation matrix".
    """
    try:
        code = application()(args=arguments, prog_name="meshwise", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        of_it = interrupt is not None and interrupt.raised and not isinstance(error, OSError)
        code = INTERRUPTED if of_it else _failed(error)
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _failed(error: Exception) -> int:
    """Print what went wrong in one message and return the exit code."""
    import traceback

    from typer import Abort

    from scenarios.console import note

    if isinstance(error, Abort):
        return INTERRUPTED
    if os.environ.get("MESHWISE_DEBUG") == "1":
        traceback.print_exception(error)
    usage = getattr(error, "format_message", None)
    if usage is not None:
        note(str(usage()))
        return BAD_INPUT
    if isinstance(error, ValueError):
        note(str(error))
        return BAD_INPUT
    if isinstance(error, ModuleNotFoundError):
        remedy = "pip install 'meshwise[exec]'" if error.name == "torch" else "`meshwise doctor` shows what is missing"
        note(f"{error.name} is not installed; {remedy}")
        return FAILED
    words = " ".join(str(error).split()) or "no message"
    if type(error).__module__.partition(".")[0] in _OWN:  # what the program raises says what it is
        note(words)
        return FAILED
    note(f"failed: {type(error).__name__}: {words[:500]} (MESHWISE_DEBUG=1 shows where)")
    return FAILED


def main() -> None:
    """Run the command line of this process, which an interrupt ends without a traceback while modules load too."""
    interrupt = PatientInterrupt()
    interrupt.install()
    try:
        code = run(interrupt=interrupt)
    except KeyboardInterrupt:  # while a message was on its way
        code = INTERRUPTED
    if getsignal(SIGINT) is interrupt:
        signal(SIGINT, SIG_DFL)  # all is written: what Python does at exit says nothing of an interrupt
    if code == INTERRUPTED:
        with suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
        os._exit(code)  # an extension module that an interrupt left half loaded may crash when Python takes it down
    sys.exit(code)
