"""What a plan says of a whole module, and what it refuses; blocks, batches and optimizers of a user."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch import nn

from meshwise.executor.modules.batches import BatchError, select_samples, split_evenly
from meshwise.executor.modules.blocks import list_blocks, recompute_blocks
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import LossError, read_loss
from meshwise.executor.modules.optimizers import OptimizerError, build_optimizer, build_scheduler
from meshwise.executor.stages.parallelize import parallelize
from meshwise.executor.stages.supported_modules import find_module_layout
from meshwise.strategies.plan.completion import complete
from meshwise.strategies.plan.layout import Layout
from meshwise.strategies.plan.offloading import offloading
from meshwise.strategies.plan.recomputation import FirstLayers, Recompute, SomeOperators, parse_words

from ...strategies.problems import problem

SMALL = problem(devices=4, layers=2, batch=16)


@given(
    st.builds(
        ModuleLayout,
        data=st.just(4),
        zero=st.integers(0, 3),
        zero_shards=st.sampled_from((0, 2)),
        num_microbatches=st.sampled_from((1, 2, 4)),
        offload=st.sampled_from([offloading(names) for names in ((), ("optimizer",), ("optimizer", "activations"))]),
        recompute=st.sampled_from((Recompute.NONE, Recompute.FULL, FirstLayers(Recompute.FULL, 1))),
    )
)
def test_a_layout_is_what_its_plan_says_and_what_its_document_says(layout: ModuleLayout) -> None:
    assert ModuleLayout.from_json(layout.to_json()) == layout
    shards = layout.zero_shards if layout.zero else 0
    decisions = {"zero": layout.zero, "zero_shards": shards or None, "recompute": layout.recompute}
    decisions["offload"] = layout.offload
    microbatch = 4 // layout.num_microbatches
    plan_layout = Layout(data=4, microbatch=microbatch, **{k: v for k, v in decisions.items() if v is not None})  # type: ignore[arg-type]
    found = find_module_layout(complete(SMALL, plan_layout))
    assert found == replace(layout, zero_shards=shards)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(data=2, context=2, microbatch=4), "context: met 2; nearest: 1"),
        (Layout(data=4, microbatch=4, recompute=Recompute.SELECTIVE), "recompute: a block is computed again whole"),
        (
            Layout(data=4, microbatch=4, recompute=FirstLayers(Recompute.SELECTIVE, 1)),
            "recompute: a block is computed again",
        ),
        (Layout(data=(4), microbatch=(3, 5, 4, 4)), "microbatch: one size on all data ranks"),
    ],
)
def test_what_cuts_a_module_is_refused(layout: Layout, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_module_layout(complete(SMALL, layout))


def test_a_plan_that_cuts_operators_is_part_of_its_layout() -> None:
    plan = complete(SMALL, Layout(data=2, tensor=2, microbatch=4))
    found = find_module_layout(plan)
    assert (found.data, found.tensor, found.num_ranks, found.plan) == (2, 2, 4, plan)
    assert ModuleLayout.from_json(found.to_json()) == found
    assert [found.find_data_part(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert found.describe() == "data 2, tensor 2, 2 microbatches"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": 0}, "at least 1"),
        ({"zero": 4}, "zero is 0, 1, 2 or 3, met 4; nearest: 3"),
        ({"data": 4, "zero": 1, "zero_shards": 3}, r"zero_shards divides data\(4\)"),
        ({"recompute": SomeOperators(("up",))}, "not operators by name, met up; nearest: full"),
        ({"recompute": parse_words("1+none")}, "one a stage, of 1 in all, met 2; nearest: full:1"),
        ({"offload": offloading(["parameters"])}, "all of its optimizer or activations.*met parameters"),
        ({"offload": offloading({"activations": 0.5})}, "met 0.5 of activations"),
        ({"offload": offloading(["activations"]), "recompute": Recompute.SELECTIVE}, "stays on the device"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModuleLayout(**changes)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.feed_forward(x)
        return result


def test_blocks_are_the_equal_members_of_the_outermost_lists() -> None:
    layers, stages = [Layer() for _ in range(3)], [[Layer(), Layer()], [Layer(), Layer(), Layer()]]
    assert list_blocks(nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))) == layers
    nested = nn.ModuleList(nn.Sequential(*stage) for stage in stages)
    assert list_blocks(nested) == [layer for stage in stages for layer in stage]
    chain = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert list_blocks(chain) == list(chain)
    assert list_blocks(Layer()) == []  # two products of a feed-forward network are no blocks


def test_blocks_that_are_computed_again_have_equal_gradients_and_names() -> None:
    module = nn.Sequential(*(Layer() for _ in range(3)))
    x, names = torch.ones(2, 4), list(module.state_dict())
    module(x).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    assert recompute_blocks(module, Recompute.FULL) == 3
    module(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(expected, (p.grad for p in module.parameters()), strict=True))  # type: ignore[arg-type]
    assert list(module.state_dict()) == names


def test_the_parts_of_a_batch_are_the_batch() -> None:
    batch = {"x": torch.arange(6), "pair": (torch.arange(12).view(6, 2), "a word")}
    parts = split_evenly(batch, 3, "ranks")
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert parts[1]["pair"][0].tolist() == [[4, 5], [6, 7]] and parts[1]["pair"][1] == "a word"
    assert select_samples(batch, 5, 6)["x"].tolist() == [5]
    with pytest.raises(BatchError, match=r"ranks\(4\) divide the batch, met 6 samples; nearest: .*\(3\), or 4 samples"):
        split_evenly(batch, 4, "ranks")
    for bad in ("words", {"x": torch.tensor(1)}, (torch.ones(2), torch.ones(3))):
        with pytest.raises(BatchError):
            split_evenly(bad, 1, "ranks")


def test_losses_are_read_in_all_their_forms() -> None:
    value = torch.tensor(2.0)
    for outputs in (value, {"loss": value}, (value, torch.ones(3, 4))):
        loss = read_loss(outputs, None, None)
        assert loss.total is value and loss.weight is None
    pair = read_loss((value, 4), None, None)
    assert pair.weight is not None and float(pair.weight) == 4
    assert float(read_loss(torch.ones(3), None, lambda outputs, batch: outputs.sum()).total) == 3
    for bad in (torch.ones(3), {"logits": value}, "loss", None):
        with pytest.raises(LossError, match="scalar loss"):
            read_loss(bad, None, None)


def test_an_optimizer_steps_shards_in_its_groups() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [{"params": module[0].parameters(), "lr": 0.5}, {"params": module[1].parameters()}]
    source = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.5)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # as shards are other parameters of the same names
    result = build_optimizer(source, other, names)
    assert result is source
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in result.param_groups] == [
        (0.5, 0.5, 2),
        (0.25, 0.5, 2),
    ]
    assert result.param_groups[1]["params"][0] is other[1].weight


def test_a_schedule_is_that_of_the_optimizer() -> None:
    module = nn.Linear(2, 2)
    optimizer, other = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert build_scheduler(schedule, optimizer) is schedule and build_scheduler(None, optimizer) is None
    with pytest.raises(OptimizerError, match="met another's"):
        build_scheduler(schedule, other)


def test_an_optimizer_of_others_is_refused() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with pytest.raises(OptimizerError, match="met others"):
        build_optimizer(torch.optim.SGD(other.parameters(), lr=0.1), module, names)
    with pytest.raises(OptimizerError, match="met others"):
        build_optimizer(lambda _: torch.optim.SGD(other.parameters(), lr=0.1), module, names)
    with pytest.raises(OptimizerError, match="met str"):
        build_optimizer(lambda _: "sgd", module, names)  # type: ignore[arg-type,return-value]
    used = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(OptimizerError, match="begins without states"):
        build_optimizer(used, module, names)


def test_a_step_in_a_loop_of_the_users_own_is_that_of_torch() -> None:
    torch.manual_seed(0)
    module, expected = nn.Linear(3, 1), nn.Linear(3, 1)
    expected.load_state_dict(module.state_dict())
    batch, optimizer = torch.randn(6, 3), torch.optim.SGD(expected.parameters(), lr=0.1)
    step = parallelize(
        module,
        ModuleLayout(num_microbatches=3),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        scheduler=lambda source: torch.optim.lr_scheduler.ExponentialLR(source, 0.5),
        loss=lambda outputs, _: outputs.square().mean(),
    )
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number
        loss = expected(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(batch) == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(module.weight, expected.weight, rtol=1e-5)
    with pytest.raises(ValueError, match=r"for all ranks that were started, 1, met data 2, .*; nearest: data=1"):
        parallelize(module, ModuleLayout(2))
