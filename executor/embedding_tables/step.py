"""A step of training of a user's module whose embedding tables are cut over the data ranks; all else is whole.

Gradients of the other parameters are averaged by `DistributedDataParallel`. A table's part has the gradients of the
samples of all ranks, and the optimizer of a rank steps its part alone.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.executor.embedding_tables.cutting import cut_tables
from meshwise.executor.embedding_tables.exchange import RankExchange
from meshwise.executor.embedding_tables.gradients import clip_parts
from meshwise.executor.embedding_tables.lookups import TableLookups
from meshwise.executor.embedding_tables.optimizers import is_foreign, require_own_rows
from meshwise.executor.embedding_tables.table_form import TableForm
from meshwise.executor.embedding_tables.tables import describe_tables, list_tables, place_tables
from meshwise.executor.modules.batches import count_samples, select_samples
from meshwise.executor.modules.blocks import list_blocks, recompute_blocks
from meshwise.executor.modules.courses import broadcast_states
from meshwise.executor.modules.evaluation import EvaluateFunction
from meshwise.executor.modules.losses import StepLoss
from meshwise.executor.modules.probe import probe
from meshwise.executor.modules.sharding import shard_module, unwrap
from meshwise.executor.modules.states import SAFETENSORS, is_distributed, write_module
from meshwise.executor.modules.step import TrainingStep
from meshwise.executor.recording.private_torch import ignore_in_data_parallel
from meshwise.executor.recording.weight_files import find_aliases
from meshwise.executor.starting.construction import fill_parameters


class TableStep(TrainingStep):
    """A step of training of a module of which every rank has parts of the tables.

    Its parameters and methods are those of `TrainingStep`.
    """

    _lookups: TableLookups | None = None

    @property
    def _keeps_parts(self) -> bool:
        return True

    def _begin(self, batch: Any) -> tuple[Optimizer, LRScheduler | None]:
        """Cut the tables, check the loss on the first batch, and return optimizer and scheduler of the parts."""
        self.module.zero_grad(set_to_none=True)
        broadcast_states(self.module)
        lookups, form = self._cut()
        self._lookups, self._form, self.part_names = lookups, form, frozenset(form.tables)
        with lookups.guard():
            self._find_loss_kind(batch)
            self._require_whole_statistics()
            self._check_loss(batch)
            has_unused = self._find_unused(batch)
        lookups.forget()
        ignore_in_data_parallel(self.module, self.part_names)
        others = [item for name, item in self.module.named_parameters() if name not in self.part_names]
        if any(parameter.requires_grad for parameter in others):
            self.module = shard_module(self.module, self.layout, self.device, self.precision, (), has_unused=has_unused)
        else:
            recompute_blocks(self.module, self.layout.find_recompute(0))
        optimizer, scheduler = self._build_optimizer()
        require_own_rows(optimizer, form.tables.values())
        if is_foreign(optimizer):
            self.table_words += f"; {type(optimizer).__name__} is taken to step each row by itself"
        return optimizer, scheduler

    def _cut(self) -> tuple[TableLookups, TableForm]:
        """Have the module's tables be this rank's parts, and give other parameters that have none their values."""
        tables = list_tables(self.module)
        self.table_words = describe_tables(tables, self.module, self.layout.tables)
        places = place_tables(tables, self.layout.tables, self.num_ranks)
        lookups = cut_tables(tables, places, RankExchange(self.device), self.device, self._values)
        pairs = zip(tables, lookups.tables, strict=True)
        form = TableForm({name: cut for table, cut in pairs for name in table.names})
        if self._values is not None:
            names = {name for name, _ in self.module.named_parameters()} - form.tables.keys()
            fill_parameters(self.module, self._values, names, self.device)
            self._values = None
        self.module.register_forward_hook(lookups.end_forward)
        return lookups, form

    def _find_unused(self, batch: Any) -> bool:
        """Return whether some sample leaves a parameter other than tables without a gradient."""
        assert self._lookups is not None
        least = torch.tensor(count_samples(batch), device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)  # ranks look up together
        parts = [table.parameter for table in self._lookups.tables if table.needs_gradient]
        for parameter in parts:
            parameter.requires_grad_(False)
        try:
            findings = self._probe(probe, list_blocks(self.module), select_samples(batch, 0, int(least)))
        finally:
            for parameter in parts:
                parameter.requires_grad_()
        return bool(findings.has_unused)

    def _run_passes(self, microbatches: Sequence[Any], step_loss: StepLoss, num_items: Tensor | None) -> None:
        assert self._lookups is not None
        with self._lookups.guard():
            super()._run_passes(microbatches, step_loss, num_items)

    def _finish_gradients(self, factor: float) -> None:
        assert self._lookups is not None
        self._lookups.send_gradients()
        super()._finish_gradients(factor)

    def _clip(self, gradients: Sequence[Tensor], max_norm: float) -> None:
        assert self._lookups is not None
        own = [table.parameter.grad for table in self._lookups.tables if table.parameter.grad is not None]
        clip_parts(gradients, own, max_norm, self.device)

    def evaluate(
        self, function: EvaluateFunction | None = None, batches: Iterable[Any] = (), *, is_marked: bool = False
    ) -> dict[str, float]:
        """Return figures as `TrainingStep.evaluate` does; all ranks look up together."""
        if self._lookups is None:
            return super().evaluate(function, batches, is_marked=is_marked)
        with self._lookups.guard():
            return super().evaluate(function, batches, is_marked=is_marked)

    def export(self, folder: str | Path, *, is_plain: bool = False, format: str = SAFETENSORS) -> Path | None:
        """Write the whole weights as `TrainingStep.export` does, and return the file; ``None`` on other ranks."""
        form = self._form
        if form is None or is_distributed(format):
            return super().export(folder, is_plain=is_plain, format=format)
        module, weights = unwrap(self.module), dict[str, Tensor]()
        for name, state in module.state_dict().items():
            whole = form.gather(name, state)
            if self.rank == 0:
                weights[name] = whole.detach().cpu()
        if self.rank:
            return None
        return write_module(Path(folder), module, weights, find_aliases(module), is_plain=is_plain)
