"""A row's words for schedule, recomputation, offloading and attention, as choices of the simulator."""

import json
import re
from math import ceil

from meshwise.scenarios.published.row import Row
from meshwise.strategies.plan.offloading import NO_OFFLOADING, Offloading
from meshwise.strategies.plan.parallelism import Attention
from meshwise.strategies.plan.recomputation import FirstLayers, Recomputation, Recompute

FOUR_BITS = r"fp4|nvfp|mxfp4|int4"
"""Words for numbers of 4 bits."""

_SCHEDULES = (
    (r"dual-?pipe-?v", "dualpipev", ""),
    (r"dual-?pipe|chimera", "dualpipev", "the nearest schedule that is simulated"),
    (r"zb-?v|v-?half|v-?min|v-?schedule|v-shape", "zbv", ""),
    (r"interleaved[- ]zero|interleaved[- ]zb|zb-?vpp", "interleaved_zero_bubble", ""),
    (r"zb-?2p|zb-?h2", "zb2p", ""),
    (r"zb|zero[- ]?bubble", "zb1p", ""),
    (r"breadth|bfs", "looped_bfs", ""),
    (r"interleav|virtual|vpp|looped|hanayo", "interleaved", ""),
    (r"2bw", "pipedream_2bw", ""),
    (r"1f1b|dapple|pipedream[- ]?flush|one[- ]forward", "1f1b", ""),
    (r"pipedream|async", "pipedream", ""),
    (r"gpipe|f-?then-?b|afab|fill[- ]?drain|all[- ]forward", "gpipe", ""),
    (r"naive|no pipelining|sequential", "naive", ""),
)
TWO_CHUNKS = ("zbv", "dualpipev")
LOOPED = ("interleaved", "looped_bfs", "interleaved_zero_bubble")


def read_schedule(row: Row, pipeline: int, chunks: int) -> tuple[str, int]:
    """Return the schedule of a row and the number of model chunks on a rank."""
    if pipeline == 1:
        return "1f1b", 1
    name = row.choose("schedule", _SCHEDULES, "1f1b")
    if name in TWO_CHUNKS:
        return name, 2
    if chunks > 1 and name == "1f1b":
        return "interleaved", chunks
    if chunks > 1 and name == "zb1p":
        row.assume("schedule interleaved_zero_bubble, for there are several chunks")
        return "interleaved_zero_bubble", chunks
    if name in LOOPED and chunks == 1:
        if "(interleaved)" in row.text("schedule") or row.states("vpp"):
            return "1f1b", 1
        row.assume("vpp 2 (not stated, of an interleaved schedule)")
        return name, 2
    return name, chunks if name in LOOPED else 1


_BY_DEFAULT = re.compile(r"\brecompute\b[^;]*\bdefaults?\b")
"""A clause of ``derived_fields`` that calls recompute some program's default: it says nothing about the run."""


def read_recompute(row: Row, layers_a_stage: int) -> Recomputation | None:
    """Return the recompute choice of a row; None where it states none."""
    words = row.text("recompute")
    if _BY_DEFAULT.search(row.text("derived_fields")):
        row.assume(f"recompute left out, for {words[:40]!r} is a default and not what the run states")
        return None
    if str(row.fields.get("recompute", "")).strip().lower() in ("none", "null") and row.fields["recompute"] is not None:
        words = "none"
    if not words:
        return None
    detail = _read_detail(row)
    full_list = re.search(r"recompute=\[([\d, ]+)\]", words) or re.search(r"full=\[([\d, ]+)\]", words)
    selective_list = re.search(r"select\w*=\[([\d, ]+)\]", words)
    if (match := full_list or selective_list) is not None:
        return _average_lists(row, Recompute.FULL if full_list else Recompute.SELECTIVE, match[1])
    if re.search(r"recompute=false", words):
        words = "selective" if re.search(r"select\w*=true", words) else "none"
    if (
        re.match(r"(none|no\b|not\b|off|false|disabled|0\b|without|w/o|never|everything_?save)", words)
        and "full" not in words
    ):
        return Recompute.NONE
    layer = _read_layer_choice(row, words)
    return _limit_layers(row, layer, f"{words} {detail}", layers_a_stage)


_EVERY_SECOND_PRODUCT = re.compile(r"(?<!not )(?<!no )per[- _]?op\b")
"""torchtitan's selective checkpointing by operator (``activation_checkpoint.py``, ``_get_custom_policy``)."""


