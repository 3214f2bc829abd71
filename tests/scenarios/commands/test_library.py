"""``meshwise init``, ``list``, ``validate`` and ``schema``: files and names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.scenarios.commands.main import run

from ..test_command_line import lines


def test_init_writes_a_scenario_once(folder: Path, capsys) -> None:
    assert run(["init", "new"]) == 0
    assert run(["validate", "new/scenario.yaml"]) == 0
    (folder / "new" / "scenario.yaml").write_text("mine")
    assert run(["init", "new"]) == 2
    assert (folder / "new" / "scenario.yaml").read_text() == "mine"


@pytest.mark.parametrize("what", ["models", "accelerators", "clusters", "schedules", "algorithms", "scenarios"])
def test_list_names_everything_with_a_description(what: str, capsys) -> None:
    assert run(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert all(row["name"] and row["description"] for row in rows)
    assert run(["list", what]) == 0
    assert len(lines(capsys.readouterr().out)) == len(rows)


def test_validate_json_lists_the_errors(folder: Path, capsys) -> None:
    (folder / "c.yaml").write_text("name: x\naccelerator: {preset: a100}\n")
    assert run(["validate", "c.yaml", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "cluster"
    assert document["valid"] is False
    assert {"file", "line", "column", "field", "message"} == set(document["errors"][0])
    assert "nearest: a100-40gb, a100-80gb" in next(
        e["message"] for e in document["errors"] if e["field"] == "accelerator.preset"
    )


@pytest.mark.parametrize("kind", ["scenario", "plan", "cluster"])
def test_schemas_are_json_schema(kind: str, capsys) -> None:
    assert run(["schema", kind]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["$schema"].startswith("https://json-schema.org/")
    jsonschema = pytest.importorskip("jsonschema", reason="only where it is installed")
    jsonschema.Draft202012Validator.check_schema(document)


HEAVY = ("torch", "pandas", "matplotlib", "scipy")


def test_validate_imports_what_it_reads_and_no_algorithm() -> None:
    # 0.5 s of CPU where all of this is true; every one of these costs tenths of it
    code = (
        "import sys\nfrom meshwise.scenarios.commands.main import run\n"
        "code = run(['validate', 'gpt3-175b-1024-a100'])\n"
        f"heavy = {(*HEAVY, 'networkx', 'numba', 'simpy', 'highspy', 'rich', 'concurrent.futures')!r}\n"
        "own = ('strategies.lowering', 'strategies.cost_model', 'simulator.engine', 'simulator.interconnect')\n"
        "own = [f'meshwise.{name}' for name in own]\n"
        "print([name for name in (*heavy, *own) if name in sys.modules], code)\n"
        "print(sorted(name for name in sys.modules if name.startswith('meshwise.strategies.search.')))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    loaded, searches = lines(done.stdout)[-2:]
    assert loaded == "[] 0", done.stderr
    assert searches == str(
        [
            f"meshwise.strategies.search.{name}"
            for name in ("acceptance", "algorithms", "choices", "objective", "space", "speed_division")
        ]
    )
