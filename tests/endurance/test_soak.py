"""What a process holds after many commands: a leak is seen, noise is not one."""

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path

import pytest

from . import soak
from .soak import Held, growth, held, main


def test_growth_is_between_the_first_and_the_last_third() -> None:
    # medians 100 and 110, whatever a single round shows
    seen = [Held(memory, 10, 3, 1) for memory in (100, 100, 900, 105, 105, 105, 110, 110, 900)]
    assert growth(seen) == {"memory": pytest.approx(0.1), "objects": 0, "files": 0, "threads": 0}


@pytest.mark.parametrize(("share", "code"), [(0.0, 0), (0.02, 1)])
def test_a_leak_is_seen(share: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[list[int]] = []
    each = int(share * held().objects)

    def rounds() -> Iterator[Held]:
        for _ in range(12):
            lost.extend([] for _ in range(each))
            yield held()

    monkeypatch.setattr(soak, "rounds", rounds)
    monkeypatch.setattr(soak, "WARM_UP", 0)
    assert main(["--seconds", "1000"]) == code


def test_a_cache_without_a_bound_may_be_one() -> None:
    @cache
    def cached(number: int) -> list[int]:
        return [number]

    before = held().objects
    for number in range(5000):
        cached(number)
    # other tests of the process may let go of something meanwhile
    assert held().objects - before > 4500


def test_caches_of_a_fixed_size_are_none() -> None:
    @lru_cache(maxsize=10**6)
    def cached(number: int) -> list[int]:
        return [number]

    before = held().objects
    for number in range(5000):
        cached(number)
    assert held().objects - before < 500
    assert cached.cache_info().currsize == 0


def test_a_round_runs_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(list(islice(soak.rounds(), 1))) == 1
