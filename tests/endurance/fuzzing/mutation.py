"""Inputs made of valid ones by changes that people and attackers make."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from .tree import Mapping, Raw, Tree, copied, nodes, text_of

_TIMES = (1, 1, 1, 2, 4)
"""Changes of one input."""
MOST_BYTES = 200_000
"""An input is cut there, so that a million of them take minutes: far larger ones have tests of their own."""

HOSTILE = (
    "\x1b[31mred", "\x1b]0;title\x07", "a\rb", "a\nb", "\x00", "\u202eabc", "\u2066x\u2069", "\ufeff", "\ud800",
    "\u0085", "<script>alert(1)</script>", "'><img src=x onerror=alert(1)>", "__import__('os').system('touch canary')",
    "${jndi:ldap://x/a}", "$(touch canary)", "; touch canary", "=cmd|' /C calc'!A0", "{{7*7}}", "%s%s%n",
    "[red]x[/red]", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", "C:\\Windows", "file:///etc/passwd",
    "a/../..", "\U0001f680", "\u0391\u03b8\u03ae\u03bd\u03b1", "x" * 2000, "$\\frac{1$", "",
)  # fmt: skip
"""Texts that do harm where they are run, opened, printed or drawn."""
WORDS = tuple(Raw(word) for word in (
    "1e9", "no", "yes", "on", "010", "0o10", "0x1F", "1:30", "1_000", "~", ".inf", "-.inf", ".nan", "NaN", "Infinity",
    "1e999", "-1e999", "1e-999", "9" * 60, "-0", "+1", ".5", "5.", "2001-01-01", "=", "<<", "true", "null", "- a",
    "!!python/object/apply:os.system [\"touch canary\"]", "!!binary aGk=", "!x y", "&a 1", "*a", "&a [*a]", "? x",
    "| x", "%", "@x", "`x`", "'", '"', "{", "[", "}", "]", ",", ":", "#", "---", "...", "\t", "!!float 1",
))  # fmt: skip
"""Words of YAML that one of its readers or another takes for something else."""
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 1.5, 1e3, -1e-9, 1e-300, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, 2**64, 10**18, 10**30, 10**99,
    1e15, 999_999_999, 1_000_000, 100_000, 4096, 65537,
)  # fmt: skip
UNITS = (
    "80 GiB", "80 B", "400 Gb/s", "400 GB/s", "1 b/s", "2 us", "2 µs", "1e300 s", "1 day", "312 TFLOP/s", "1 FLOPS",
    "5 kg", "1e-300 s", "1e308 TB", "-1 s", "0 s", "1e9999 s", "80GiB", "80", "\u0661 GiB", "1 Gb", "9" * 80 + " s",
)  # fmt: skip


class Mutator:
    """Makes inputs of a corpus.

    Parameters
    ----------
    texts
        Valid inputs, as text.
    trees
        The same as trees, where the form of the input is one.
    write
        The text of a tree.
    """

    def __init__(
        self, texts: Sequence[str], trees: Sequence[Tree] = (), write: Callable[[Tree], str] = text_of
    ) -> None:
        self.texts, self.trees, self.write = texts, trees, write
        places = [place for tree in trees for place in nodes(tree)]
        self.values = [holder[index] for holder, index in places] or [""]
        self.keys = sorted({holder[0] for holder, index in places if index == 1 and isinstance(holder[0], str)}) or [
            "a"
        ]

    def input(self, random: Random) -> bytes:
        """Return the next input that ``random`` draws."""
        kind = random.random()
        if self.trees and kind < 0.7:
            content = self._structured(random).encode("utf-8", "surrogatepass")
        elif kind < 0.97:
            content = self._edited(random).encode("utf-8", "surrogatepass")
        else:
            content = random.randbytes(random.randrange(200))
        if random.random() < 0.05:
            content = _flipped(content, random)
        return content[:MOST_BYTES]

    def _structured(self, random: Random) -> str:
        tree = copied(random.choice(self.trees))
        for _ in range(random.choice(_TIMES)):
            places = list(nodes(tree))
            if not places:
                break
            holder, index = random.choice(places)
            random.choice(_CHANGES)(self, tree, holder, index, random)
        return self.write(tree)

    def value(self, random: Random) -> Tree:
        """Return a value to put anywhere."""
        kind = random.randrange(6)
        if kind == 0:
            return random.choice(HOSTILE)
        if kind == 1:
            return random.choice(WORDS)
        if kind == 2:
            return random.choice(NUMBERS)
        if kind == 3:
            return random.choice(UNITS)
        if kind == 4:
            return copied(random.choice(self.values))
        return random.choice((None, True, False, [], Mapping(), [[]], Mapping([["a", 1]]), [None]))

    def _edited(self, random: Random) -> str:
        """Return a text with lines, words or characters changed."""
        text = random.choice(self.texts)
        for _ in range(random.choice(_TIMES)):
            text = random.choice((_lines, _words, _characters))(text, random)
        return text


def _put(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    holder[index] = mutator.value(random)


def _scale(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    """Change a number a little or a lot, in its text where it has a unit."""
    value = holder[index]
    if isinstance(value, str) and value[:1].isdigit():
        holder[index] = value.replace(" ", random.choice(("", "e3 ", "e9 ", "000 ", "e-9 ")), 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        holder[index] = random.choice((value + 1, value - 1, -value, value * 2, value * 10 ** random.randrange(1, 20)))
    else:
        holder[index] = mutator.value(random)


def _drop(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    owner = _owner(tree, random)
    if owner:
        owner.pop(random.randrange(len(owner)))


def _repeat(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    owner = _owner(tree, random)
    if owner:
        times = random.choice((1, 1, 1, 2, 300))
        owner.extend(copied(random.choice(owner)) for _ in range(times))


def _rename(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    owner = _owner(tree, random)
    if isinstance(owner, Mapping) and owner:
        pair = random.choice(owner)
        pair[0] = random.choice(
            (str(pair[0])[1:], f"{pair[0]}s", random.choice(mutator.keys), random.choice(HOSTILE), random.choice(WORDS))
        )


def _add(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    owner = _owner(tree, random)
    if isinstance(owner, Mapping):
        owner.insert(random.randint(0, len(owner)), [random.choice(mutator.keys), mutator.value(random)])
    elif owner is not None:
        owner.insert(random.randint(0, len(owner)), mutator.value(random))


def _nest(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 60))):
        holder[index] = [holder[index]] if random.random() < 0.5 else Mapping([["a", holder[index]]])


def _swap(mutator: Mutator, tree: Tree, holder: list[Any], index: int, random: Random) -> None:
    other, place = random.choice(list(nodes(tree)))
    holder[index], other[place] = copied(other[place]), copied(holder[index])


def _owner(tree: Tree, random: Random) -> list[Any] | None:
    """Return one of the mappings and lists of a tree."""
    owners = [holder[index] for holder, index in nodes(tree) if isinstance(holder[index], list)]
    return random.choice([tree, *owners]) if isinstance(tree, list) else None


_CHANGES = (_put, _put, _put, _scale, _scale, _drop, _drop, _repeat, _rename, _add, _add, _nest, _swap)


def _lines(text: str, random: Random) -> str:
    lines = text.split("\n")
    index = random.randrange(len(lines))
    kind = random.randrange(5)
    if kind == 0:
        del lines[index]
    elif kind == 1:
        lines.insert(index, random.choice(lines))
    elif kind == 2:
        lines[index] = random.choice((" ", "  ", "\t")) + lines[index]
    elif kind == 3:
        lines[index] = lines[index].lstrip()
    else:
        lines = lines[: index + 1]
    return "\n".join(lines)


def _words(text: str, random: Random) -> str:
    words = text.split(" ")
    index = random.randrange(len(words))
    pool = random.choice((HOSTILE, WORDS, UNITS, tuple(map(str, NUMBERS)), words))
    words[index] = random.choice(pool)
    return " ".join(words)


def _characters(text: str, random: Random) -> str:
    start = random.randint(0, len(text))
    kind = random.randrange(3)
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + text[start + random.randint(1, 8) :]
    word = random.choice((*HOSTILE, *WORDS, "[" * 50, "{a: " * 50, "- " * 50, "0" * 300, "F", "B", ";", "(", ")"))
    return text[:start] + word + text[start:]


def _flipped(content: bytes, random: Random) -> bytes:
    found = bytearray(content)
    for _ in range(random.randint(1, 4)):
        if found:
            found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)
