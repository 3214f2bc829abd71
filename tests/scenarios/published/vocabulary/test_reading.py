"""Texts are read by the table of words: exact first, then the longest whole word, never by their look."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.scenarios.published.row import FLAG_WORDS, WORD_FIELDS
from meshwise.scenarios.published.vocabulary.reading import (
    describe_vocabularies,
    find_words,
    list_unused,
    load_vocabularies,
    read_words,
)

PAGE = Path(__file__).parents[4] / "docs/rows.md"
TABLE = json.loads(files("meshwise.scenarios.published.vocabulary").joinpath("aliases.json").read_text("utf-8"))
ALIASES = [
    (field, word, alias)
    for field, entry in TABLE.items()
    for word, aliases in entry["words"].items()
    for alias in (word, *aliases)
]


@given(st.sampled_from(ALIASES), st.sampled_from([str.upper, str.title, lambda text: text.replace(" ", "-")]))
def test_every_alias_reads_as_its_word_however_it_is_spelt(entry: tuple[str, str, str], spell: object) -> None:
    field, word, alias = entry
    assert read_words(field, spell(alias)).word == word  # type: ignore[operator]
    assert read_words(field, alias.replace(" ", "_")).misread == ""


def test_no_alias_stands_for_two_words() -> None:
    for field, entry in TABLE.items():
        pairs = {(alias.replace(" ", ""), word) for word, group in entry["words"].items() for alias in (word, *group)}
        assert len(pairs) == len({alias for alias, _ in pairs}), field


def test_every_field_of_words_has_a_vocabulary() -> None:
    assert {*WORD_FIELDS, FLAG_WORDS} <= set(load_vocabularies())


@pytest.mark.parametrize(
    ("field", "text", "word"),
    [
        ("schedule", "1F1B-I", "interleaved"),
        ("schedule", "1F1B interleaved (vpp 4)", "interleaved"),
        ("schedule", "1f1bx", ""),  # a whole word or nothing
        ("attention_kernel", "fused", "unfused"),  # scores in memory, one kernel for the softmax
        ("attention_kernel", "torch", "unfused"),
        ("attention_kernel", "torch SDPA", "flash_2"),
        ("attention_kernel", "cuDNN fused attention", "flash_3"),
        ("attention_kernel", "FlashAttention-2", "flash_2"),
        ("attention_kernel", "unfused, fused softmax kernel (Megatron)", "unfused"),
        ("precision", "FP8 + BF16", "fp8"),  # the first of the table, whatever is longer
        ("precision", "bf16 compute, fp32 weights", "bf16"),
        ("yes_or_no", "off (public launcher keeps overlap off)", "no"),
        ("yes_or_no", "async TP", "yes"),
        ("recompute", "full AC, not per-op", "full"),
    ],
)
def test_readings(field: str, text: str, word: str) -> None:
    assert read_words(field, text).word == word


def test_a_negated_word_does_not_count() -> None:
    assert "every_second_product" not in find_words("recompute", "selective, not per-op")
    assert read_words("attention_kernel", "no flash").word == "unfused"  # an alias of its own


@pytest.mark.parametrize(
    ("text", "misread", "nearest"),
    [("zig-zag", "zig zag", ""), ("1F1B intrleaved", "intrleaved", "interleaved"), ("Gpip", "gpip", "gpipe")],
)
def test_what_is_not_understood_is_told_with_the_nearest_word(text: str, misread: str, nearest: str) -> None:
    reading = read_words("schedule", text)
    assert reading.misread == misread
    assert not nearest or reading.nearest == nearest


@given(st.sampled_from(sorted(TABLE)), st.text(max_size=60))
def test_any_text_is_read_and_no_word_appears_from_nowhere(field: str, text: str) -> None:
    reading = read_words(field, text)
    assert bool(reading.word) == bool(reading.alias)
    assert reading.word == "" or reading.word in TABLE[field]["words"]
    assert set(find_words(field, text)) <= set(TABLE[field]["words"])
    list_unused(field, text)


def test_a_word_that_a_longer_alias_overlaps_is_used() -> None:
    # "adamw 16 bit" and "16 bit states" are aliases of one word, and "adamw" of another
    reading = read_words("optimizer", "AdamW 16-bit states")
    assert (reading.word, reading.unused, reading.misread) == ("adamw_16bit", (), "")


def test_the_page_has_the_tables() -> None:
    assert describe_vocabularies().strip() in PAGE.read_text("utf-8")
