"""An optimizer steps a part of a table as it steps the whole: by elements, or by rows where these are whole."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.executor.embedding_tables.cut_table import CutTable  # noqa: E402
from meshwise.executor.embedding_tables.optimizers import require_own_rows  # noqa: E402
from meshwise.executor.embedding_tables.tables import Part, TableError  # noqa: E402


class RowWise(torch.optim.SGD):
    """Not torch's own: it may look at whole rows."""


ROWS, COLUMNS = Part(0, 4, 0, 8), Part(0, 8, 0, 4)


@pytest.mark.parametrize(
    ("kind", "part", "text"),
    [
        (torch.optim.SGD, ROWS, ""),
        (torch.optim.SGD, COLUMNS, ""),
        (RowWise, ROWS, ""),
        (RowWise, COLUMNS, "met RowWise of users; nearest: AdamW"),
        (torch.optim.Adafactor, ROWS, "met Adafactor of users; nearest: AdamW"),
    ],
)
def test_optimizers_of_parts(kind: type, part: Part, text: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(part.sizes))
    table = CutTable("users", parameter, [part], 0, torch.nn.Embedding(8, 8))
    optimizer = kind([parameter], lr=0.1)
    if text:
        with pytest.raises(TableError, match=text):
            require_own_rows(optimizer, [table])
    else:
        require_own_rows(optimizer, [table])
