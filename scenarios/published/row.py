"""One row of published measurements: its fields by type, the assumptions made to read it, and its measurements."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from meshwise.scenarios.files.errors import format_value
from meshwise.scenarios.intervals import NOT_UNDERSTOOD
from meshwise.scenarios.published.vocabulary.reading import Reading, find_words, list_unused, read_words
from meshwise.strategies.plan.framework import find_framework, find_nearest_alias

_Value = TypeVar("_Value")

MAX_TEXT = 2000
"""Number of characters of a text field that are read."""
MAX_COUNT = 10**9
"""Largest count of a field, unless the caller states another."""

_NOTHING = frozenset({"", "none", "null", "nan", "n/a", "na", "-", "?", "unknown", "not stated", "unspecified"})
_HEAD = re.compile(r"[^(\[{,;]*")

WORD_FIELDS = (
    "schedule", "recompute", "recompute_detail", "precision", "optimizer", "attention_kernel", "ffn_type", "offload",
    "zero_stage", "norm_kernel", "gradient_precision", "state_precision", "loss", "arch", "accelerator",
    "intra_node_link", "inter_node_link",
)  # fmt: skip
"""Fields with a vocabulary of their own in ``vocabulary/aliases.json``."""
FLAGS = ("sequence_parallel", "dp_overlap", "tp_overlap", "tied_embeddings", "compiled")
"""Fields that say yes or no."""
FLAG_WORDS = "yes_or_no"
"""The vocabulary of flags."""

GIGABYTES = re.compile(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d+)?) ?gi?b?(?![a-z0-9/])")
"""A size of device memory, in a normalised text."""
MEMORY_RATE = re.compile(r"(?<![a-z0-9.])(\d{1,4}(?:\.\d+)?) ?([tg])i?b/s(?: hbm\d?e?)?(?! (?:nv|xgmi|link))")
"""A bandwidth of device memory, in a normalised text."""
POWER = re.compile(r"(?<![a-z0-9.])(\d{2,4}) ?w(?:atts?)?(?![a-z0-9])")
"""A power limit of a device in W, in a normalised text."""
_LINK_RATE = re.compile(
    r"(?<![a-z0-9.])(?:\d+ ?(?:nics?|hcas?|ports?|rails?)? ?[x*] ?)?\d+(?:\.\d+)? ?(?:tb|gb|g)(?:it|its)?"
    r"(?:/s|ps|be|e)?(?: ?[x*] ?\d+)?(?![a-z0-9])"
)
_FIGURES: Mapping[str, tuple[re.Pattern[str], ...]] = {
    "accelerator": (GIGABYTES, MEMORY_RATE, POWER),
    "intra_node_link": (re.compile(r"(?<![a-z])(?:gen|pcie) ?[2-6](?:\.0)?(?: ?x ?\d+)?(?![a-z0-9])"),),
    "inter_node_link": (_LINK_RATE,),
}
"""Figures that are read in the texts of machines, in which words with figures have meanings of their own."""


FIELDS = (
    *WORD_FIELDS, *FLAGS,
    "row_id", "source_id", "model", "n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden", "vocab",
    "seq_len", "n_params", "moe_experts", "moe_topk", "moe_ffn_hidden", "moe_shared_ffn_hidden", "n_dense_layers",
    "framework", "software", "accel_mem_gb", "n_devices", "devices_per_node", "nic_gbps_per_device", "dp", "tp", "pp",
    "cp", "ep", "vpp", "fsdp_shards", "micro_batch", "grad_accum", "global_batch", "plan_note", "status", "step_time_s",
    "tokens_per_s_per_device", "samples_per_s_per_device", "peak_mem_gib", "peak_mem_kind", "peak_mem_reserved_gib",
    "mem_note", "peak_tflops_used", "derived_fields", "cp_comm_type", "tier",
)  # fmt: skip
"""Fields that are read; others, such as where a row was found, may stand beside them."""
NEAR_NAME = 0.87
"""Similarity from which an unknown field is a misspelt known one (``difflib.get_close_matches``)."""


@lru_cache(maxsize=1024)
def find_near_field(name: str) -> str:
    """Return the known field that a name misspells; an empty text where there is none.

    >>> find_near_field("mirco_batch")
    'micro_batch'
    """
    return next(iter(get_close_matches(name, FIELDS, 1, NEAR_NAME)), "")


MAX_FIELDS = 500

_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_UNIT = re.compile(r"[0-9.]\s*([a-zA-Z]*)\s*$")

_NUMBER = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*([eE][-+]?[0-9]+)?)\s*([kKmM](?![a-zA-Z])|)(?!\s*[-x*/~.][0-9])")
"""A number with an optional k or m; it does not match one of several numbers, as in ``8x400`` or ``1-4``."""


class Skip(ValueError):
    """The reason why a row is not predicted; its message begins with the field."""


class Row:
    """A row of fields; ``assumed`` collects the assumptions that were made to read it.

    A field that is missing, null or a word such as "n/a" reads as None. An impossible value raises `Skip`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.assumed: list[str] = []

    def assume(self, assumption: str) -> None:
        """Note an assumption, once."""
        if assumption not in self.assumed:
            self.assumed.append(assumption)

    def states(self, name: str) -> bool:
        """Return whether a field has a value."""
        value = self.fields.get(name)
        return value is not None and not (isinstance(value, str) and value.strip().lower() in _NOTHING)

    def text(self, *names: str) -> str:
        """Return the stated fields in lower case, joined by spaces; empty where none is stated."""
        values = [self.fields[name] for name in names if self.states(name)]
        return " ".join(str(value)[:MAX_TEXT] for value in values).strip().lower()

    def number(self, name: str) -> float | None:
        """Return a positive number; ``"80 GB"`` is read without its unit, and ``"32k"`` in thousands."""
        value: Any = self.fields.get(name)
        if not self.states(name) or value == 0:
            return None
        if isinstance(value, str) and (match := _NUMBER.match(value)):
            # 32k tokens of context are 32,768
            thousand = 1024.0 if name == "seq_len" else 1000.0
            text = value
            value = float(re.sub("[_,]", "", match[1])) * {"": 1.0, "k": thousand, "m": thousand**2}[match[3].lower()]
            if name.endswith("_time_s"):
                unit = _UNIT.search(text)
                if unit is None or unit[1].lower() not in _SECONDS:
                    units = ", ".join(filter(None, _SECONDS))
                    raise Skip(f"{name} is in seconds, or has one of the units {units}, met {text[:40]!r}")
                value = float(match[1].replace(",", "").replace("_", "")) * _SECONDS[unit[1].lower()]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise Skip(f"{name} is a number above 0, met {format_value(value)}")
        return float(value)

    def count(self, name: str, maximum: int = MAX_COUNT) -> int | None:
        """Return a positive whole number; None where the field is missing or 0."""
        number = self.number(name)
        if number is not None and (not number.is_integer() or number > maximum):
            raise Skip(f"{name} is a whole number of at most {maximum}, met {format_value(self.fields[name])}")
        return None if number is None else int(number)

    def optional_count(self, name: str, maximum: int = MAX_COUNT) -> int | None:
        """Return a count; where the value is none, return None and note that as an assumption."""
        return self.attempt(lambda: self.count(name, maximum), f"{name} left out, for")

    def optional_number(self, name: str) -> float | None:
        """Return a number; where the value is none, return None and note that as an assumption."""
        return self.attempt(lambda: self.number(name), f"{name} left out, for")

    def attempt(self, read: Callable[[], _Value], words: str) -> _Value | None:
        """Return what ``read`` returns; where it raises `Skip`, note why after ``words`` and return None."""
        try:
            return read()
        except Skip as skip:
            self.assume(f"{words} {skip}")
            return None

    def words(self, name: str) -> str:
        """Return the text of a field that has words; empty where it states nothing. A mapping or list reads as "{}"."""
        value = self.fields.get(name)
        if value is None:
            return ""
        if isinstance(value, dict | list):
            return "{}"
        text = str(value)[:MAX_TEXT].strip()
        return "" if text.lower() in _NOTHING - {"none", "null"} else text

    def reading(self, name: str) -> Reading:
        """Return what a field says by its vocabulary; a text that begins with "not stated" says nothing."""
        text = self.words(name)
        reading = read_words(name if name in WORD_FIELDS else FLAG_WORDS, text)
        head = _HEAD.match(text.lower())
        if not reading.word and head is not None and head[0].strip() in _NOTHING:
            return Reading(unused=reading.unused)
        return reading

    def read_word(self, name: str, default: str = "") -> str:
        """Return the known word that a field says; ``default`` where it says none, which is noted as an assumption."""
        word = self.reading(name).word
        self.note_words(name)
        if not word and default:
            stated = "as if not stated" if self.words(name) else "not stated"
            self.assume(f"{name} {default} ({stated})")
        return word or default

    def choose_word(self, name: str, words: tuple[str, ...]) -> str:
        """Return the word of a field where it is one of ``words``; else an empty text, with what is assumed noted."""
        word = self.read_word(name)
        if word and word not in words:
            self.assume(f"{name} {word} is not simulated, as if not stated")
        return word if word in words else ""

    def misreadings(self) -> dict[str, str]:
        """Return by field what of its text is not understood, with the nearest known word."""
        faults = {name: fault for name in (*WORD_FIELDS, *FLAGS) if (fault := self._describe_misreading(name))}
        framework = self.text("framework")
        if framework and find_framework(framework) is None:
            nearest = find_nearest_alias(framework)
            faults["framework"] = f"{format_value(framework)} {NOT_UNDERSTOOD}; nearest known alias: {nearest}"
        return faults | self.list_misspelt()

    def list_misspelt(self) -> dict[str, str]:
        """Return the fields that are not known but are spelt like a known one that the row lacks, with that one."""
        result = {}
        for name in list(self.fields)[:MAX_FIELDS]:
            near = "" if name in FIELDS else find_near_field(str(name)[:40])
            if near and near not in self.fields:
                result[name] = f"this field {NOT_UNDERSTOOD}; nearest known field: {near}"
        return result

    def _describe_misreading(self, name: str) -> str:
        if name == "recompute_detail" and isinstance(self.fields.get(name), dict | list):
            return ""
        reading = self.reading(name)
        if not reading.misread:
            return ""
        nearest = f"; nearest known word: {reading.nearest}" if reading.nearest else ""
        return f"{format_value(reading.misread)} {NOT_UNDERSTOOD}{nearest}"

    def note_words(self, *names: str) -> None:
        """Note the words of fields, of all that have words where none is named, that are not understood or not used."""
        for field, fault in {} if names else self.list_misspelt().items():
            self.assume(f"{format_value(field)}: {fault}")
        for name in names or (*WORD_FIELDS, *FLAGS):
            fault = self._describe_misreading(name)
            if fault:
                self.assume(f"{name} {fault}")
            elif unused := self._list_unused(name):
                self.assume(f"{name} words not used: {format_value(' '.join(unused))}")

    def _list_unused(self, name: str) -> tuple[str, ...]:
        if isinstance(self.fields.get(name), dict | list) or not self.states(name):
            return ()
        if name in _FIGURES:
            return list_unused(name, self.words(name), _FIGURES[name])
        return self.reading(name).unused

    def says(self, word: str, *names: str) -> bool:
        """Return whether one of these free texts has a known word of notes; an assumption tells which and where."""
        for name in names:
            alias = find_words("plan_note", self.text(name)).get(word)
            if alias is not None:
                self.assume(f"from {name}: {alias!r} taken as {word}")
                return True
        return False

    def count_or_default(self, name: str, default: int, reason: str = "not stated", maximum: int = MAX_COUNT) -> int:
        """Return a count; where it is not stated, return ``default`` and note that as an assumption."""
        value = self.optional_count(name, maximum)
        if value is None:
            self.assume(f"{name} {default} ({reason})")
            return default
        return value

    def flag(self, name: str) -> bool | None:
        """Return whether a field says yes or no; None where it says neither."""
        value = self.fields.get(name)
        if isinstance(value, bool):
            return value
        word = self.reading(name).word
        return None if not word else word == "yes"


