"""UniAP's search: layers that are each parallel in their own way, against the plans in which all are alike."""

import pytest

from meshwise.strategies.plan.recomputation import FirstLayers, Recompute
from meshwise.strategies.search.algorithms.best_first import BestFirst
from meshwise.strategies.search.algorithms.uniap import UniAP
from meshwise.strategies.search.simulated_search import search
from meshwise.strategies.search.space import Space

from ...problems import problem


@pytest.mark.parametrize("bandwidth", [1e9, 1e11])
def test_it_is_never_slower_than_plans_whose_layers_are_all_alike(bandwidth: float) -> None:
    """Among data, fully sharded and tensor parallelism on the same schedule, where memory is plenty."""
    of = problem(devices=4, layers=2, batch=8, bandwidth=bandwidth)
    alike = Space(schedule=("1f1b",), sequence_parallel=(False,), overlap_tensor=(False,), zero=(0,))
    uniap, uniform = search(UniAP(), of), search(BestFirst(), of, alike)
    assert uniap.best is not None and uniform.best is not None
    assert uniap.best.evaluation.step_time <= 1.01 * uniform.best.evaluation.step_time
    assert uniap.lower_bound is not None
    assert uniap.lower_bound <= min(uniap.best.evaluation.step_time, uniform.best.evaluation.step_time)


def test_layers_differ_where_that_is_faster() -> None:
    """A vocabulary of many times the hidden size: the head is tensor parallel, layers are data parallel."""
    of = problem(devices=4, layers=2, batch=16, vocab=200_000, bandwidth=1e10)
    result = search(UniAP(), of, Space(pipeline=(1,), data=(1,)))
    assert result.best is not None
    cuts = {sharding.operator: sharding.cuts for sharding in result.best.plan.shardings}
    assert cuts["layers.qkv"] == cuts["layers.down"] == (("batch", ("tensor",)),)
    assert cuts["head.logits"] == (("vocab", ("tensor",)),)


@pytest.mark.parametrize("fields", [{"seconds": 0.0}, {"gap": 1.0}, {"gap": -0.1}])
def test_nonsense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds is more than 0, and gap at least 0 and less than 1, met"):
        UniAP(**fields)


def test_a_space_without_recomputations_that_it_knows_has_no_stages() -> None:
    result = search(UniAP(), problem(devices=2, layers=2, batch=4), Space(recompute=(FirstLayers(Recompute.FULL, 1),)))
    assert result.end == "finished" and result.best is None
