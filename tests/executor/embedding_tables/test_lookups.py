"""Look-ups in a table of which ranks have parts are those in the whole one, and so are gradients of the parts."""

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import ThreadExchange, cut_copy, run_threads
from torch import Tensor, nn

from meshwise.executor.embedding_tables.lookups import WholeTableError
from meshwise.executor.embedding_tables.tables import TableError
from meshwise.executor.modules.losses import LossError
from meshwise.strategies.tables.embeddings import TableCut

WORDS = (TableCut.ROWS, TableCut.TABLE, TableCut.COLUMNS)


def draw_values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def draw_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a table, and for every rank bags of any length; a bag may be empty, and so may all of a rank."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    indices = st.lists(st.integers(0, rows - 1), max_size=6)
    mode = draw(st.sampled_from(["none", "sum", "mean", "max"]))
    bags = draw(st.lists(st.lists(indices, max_size=4), min_size=2, max_size=3))
    return {
        "weight": draw_values((rows, width), draw(st.integers(0, 99))),
        "mode": mode,
        "padding": draw(st.none() | st.integers(0, rows - 1)),
        "sparse": draw(st.booleans()) and mode != "max",
        "is_weighted": draw(st.booleans()) and mode == "sum",
        "word": draw(st.sampled_from(WORDS)),
        "bags": bags,
    }


def make_table(case: dict[str, Any]) -> Any:
    options = {"padding_idx": case["padding"], "sparse": case["sparse"], "freeze": False}
    if case["mode"] == "none":
        return nn.Embedding.from_pretrained(case["weight"].clone(), **options)
    return nn.EmbeddingBag.from_pretrained(case["weight"].clone(), mode=case["mode"], **options)


def look_up(table: Any, case: dict[str, Any], bags: list[list[int]], first: int) -> tuple[Tensor, Tensor | None]:
    """Return what a table gives for some bags, of which ``first`` indices come before, and the weights of indices."""
    indices = torch.tensor([index for bag in bags for index in bag], dtype=torch.int64)
    if case["mode"] == "none":
        return table(indices), None
    offsets = torch.tensor([sum(map(len, bags[:place])) for place in range(len(bags))], dtype=torch.int64)
    all_weights = draw_values((200,), 7)
    weights = all_weights[first : first + len(indices)].clone().requires_grad_() if case["is_weighted"] else None
    return table(indices, offsets, weights), weights


@given(case=draw_cases())
def test_a_cut_table_is_the_whole_one_for_every_rank(case: dict[str, Any]) -> None:
    bags, num_ranks = case["bags"], len(case["bags"])
    whole = make_table(case)
    firsts = [sum(len(bag) for row in bags[:rank] for bag in row) for rank in range(num_ranks)]
    expected = [look_up(whole, case, row, first) for row, first in zip(bags, firsts, strict=True)]
    factors = [draw_values(tuple(outputs.shape), rank) for rank, (outputs, _) in enumerate(expected)]
    sum((outputs * factor).sum() for (outputs, _), factor in zip(expected, factors, strict=True)).backward()

    def run(rank: int, exchange: ThreadExchange) -> tuple[Tensor, Tensor, Tensor | None]:
        table, lookups = cut_copy(whole, case["word"], exchange)
        outputs, weights = look_up(table, case, bags[rank], firsts[rank])
        (outputs * factors[rank]).sum().backward()
        lookups.end_forward()
        lookups.send_gradients()
        gradient = lookups.tables[0].parameter.grad
        assert gradient is not None and gradient.is_sparse == case["sparse"]
        own = lookups.tables[0].part
        rows = whole.weight.grad.to_dense()
        gradients = gradient.to_dense() * num_ranks
        torch.testing.assert_close(gradients, own.select(rows, (own.first_row, own.end_row)))
        if case["sparse"]:  # rows that no rank has looked up are not among them
            known = {index for row in bags for bag in row for index in bag} - {case["padding"]}
            own_rows = {int(row) + own.first_row for row in gradient.coalesce().indices()[0]}
            assert own_rows == {row for row in known if own.first_row <= row < own.end_row and own.width}
        return outputs, gradients, None if weights is None else weights.grad

    results, _ = run_threads(num_ranks, run)
    for (outputs, _, weight_gradient), (expected_outputs, weights) in zip(results, expected, strict=True):
        assert torch.equal(outputs, expected_outputs)
        if weights is not None:
            torch.testing.assert_close(weight_gradient, weights.grad)


