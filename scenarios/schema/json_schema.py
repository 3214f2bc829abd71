"""JSON Schemas of input files, for completion and remarks in editors."""

import json
from typing import Any

from pydantic import TypeAdapter

from meshwise.scenarios.files.library import SCHEMA
from meshwise.scenarios.schema.cluster import WrittenCluster
from meshwise.scenarios.schema.graph import GraphTable
from meshwise.scenarios.schema.plan import AnyPlan
from meshwise.scenarios.schema.scenario import ScenarioTable

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[str, Any] = {"scenario": ScenarioTable, "plan": AnyPlan, "cluster": WrittenCluster, "graph": GraphTable}
KINDS = tuple(_TYPES)


def build_json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file, one of `KINDS`."""
    schema = TypeAdapter(_TYPES[kind]).json_schema()
    head = {"$schema": DIALECT, "title": f"meshwise {kind}"}
    return head | {key: value for key, value in schema.items() if key != "title"}


def format_schema() -> str:
    """Return the schema of scenarios as the text of its file."""
    return json.dumps(build_json_schema("scenario"), indent=1) + "\n"


def format_reference(depth: int) -> str:
    """Return the comment that names the schema in a scenario file ``depth`` folders below it.

    The YAML language server of editors reads it (github.com/redhat-developer/yaml-language-server, "Using inlined
    schema").

    >>> format_reference(1)
    '# yaml-language-server: $schema=../scenario.schema.json'
    """
    return f"# yaml-language-server: $schema={'../' * depth}{SCHEMA}"
