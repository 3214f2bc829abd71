"""The fields of scenario and plan files are those of layouts and plans, with their defaults."""

from dataclasses import fields

from meshwise.scenarios.schema.plan import PlanDocument, PlanTable
from meshwise.strategies.plan.layout import STEP_DECISIONS, Layout
from meshwise.strategies.plan.plan import Plan


def test_the_schema_has_every_field_of_layout_and_plan() -> None:
    assert set(PlanTable.model_fields) == {field.name for field in fields(Layout)}
    keys = {item.name: item.key for item in STEP_DECISIONS}
    assert set(PlanDocument.model_fields) - {"version"} == {keys.get(field.name, field.name) for field in fields(Plan)}


def test_the_defaults_of_the_schema_are_those_of_layout() -> None:
    defaults = {name: info.default for name, info in PlanTable.model_fields.items()}
    assert {field.name: field.default for field in fields(Layout)} == {f.name: defaults[f.name] for f in fields(Layout)}
