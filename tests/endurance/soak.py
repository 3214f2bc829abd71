"""One process runs commands over and over, and what it holds of the machine is measured.

``python -m tests.endurance.soak`` runs them for an hour.

Every round runs each command once, on a scenario of its own. After it caches are emptied, for these have a fixed size
that many rounds fill, and what is left is counted: resident memory, objects that Python's collector knows, open files
and threads. What a process learns once (imports) is there after the first rounds; the rounds after these are cut into
thirds, and the median of the last one must not be above that of the first one by more than noise is.
"""

import argparse
import gc
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import _lru_cache_wrapper
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.console import BAD_INPUT

WARM_UP = 30
"""Rounds that are not counted."""
ALLOWED = 0.02
"""By how much of it the median of the last third may be above that of the first."""
_SCENARIO = """\
name: round {seed}
model:
  transformer: {{layers: {layers}, hidden: 256, heads: 8, ffn: 1024, vocab: {vocab}, tied_embeddings: false}}
training: {{global_batch: {batch}, sequence: 64, precision: fp32, optimizer: adamw, framework: execute}}
cluster: {{preset: local-cpu, nodes: 1, devices_per_node: 8}}
plan: {{data: 2, tensor: 2, pipeline: 2, microbatch: 2, schedule: 1f1b}}
"""
_COMMANDS = (
    "validate round.yaml",
    "simulate round.yaml --timeline timeline.png --trace trace.json --memory memory.svg",
    "simulate round.yaml --timeline page.html --engine longest_path",
    "search round.yaml --out plan.json",
    "search round.yaml --algorithm mcmc --budget 20 --seed {seed} --resume {seed}.jsonl",
    "simulate round.yaml --plan plan.json --trace trace.pftrace",
    "explain round.yaml --seconds 1",
    "export round.yaml --to slurm --out run.sbatch",
    "simulate megatron/gpt-18b-256-a100",
)
_WRONG = "simulate wrong.yaml"


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds after a round: bytes of resident memory, and how many of the rest."""

    memory: int
    objects: int
    files: int
    threads: int


def held() -> Held:
    """Return what this process holds now but in caches of a fixed size (Linux)."""
    for each in gc.get_objects():
        # isinstance asks weak proxies, whose objects may be gone
        if type(each) is _lru_cache_wrapper and each.cache_info().maxsize is not None:
            each.cache_clear()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects()), files, threading.active_count())


def rounds() -> Iterator[Held]:
    """Yield what is held after every round of all commands; ``ValueError`` where one does not end as it should."""
    for seed in count():
        with tempfile.TemporaryDirectory(prefix="meshwise-") as folder, chdir(folder):
            draw = Random(seed)
            sizes = {
                "layers": 2 * draw.randrange(1, 5),
                "vocab": 64 * draw.randrange(4, 64),
                "batch": 16 * draw.randrange(1, 5),
            }
            Path("round.yaml").write_text(_SCENARIO.format(seed=seed, **sizes))
            Path("wrong.yaml").write_text(_SCENARIO.format(seed=seed, **sizes).replace("tensor: 2", "tensor: 3"))
            for command in _COMMANDS:
                _run(command.format(seed=seed), 0)
            _run(_WRONG, BAD_INPUT)
        yield held()


def _run(command: str, wanted: int) -> None:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = run(command.split())
    if code != wanted:
        raise ValueError(f"meshwise {command}: exit code {wanted}, met {code}: {said.getvalue()[-500:]}")


def growth(seen: Sequence[Held]) -> dict[str, float]:
    """Return by how much of it the median of the last third of some rounds is above that of the first.

    >>> growth([Held(100, 10, 3, 1)] * 3 + [Held(125, 10, 3, 1)] * 3)["memory"]
    0.25
    """
    third = max(len(seen) // 3, 1)
    rows = [asdict(each) for each in seen]
    first, last = (
        {name: median(row[name] for row in part) for name in rows[0]} for part in (rows[:third], rows[-third:])
    )
    return {name: last[name] / first[name] - 1 for name in first}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds for so long, print a line for each, and return 0 where nothing grew, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no round begins after so long")
    parser.add_argument("--out", type=Path, help="write what was held after every round (.json)")
    given = parser.parse_args(arguments)
    start, seen = time.monotonic(), list[Held]()
    for number, each in enumerate(rounds(), 1):
        seen.append(each)
        told = f"{each.memory / 2**20:.1f} MiB, {each.objects} objects, {each.files} files, {each.threads} threads"
        print(f"round {number}, {time.monotonic() - start:.0f} s: {told}", flush=True)
        if time.monotonic() - start > given.seconds:
            break
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(each) for each in seen], indent=1) + "\n")
    if len(seen) <= WARM_UP + 3:
        print(
            f"{WARM_UP + 3} rounds are too few to tell growth, met {len(seen)}; give it more --seconds", file=sys.stderr
        )
        return 1
    grown = growth(seen[WARM_UP:])
    print(", ".join(f"{name} {share:+.2%}" for name, share in grown.items()) + f" after {len(seen)} rounds")
    return int(max(grown.values()) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
