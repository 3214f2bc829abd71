"""States of an optimizer that steps sparse gradients alone, before its first step."""

import torch
from torch.optim import Optimizer, SparseAdam


def fill_sparse_states(optimizer: Optimizer) -> None:
    """Give ``SparseAdam`` the states that a checkpoint is read into.

    To others torch's ``get_state_dict`` gives them by a step of dense zeros, which this one refuses.
    """
    if not isinstance(optimizer, SparseAdam) or optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [item for group in optimizer.param_groups for item in group["params"] if item.requires_grad]
    for parameter in parameters:
        no_rows, no_values = torch.empty((1, 0), dtype=torch.int64), parameter.new_empty((0, *parameter.shape[1:]))
        parameter.grad = torch.sparse_coo_tensor(
            no_rows.to(parameter.device), no_values, parameter.shape, check_invariants=False, is_coalesced=True
        )
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # type: ignore[no-untyped-call]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
