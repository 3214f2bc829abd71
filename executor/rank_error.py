"""How a rank failed, left as a file by the rank itself."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LENGTH = 800
"""Characters of an exception that are kept at most."""


def error_file(folder: Path, rank: int) -> Path:
    """Return where ``rank`` leaves its exception as JSON."""
    return folder / f"rank-{rank}.error"


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that ended a rank, and when: seconds since 1970."""

    time: float
    error: str

    @classmethod
    def of(cls, error: Exception) -> "RankError":
        """Return an exception as one line, with what it came from, now."""
        chain: list[BaseException] = [error]
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        return cls(time.time(), ", because of ".join(map(_line, chain)))

    def write(self, folder: Path, rank: int) -> None:
        """Leave this as the error of ``rank``."""
        error_file(folder, rank).write_text(json.dumps(asdict(self)))


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:LENGTH]


def read_errors(folder: Path, ranks: int) -> dict[int, RankError]:
    """Return the errors of the ranks that left one."""
    paths = {rank: error_file(folder, rank) for rank in range(ranks)}
    return {rank: RankError(**json.loads(path.read_text())) for rank, path in paths.items() if path.exists()}
