"""Cuts make the heaviest stage lightest, as trying all of them does; named ones are where modules begin."""

from itertools import combinations, pairwise

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwise.executor.stages import cuts
from meshwise.executor.stages.cuts import CutError, choose_cuts, find_free_nodes, list_operators, measure_work
from meshwise.executor.stages.export import export_step, list_paths
from tests.executor.stages.woven import build_woven


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(2, 4), st.data())
def test_the_heaviest_stage_is_as_light_as_can_be(work: list[int], num_stages: int, data: st.DataObject) -> None:
    is_trained = data.draw(st.lists(st.booleans(), min_size=len(work), max_size=len(work)))
    sums = [float(sum(work[:end])) for end in range(len(work) + 1)]

    def find_heaviest(bounds: list[int]) -> float:
        return max(sums[end] - sums[start] for start, end in pairwise(bounds))

    ways = [[0, *places, len(work)] for places in combinations(range(1, len(work)), num_stages - 1)]
    ways = [way for way in ways if all(any(is_trained[start:end]) for start, end in pairwise(way))]
    found = cuts._divide(num_stages, list(range(len(work) + 1)), sums, is_trained)
    if not ways:
        assert found is None
    else:
        assert found is not None
        assert find_heaviest([0, *found, len(work)]) == min(map(find_heaviest, ways))


def test_a_product_weighs_its_operations_and_what_it_writes() -> None:
    module = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 1, bias=False))
    step = export_step(module, lambda outputs, batch: outputs.mean(), torch.ones(4, 6))
    first = list_operators(step)[0]
    # 2 * 4 * 6 * 3 operations, and 4 * 3 numbers of 4 bytes
    assert measure_work(first) == 2 * 4 * 6 * 3 + cuts.FLOPS_PER_BYTE * 4 * 3 * 4


def test_cuts_lie_between_blocks_or_where_a_module_begins() -> None:
    _, step = build_woven()
    operators = list_operators(step)
    blocks = frozenset(f"layers.{number}" for number in range(4))
    (place,) = choose_cuts(step, operators, 2, (), blocks)
    assert list_paths(operators[place])[-1] in blocks
    (place,) = choose_cuts(step, operators, 2, ("layers.3",), blocks)
    assert list_paths(operators[place]) == ("layers.3",) and list_paths(operators[place - 1]) != ("layers.3",)
    with pytest.raises(CutError, match=r"met layers.9; nearest: layers\.\d"):
        choose_cuts(step, operators, 2, ("layers.9",), blocks)


def test_what_depends_on_the_batch_alone_belongs_to_no_stage() -> None:
    _, step = build_woven()
    free_nodes = {node.name for node in find_free_nodes(step) if node.op == "call_function"}
    assert {"gt"} <= free_nodes  # the mask x > 0
    assert not {"argmax", "detach"} & free_nodes
