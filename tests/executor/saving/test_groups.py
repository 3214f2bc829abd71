"""Groups of all ranks together have every parameter once, and the options of the groups of one process."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from meshwise.executor.saving.groups import join_groups, list_groups


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_divided_groups_join_to_those_of_one_process(places: list[int], num_ranks: int, has_empty_groups: bool) -> None:
    def list_own(names: list[int]) -> list[dict[str, Any]]:
        rows = [{"lr": place, "params": [str(n) for n in names if places[n] == place]} for place in range(3)]
        return [row for row in rows if row["params"] or has_empty_groups]

    joint = join_groups([list_own(list(range(rank, len(places), num_ranks))) for rank in range(num_ranks)])
    if has_empty_groups:
        assert [group["lr"] for group in joint] == [0, 1, 2]
    rates = [(int(name), group["lr"]) for group in joint for name in group["params"]]
    assert sorted(rates) == list(enumerate(places))


def test_groups_have_names_and_options_of_the_optimizer() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [module.bias]}, {"params": [module.weight], "lr": 2.0}], lr=1.0)
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = list_groups(optimizer, names)
    assert [(group["params"], group["lr"]) for group in groups] == [(["bias"], 1.0), (["weight"], 2.0)]
    assert all(group.keys() == row.keys() for group, row in zip(groups, optimizer.param_groups, strict=True))
