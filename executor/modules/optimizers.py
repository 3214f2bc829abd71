"""The optimizer and the schedule of the learning rate of a user's module, built once its parameters are sharded."""

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwise.executor.recording.rank_files import UserError

OptimizerFactory = Callable[[nn.Module], Optimizer]
"""Returns the optimizer of a module, whose parameters may be shards by then."""
SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Returns a schedule of the learning rate, which is stepped once a step."""

WEIGHT_DECAY = 0.01
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Optimizers of torch that step each element of a parameter by itself."""


class OptimizerError(UserError):
    """An optimizer that cannot step a module's parameters."""


def make_adamw(learning_rate: float) -> OptimizerFactory:
    """Return a factory of AdamW with torch's other defaults."""
    return lambda module: AdamW(module.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)


def build_optimizer(source: OptimizerFactory | Optimizer, module: nn.Module, names: Mapping[int, str]) -> Optimizer:
    """Return the optimizer of a module.

    Parameters
    ----------
    source
        A function of the module; or an optimizer of its parameters as they were before they were sharded, which steps
        the shards from then on.
    names
        The names of parameters, by the identity that they had before.

    Raises
    ------
    OptimizerError
        Where the source is no optimizer, has states already, or parameters of another module.
    """
    if isinstance(source, Optimizer):
        return _hand_over(source, module, names)
    optimizer = source(module)
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"optimizer(module) returns a torch.optim.Optimizer, met {type(optimizer).__name__}")
    own_parameters = set(map(id, module.parameters()))
    if any(id(parameter) not in own_parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError("an optimizer steps the parameters of the module that it is given, met others")
    return optimizer


def build_scheduler(source: SchedulerFactory | LRScheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """Return the schedule of an optimizer; `OptimizerError` where it is another optimizer's."""
    scheduler = source if source is None or isinstance(source, LRScheduler) else source(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise OptimizerError("a schedule depends on the step alone, met ReduceLROnPlateau; nearest: CosineAnnealingLR")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise OptimizerError("a schedule is of the optimizer that steps the module, met another's")
    return scheduler


def require_no_states(optimizer: Optimizer) -> None:
    """Raise `OptimizerError` where an optimizer has stepped before."""
    if optimizer.state:
        raise OptimizerError(
            f"an optimizer begins without states, met {type(optimizer).__name__} with those of {len(optimizer.state)} "
            "parameters; nearest: a new one, and step.load(FOLDER)"
        )


def _hand_over(source: Optimizer, module: nn.Module, names: Mapping[int, str]) -> Optimizer:
    require_no_states(source)
    parameters = dict(module.named_parameters())
    group_names = [[names.get(id(parameter)) for parameter in group["params"]] for group in source.param_groups]
    if any(None in row for row in group_names):
        raise OptimizerError("an optimizer steps the parameters of the module that is parallelised, met others")
    for group, row in zip(source.param_groups, group_names, strict=True):
        # a rank of a pipeline has the parameters of its own stages alone
        group["params"] = [parameters[name] for name in row if name in parameters]
    return source
