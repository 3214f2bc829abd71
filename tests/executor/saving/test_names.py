"""Keys of a checkpoint are found by the names of parameters, whatever stands before them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwise.executor.saving.names import NamesError, find_scheduler, match_names

WORD = st.text("abc", min_size=1, max_size=2)
NAME = st.lists(WORD, min_size=1, max_size=3).map(".".join)
HERE = Path("script")


@given(st.sets(NAME, min_size=1, max_size=5), st.sampled_from(["", "model.", "app.model.", "x.y."]), st.booleans())
def test_keys_are_those_with_the_prefix_of_all(names: set[str], prefix: str, has_averages: bool) -> None:
    states = [f"state.{name}.{key}" for name in sorted(names) for key in ("step", "exp_avg")]
    keys = {prefix + name for name in names} | {f"optim.{name}" for name in states}
    keys |= {f"averages.{name}" for name in names} if has_averages and prefix in ("model.", "app.model.") else set()
    found = match_names(HERE, sorted(names), [*states, "param_groups.a.lr"], keys)
    assert found["optimizer"] == {name: f"optim.{name}" for name in states}
    assert found["module"].keys() == names and set(found["module"].values()) <= keys
    if not any(f"{name}.{other}" in names for name in names for other in names):
        assert found["module"] == {name: prefix + name for name in names}


def test_states_that_are_not_there_are_left_out() -> None:
    keys = {"model.a", "model.b", "optim.state.a.step"}
    found = match_names(HERE, ["a", "b"], ["state.a.step", "state.b.step"], keys)
    assert found["optimizer"] == {"state.a.step": "optim.state.a.step"}
    assert match_names(HERE, ["a"], ["state.a.step"], {"model.a"})["optimizer"] == {}
    with pytest.raises(NamesError, match="met none for c under model"):
        match_names(HERE, ["a", "b", "c"], [], keys)


def test_a_schedule_is_found_by_its_last_step() -> None:
    keys = {"model.a", "lr.last_epoch", "lr.base_lrs"}
    assert find_scheduler(HERE, {"last_epoch": 0, "base_lrs": []}, keys) == {
        "last_epoch": "lr.last_epoch", "base_lrs": "lr.base_lrs"
    }  # fmt: skip
    assert find_scheduler(HERE, {"last_epoch": 0}, {"model.a"}) == {}
    with pytest.raises(NamesError, match="of the same kind, met lr"):
        find_scheduler(HERE, {"last_epoch": 0, "T_max": 4}, keys)
