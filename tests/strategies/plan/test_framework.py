"""The table of frameworks: every figure has a source, every alias one entry, and what is like another inherits."""

import json
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.simulator.machine.composition import COMPOSITIONS
from meshwise.simulator.models.attention import ATTENTION_KERNELS
from meshwise.strategies.plan.framework import (
    ENTRIES,
    FRAMEWORKS,
    TABLE,
    Defaults,
    Entry,
    describe_frameworks,
    find_framework,
    find_nearest_alias,
    list_aliases,
    split_words,
)
from meshwise.strategies.plan.problem import GRADIENT_PRECISIONS, KERNELS, LOSSES, Training

ROOT = Path(__file__).parents[3]
WRITTEN = json.loads(files("meshwise.strategies.plan").joinpath(TABLE).read_text("utf-8"))
"""The table as its file has it."""


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
def test_every_figure_has_a_source_and_a_legal_value(entry: Entry) -> None:
    assert entry.description and entry.read
    assert all(len(source) > 3 for source in entry.sources.values())
    values = {field.name: getattr(entry.conventions, field.name) for field in fields(entry.conventions)}
    # what differs from a framework that does nothing by itself is read from somewhere
    unread = {name for name, value in values.items() if value not in (False, 0, (), entry.name)} - set(entry.sources)
    assert unread <= {"loss_copies", "routed_copies"}
    defaults = entry.defaults
    assert defaults.zero in range(4) and 0 <= defaults.launch < 1e-3
    assert defaults.attention in ATTENTION_KERNELS
    assert set(defaults.composed) <= set(COMPOSITIONS)
    assert defaults.gradient_precision in (None, *GRADIENT_PRECISIONS)
    assert (defaults.selective in ("core", "products"), defaults.microbatches in ("one", "stages")) == (True, True)
    assert defaults.microbatch_of in ("rank", "chip")


def test_an_entry_has_what_the_one_that_it_is_like_has_and_it_does_not_say() -> None:
    for name, written in WRITTEN.items():
        base = ENTRIES[written["like"]] if "like" in written else None
        for part, of in (("conventions", Entry.conventions), ("defaults", Entry.defaults)):
            own, value = written.get(part, {}), of.__get__(ENTRIES[name])
            for field in fields(value):
                if field.name in own:
                    expected = own[field.name][0]
                    expected = tuple(expected) if isinstance(expected, list) else expected
                    assert getattr(value, field.name) == expected
                elif base is not None and field.name != "name":
                    assert getattr(value, field.name) == getattr(of.__get__(base), field.name)


def test_aliases_belong_to_one_entry() -> None:
    pairs = [(split_words(alias), entry.name) for entry in ENTRIES.values() for alias in (*entry.aliases, entry.name)]
    for alias, name in pairs:
        assert {other for words, other in pairs if words == alias} == {name}, alias
    assert find_framework("") is None


@given(st.sampled_from(sorted(list_aliases())), st.lists(st.sampled_from(["of", "ours", "7b", "(x)"]), max_size=3))
def test_an_alias_is_found_among_other_words_in_any_spelling(alias: tuple[str, ...], others: list[str]) -> None:
    name = list_aliases()[alias]
    for sign in (" ", "-", " / "):
        entry = find_framework(" ".join([*others, sign.join(alias).upper(), *others]))
        assert entry is not None and entry.name == name


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Megatron-LM", "megatron"),
        ("Megatron-LM (April 2021)", "megatron_2021"),
        ("Megatron-DeepSpeed", "megatron_deepspeed"),
        ("Primus-torchtitan", "torchtitan"),
        ("llm-foundry/Composer + torch FSDP", "llm_foundry"),
        ("Megatron + torch FSDP", "torch"),
        ("megatronic", None),
        ("our own", None),
    ],
)
def test_the_longest_alias_of_whole_words_wins(words: str, name: str | None) -> None:
    entry = find_framework(words)
    assert (entry and entry.name) == name


def test_a_misspelt_framework_has_a_nearest_alias() -> None:
    assert find_nearest_alias("torchtitn") == "torchtitan"
    assert find_nearest_alias("") in {" ".join(alias) for alias in list_aliases()}


def test_the_two_ends() -> None:
    eager, compiled = ENTRIES["eager"].defaults, ENTRIES["compiled"].defaults
    assert set(eager.composed) == set(COMPOSITIONS) and compiled.composed == ()
    assert eager.launch > compiled.launch == 0
    assert FRAMEWORKS["compiled"].loss_copies is None and not FRAMEWORKS["compiled"].keeps_gates


def test_all_are_described_by_name() -> None:
    text = describe_frameworks()
    assert all(f"{name}: {entry.description}" in text for name, entry in ENTRIES.items())


@pytest.mark.parametrize("framework", ENTRIES)
def test_a_step_is_run_as_a_framework_runs_it_unless_words_say_otherwise(framework: str) -> None:
    plain, defaults = Training(8, 8), ENTRIES[framework].defaults
    run = plain.run_by(framework)
    assert (run.framework, run.composed, run.gathers_logits) == (
        framework,
        defaults.composed,
        defaults.gathers_logits,
    )
    for kernels, composed in KERNELS.items():
        for loss, gathers in LOSSES.items():
            stated = plain.run_by(framework, kernels, loss)
            assert (stated.composed, stated.gathers_logits) == (composed, gathers)


def test_defaults_without_a_word_do_nothing() -> None:
    assert Defaults() == Defaults(zero=0, launch=0.0, composed=(), gathers_logits=False)


def test_the_guide_lists_every_framework_with_its_aliases() -> None:
    page = (ROOT / "docs/guides/frameworks.md").read_text("utf-8")
    for name, entry in ENTRIES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert entry.description in row and row.endswith(f"| {', '.join(entry.aliases)} |")
        assert f"ZeRO {entry.defaults.zero}," in row
