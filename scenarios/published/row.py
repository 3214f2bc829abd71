"""One row of published measurements: its fields by type, the assumptions made to read it, and its measurements."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from meshwise.scenarios.files.errors import format_value

_Value = TypeVar("_Value")

MAX_TEXT = 2000
"""Number of characters of a text field that are read."""
MAX_COUNT = 10**9
"""Largest count of a field, unless the caller states another."""

_NOTHING = frozenset({"", "none", "null", "nan", "n/a", "na", "-", "?", "unknown", "not stated", "unspecified"})
_TRUE = re.compile(r"^(true|yes|on|1|enabled?|overlap\w*)\b")
_FALSE = re.compile(r"^(false|no|not|off|0|disabled?|none|without)\b")


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
            value = float(re.sub("[_,]", "", match[1])) * {"": 1.0, "k": thousand, "m": thousand**2}[match[3].lower()]
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

    def choose(self, name: str, table: Iterable[tuple[str, str, str]], default: str) -> str:
        """Return the choice that the words of a field stand for, by the first pattern that matches in a table.

        ``table`` has pattern, choice and, where the choice is an assumption, the reason for it.
        """
        words = self.text(name)
        choice, reason = next(
            ((choice, reason) for pattern, choice, reason in table if re.search(pattern, words)),
            (default, f"{words[:40]!r} not known" if words else "not stated"),
        )
        if reason:
            self.assume(f"{name} {choice} ({reason})")
        return choice

    def choose_word(self, name: str, words: tuple[str, ...]) -> str:
        """Return the word of a field, "" where none is stated; for an unknown word note that the first one is taken."""
        word = self.text(name)
        if word and word not in words:
            self.assume(f"{name} {word[:40]!r} taken as {words[0]}; known: {', '.join(words)}")
            return words[0]
        return word

    def require_count(self, name: str, maximum: int = MAX_COUNT) -> int:
        """Return a count; raise `Skip` where it is not stated."""
        value = self.count(name, maximum)
        if value is None:
            raise Skip(f"{name} is not stated")
        return value

    def count_or_default(self, name: str, default: int, reason: str = "not stated", maximum: int = MAX_COUNT) -> int:
        """Return a count; where it is not stated, return ``default`` and note that as an assumption."""
        value = self.count(name, maximum)
        if value is None:
            self.assume(f"{name} {default} ({reason})")
            return default
        return value

    def flag(self, name: str) -> bool | None:
        """Return whether a field says on or off; None where it says neither."""
        value = self.fields.get(name)
        if isinstance(value, bool):
            return value
        words = str(value)[:MAX_TEXT].strip().lower() if value is not None else ""
        if _FALSE.search(words) or re.search(r"\b(off|not overlapped|no overlap)\b", words):
            return False
        return True if _TRUE.search(words) or "overlap" in words or re.search(r"\bon\b", words) else None


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
