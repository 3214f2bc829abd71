"""The schema for editors: in step with the reader, named by every scenario, and of one mind with it on structure."""

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from meshwise.scenarios.commands.main import run
from meshwise.scenarios.files import library
from meshwise.scenarios.files.checking import check_table
from meshwise.scenarios.files.errors import ScenarioError
from meshwise.scenarios.files.reader import parse_document
from meshwise.scenarios.schema.cluster import ClusterTable
from meshwise.scenarios.schema.graph import GraphTable
from meshwise.scenarios.schema.json_schema import KINDS, build_json_schema, format_reference, format_schema
from meshwise.scenarios.schema.plan import PlanTable
from meshwise.scenarios.schema.scenario import ScenarioTable

from ...endurance.fuzzing import corpus
from ...endurance.fuzzing.mutation import Mutator

STRUCTURE = (
    "there is no such field",
    "this field is required",
    "holds a whole number",
    "holds a number",
    "holds true or false",
    "holds text",
    "holds a list",
    "holds a mapping",
)
"""How the messages begin that are of the form of a file, and not of what its values mean."""


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(build_json_schema(kind))


def test_the_file_is_the_schema_of_this_version() -> None:
    met = (library.find_root() / library.SCHEMA).read_text("utf-8")
    assert met == format_schema(), (
        "python -c 'from meshwise.scenarios.schema.json_schema import *; print(format_schema(), end=\"\")' writes it"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_schema_is_one(kind: str) -> None:
    Draft202012Validator.check_schema(build_json_schema(kind))


@pytest.mark.parametrize("name", library.list_names())
def test_every_scenario_names_the_schema_and_keeps_it(name: str) -> None:
    path = library.find_root() / f"{name}.yaml"
    first = path.read_text("utf-8").splitlines()[0]
    assert first == format_reference(name.count("/"))
    assert (path.parent / first.partition("$schema=")[2]).resolve() == (library.find_root() / library.SCHEMA).resolve()
    assert [error.message for error in validator("scenario").iter_errors(parse_document(path.read_bytes()).data)] == []


def test_a_new_scenario_finds_its_schema_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", str(tmp_path)]) == 0
    first = (tmp_path / "scenario.yaml").read_text("utf-8").splitlines()[0]
    assert (tmp_path / first.partition("$schema=")[2]).read_text("utf-8") == format_schema()


def test_a_schema_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / library.SCHEMA).write_text("mine")
    assert run(["init", str(tmp_path)]) == 0
    assert (tmp_path / library.SCHEMA).read_text() == "mine"


CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "scenario": (ScenarioTable, corpus.scenarios()),
    "plan": (PlanTable, corpus.plans()[:20]),
    "cluster": (ClusterTable, corpus.clusters()[:-1]),
    "graph": (GraphTable, corpus.graphs()),
}


@pytest.mark.parametrize("kind", CASES)
def test_schema_and_reader_agree_on_structure(kind: str) -> None:
    """What the reader takes the schema takes, and what the schema takes has the right form to the reader."""
    table, texts = CASES[kind]
    mutator, random = Mutator(texts, corpus.trees(texts)), Random(kind)
    seen = [0, 0]
    for _ in range(150):
        content = mutator.input(random)
        try:
            document = parse_document(content)
        except ScenarioError:
            continue
        if not isinstance(document.data, dict) or (kind == "plan" and "version" in document.data):
            continue
        _, faults = check_table(table, document)
        fitting = validator(kind).is_valid(document.data)
        seen[fitting] += 1
        if fitting:
            assert not [fault for fault in faults if fault.message.startswith(STRUCTURE)], content
        else:
            errors = [f"{error.json_path}: {error.message}" for error in validator(kind).iter_errors(document.data)]
            assert faults, (content, errors[:3])
    assert min(seen) >= 5, seen
