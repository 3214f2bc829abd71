"""The same scenario and seed give the same bytes, whatever the hash seed and however many workers there are.

Files say no time of day and not how long anything took, but for those whose subject it is: what searches took is in
journals, comparisons and pages of searches. ``--hypothesis-profile long`` takes more hash seeds and workers.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ..examples import LONG

CLOCKS = {"wall_time", "elapsed"}


HASH_SEEDS = ("0", "1", "2", "3", "random") if LONG else ("0", "random")
WORKERS = ("1", "2", "4") if LONG else ("1", "2")


def written(folder: Path, hash_seed: str, *arguments: str) -> dict[str, Any]:
    """Run a command in a new folder and return what it wrote, stdout too; of what has clocks, without them."""
    folder.mkdir()
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "meshwise", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True, timeout=300)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {"stdout": without_clocks(json.loads(done.stdout))} | files


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if key not in CLOCKS}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def page(content: bytes) -> tuple[bytes, Any, bytes]:
    """Return a page around its document, and the document without clocks; a history is evaluations, elapsed, best."""
    before, after = content.split(b'<script id="document" type="application/json">')
    text, rest = after.split(b"</script>", 1)
    document = without_clocks(json.loads(text))
    for search in document["searches"]:
        search["history"] = [[count, best] for count, _, best in search["history"]]
    return before, document, rest


def test_a_simulation_writes_the_same_bytes(tmp_path: Path) -> None:
    files = ["--trace", "t.json", "--timeline", "page.html", "--memory", "m.svg", "--save", "s.json", "--kineto", "k"]
    found = [written(tmp_path / seed, seed, "simulate", "local/dp2-tp2-pp2", "--json", *files) for seed in HASH_SEEDS]
    assert {"t.json", "page.html", "m.svg", "s.json", "k/rank.0.json"} <= found[0].keys()
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("name", ["machines/llama2-13b-32-a100-straggler", "machines/gpt-70b-16-v100-offload"])
def test_other_machines_are_simulated_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    found = [written(tmp_path / seed, seed, "simulate", name, "--json", "--trace", "t.pftrace") for seed in HASH_SEEDS]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    "algorithm", [["--algorithm", "mcmc", "--budget", "6", "--seed", "3"], []], ids=["mcmc", "own"]
)
def test_a_search_writes_the_same_bytes_with_any_number_of_workers(algorithm: list[str], tmp_path: Path) -> None:
    found = []
    pairs = tuple(product(HASH_SEEDS, WORKERS))
    for seed, count in pairs if LONG else (pairs[0], pairs[-1]):
        options = [*algorithm, "--out", "plan.json", "--resume", "j.jsonl", "--report", "page.html"]
        folder = tmp_path / f"{seed}-{count}"
        each = written(folder, seed, "search", "local/dp2-tp2-pp2", "--json", "--workers", count, *options)
        each["j.jsonl"] = [without_clocks(json.loads(line)) for line in each["j.jsonl"].splitlines()]
        each["page.html"] = page(each["page.html"])
        found.append(each)
    assert json.loads(found[0]["plan.json"]) == found[0]["stdout"]["best"]["plan"]
    assert all(each == found[0] for each in found)


def test_a_comparison_writes_the_same_bytes(tmp_path: Path) -> None:
    names = "auto,mcmc,mcts,random"
    found = []
    for seed in HASH_SEEDS:
        options = ["--algorithms", names, "--budget", "4", "--seed", "3", "--out", ".", "--report", "page.html"]
        each = written(tmp_path / seed, seed, "compare", "local/dp2", "--json", *options)
        rows = [line.split(",") for line in each["compare.csv"].decode().splitlines()]
        clock = rows[0].index("wall_time")
        each["compare.csv"] = [row[:clock] + row[clock + 1 :] for row in rows]
        each["compare.json"] = without_clocks(json.loads(each["compare.json"]))
        each["page.html"] = page(each["page.html"])
        del each["compare.png"]  # draws quality against time
        found.append(each)
    assert all(each == found[0] for each in found)
