"""The user's file: what is trained, on which data, with which loss, optimizer and schedule.

Loading it runs its code. `UserFile` has the functions that it defines; the other files of its folder can be imported.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from meshwise.executor.capture.capture import format_error
from meshwise.executor.capture.source_lines import find_error_line
from meshwise.executor.recording.private_torch import compile_in_place
from meshwise.executor.recording.rank_files import UserError
from meshwise.executor.starting.construction import Start, start_module
from meshwise.executor.starting.draws import seed_draws

NAMES = ("model", "data", "loss", "optimizer", "scheduler", "initialize", "evaluate", "evaluation_data")
"""The functions that a file may define."""
NEEDED = ("model", "data")


class UserFileError(UserError):
    """A user's file that cannot be read, or a function of it that fails; the message begins with its line."""


@dataclass(frozen=True, slots=True)
class UserFile:
    """The functions of a user's file; the optional ones are ``None`` where it has none.

    Parameters
    ----------
    batch
        ``BATCH``, the samples of a step.
    save_beside
        Writes what belongs to the weights into their folder, such as a tokenizer.
    start
        Starts the module of a seed otherwise than by recording ``model``.
    """

    path: Path
    model: Callable[[], nn.Module]
    data: Callable[..., Any]
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[nn.Module], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    initialize: Callable[[nn.Module], None] | None = None
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    evaluation_data: Callable[..., Any] | None = None
    batch: int | None = None
    save_beside: Callable[[Path], None] | None = None
    start: Callable[[int], Start] | None = None

    def build_model(self, seed: int) -> nn.Module:
        """Return the module, whose first parameters are drawn from a seed."""
        return self.start_model(seed).build()

    def start_model(self, seed: int) -> Start:
        """Return the module of `build_model`, without the memory of its parameters where it can be built so."""
        if self.start is not None:
            return self.start(seed)
        return start_module(lambda: self._run_model(seed), seed)

    def _run_model(self, seed: int) -> nn.Module:
        module = self.call("model")
        if not isinstance(module, nn.Module):
            raise UserFileError(
                f"{self._find_line(self.model)}: model() returns a torch.nn.Module, met {type(module).__name__}"
            )
        module = compile_in_place(module)
        if self.initialize is not None:
            seed_draws(seed)
            self.call("initialize", module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserFileError(f"{self._find_line(self.model)}: a module has parameters that are trained, met none")
        return module

    def open_data(self, rank: int, num_ranks: int, name: str = "data") -> tuple[Any, bool]:
        """Return the user's data, or those of a function of another name, and whether they are of this rank alone."""
        is_own = self.divides_data(name)
        return (self.call(name, rank, num_ranks) if is_own else self.call(name)), is_own

    def divides_data(self, name: str = "data") -> bool:
        """Return whether the user's function of that name gives every rank data of its own."""
        try:
            parameters = inspect.signature(getattr(self, name)).parameters
        except (TypeError, ValueError):
            return False
        num_needed = sum(parameter.default is parameter.empty for parameter in parameters.values())
        return num_needed >= 2 or {"rank", "world"} <= parameters.keys()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a function of the file returns; `UserFileError` with its line where it fails."""
        function: Any = getattr(self, name)
        try:
            return function(*arguments)
        except UserError:
            raise
        except Exception as error:
            raise UserFileError(f"{find_own_line(error, self.path)}: {name}(): {format_error(error)}") from error

    def _find_line(self, function: Callable[..., Any]) -> str:
        code = getattr(function, "__code__", None)
        return f"{self.path}:{code.co_firstlineno}" if code is not None else str(self.path)


def load_file(path: Path) -> UserFile:
    """Return the functions of a file, whose code is run.

    Raises
    ------
    UserFileError
        Where the file cannot be read or run, or does not define what is needed.
    """
    if path.suffix != ".py" or not path.is_file():
        raise UserFileError(f"{path}: a file FILE.py with model() and data(), met no such file")
    module = _run_file(path)
    symbols = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    missing_names = [name for name in NEEDED if not callable(symbols.get(name))]
    if missing_names:
        matches = get_close_matches(missing_names[0], symbols, n=1)
        nearest = f"; nearest: {matches[0]}" if matches else ""
        raise UserFileError(
            f"{path}: the file has the functions model() and data(), met no {missing_names[0]}(){nearest}"
        )
    if "evaluate" in symbols and "evaluation_data" not in symbols:
        rule = "evaluate(model, batch) has evaluation_data() beside it, samples that are not trained on"
        raise UserFileError(f"{path}: {rule}, met none; nearest: def evaluation_data(): ...")
    found = {name: symbols[name] for name in NAMES if name in symbols}
    for name, value in found.items():
        if not callable(value):
            raise UserFileError(f"{path}: {name} is a function, met {type(value).__name__}")
    batch = symbols.get("BATCH")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise UserFileError(f"{path}: BATCH is a number of samples of at least 1, met {batch!r}")
    return UserFile(path, **found, batch=batch)


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"trained_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where workers of a loader and pickle look for its classes
    sys.path.insert(0, str(path.resolve().parent))  # stays: workers of a loader import from there too
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserFileError(f"{error.filename or path}:{error.lineno}: {format_error(error)}") from error
    except Exception as error:
        raise UserFileError(f"{find_own_line(error, path)}: {format_error(error)}") from error
    return module


def find_own_line(error: BaseException, path: Path) -> str:
    """Return the last place in the user's file, or in its folder, that an error came through, as ``FILE:LINE``.

    Else it is the last place in other code of the user, or in a package that has the module.
    """
    folder = path.resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_absolute()]
    own_frames = [frame for frame in frames if Path(frame.filename).resolve().parent == folder]
    if own_frames:
        return f"{own_frames[-1].filename}:{own_frames[-1].lineno}"
    is_in_module = any(frame.name == nn.Module._call_impl.__name__ for frame in frames)
    return find_error_line(error, in_packages=is_in_module) or str(path)