GIB = 2.0**30
GB = 1e9


class Measurement(NamedTuple):
    """The measurements of a run: step time in s, peak memory of the fullest device in bytes, and how the run ended.

    ``memory_kind`` says what the memory is: one of `MEMORY_KINDS`, or `ALLOCATED_LAST`. ``reserved_memory`` is what the
    allocator reserved, in bytes, where the row also states what it allocated to tensors.
    """

    step_time: float | None
    peak_memory: float | None
    status: str
    memory_kind: str
    reserved_memory: float | None


ALLOCATED, RESERVED, DEVICE = MEMORY_KINDS = "allocated", "reserved", "device"
"""Kinds of measured memory: of tensors, what the allocator reserved, and all that is taken of the device."""
ALLOCATED_LAST = "allocated by the last rank"
"""The kind of memory of tensors that the last pipeline rank alone logs, as Megatron-LM does."""


_OUT_OF_MEMORY = re.compile(r"oom|out[-_ ]of[-_ ]memory|cuda error: out|exceed\w* memory")
_OUTSIDE = re.compile(r"nvidia-smi|rocm-smi|nvml|dcgm|gpu memory used|device memory used|total gpu memory")


def read_measurement(row: Row) -> Measurement:
    """Return the measurements of a row; a figure that cannot be read counts as missing and is noted."""
    memory, kind = _read_memory(row)
    status = row.text("status")
    status = "oom" if _OUT_OF_MEMORY.search(status) else "ok" if status in ("", "ok", "success", "pass") else status
    step_time = _read_step_time(row)
    reserved = _read_figure(row, "peak_mem_reserved_gib") if row.states("peak_mem_gib") else None
    return Measurement(step_time, memory, status[:40], kind, None if reserved is None else GIB * reserved)


