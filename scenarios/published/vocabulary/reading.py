"""Words of a field: the known ones with their aliases from ``aliases.json``, and how a text is read by them.

A text is compared in lower case, with dashes and underscores as spaces, and spaces are optional: ``Flash-Attention 2``
is ``flashattention2``. It is read in this order, never by the look of a word:

1. the whole text is a known word or an alias;
2. the part before the first bracket, comma or semicolon is one, or has some as whole words: the longest counts;
3. the whole text has some as whole words: the longest counts.

In fields that choose the first of the table, such as precision, that one counts instead of the longest: ``bf16 with fp8
products`` is fp8. A word after "no", "not" or "without" does not count, unless that is an alias of its own.
What is left of the text is reported, and so is the nearest alias to a text without a known word.
"""

import json
import re
from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

NEAR = 0.8
"""Similarity from which an unused word is taken for a misspelt alias (``difflib.SequenceMatcher.ratio``)."""
MIN_NEAR_LENGTH = 5
"""Fewest letters of a word that is compared so: ``fp8`` and ``fp6`` are two words, not one misspelt."""
FILLERS = frozenset(
    {
        "a", "an", "the", "of", "and", "with", "or", "in", "on", "by", "to", "for", "from", "at", "is", "as", "it",
        "its", "not", "no", "stated", "each", "per", "only", "own", "our", "other", "exact", "about", "approx", "via",
        "use", "used", "uses", "using",
    }
)  # fmt: skip
"""Words without a meaning of their own."""
_NEGATION = re.compile(r"(?<![a-z0-9])(?:no|not|non|without|w/o)\s$")
_HEAD_END = re.compile(r"[(\[{,;]")


class Reading(NamedTuple):
    """What a text says.

    Parameters
    ----------
    word
        The known word; empty where the text has none.
    alias
        The part of the text that says so.
    unused
        Words of the text that no alias covers.
    misread
        The words that are not understood: the text without a known word, or unused words that look like an alias.
    nearest
        The alias nearest to ``misread``, or empty.
    """

    word: str = ""
    alias: str = ""
    unused: tuple[str, ...] = ()
    misread: str = ""
    nearest: str = ""


class Vocabulary(NamedTuple):
    """The words of one field.

    ``words`` has the known word of every alias, without spaces; ``ignored`` has aliases without a meaning.
    """

    words: Mapping[str, str]
    order: tuple[str, ...]
    ignored: frozenset[str]
    chooses_first: bool
    has_figures: bool
    pattern: re.Pattern[str]
    aliases: Mapping[str, tuple[str, ...]]


def normalise(text: str) -> str:
    """Return a text in lower case, with dashes and underscores as spaces and single spaces.

    >>> normalise("  Flash-Attention_2 ")
    'flash attention 2'
    """
    return " ".join(re.sub(r"[-_\u2010-\u2015]", " ", text.lower()).split())


def _join(text: str) -> str:
    return text.replace(" ", "")


@lru_cache(maxsize=1)
def load_vocabularies() -> Mapping[str, Vocabulary]:
    """Return the vocabulary of every field that has one."""
    table: dict[str, dict[str, Any]] = json.loads(files(__package__).joinpath("aliases.json").read_text("utf-8"))
    return {field: _build_vocabulary(entry) for field, entry in table.items()}


def _build_vocabulary(entry: Mapping[str, Any]) -> Vocabulary:
    aliases: dict[str, tuple[str, ...]] = {word: (word, *others) for word, others in entry["words"].items()}
    words = {_join(normalise(alias)): word for word, group in aliases.items() for alias in group}
    ignored = frozenset(_join(normalise(alias)) for alias in entry.get("ignored", ()))
    normalised = [normalise(alias) for group in (*aliases.values(), entry.get("ignored", ())) for alias in group]
    longest_first = sorted({*normalised}, key=lambda alias: (-len(alias), alias))
    # a lookahead finds aliases that overlap as well
    pattern = re.compile(f"(?=({'|'.join(map(_build_pattern, longest_first))}))")
    return Vocabulary(
        words,
        tuple(aliases),
        ignored,
        entry.get("chooses") == "first",
        bool(entry.get("figures")),
        pattern,
        aliases,
    )


def _build_pattern(alias: str) -> str:
    """Return a pattern of an alias as whole words: no letter or digit goes on at its ends."""
    start = "(?<![a-z0-9])" if alias[0].isalnum() else ""
    end = "(?![a-z0-9])" if alias[-1].isalnum() else ""
    return start + re.escape(alias).replace(r"\ ", " ?") + end


