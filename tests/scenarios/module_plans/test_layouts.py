"""Layouts that are tried: all that can run, each once, and nothing that a run refuses."""

from meshwise.executor.modules.layout import CUTS, ModuleLayout
from meshwise.scenarios.module_plans.layouts import Choices, find_choices, list_layouts
from meshwise.strategies.plan.recomputation import Recompute
from tests.scenarios.module_plans.modules import build_figures


def test_every_layout_is_tried_once() -> None:
    layouts = list(list_layouts(8, Choices((1, 2, 4))))
    assert len(layouts) == len(set(layouts))
    # one rank has 4 numbers of microbatches; two have 3 with each ZeRO stage; four have 2, and two numbers of shards
    assert len(layouts) == 2 * (4 + 4 * 3 + 2 + 3 * 2 * 2)
    assert layouts[0] == ModuleLayout()
    assert ModuleLayout(4, 3, 2, num_microbatches=2, recompute=Recompute.FULL) in layouts


def test_what_a_run_refuses_is_not_tried() -> None:
    def list_words(**changes: str) -> list[str]:
        choices = find_choices((1, 2), build_figures(**changes), 0)
        return [layout.describe() for layout in list_layouts(4, choices)]

    assert list_words(whole_batch="it mixes samples") == [
        "data 1, 1 microbatch",
        "data 1, 1 microbatch, full recompute",
    ]
    assert all("1 microbatch" in words for words in list_words(whole_microbatch="batch statistics"))
    assert not any("ZeRO" in words for words in list_words(whole_states="several dtypes"))
    assert any("ZeRO" in words for words in list_words())
    assert not any("recompute" in words for words in list_words(blocks=()))  # type: ignore[arg-type]


def test_ranks_divide_the_batch() -> None:
    assert {layout.data for layout in list_layouts(6, Choices((1, 2, 3, 4)))} == {1, 2, 3}


def test_stages_begin_at_blocks() -> None:
    figures = build_figures()
    choices = find_choices((2,), figures, 2, is_captured=True)
    pipelines = [layout for layout in list_layouts(8, choices) if layout.pipeline > 1]
    # 2, 4 or 8 microbatches, with and without recomputation
    assert len(pipelines) == 6 and {layout.cuts for layout in pipelines} == {("layers.1",)}
    for refusal in ({"buffers": 8}, {"whole_batch": "it mixes samples"}):
        refused = find_choices((2,), build_figures(**refusal), 2, is_captured=True)
        assert all(layout.pipeline == 1 for layout in list_layouts(8, refused))
    assert not find_choices((2,), figures, 2).blocks


def test_samples_of_cut_experts_divide() -> None:
    axes = ((CUTS["expert"], 2),), ((CUTS["context"], 2),), ((CUTS["tensor"], 4),)
    layouts = list(list_layouts(4, Choices((4,), recomputes=False, cut_axes=axes, divides_cut_samples=True)))
    cuts = {(layout.data, layout.num_microbatches, layout.cut_axes) for layout in layouts if layout.cut_axes}
    # two data ranks have two samples each, which two ranks of experts divide in one microbatch alone
    assert cuts == {(2, 1, axes[0]), (2, 1, axes[1]), (2, 2, axes[1]), (1, 1, axes[2]), (1, 2, axes[2])}
