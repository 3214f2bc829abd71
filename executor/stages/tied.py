"""Parameters that several stages read, such as a table of tokens at both ends: every stage has a copy.

Copies begin equal. Once a step their gradients are added, so that they stay equal.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwise.executor.recording.tensors import to_local


class TiedParameters:
    """The parameters of several stages on one rank; every rank makes one, since their ranks form groups.

    Parameters
    ----------
    stage_names
        The names of the parameters of every stage.
    stage_positions
        The pipeline rank of every stage.
    position
        The pipeline rank of this one.
    mesh
        All ranks, with ``pipeline`` first.
    """

    def __init__(
        self, stage_names: Sequence[Sequence[str]], stage_positions: Sequence[int], position: int, mesh: DeviceMesh
    ) -> None:
        self.position = position
        self._positions: dict[str, tuple[int, ...]] = {}
        for names, stage_position in zip(stage_names, stage_positions, strict=True):
            for name in names:
                positions = self._positions.get(name, ())
                self._positions[name] = tuple(sorted({*positions, stage_position}))
        lines = mesh.mesh.reshape(mesh.mesh.shape[0], -1).T.tolist()  # the ranks of every pipeline
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for positions in sorted({positions for positions in self._positions.values() if len(positions) > 1}):
            rows = [[line[place] for place in positions] for line in lines]
            self._groups[positions], _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]

    def is_counted(self, name: str) -> bool:
        """Return whether this rank counts a parameter in a norm over all: of several copies one does."""
        return self._positions.get(name, (self.position,))[0] == self.position

    def sum_gradients(self, stage_parameters: Sequence[dict[str, nn.Parameter]]) -> None:
        """Add the gradients of all copies.

        Parameters
        ----------
        stage_parameters
            The parameters of the stages of this rank, by name.
        """
        for name, positions in sorted(self._positions.items()):
            copies = [parameters[name] for parameters in stage_parameters if name in parameters]
            gradients = [to_local(copy.grad) for copy in copies if copy.grad is not None]
            if not gradients or (len(gradients) == 1 and len(positions) == 1):
                continue
            total = gradients[0]
            for gradient in gradients[1:]:
                total.add_(gradient)
            if len(positions) > 1:
                dist.all_reduce(total, group=self._groups[positions])
            for gradient in gradients[1:]:
                gradient.copy_(total)

    def copy_updates(self, stage_parameters: Sequence[dict[str, nn.Parameter]]) -> None:
        """Give all copies on this rank the values of the first, which the optimizer steps."""
        first: dict[str, nn.Parameter] = {}
        for parameters in stage_parameters:
            for name, parameter in parameters.items():
                if name in first:
                    to_local(parameter.detach()).copy_(to_local(first[name].detach()))
                else:
                    first[name] = parameter
