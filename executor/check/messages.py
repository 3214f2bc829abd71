"""Messages between ranks as torch's dispatcher sees them: kind, ranks and bytes of each. `MessageRecorder`.

The private interfaces of torch for this are all in this file (torch 2.13).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional")
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Names of collectives here, by torch's operators; operators that are missing here keep their own names."""
_SILENT = ("wait_tensor", "recv_", "barrier", "monitored_barrier_", "check_for_nan")
"""Operators of torch that move nothing, or move what the sender counts."""


class Message(NamedTuple):
    """A collective that a rank takes part in, or a send from it: its kind, its ranks and its size in bytes.

    The size is that of one rank's buffer, for gathers and scatters that of the full buffer. The ranks of a send are its
    two ends.
    """

    kind: str
    ranks: tuple[int, ...]
    size: int


class MessageRecorder(TorchDispatchMode):
    """Records the messages of its body in ``messages``, in the order in which they are launched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages: list[Message] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self.messages += list_messages(function, args)
        return function(*args, **(kwargs or {}))


def list_messages(function: Any, args: Any) -> list[Message]:
    """Return the message that a call of an operator of torch sends, or nothing."""
    if getattr(function, "namespace", "") not in _NAMESPACES:
        return []
    operator = function.name().partition("::")[2].partition(".")[0]
    if operator in _SILENT:
        return []
    kind, ranks = _NAMES.get(operator, operator), _find_ranks(args)
    size = max(sum(tensor.nbytes for tensor in list_tensors(part)) for part in args)
    if operator == "all_gather_into_tensor":  # its argument is one rank's part: it makes the full buffer itself
        size *= len(ranks)
    if kind == "send":
        ranks = tuple(sorted({dist.get_rank(), ranks[args[2]]}))
    return [Message(kind, ranks, size)]


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _find_ranks(args: Any) -> tuple[int, ...]:
    """Return the ranks of the process group among a communication's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(argument)
        elif isinstance(argument, dist.ProcessGroup):
            group = argument
        else:
            continue
        return tuple(dist.get_process_group_ranks(group))
    return tuple(dist.get_process_group_ranks(_resolve_process_group(args[-1])))