def _read_figure(row: Row, name: str) -> float | None:
    return row.attempt(lambda: row.number(name), "not measured:")


def _read_step_time(row: Row) -> float | None:
    step_time = _read_figure(row, "step_time_s")
    if step_time is not None:
        return step_time
    total, devices = _read_figure(row, "global_batch"), _read_figure(row, "n_devices")
    samples, tokens = _read_figure(row, "samples_per_s_per_device"), _read_figure(row, "tokens_per_s_per_device")
    length = _read_figure(row, "seq_len")
    if samples is None and tokens is not None and length is not None:
        samples = tokens / length
    if samples is None or total is None or devices is None:
        return None
    row.assume("measured step time from the samples or tokens a second that were measured")
    return total / (samples * devices)


def _read_memory(row: Row) -> tuple[float | None, str]:
    note = row.text("mem_note")
    kind = DEVICE if _OUTSIDE.search(note) else ALLOCATED
    for name in ("peak_mem_gib", "peak_mem_reserved_gib"):
        memory = _read_figure(row, name)
        if memory is not None:
            if name != "peak_mem_gib":
                row.assume("measured peak memory is what the allocator reserved, not what was allocated")
                return GIB * memory, RESERVED
            stated_kind = row.text("peak_mem_kind")
            kind = stated_kind if stated_kind in MEMORY_KINDS else kind
            is_last = kind == ALLOCATED and re.search(r"last (pipeline )?(rank|stage)", note)
            return GIB * memory, ALLOCATED_LAST if is_last else kind
    figures = re.findall(r"(\d+(?:\.\d+)?)\s*(gib|gb)\b", note)
    if len(figures) != 1 or not re.search(r"peak|max|alloc|reserv|used|usage|memory", note):
        return None, kind
    row.assume(f"measured peak memory of {figures[0][0]} {figures[0][1]} from mem_note")
    return float(figures[0][0]) * (GIB if figures[0][1] == "gib" else GB), kind