def keeps_every_second_product(row: Row) -> bool:
    """Return whether a row keeps attention and every second product of a layer, and computes all else again."""
    words = row.text("recompute")
    is_selective = bool(re.match("select", words)) or bool(_EVERY_SECOND_PRODUCT.match(words))
    return is_selective and bool(_EVERY_SECOND_PRODUCT.search(f"{words} {_read_detail(row)}"))


def _read_detail(row: Row) -> str:
    value = row.fields.get("recompute_detail")
    return json.dumps(value)[:1000].lower() if isinstance(value, dict | list) else row.text("recompute_detail")


def _read_layer_choice(row: Row, words: str) -> Recompute:
    if re.search(r"qkv\w* (offload|on host)|offload", words):
        row.assume(f"recompute full: {words[:60]!r} keeps a part on hosts, which is not simulated")
        return Recompute.FULL
    if re.search(r"nothing_?save", words):
        return Recompute.FULL
    if re.search(r"minimal|save|dots|matmul outputs|select|core|attention|attn|partial|moe_act|mlp|norm|act\b", words):
        if not re.match(r"selective( \(attention core\))?$", words):
            row.assume(f"recompute selective, of the attention core: the nearest to {words[:60]!r}")
        return Recompute.SELECTIVE
    if not re.search(
        r"full|uniform|all|every|whole|block|yes|true|on\b|checkpoint|ckpt|remat|\bac\b|layer|enabled|1\b", words
    ):
        row.assume(f"recompute full: {words[:40]!r} not known")
    return Recompute.FULL


def _limit_layers(row: Row, layer: Recompute, words: str, layers: int) -> Recomputation:
    """Return a recompute choice limited to the number of layers per stage in the words; all layers without one."""
    percent_match = re.search(r"(\d+(?:\.\d+)?) ?%", words)
    fraction_match = re.search(r"(\d+) ?(?:of|out of|/) ?(\d+)", words)
    interval_match = re.search(r"every (?:(\d+)(?:nd|rd|th)? layer|(other|second) layer)|\bselective (\d+)\b", words)
    count_match = re.search(
        r"(?:num[-_ ]layers|recompute[-_ ]layers)\W{1,3}(\d+)|(?:block\W{1,3})?\b(\d+)(?: layers|$)", words.strip()
    )
    if percent_match and 0 < float(percent_match[1]) < 100:
        num_recomputed = ceil(layers * float(percent_match[1]) / 100)
    elif fraction_match and 0 < int(fraction_match[1]) < int(fraction_match[2]):
        num_recomputed = ceil(layers * int(fraction_match[1]) / int(fraction_match[2]))
    elif interval_match:
        num_recomputed = ceil(layers / max(1, int(interval_match[1] or interval_match[3] or 2)))
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


def read_offload(row: Row) -> Offloading:
    """Return which states a row offloads to host memory."""
    words = row.text("offload")
    if not words or re.match(r"(none|no|false|off|0)\b", words):
        return NO_OFFLOADING
    percent_match = re.search(r"(\d+(?:\.\d+)?) ?%", words)
    fractions = (min(max(float(percent_match[1]) / 100, 0.01), 1.0) if percent_match else 1.0,)
    parameters = fractions if re.search(r"param|weight|zero-?infinity", words) else ()
    activations = fractions if re.search(r"activation|\bact\b", words) and "qkv" not in words else ()
    optimizer = fractions if parameters or re.search(r"optim|state|cpu|adam|zero-?offload|true|yes", words) else ()
    if not (optimizer or parameters or activations):
        row.assume(f"offload nothing: {words[:60]!r} is not simulated")
        return NO_OFFLOADING
    return Offloading(optimizer, parameters, activations)


def read_attention(row: Row, context: int) -> Attention:
    """Return the attention algorithm of context parallel ranks."""
    if context == 1:
        return Attention.RING
    words = row.text("plan_note", "attention_kernel", "framework", "note", "cp_comm_type", "schedule")
    if re.search(r"ulysses|a2a|all-?to-?all", words):
        return Attention.ULYSSES
    if re.search(r"all-?_?gather", words):
        return Attention.ALL_GATHER
    if not re.search(r"ring|p2p", words):
        row.assume("context parallel attention by a ring (not stated)")
    return Attention.RING


def is_frozen(row: Row) -> bool:
    """Return whether most weights are frozen, as with LoRA."""
    if not re.search(r"\blora\b|\bqlora\b|\bpeft\b|adapter", row.text("model", "plan_note", "arch")):
        return False
    row.assume("weights are frozen, and adapters count for nothing (LoRA)")
    return True
