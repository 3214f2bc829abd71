"""A module in a loop of the user's own with its first batch: measured, captured and checked on copies."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.executor.cut_modules.captures import CutError, capture_batch, check_program, require_same_module
from meshwise.executor.cut_modules.elementwise import require_elementwise
from meshwise.executor.module_measures.figures import ModuleFigures
from meshwise.executor.module_measures.first_batch import capture_loss, has_weighted_loss
from meshwise.executor.module_measures.measuring import measure_module
from meshwise.executor.module_measures.source import ModuleSource, copy_module, copy_source
from meshwise.executor.modules.batches import count_samples, map_tensors, select_samples
from meshwise.executor.modules.layout import ModuleLayout
from meshwise.executor.modules.losses import LossFunction
from meshwise.executor.modules.optimizers import OptimizerFactory
from meshwise.executor.modules.sharding import count_ranks, find_rank
from meshwise.executor.operators.layouts import Layouts
from meshwise.executor.recording.rank_files import UserError
from meshwise.simulator.operator_graph import OperatorGraph
from meshwise.strategies.plan.plan import Plan


class LiveModule:
    """A module and its first batch, of which nothing is changed.

    Parameters
    ----------
    batch
        The samples of this rank, or with ``is_global`` those of all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        *,
        is_global: bool,
        optimizer: OptimizerFactory | Optimizer,
        loss: LossFunction | None,
        precision: str,
        device: torch.device,
    ) -> None:
        self.module, self.loss, self.precision, self.device = module, loss, precision, device
        self.is_global, self.num_ranks = is_global, count_ranks()
        num_samples = count_samples(batch)
        self.samples = num_samples if is_global else num_samples * self.num_ranks
        self._batch = batch
        self._source: ModuleSource = copy_source(
            module, optimizer, loss, precision, device, self._select_own(num_samples) if is_global else batch
        )

    def measure(self, seconds: float, plans: Sequence[Plan] = ()) -> ModuleFigures:
        """Return what it takes, measured for about ``seconds`` on all ranks, which call this together.

        Plans have the operators cut over some of the ranks.
        """
        if self.num_ranks > 1 and self.device.type == "cuda" and "cpu:" not in str(dist.get_backend_config()):
            met = f"met {dist.get_backend()}"
            raise UserError(f"search: ranks exchange numbers on the host too, {met}; nearest: cpu:gloo,cuda:nccl")
        return measure_module(self._source, seconds, plans)

    def capture(self) -> OperatorGraph:
        """Return the operator graph; ``ValueError`` where it cannot be captured."""
        return capture_loss(self._copy(), self._to_host(self._batch), self.loss).graph

    def has_weight(self) -> bool:
        """Return whether the loss is a pair (sum, weight)."""
        return has_weighted_loss(self._copy(), self._to_host(self._batch), self.loss)

    def require_cuts(self, layout: ModuleLayout) -> None:
        """Raise `UserError` where the module cannot be cut as a layout says, which needs the global batch."""
        assert layout.plan is not None and self.is_global
        copy, nearest = self._copy(), f"data={self.num_ranks}"
        require_elementwise(self._source.build_optimizer(self._source.build()))
        microbatch = select_samples(self._to_host(self._batch), 0, self.samples // layout.num_microbatches)
        if count_samples(microbatch) < 2:
            raise CutError("a microbatch of a cut module has at least 2 samples on all data ranks, met 1; nearest: 2")
        captured = capture_batch(copy, microbatch, self.loss, nearest=nearest)
        require_same_module(layout.plan, captured, copy)
        Layouts(captured, {sharding.operator: sharding for sharding in layout.plan.shardings})
        check_program(copy, microbatch, self.loss, nearest=nearest)

    def _copy(self) -> nn.Module:
        return copy_module(self.module, "fp32").cpu()

    def _to_host(self, batch: Any) -> Any:
        """Return a batch for `_copy`: samples of a step in fp64 have the dtype of the module."""
        own = next((parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()), None)

        def move(tensor: Tensor) -> Tensor:
            is_wide = self.precision == "fp64" and tensor.dtype is torch.float64
            return tensor.detach().to("cpu", own if is_wide else None)

        return map_tensors(batch, move)

    def _select_own(self, num_samples: int) -> Any:
        """Return the part of a global batch that this rank measures: its own, or the first where none divides it."""
        share, rest = divmod(num_samples, self.num_ranks)
        first = 0 if rest or not share else share * find_rank()
        return select_samples(self._batch, first, first + max(share, 1))
