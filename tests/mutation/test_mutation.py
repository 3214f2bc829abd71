"""Mutants are what they say, tests that check a line kill its mutants, and those that only run it do not."""

import ast
from pathlib import Path

import pytest

from .equivalent import EQUIVALENT
from .mutants import mutants
from .tests_of import TESTS
from .trial import Bench, Outcome

ROOT = Path(__file__).parents[2]
SOURCE = '''"""No number 1 of a text is changed."""


def cost(size: int, rate: int = 2) -> float:
    """Return size / rate."""
    if size < 0:
        raise ValueError(f"{size + 1} is negative")
    return size / rate


def late(steps: int) -> bool:
    while steps > 9:
        steps -= 5
    return steps > 3
'''
CHECKS = """from simulator.half import cost, late


def test_cost() -> None:
    assert (cost(6, 3), cost(0), cost(1)) == (2, 0, 0.5)


def test_late() -> None:
    assert late(13)
    assert not late(0)
"""


def changes(source: str) -> list[str]:
    return [f"{each.was} -> {each.now}" for each in mutants(source)]


def test_every_kind_of_mutant() -> None:
    assert changes("a + b") == ["a + b -> (a - b)", "a + b -> a", "a + b -> b"]
    assert changes("a *= 2") == ["a *= 2 -> a /= 2", "2 -> (3)", "2 -> (1)", "2 -> (4)"]
    assert changes("0 < a <= b")[:2] == ["0 < a <= b -> (0 <= a <= b)", "0 < a <= b -> (0 < a < b)"]
    assert changes("max(a, np.minimum(b, ceil(c)))") == [
        "max -> min",
        "np.minimum -> np.maximum",
        "ceil -> int",
    ]
    assert changes("a if b else c") == [
        "a if b else c -> (c if b else a)",
        "a if b else c -> a",
        "a if b else c -> c",
    ]
    assert changes("a and not b") == [
        "a and not b -> (a or not b)",
        "a and not b -> (not b)",
        "a and not b -> (a)",
        "not b -> b",
    ]
    assert changes("if a:\n    pass") == ["a -> (not a)"]
    assert changes("[a for a in b if a]") == ["a -> (not a)"]
    assert changes("True") == ["True -> (False)"]
    assert changes("'é', a - b")[0] == "a - b -> (a + b)"  # columns are counted in bytes


def test_texts_annotations_and_messages_stay() -> None:
    assert changes("def f(a: 'int' = 1) -> Literal[2]:\n    'doc 3'\n    raise ValueError(4)") == [
        "1 -> (2)",
        "1 -> (0)",
    ]
    assert changes("'a' + b") == ["'a' + b -> ('a')", "'a' + b -> b"]  # a difference of texts would only raise


@pytest.mark.parametrize("path", TESTS)
def test_every_mutant_of_a_file_is_another_program(path: str) -> None:
    source = (ROOT / path).read_text("utf-8")
    was, found = ast.dump(ast.parse(source)), mutants(source)
    assert len(found) > 10
    assert all(ast.dump(ast.parse(each.source)) != was for each in found[:: len(found) // 10])
    assert all((ROOT / test).exists() for test in TESTS[path])


def test_what_is_called_equivalent_is_a_mutant() -> None:
    for path in {key[0] for key in EQUIVALENT}:
        source = (ROOT / path).read_text("utf-8")
        known = {each.change(source) for each in mutants(source)}
        assert [key for key in EQUIVALENT if key[0] == path and key[1:] not in known] == []


def test_tests_kill_what_they_check_and_nothing_else(tmp_path: Path) -> None:
    for folder in ("simulator", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "simulator/half.py").write_text(SOURCE)
    (tmp_path / "tests/test_half.py").write_text(CHECKS)
    bench = Bench(tmp_path, "simulator/half.py", ["tests/test_half.py"])
    bench.limit = 8  # seconds of CPU: on a busy machine loading takes some
    every = {f"{each.was} -> {each.now}": each.source for each in mutants(SOURCE)}
    assert bench.outcome(every["size / rate -> (size * rate)"]) is Outcome.KILLED
    assert bench.outcome(every["size < 0 -> (size <= 0)"]) is Outcome.KILLED
    assert bench.outcome(every["steps > 3 -> (steps >= 3)"]) is Outcome.SURVIVED  # no test has 3 steps
    assert bench.outcome(every["steps -= 5 -> steps += 5"]) is Outcome.ENDLESS
    assert (tmp_path / "simulator/half.py").read_text() == SOURCE


def test_tests_that_fail_before_anything_is_changed_say_so(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("")
    (tmp_path / "test_half.py").write_text("def test_it() -> None:\n    raise AssertionError\n")
    with pytest.raises(ValueError, match=r"test_half.py: tests pass before anything is changed, met exit status 1"):
        Bench(tmp_path, "half.py", ["test_half.py"])
