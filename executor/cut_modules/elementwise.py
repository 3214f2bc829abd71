"""Which optimizers step parts of parameters as they would step the whole."""

from torch.optim import Optimizer

from meshwise.executor.cut_modules.captures import CutError
from meshwise.executor.modules.optimizers import ELEMENTWISE


def require_elementwise(optimizer: Optimizer) -> None:
    """Raise `CutError` for an optimizer that does not step each element by itself."""
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim")
    if not (is_torch and kind.__name__ in ELEMENTWISE):
        rule = "an optimizer of cut parameters steps each element by itself"
        raise CutError(f"{rule}, as {', '.join(ELEMENTWISE[:3])} do, met {kind.__name__}; nearest: AdamW")
