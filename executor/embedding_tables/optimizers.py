"""Which optimizers step a rank's part of a table as they would step the whole one."""

from collections.abc import Iterable

from torch.optim import SGD, Optimizer

from meshwise.executor.embedding_tables.cut_table import CutTable
from meshwise.executor.embedding_tables.tables import TableError
from meshwise.executor.modules.optimizers import ELEMENTWISE

SPARSE = "SparseAdam"


def is_foreign(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is not torch's, so that nothing is known of what it looks at."""
    return not type(optimizer).__module__.startswith("torch.optim")


def require_own_rows(optimizer: Optimizer, tables: Iterable[CutTable]) -> None:
    """Raise `TableError` where an optimizer of torch looks at a table as a whole, or keeps sparse states of it.

    Those that are not torch's are taken to step rows by themselves, as row-wise ones do, which columns do not suit.
    """
    kind = type(optimizer)
    is_elementwise = kind.__name__ in (*ELEMENTWISE, SPARSE) and not is_foreign(optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    rule = f"tables: an optimizer of a cut table steps each row by itself, as {SPARSE} and Adagrad do"
    for table in tables:
        group = groups.get(id(table.parameter))
        is_row = is_foreign(optimizer) and table.part.width == table.width
        if group is not None and not (is_elementwise or is_row):
            raise TableError(f"{rule}, met {kind.__name__} of {table.name}; nearest: AdamW")
        if group is not None and kind is SGD and group["momentum"] and table.has_sparse_gradient:
            met = f"met SGD with momentum of {table.name}, whose gradient is sparse"
            raise TableError(f"{rule}, {met}; nearest: momentum=0")
