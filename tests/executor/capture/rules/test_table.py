"""The table of rules has every operator that modules are made of; one that it has not is named."""

import pytest

pytest.importorskip("torch")
import modules
import torch
from cutting import operators

from meshwise.executor.capture.capture import capture

from ..test_capture import Calls, captured

NAMES = list(modules.MODULES)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_has_a_rule(name: str) -> None:
    assert not [line for line in captured(name)[0].warnings if "replicated" in line]


def test_an_operator_without_a_rule_is_named_and_replicated() -> None:
    found = capture(Calls(lambda x, w: torch.linalg.pinv(x @ w)), (torch.randn(4, 6, dtype=torch.float64),))
    assert any("replicated" in line for line in found.warnings)
    unknown = [
        each for each in operators(found).values() if each.uncut and set(each.uncut) == {d for d, _ in each.dims}
    ]
    assert unknown
