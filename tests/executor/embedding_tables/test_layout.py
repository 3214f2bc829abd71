"""What a plan says of tables, what it refuses, and what a run says of its prediction."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.executor.modules.layout import ModuleLayout, parse_layout
from meshwise.executor.user_training.job import TrainJob
from meshwise.scenarios.module_plans.planning import TABLES_LINE, plan_run
from meshwise.strategies.tables.embeddings import TableCut

RECOMMENDERS = Path(__file__).parent / "recommenders.py"


def test_words_of_tables_are_a_layout_and_its_document() -> None:
    layout = parse_layout("data=2,tables=rows", ModuleLayout())
    assert layout == ModuleLayout(2, tables=TableCut.ROWS)
    assert ModuleLayout.from_json(layout.to_json()) == layout
    assert layout.describe() == "data 2, 1 microbatch, tables by rows"
    earlier = {name: value for name, value in ModuleLayout(2).to_json().items() if name != "tables"}
    assert ModuleLayout.from_json(earlier) == ModuleLayout(2)
    assert not parse_layout("data=1,tables=table", ModuleLayout()).cuts_tables  # there is no other rank


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("data=2,tables=row", "tables are replicated, rows, table or columns, met 'row'; nearest: rows"),
        ("data=2,tables=host", "met 'host'; nearest: rows"),
        ("data=2,tables=rows,zero=2", r"tables\(rows\) are cut over .*, met zero=2; nearest: data=2"),
        ("tensor=2,tables=rows", "met tensor=2; nearest: data=2"),
        ("pipeline=2,num_microbatches=2,tables=table", "met pipeline=2"),
        ("data=2,tables=rows,offload=optimizer", "met offload=optimizer"),
    ],
)
def test_what_goes_with_no_cut_tables_is_refused(words: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_layout(words, ModuleLayout())


def test_a_run_says_that_cut_tables_are_not_predicted() -> None:
    layout = ModuleLayout(2, tables=TableCut.ROWS)
    planned = plan_run(TrainJob(str(RECOMMENDERS), layout, 3), layout=layout, processes=None, calibrates=True)
    assert planned.layout == layout and planned.prediction is None
    assert planned.list_assumptions() == [f"not predicted: {TABLES_LINE}"]
