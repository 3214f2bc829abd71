"""Which optimizers step a rank's part of a table as they would step the whole one."""

from collections.abc import Iterable

from torch.optim import Optimizer

from meshwise.executor.cut_modules.elementwise import ELEMENTWISE
from meshwise.executor.embedding_tables.cut_table import CutTable
from meshwise.executor.embedding_tables.tables import TableError

SPARSE = "SparseAdam"


def require_own_rows(optimizer: Optimizer, tables: Iterable[CutTable]) -> None:
    """Raise `TableError` for an optimizer of torch that looks at a parameter as a whole, if it steps a table.

    Those that are not torch's are taken to step rows by themselves, as row-wise ones do.
    """
    kind = type(optimizer)
    own_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in (*ELEMENTWISE, SPARSE):
        return
    for table in tables:
        if id(table.parameter) in own_ids:
            rule = f"tables: an optimizer of a cut table steps each row by itself, as {SPARSE} and Adagrad do"
            raise TableError(f"{rule}, met {kind.__name__} of {table.name}; nearest: AdamW")
