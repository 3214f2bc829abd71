"""How a step begins: with a module whose parameters are not yet there where ranks keep parts of them, else with all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from meshwise.executor.starting.construction import DeferredModule, Start, fill_parameters
from meshwise.executor.starting.first_values import FirstValues
from meshwise.executor.starting.shards import find_obstacle, tell_whole
from meshwise.executor.starting.trials import WholeNeededError, try_forward

Result = TypeVar("Result")

NEEDS_VALUES = "its forward on the first batch needs values to know what it runs"


class Beginning:
    """What steps have in common that keep parts of a module.

    ``whole_reason`` says why this rank has had the whole in memory; empty where it had not. ``part_names`` are the
    names of parameters of which every rank has another part, and ``table_words`` says which tables are cut.
    """

    module: nn.Module
    device: torch.device
    whole_reason: str = ""
    part_names: frozenset[str] = frozenset()
    table_words: str = ""
    prediction: Any = None
    """What a step was predicted to take; ``None`` where its plan was not searched for."""
    _values: FirstValues | None = None
    """First values of parameters that are not yet there; ``None`` once they are."""

    def _take_start(self, start: Start) -> nn.Module:
        """Return a module without its parameters where all ranks can make parts of them, else with them."""
        obstacle = find_obstacle(start)
        if obstacle is None and isinstance(start, DeferredModule):
            self._values = start.values
            return start.module
        self._begin_whole(obstacle or "")
        return start.build()

    def _begin_whole(self, reason: str) -> None:
        """Say why this rank has the whole module in memory, if there are words for it."""
        self.whole_reason = reason
        tell_whole(reason)

    def _fill(self, reason: str = NEEDS_VALUES) -> None:
        """Give all parameters that are not yet there their values, whole."""
        if self._values is not None:
            self._begin_whole(reason)
            fill_parameters(self.module, self._values)
            self.module.to(self.device)
            self._values = None

    def _try(self, check: Callable[[], Result], is_clear: Callable[[Result], bool] = lambda _: True) -> Result:
        """Return what a check finds that runs the module; without values as `try_forward` does."""
        if self._values is not None:
            try:
                return try_forward(self.module, self._values, self.device, check, is_clear)
            except WholeNeededError as error:
                self._fill(str(error))
        return check()
