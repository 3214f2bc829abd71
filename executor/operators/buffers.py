"""The buffers that a rank renews: running statistics and counts, each rank's part."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from executor.capture.updates import Update
from executor.operators.collectives import Dims, Ranks
from executor.operators.layouts import Layouts
from strategies.sharding import REPLICATED, ShardingSpec


class Buffers:
    """Buffers by name, each cut as the value is that it is renewed from; whole where it is renewed from none.

    Parameters
    ----------
    updates
        Those of the stages of this rank.
    whole
        The buffers of the module.
    """

    def __init__(self, layouts: Layouts, ranks: Ranks, updates: Iterable[Update], whole: Mapping[str, Tensor]) -> None:
        self.layouts, self.ranks = layouts, ranks
        self.updates = {update.buffer: update for update in updates}
        self._shapes = {name: whole[name].shape for name in self.updates}
        self._parts = {name: self._cut(update, whole[name]) for name, update in self.updates.items()}

    @torch.no_grad()
    def renew(self, update: Update, value: Tensor | None) -> None:
        """Renew a buffer from this rank's part of the root of the value that its update reads."""
        have = self._parts[update.buffer]
        if value is None:
            self._parts[update.buffer] = update.program.forward(have)
            return
        root, (dims, spec) = self.layouts.root[update.reads], self._layout(update)
        own = self.layouts.dims(root)
        value = self.ranks.redistribute(value.detach(), own, self.layouts.produced[root], spec)
        self._parts[update.buffer] = update.program.forward(have, value.permute([own.index(dim) for dim in dims]))

    def whole(self, name: str) -> Tensor:
        """Return a whole buffer from the parts of all ranks."""
        dims, spec = self._layout(self.updates[name])
        return self.ranks.redistribute(self._parts[name], dims, spec, REPLICATED).reshape(self._shapes[name])

    def _cut(self, update: Update, whole: Tensor) -> Tensor:
        if not update.reads:
            return whole.clone()
        dims, spec = self._layout(update)
        shaped = whole.reshape([self.layouts.sizes(self.layouts.root[update.reads])[dim] for dim in dims])
        return self.ranks.redistribute(shaped, dims, REPLICATED, spec).clone()

    def _layout(self, update: Update) -> tuple[Dims, ShardingSpec]:
        """Return the named dims of a buffer, one for each torch dim of its part, and its layout."""
        if not update.reads:
            return (), REPLICATED
        dims = tuple(dim for group in self.layouts.captured.dims[update.reads] for dim in group)
        return dims, self.layouts.produced[self.layouts.root[update.reads]].complete
