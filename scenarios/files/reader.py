"""A strict reader of YAML, and so of JSON, and a writer whose text it reads back equal.

The reader returns plain data, and the line and column of each field. PyYAML's own loaders read ``1e9`` as text and
``no`` as false, keep the last of two equal keys, build objects that tags name and fail on deep nesting. This reader
uses only PyYAML's events and builds mappings, sequences and scalars of the YAML 1.2 core schema from them.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from meshwise.scenarios.files.errors import SHOWN, Fault, ScenarioError, shown
from meshwise.simulator.brief import brief
from meshwise.simulator.files import unsafe_character

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 32
MAX_DIGITS = 100
MAX_VALUES = 150_000
MAX_KEYS = 50_000
MAX_FAULTS = 100
MAX_LINES = 4096
"""Most lines of one block of text that get a place."""

Data = Any
"""A dict with text keys, list, str, int, float, bool or None."""
FieldPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_PADDED = re.compile(r"[-+]?0[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """The data of a file, and by path the line and column, from 1, of each key or item.

    The lines of a literal block of text count as its items.
    """

    file: str
    data: Data
    places: dict[FieldPath, tuple[int, int]] = field(default_factory=dict)

    __repr__ = brief("file")

    def fault(self, path: FieldPath, message: str) -> Fault:
        """Return a fault at ``path``; its place is that of the nearest enclosing field in the file."""
        known = path
        while known and known not in self.places:
            known = known[:-1]
        line, column = self.places.get(known, (1, 1))
        return Fault(self.file, line, column, dotted(path), message)


def read(path: str | Path) -> Document:
    """Return the document of a file.

    Raises
    ------
    ScenarioError
        Where the file cannot be read or is not strict YAML; never another error.
    """
    return parse(content_of(path), str(path))


def content_of(path: str | Path) -> bytes:
    """Return the bytes of a file, at most `MAX_BYTES` + 1, which is too many; `ScenarioError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise ScenarioError((Fault(str(path), 0, 0, "", "a file is needed, met a directory"),)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScenarioError((Fault(str(path), 0, 0, "", f"the file cannot be read: {reason}"),)) from None


def parse(content: bytes, file: str = "<text>") -> Document:
    """Return the document of the content of a file; ``file`` is its name in messages.

    >>> parse(b"{rate: 1e9, on: no}").data
    {'rate': 1000000000.0, 'on': 'no'}
    """
    if len(content) > MAX_BYTES:
        raise ScenarioError((Fault(file, 0, 0, "", f"a file has at most {MAX_BYTES} bytes, met more"),))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        message = f"a file is UTF-8 text, met the byte 0x{content[error.start]:02x}"
        raise ScenarioError((Fault(file, line, column, "", message),)) from None
    builder = _Builder(file, _events(text, file), text.split("\n"))
    data = builder.document()
    if builder.faults:
        raise ScenarioError(tuple(builder.faults))
    return Document(file, data, builder.places)


def _events(text: str, file: str) -> Iterator[yaml.Event]:
    loader = getattr(yaml, "CLoader", yaml.Loader)  # libyaml is much faster, but PyYAML may be built without it
    try:
        yield from yaml.parse(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        words = " ".join(part for part in (error.context, error.problem) if part)
        raise ScenarioError((Fault(file, line, column, "", f"this is not YAML: {words}"),)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = "a file is printable text, met a control character"
        raise ScenarioError((Fault(file, line, column, "", message),)) from None
    except (yaml.YAMLError, RecursionError, MemoryError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ScenarioError((Fault(file, 1, 1, "", f"this is not YAML: {reason}"),)) from None


class _Builder:
    """Builds data and places from events, and collects faults; recursion is bounded by `MAX_DEPTH`."""

    def __init__(self, file: str, events: Iterator[yaml.Event], lines: list[str]) -> None:
        self.file, self.lines = file, lines
        self.events = events
        self.values = 0
        self.faults: list[Fault] = []
        self.places: dict[FieldPath, tuple[int, int]] = {}

    def document(self) -> Data:
        next(self.events)  # start of the stream
        if not isinstance(next(self.events), yaml.DocumentStartEvent):
            return None
        data = self._value(next(self.events), ())
        next(self.events)  # end of the document
        extra = next(self.events)
        if not isinstance(extra, yaml.StreamEndEvent):
            self._stop(extra, (), "a file holds one document, met a second one")
        return data

    def _value(self, event: yaml.Event, path: FieldPath) -> Data:
        if len(path) > MAX_DEPTH:
            self._stop(event, path[:3], f"values nest at most {MAX_DEPTH} deep, met more")
        self.values += 1
        if self.values > MAX_VALUES:
            self._stop(event, path[:3], f"a file has at most {MAX_VALUES} values, met more")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            self._fault(event, path, "anchors (&) and aliases (*) are not read; write the value out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._fault(event, path, f"tags are not read, met {shown(tag)}; leave it out")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(event, path) if isinstance(event, yaml.ScalarEvent) else None

    def _mapping(self, path: FieldPath) -> dict[str, Data]:
        result: dict[str, Data] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag is not None:
                self._stop(event, path, "a key is plain text, met a mapping, sequence, anchor, alias or tag")
            key = event.value
            place = _place(event)
            if not key.isprintable():
                self._plain(event, key, (*path, key))
            if len(result) >= MAX_KEYS:
                self._stop(event, path, f"a mapping has at most {MAX_KEYS} keys, met more")
            if key in result:
                first = self.places[(*path, key)]
                self._fault(event, (*path, key), f"a key occurs once, met it on line {first[0]} and on line {place[0]}")
            else:
                self.places[(*path, key)] = place
            result.setdefault(key, self._value(next(self.events), (*path, key)))
        return result

    def _sequence(self, path: FieldPath) -> list[Data]:
        result: list[Data] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            self.places[(*path, len(result))] = _place(event)
            result.append(self._value(event, (*path, len(result))))
        return result

    def _scalar(self, event: yaml.ScalarEvent, path: FieldPath) -> Data:
        text: str = event.value
        if not text.isprintable():
            self._plain(event, text, path)
        if not event.implicit[0]:  # a quoted scalar, or a block of text: never a number, true, false or null
            if event.style == "|":
                self._block(event, path)
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _NOT_FINITE.fullmatch(text):
            self._fault(event, path, f"a number is finite, met {text}")
            return None
        if is_text(text):
            return text
        if len(text) > MAX_DIGITS:
            self._fault(event, path, f"a number has at most {MAX_DIGITS} characters, met {len(text)}")
            return None
        if _PADDED.fullmatch(text):
            near = f"{int(text)}" if float(text).is_integer() else text.lstrip("0")
            message = f"a number does not begin with 0, which some readers take for octal, met {text}; nearest: {near}"
            self._fault(event, path, message)
        number = _number(text)
        if not math.isfinite(number):
            self._fault(event, path, f"a number is finite, met {text}")
        return number

    def _plain(self, event: yaml.ScalarEvent, text: str, path: FieldPath) -> None:
        """Add a fault where a text has a character that moves the cursor of a terminal or hides others."""
        if (met := unsafe_character(text)) is not None:
            self._fault(event, path, f"text is printable, met {met}")

    def _block(self, event: yaml.ScalarEvent, path: FieldPath) -> None:
        """Record the places of the first lines of a literal block, from its first line that is not empty."""
        row, _ = _place(event)  # the line after the mark, from 0
        while row < len(self.lines) and not self.lines[row].strip():
            row += 1
        count = 1 + event.value.strip("\n").count("\n")
        for index, line in enumerate(self.lines[row : row + min(count, MAX_LINES)]):
            self.places[(*path, index)] = row + index + 1, len(line) - len(line.lstrip(" ")) + 1

    def _fault(self, event: yaml.Event, path: FieldPath, message: str) -> None:
        line, column = _place(event)
        self.faults.append(Fault(self.file, line, column, dotted(path), message))
        if len(self.faults) >= MAX_FAULTS:
            raise ScenarioError(tuple(self.faults))

    def _stop(self, event: yaml.Event, path: FieldPath, message: str) -> NoReturn:
        self._fault(event, path, message)
        raise ScenarioError(tuple(self.faults))


def dotted(path: FieldPath) -> str:
    """Return a path as text, such as ``plan.tensor``; long keys are cut, unprintable ones escaped.

    >>> dotted(("plan", "stages", 3))
    'plan.stages.3'
    """
    return ".".join(_name(str(part)) for part in path)


def _name(key: str) -> str:
    return key if key.isprintable() and len(key) <= SHOWN else shown(key)


def is_text(plain: str) -> bool:
    """Return whether an unquoted scalar is text: not null, true, false or a number.

    >>> is_text("no"), is_text("1e9")
    (True, False)
    """
    numbers = (_INT, _FLOAT, _BASED, _NOT_FINITE)
    return plain not in _NULL and plain not in _BOOL and not any(number.fullmatch(plain) for number in numbers)


def _number(text: str) -> int | float:
    if _INT.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    return float(text)


def _place(event: yaml.Event) -> tuple[int, int]:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


class _Dumper(yaml.SafeDumper):
    """Writes YAML in which text is quoted if YAML 1.2 would read it as another type, and flat lists take one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = None if is_text(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    mantissa, *exponent = repr(float(value)).split("e")
    point = "" if "." in mantissa or not exponent else ".0"  # PyYAML takes 1e-05 for text and would tag it
    return dumper.represent_scalar("tag:yaml.org,2002:float", "e".join([mantissa + point, *exponent]))


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)
_Dumper.add_multi_representer(float, _float)  # NumPy floats too
_Dumper.add_representer(float, _float)


def dump(data: dict[str, Any]) -> str:
    """Return ``data`` as YAML text, keys in their order.

    >>> print(dump({"name": "1e9", "pair": [1, "2 us"]}), end="")
    name: '1e9'
    pair: [1, 2 us]
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
