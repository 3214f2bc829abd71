"""A row's words for recomputation, as a choice of the simulator."""

import json
import re
from math import ceil

from meshwise.scenarios.published.row import Row
from meshwise.scenarios.published.vocabulary.reading import find_words
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute

_BY_DEFAULT = re.compile(r"\brecompute\b[^;]*\bdefaults?\b")
"""A clause of ``derived_fields`` that calls recompute some program's default: it says nothing about the run."""

_COUNTS = re.compile(r"\b(recompute|full|select\w*)=(\[[\d, ]+\]|true|false)")
"""How MindFormers writes what each stage recomputes: a number of layers a stage, or all or none."""


def read_recompute(row: Row, layers_a_stage: int) -> Recomputation | None:
    """Return the recompute choice of a row; None where it states none, or none that is understood."""
    words = row.text("recompute") or row.words("recompute").lower()
    if _BY_DEFAULT.search(row.text("derived_fields")):
        row.assume(f"recompute left out, for {words[:40]!r} is a default and not what the run states")
        return None
    counts = {("full" if name == "recompute" else name[:6]): value for name, value in _COUNTS.findall(words)}
    if counts.get("full") == "true":
        return Recompute.FULL
    for name, layer in (("full", Recompute.FULL), ("select", Recompute.SELECTIVE)):
        if counts.get(name, "").startswith("["):
            return _average_lists(row, layer, counts[name])
    if counts.get("full") == "false":
        return Recompute.SELECTIVE if counts.get("select") == "true" else Recompute.NONE
    word = row.read_word("recompute")
    if word in ("", "none"):
        return Recompute.NONE if word else None
    return _limit_layers(row, _choose_layer(row, word, words), f"{words} {_read_detail(row)}", layers_a_stage)


def keeps_every_second_product(row: Row) -> bool:
    """Return whether a row keeps attention and every second product of a layer, and computes all else again.

    That is torchtitan's selective checkpointing by operator (``activation_checkpoint.py``, ``_get_custom_policy``).
    """
    word = row.read_word("recompute")
    if word != "selective":
        return word == "every_second_product"
    texts = {"recompute": row.text("recompute"), "recompute_detail": _read_detail(row)}
    return any("every_second_product" in find_words(field, text) for field, text in texts.items())


def keeps_products(row: Row) -> bool:
    """Return whether a row keeps the results of all products with weights, and computes all else of a layer again.

    That is the policy ``minimal`` of MaxText (``layers/decoders.py``, get_remat_policy), which is
    ``checkpoint_dots_with_no_batch_dims`` of jax.
    """
    texts = {"recompute": row.text("recompute"), "recompute_detail": _read_detail(row)}
    return row.read_word("recompute") not in ("none", "full") and any(
        "all_but_products" in find_words(field, text) for field, text in texts.items()
    )


def _read_detail(row: Row) -> str:
    value = row.fields.get("recompute_detail")
    return json.dumps(value)[:1000].lower() if isinstance(value, dict | list) else row.text("recompute_detail")


def _choose_layer(row: Row, word: str, words: str) -> Recompute:
    """Return what is recomputed of a layer, by a known word."""
    if word == "host":
        row.assume(f"recompute full: {words[:60]!r} keeps a part on hosts, which is not simulated")
        return Recompute.FULL
    if word == "full":
        return Recompute.FULL
    if word != "selective" or "some_operators" in find_words("recompute", words):
        row.assume(f"recompute selective, of the attention core: the nearest to {words[:60]!r}")
    return Recompute.SELECTIVE


def _limit_layers(row: Row, layer: Recompute, words: str, layers: int) -> Recomputation:
    """Return a recompute choice limited to the number of layers per stage in the words; all layers without one."""
    percent_match = re.search(r"(\d+(?:\.\d+)?) ?%", words)
    fraction_match = re.search(r"(\d+) ?(?:of|out of|/) ?(\d+)", words)
    interval_match = re.search(r"every (?:(\d+)(?:nd|rd|th)? layer|(other|second) layer)|\bselective (\d+)\b", words)
    count_match = re.search(
        r"(?:num[-_ ]layers|recompute[-_ ]layers)\W{1,3}(\d+)|(?:block\W{1,3})?\b(\d+)(?: layers|$)", words.strip()
    )
    if percent_match and 0 < float(percent_match[1]) < 100:
        num_recomputed = max(1, ceil(layers * float(percent_match[1]) / 100))
    elif fraction_match and 0 < int(fraction_match[1]) < int(fraction_match[2]):
        num_recomputed = max(1, ceil(layers * int(fraction_match[1][:9]) / int(fraction_match[2][:9])))
    elif interval_match:
        num_recomputed = max(1, ceil(layers / max(1, int((interval_match[1] or interval_match[3] or "2")[:9]))))
    elif count_match and "block" in words and 0 < int(count_match[1] or count_match[2]) < layers:
        num_recomputed = int(count_match[1] or count_match[2])
    else:
        return layer
    if layer is Recompute.NONE or num_recomputed >= layers:
        return layer
    row.assume(f"recompute {layer} of the first {num_recomputed} layers of every stage")
    return FirstLayers(layer, num_recomputed)


def _average_lists(row: Row, layer: Recompute, numbers: str) -> Recomputation:
    counts = [min(int(number), 10_000) for number in re.findall(r"\d{1,9}", numbers)]
    mean = round(sum(counts) / len(counts)) if counts else 0
    row.assume(f"recompute {layer} of {mean} layers in every stage, the mean of {str(counts)[:60]}")
    return FirstLayers(layer, mean) if mean else Recompute.NONE
