"""The stages of a captured module that one rank runs, each compiled, and one microbatch in one of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwise.executor.capture.captured import CapturedModule
from meshwise.executor.operators.collectives import RankMesh
from meshwise.executor.operators.layouts import Layouts, build_stage_programs
from meshwise.executor.operators.local_stage import LocalStage, list_gradients, sum_gradients
from meshwise.executor.operators.stage_compiler import compile_stage
from meshwise.strategies.plan.mesh import PIPELINE
from meshwise.strategies.plan.plan import Plan


class OperatorNetwork(nn.Module):
    """A captured module on one rank of a mesh.

    ``parts`` has this rank's parts of parameters by their names in the module, and ``buffers_of`` the stage that renews
    each buffer. A tied parameter has one of its names.

    Parameters
    ----------
    module
        The module that was captured; this rank's parts of its parameters and buffers are copied.
    device
        The device of these parts and of all computation.
    """

    def __init__(
        self, captured: CapturedModule, module: nn.Module, plan: Plan, ranks: RankMesh, device: torch.device
    ) -> None:
        super().__init__()
        self.captured, self.ranks, self.device = captured, ranks, device
        layouts = Layouts(captured, {sharding.operator: sharding for sharding in plan.shardings})
        programs = build_stage_programs(layouts, plan.stages)
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        tensors = dict(module.named_parameters(remove_duplicate=False))
        names = {root: first_names[id(tensors[name])] for root, name in captured.parameters.items()}
        readers: dict[str, set[int]] = {}
        for program, position in zip(programs, plan.positions, strict=True):
            for root in program.parameters:
                readers.setdefault(names[root], set()).add(position)
        self._read_names = set(readers)
        self.parts: dict[str, nn.Parameter] = {}
        self.local_stages: dict[int, LocalStage] = {}
        for stage in plan.stages_at(ranks.coordinate.get(PIPELINE, 0)):
            arguments = captured, module, plan, ranks, stage, device
            self.local_stages[stage] = compile_stage(*arguments, self.parts, inputs_are_cut=False)
            self.parts |= self.local_stages[stage].parts
        self._modules_of_stages = nn.ModuleList(self.local_stages.values())
        self.buffers_of = {
            name: local_stage for local_stage in self.local_stages.values() for name in local_stage.buffer_parts
        }
        self._summed_axes = {
            name: axes for local_stage in self.local_stages.values() for name, axes in local_stage.summed_axes.items()
        }
        shared = {name: tuple(sorted(positions)) for name, positions in readers.items() if len(positions) > 1}
        groups = {positions: ranks.make_group(PIPELINE, positions) for positions in sorted(set(shared.values()))}
        self._shared_groups = {name: groups[shared[name]] for name in names.values() if name in shared}

    def gather_parameter(self, name: str, part: Tensor) -> Tensor:
        """Return a whole parameter, or its whole gradient, gathered from the parts of all ranks."""
        owner = next(stage for stage in self.local_stages.values() if name in stage.parts)
        return owner.gather_parameter(name, part)

    def list_unread(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of a module, by name, that no stage reads and so no step changes."""
        return {name: parameter for name, parameter in module.named_parameters() if name not in self._read_names}

    def sum_gradients(self) -> None:
        """Sum gradients over the axes along which ranks have the same parameter, but other parts of its operators.

        The gradients of a parameter that several pipeline ranks read are then summed over these ranks.
        """
        sum_gradients(self.ranks, list_gradients(self.parts), self._summed_axes)
        for name, group in self._shared_groups.items():
            if name in self.parts and self.parts[name].requires_grad:
                part = self.parts[name]
                gradient = torch.zeros_like(part) if part.grad is None else part.grad
                part.grad = self.ranks.all_reduce(gradient, PIPELINE, group)


class Pass:
    """One microbatch in one stage, from its forward to its backward."""

    def __init__(self, network: OperatorNetwork, stage: int, inputs: Sequence[Tensor]) -> None:
        self.stage, self.device = network.local_stages[stage], network.device
        named_inputs = dict(zip(network.captured.inputs, inputs, strict=True))
        self.inputs = [named_inputs[name] for name in self.stage.inputs]
        self.received_values: list[Tensor] = []
        self.sent_values: tuple[Tensor, ...] = ()

    def forward(self, messages: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage on the values from the stage before; return the values for the next one, or the loss alone."""
        self.received_values = [value.requires_grad_(value.is_floating_point()) for value in messages]
        results = self.stage.forward(self.received_values, self.inputs)  # no hooks, which a stage does not have
        self.sent_values = (results,) if isinstance(results, Tensor) else results
        return tuple(value.detach() for value in self.sent_values)

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run backward from the gradients of sent values, or of the loss; return those of received values."""
        ends = zip(self.list_differentiable(self.sent_values), gradients, strict=True)
        pairs = [(value, gradient) for value, gradient in ends if value.requires_grad]
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        received_values = self.list_differentiable(self.received_values)
        return tuple(torch.zeros_like(value) if value.grad is None else value.grad for value in received_values)

    def make_receive_buffers(self) -> list[Tensor]:
        """Return empty tensors for the values from the stage before."""
        return [torch.empty_like(self.stage.example(name), device=self.device) for name in self.stage.received]

    def make_gradient_buffers(self) -> list[Tensor]:
        """Return empty tensors for the gradients of the values that this stage sent."""
        values = self.list_differentiable(self.sent_values)
        return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]

    @staticmethod
    def list_differentiable(values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that can have gradients: those of floating point."""
        return [value for value in values if value.is_floating_point()]
