"""Modules are captured as training calls them: with batches of any form, and losses of the user's own."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import networks  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from meshwise.executor.cut_modules import captures  # noqa: E402
from meshwise.executor.cut_modules.captures import (  # noqa: E402
    CutError,
    capture_batch,
    check_start,
    copy_structure,
    find_signature,
    find_weight,
    make_example,
    require_same_module,
)
from meshwise.executor.modules.batches import list_tensors  # noqa: E402
from meshwise.executor.starting.construction import DeferredModule, start_module  # noqa: E402
from meshwise.scenarios.inputs.operator_cuts import choose_cuts  # noqa: E402


def find_batch(kind: str, samples: int = 4) -> object:
    return default_collate([networks.KINDS[kind][1](torch.Generator().manual_seed(n)) for n in range(samples)])


def test_a_weighted_loss_of_a_dict_is_captured_as_its_quotient() -> None:
    module, batch = networks.Gated(), find_batch("gated")
    captured = capture_batch(module, batch, None, nearest="data=2")
    assert len(captured.inputs) == 2 and captured.batch == 4
    total, weight = module(**batch)  # type: ignore[arg-type]
    parameters = [dict(module.named_parameters())[name] for name in captured.parameters.values()]
    buffers = [module.get_buffer(name) for name in captured.buffers.values()]
    given = [*parameters, *buffers, *captured.constants.values(), *list_tensors(batch)]
    (loss,) = captured.module.forward(*given)
    torch.testing.assert_close(loss, total / weight)
    assert "forward" not in vars(module)


def test_a_copy_of_the_structure_is_captured_alike() -> None:
    module, batch = networks.Packed(), find_batch("packed")
    copy = copy_structure(module)
    assert copy.head.weight is copy.words.weight is not module.words.weight
    found, expected = (capture_batch(each, batch, None, nearest="data=2") for each in (copy, module))
    assert found.graph == expected.graph


def test_a_signature_is_that_of_form_and_shapes() -> None:
    x = torch.ones(2, 3)
    assert find_signature({"x": x, "name": None}) == find_signature({"x": x * 2, "name": None})
    others = ({"x": x.double(), "name": None}, {"x": x[:1], "name": None}, {"x": x, "name": 1}, (x, None))
    assert find_signature({"x": x, "name": None}) not in {find_signature(each) for each in others}
    assert make_example((x,), 3)[0].shape == (6, 3)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().sum()


def test_sparse_gradients_are_refused_with_their_line() -> None:
    with pytest.raises(CutError, match=r"test_captures.py:\d+: gradients of a cut module are dense"):
        capture_batch(Sparse(), torch.zeros(4, 2, dtype=torch.int64), None, nearest="data=2")


def test_a_plan_of_another_module_or_batch_is_refused() -> None:
    packed, gated = (
        capture_batch(networks.KINDS[kind][0](), find_batch(kind), None, nearest="data=2")
        for kind in ("packed", "gated")
    )
    plan = choose_cuts(packed.graph, data=1, tensor=2, samples=4, num_microbatches=1)
    require_same_module(plan, packed, nn.Identity())
    with pytest.raises(CutError, match=r"shardings are of operators of the module, met words\.add"):
        require_same_module(plan, gated, nn.Identity())


def start(kind: str) -> DeferredModule:
    found = start_module(networks.KINDS[kind][0], 0)
    assert isinstance(found, DeferredModule)
    return found


def test_a_module_without_values_has_them_for_a_comparison_if_it_is_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"loss": lambda outputs, batch: outputs.square().mean(), "nearest": "data=2"}
    hooked, plain = start("hooked"), start("packed")
    with pytest.raises(CutError, match="a hook of a gradient"):
        check_start(hooked.module, hooked.values, find_batch("hooked"), **options)
    check_start(plain.module, plain.values, find_batch("packed"), None, nearest="data=2")
    assert not capsys.readouterr().err
    assert all(parameter.is_meta for parameter in (*hooked.module.parameters(), *plain.module.parameters()))
    monkeypatch.setattr(captures, "CHECKED_BYTES", 1000)
    check_start(hooked.module, hooked.values, find_batch("hooked"), **options)
    assert "the program is not checked: a module with at most 1e-06 GB" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "has_weight"), [("gated", True), ("packed", False)])
def test_a_weight_is_found(kind: str, has_weight: bool) -> None:
    assert find_weight(networks.KINDS[kind][0](), find_batch(kind), None) == has_weight
