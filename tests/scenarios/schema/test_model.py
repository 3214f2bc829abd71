"""The network of a scenario has one source, and sizes that are counts."""

import pytest
from pydantic import ValidationError

from meshwise.scenarios.schema.model import ExpertsTable, ModelTable, TransformerTable

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100}


def test_the_network_is_said_in_one_way() -> None:
    assert ModelTable(preset="gpt3-175b").preset == "gpt3-175b"
    assert ModelTable(transformer=TransformerTable(**SIZES)).transformer is not None
    with pytest.raises(ValidationError, match="met preset and graph"):
        ModelTable(preset="gpt3-175b", graph="g.json")
    with pytest.raises(ValidationError, match="holds one of preset, transformer, dlrm, hf_config and graph, met none"):
        ModelTable()


@pytest.mark.parametrize("field", SIZES)
def test_every_size_is_stated_and_at_least_one(field: str) -> None:
    with pytest.raises(ValidationError):
        TransformerTable(**{**SIZES, field: 0})
    with pytest.raises(ValidationError):
        TransformerTable(**{name: size for name, size in SIZES.items() if name != field})


def test_shared_experts_and_dense_layers_may_be_none_and_factors_are_no_less_than_one() -> None:
    table = ExpertsTable(count=8, top_k=2, ffn=16)
    assert (table.shared, table.dense_layers, table.capacity_factor, table.imbalance) == (0, 0, 1.0, 1.0)
    with pytest.raises(ValidationError):
        ExpertsTable(count=8, top_k=2, ffn=16, imbalance=0.5)
