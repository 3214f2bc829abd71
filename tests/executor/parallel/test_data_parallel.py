"""When gradients of stages are reduced: at once beneath later passes, or all at the end; each unit once."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.executor.parallel.data_parallel import GradientReducer


def unit(name: str, replicas: int = 2) -> Any:
    return SimpleNamespace(name=name, sharing=SimpleNamespace(replicas=SimpleNamespace(size=lambda: replicas)))


class Log(list[str]):
    """What was begun and finished, in order."""

    def begin(self, each: Any) -> Any:
        self.append(f"begin {each.name}")
        return lambda: self.append(f"end {each.name}")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stage_is_reduced_as_soon_as_it_is_done_where_passes_hide_it(overlap: bool) -> None:
    log = Log()
    reducer = GradientReducer(log.begin, overlap)
    reducer.add_unit(unit("last"))
    log.append("backward")
    reducer.add_unit(unit("first"))
    reducer.finish()
    ends = ["end last", "end first"]
    if overlap:
        assert log == ["begin last", "backward", "begin first", *ends]
    else:
        assert log == ["backward", "begin last", "begin first", *ends]
    reducer.finish()
    assert len(log) == 5  # nothing is reduced twice


def test_gradients_of_one_rank_are_whole() -> None:
    log = Log()
    reducer = GradientReducer(log.begin, True)
    reducer.add_unit(unit("alone", replicas=1))
    reducer.finish()
    assert log == []
