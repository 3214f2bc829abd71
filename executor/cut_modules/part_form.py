"""States of a rank with parts of operators in a checkpoint, which is the same under any plan.

Every rank writes and reads its own boxes of the whole, so that it has no more of it in memory than its parts.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.executor.cut_modules.part_values import list_part_boxes
from meshwise.executor.operators.local_stage import LocalStage
from meshwise.executor.recording.private_torch import list_chunks
from meshwise.executor.recording.tensors import to_local
from meshwise.executor.saving.shared_states import SharedState, select_boxes


class PartForm:
    """States of a checkpoint as those of a rank with parts (`meshwise.executor.modules.states.StateForm`).

    Parameters
    ----------
    aliases
        Further names of tied parameters, each with the first one.
    """

    def __init__(self, program: LocalStage, aliases: Mapping[str, str]) -> None:
        self.program, self.aliases = program, aliases

    def gather(self, name: str, state: Tensor) -> Tensor:
        """Return the whole of a state that has the shape of this rank's part."""
        part = state.full_tensor() if isinstance(state, DTensor) else state
        if not self._is_part(name, part):
            return part
        return self.program.gather_parameter(self._find_name(name), part.detach())

    def share(self, name: str, state: Tensor) -> Tensor:
        """Return a state as this rank's boxes of the whole, in the same memory."""
        if not self._is_part(name, state):
            return state
        placement = self.program.placements[self._find_name(name)]
        boxes = list_part_boxes(placement, self.program.ranks)
        if not isinstance(state, DTensor):
            return SharedState(state, placement.shape, boxes)
        chunks = [chunk for chunk in list_chunks(state) if 0 not in chunk.sizes]
        own_boxes = [box for chunk in chunks for box in select_boxes(boxes, chunk.offsets, chunk.sizes)]
        return SharedState(to_local(state), placement.shape, own_boxes)

    def _is_part(self, name: str, state: Tensor) -> bool:
        part = self.program.parts.get(self._find_name(name))
        return part is not None and state.shape == part.shape

    def _find_name(self, name: str) -> str:
        return self.aliases.get(name, name)