def test_a_row_is_asked_for_once_and_its_gradient_goes_the_same_way() -> None:
    """Of rows 0 to 4 the first rank has 0 and 1; it looks up 4, 4 and 0, and the other rank 1, 0 and 0."""
    indices = [torch.tensor([4, 4, 0]), torch.tensor([1, 0, 0])]

    def run(rank: int, exchange: ThreadExchange) -> None:
        table, lookups = cut_copy(nn.Embedding(5, 3, sparse=True), TableCut.ROWS, exchange)
        table(indices[rank]).sum().backward()
        lookups.end_forward()
        lookups.send_gradients()

    _, shared = run_threads(2, run)
    meeting, row = ("int64", 16), 3 * 4
    assert shared.messages[0] == [meeting, ("int32", 4), ("float32", 2 * row), meeting, ("float32", row)]
    assert shared.messages[1] == [meeting, ("int32", 8), ("float32", row), meeting, ("float32", 2 * row)]


def test_a_table_of_one_rank_sends_nothing_from_others() -> None:
    def run(rank: int, exchange: ThreadExchange) -> None:
        table, lookups = cut_copy(nn.Embedding(5, 3), TableCut.TABLE, exchange)
        table(torch.tensor([rank])).sum().backward()
        lookups.send_gradients()

    _, shared = run_threads(2, run)
    assert [size for _, size in shared.messages[0]] == [16, 0, 12, 0]
    assert [size for _, size in shared.messages[1]] == [16, 4, 0, 12]


def test_rows_that_no_rank_used_have_no_gradient_and_those_of_another_rank_have() -> None:
    def run(rank: int, exchange: ThreadExchange) -> tuple[bool, Tensor | None]:
        table, lookups = cut_copy(nn.Embedding(4, 2), TableCut.ROWS, exchange)
        table(torch.tensor([0, 3]))
        lookups.send_gradients()
        is_none = lookups.tables[0].parameter.grad is None
        outputs = table(torch.tensor([0, 3]))
        if rank == 0:
            outputs.sum().backward()
        lookups.send_gradients()
        return is_none, lookups.tables[0].parameter.grad

    results, _ = run_threads(2, run)
    assert [is_none for is_none, _ in results] == [True, True]
    assert [gradient.tolist() for _, gradient in results] == [[[0.5, 0.5], [0, 0]], [[0, 0], [0.5, 0.5]]]


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_of_no_row_is_an_error_of_its_line(index: int) -> None:
    def run(rank: int, exchange: ThreadExchange) -> None:
        table, _ = cut_copy(nn.Embedding(5, 3), TableCut.ROWS, exchange)
        with pytest.raises(IndexError, match=f"indices of table are 0 to 4, met {index}"):
            table(torch.tensor([index, 2]))

    run_threads(2, run)


def test_ranks_that_look_up_otherwise_know_of_each_other() -> None:
    def run(rank: int, exchange: ThreadExchange) -> None:
        table, lookups = cut_copy(nn.Embedding(5, 3), TableCut.ROWS, exchange)
        own, other = ("in table", "at the end of forward")[:: 1 - 2 * rank]
        with pytest.raises(LossError, match=f"this one {own}, met rank {1 - rank} {other}"):
            if rank == 0:
                table(torch.tensor([1]))
            else:
                lookups.end_forward()

    run_threads(2, run)


def test_a_module_reads_a_table_by_indices_alone() -> None:
    def run(rank: int, exchange: ThreadExchange) -> None:
        table, lookups = cut_copy(nn.Embedding(5, 3), TableCut.ROWS, exchange)
        assert table.weight.shape == ((2, 3), (3, 3))[rank]  # of an optimizer
        assert list(dict(table.named_parameters())) == ["weight"]
        with lookups.guard(), pytest.raises(WholeTableError, match=r"met its whole weight in use, table.weight"):
            table.weight.sum()
        table.weight.sum().backward()
        with pytest.raises(TableError, match="met its whole weight in use"):
            lookups.send_gradients()

    run_threads(2, run)