@lru_cache(maxsize=4096)
def read_words(field: str, text: str) -> Reading:
    """Return what a text says as the value of a field that has a vocabulary.

    >>> read_words("schedule", "1F1B-I").word, read_words("schedule", "none (FSDP)").word
    ('interleaved', 'none')
    >>> reading = read_words("schedule", "intrleaved")
    >>> reading.word, reading.misread, reading.nearest
    ('', 'intrleaved', 'interleaved')
    """
    vocabulary, words = load_vocabularies()[field], normalise(text)
    if not words:
        return Reading()
    if (word := vocabulary.words.get(_join(words))) is not None:
        return Reading(word, words)
    head = normalise(_HEAD_END.split(words)[0])
    if (word := vocabulary.words.get(_join(head))) is None:
        alias = _choose_alias(vocabulary, head) or _choose_alias(vocabulary, words)
    else:
        alias = head
    unused = list_unused(field, words)
    if not alias:
        return Reading("", "", unused, words, _find_nearest(vocabulary, words))
    misread, nearest = next(
        ((unused_word, near) for unused_word in unused if (near := _find_misspelt(vocabulary, unused_word))), ("", "")
    )
    return Reading(vocabulary.words[_join(alias)], alias, unused, misread, nearest)


def find_words(field: str, text: str) -> dict[str, str]:
    """Return every known word of a field in a text, with the alias that says so, in the order of the text.

    >>> find_words("offload", "params and optimizer states to CPU")
    {'parameters': 'params', 'optimizer': 'optimizer states'}
    """
    vocabulary = load_vocabularies()[field]
    found: dict[str, str] = {}
    for alias, _, _ in _list_matches(vocabulary, normalise(text)):
        if (word := vocabulary.words.get(_join(alias))) is not None:
            found.setdefault(word, alias)
    return found


def _list_matches(vocabulary: Vocabulary, words: str) -> list[tuple[str, int, int]]:
    """Return the aliases in a text with their places, none inside a longer one and none that is negated."""
    matches = [(match[1], match.start(1), match.end(1)) for match in vocabulary.pattern.finditer(words)]
    chosen: list[tuple[str, int, int]] = []
    for alias, start, end in sorted(matches, key=lambda match: (-len(match[0]), match[1])):
        if all(end <= other_start or other_end <= start for _, other_start, other_end in chosen):
            chosen.append((alias, start, end))
    return [match for match in sorted(chosen, key=lambda match: match[1]) if not _NEGATION.search(words[: match[1]])]


def _choose_alias(vocabulary: Vocabulary, words: str) -> str:
    aliases = [alias for alias, _, _ in _list_matches(vocabulary, words) if _join(alias) in vocabulary.words]
    if not aliases:
        return ""
    if vocabulary.chooses_first:
        return min(aliases, key=lambda alias: vocabulary.order.index(vocabulary.words[_join(alias)]))
    return max(aliases, key=len)


_TOKEN = re.compile(r"[a-z0-9][a-z0-9.+/&]*")


def list_unused(field: str, text: str, figures: tuple[re.Pattern[str], ...] = ()) -> tuple[str, ...]:
    """Return the words of a text that neither an alias of a field nor one of the ``figures`` covers.

    A word that is an alias counts as covered where a longer alias has taken the words around it.

    >>> list_unused("accelerator", "A100 SXM4 80GB 400W", (re.compile("[0-9]+gb"),))
    ('400w',)
    """
    vocabulary, words = load_vocabularies()[field], normalise(text)
    for figure in figures:
        words = figure.sub(" ; ", words)
    for _, start, end in _list_matches(vocabulary, words):
        words = words[:start] + " " * (end - start) + words[end:]
    tokens = (token.rstrip(".+/&") for token in _TOKEN.findall(words))
    return tuple(
        dict.fromkeys(
            token
            for token in tokens
            if token
            and token not in FILLERS
            and _join(token) not in vocabulary.words
            and not (vocabulary.has_figures and re.search(r"\d", token))
        )
    )


def _find_misspelt(vocabulary: Vocabulary, word: str) -> str:
    if len(word) < MIN_NEAR_LENGTH:
        return ""
    return next(iter(get_close_matches(word, vocabulary.words, n=1, cutoff=NEAR)), "")


def _find_nearest(vocabulary: Vocabulary, words: str) -> str:
    """Return the alias that is most similar to a text or to one of its words."""
    candidates = (words[:60], *_TOKEN.findall(words)[:8])
    scores = (
        (SequenceMatcher(None, alias, _join(candidate)).ratio(), alias)
        for candidate in candidates
        for alias in vocabulary.words
    )
    return max(scores, key=lambda score: score[0], default=(0.0, ""))[1]


def describe_vocabularies() -> str:
    """Return the tables of known words and aliases as Markdown, a table a field."""
    lines: list[str] = []
    for field, vocabulary in load_vocabularies().items():
        lines += [f"### `{field}`", "", "| word | aliases |", "|---|---|"]
        lines += [f"| {word} | {', '.join(group[1:]) or '-'} |" for word, group in vocabulary.aliases.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe_vocabularies())
